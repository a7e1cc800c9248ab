"""The HIP backend of gpuinterop, on hip-python."""
