"""A library that takes any backend: it brightens a renderer's pixels in the renderer's own memory.

It asks the capability table, never for a vendor's name, and takes another path where a device has a gap.
"""

from __future__ import annotations

import numpy as np

import gpuinterop as gi

NEEDS = ((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd), (gi.Operation.MAP_BUFFER, gi.OpaqueFd))


class Brightener:
    """Brightens what a renderer has drawn.

    Parameters
    ----------
    device : gpuinterop.Device
    memory : gpuinterop.OpaqueFd
        The renderer's memory; consumed.
    size : int
        Bytes of that memory.

    Raises
    ------
    gpuinterop.UnsupportedError
        The device cannot import such memory; the message has the reason.
    """

    def __init__(self, device: gi.Device, memory: gi.OpaqueFd, size: int) -> None:
        for need in NEEDS:
            device.capabilities.require(need)
        self.device = device
        self.memory = device.import_memory(memory, size=size)
        self.buffer = self.memory.map_buffer()

    def run(self, amount: int, ready: gi.ExternalSemaphore[gi.Binary] | None = None) -> None:
        """Add `amount` to each byte, up to 255; behind `ready` on the device where there is one."""
        with self.device.create_stream() as stream:
            if ready is not None:
                ready.wait(stream)
            stream.synchronize(timeout=30)
        pixels = np.empty(self.buffer.size, np.uint8)
        self.buffer.copy_to_host(pixels)
        self.buffer.copy_from_host(np.minimum(pixels.astype(np.uint16) + amount, 255).astype(np.uint8))

    def close(self) -> None:
        """Give the memory back, when the device is done with it."""
        self.memory.close()


def can_wait(device: gi.Device) -> bool:
    """Whether the device itself can wait for the renderer; without that, the caller waits on the host."""
    return device.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))
