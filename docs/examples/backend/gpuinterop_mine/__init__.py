"""A backend to copy: put your driver's calls where this one has the CPU's, room by room."""
