"""The objects and their rules: what each is, when it can be used, and when it is released. No backend, no binding."""
