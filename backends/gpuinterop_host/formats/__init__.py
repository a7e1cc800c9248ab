"""Layouts of shared memory: two drivers' private layouts."""
