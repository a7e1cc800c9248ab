"""gpuinterop's HIP backend. It uses hip-python."""
