"""All meaning: what an object is, when it may be used, and when its native half goes. Knows no vendor."""
