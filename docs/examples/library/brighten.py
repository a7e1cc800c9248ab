"""A library for any backend: it brightens a renderer's pixels in the renderer's own memory.

It never asks for a vendor's name, only the capability table, and uses another path if a device has a gap.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import gpuinterop as gi

NEEDS = ((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd), (gi.Operation.MAP_BUFFER, gi.OpaqueFd))
ON_DEVICE = ((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd), (gi.Operation.WAIT_SEMAPHORE, gi.OpaqueFd))


class Brightener:
    """Brightens what a renderer has drawn.

    Parameters
    ----------
    device : gpuinterop.Device
    memory : gpuinterop.OpaqueFd
        The renderer's memory, which this consumes.
    size : int
        Size of that memory in bytes.
    ready : gpuinterop.OpaqueFd, optional
        A binary semaphore that the renderer signals after drawing, if it shares one. Consumed if the device can wait
        for it.

    Raises
    ------
    gpuinterop.UnsupportedError
        The device cannot import such memory; the message has the reason.
    """

    def __init__(self, device: gi.Device, memory: gi.OpaqueFd, size: int, ready: gi.OpaqueFd | None = None) -> None:
        for need in NEEDS:
            device.capabilities.require(need)
        self.device = device
        self.memory = device.import_memory(memory, size=size)
        self.buffer = self.memory.map_buffer()
        if ready is not None and device.capabilities.missing(*ON_DEVICE):
            ready = None  # the caller still owns it, open
        self.ready = None if ready is None else device.import_semaphore(ready)

    def run(self, amount: int, wait_on_host: Callable[[], object]) -> None:
        """Add `amount` to each byte, up to 255, once the renderer has drawn.

        If the device cannot wait for the renderer, `wait_on_host` must, for example with the renderer's fence.
        """
        if self.ready is None:
            wait_on_host()
        else:
            with self.device.create_stream() as stream:
                self.ready.wait(stream)
                stream.synchronize(timeout=30)
        pixels = np.empty(self.buffer.size, np.uint8)
        self.buffer.copy_to_host(pixels)
        self.buffer.copy_from_host(np.minimum(pixels.astype(np.uint16) + amount, 255).astype(np.uint8))

    def close(self) -> None:
        """Release the memory and the semaphore when the device is done with them."""
        self.memory.close()
        if self.ready is not None:
            self.ready.close()
