"""gpuinterop's host backend: the CPU as the device, with real operating-system handles. Linux only."""
