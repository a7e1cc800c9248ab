"""What lies in the shared memory: two drivers' private layouts, and one of our own."""
