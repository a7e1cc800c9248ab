"""The CUDA backend of gpuinterop, on ``cuda.bindings.driver``."""
