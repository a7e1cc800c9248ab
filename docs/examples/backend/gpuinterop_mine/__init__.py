"""A backend to copy: replace its CPU code with your driver's calls, one module at a time."""
