"""gpuinterop's CUDA backend. It uses ``cuda.bindings.driver``."""
