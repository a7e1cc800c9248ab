"""Layouts of shared memory: the private ones of two drivers, and our own."""
