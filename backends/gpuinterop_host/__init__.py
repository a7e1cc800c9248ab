"""The host backend of gpuinterop: the CPU as the device, with real operating-system handles. Linux only."""
