"""What the bench measures: a backend's device, the calls by hand for it, and an independent exporter."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from gpuinterop import DeviceNotFoundError, OpaqueFd, Operation, TimelineFd, get_backend
from gpuinterop.testing import stand_ins
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.base import Driver, Exporter
from gpuinterop.testing.exporters.vulkan import list_drivers

from .by_hand import CudaByHand, HipByHand
from .clock import Comparison


class Bench(ExitStack):
    """A device to measure.

    `backend` defaults to the one that gpuinterop chooses; `quick` takes only a few times, to see that it works.
    `stand_in` names the test double that replaces the driver, or is below it; empty without one. `works` is
    False if that is a simulated driver whose streams do nothing. `by_hand` makes the same calls with the vendor's
    bindings, or is None.
    """

    def __init__(self, backend: str | None, *, quick: bool) -> None:
        super().__init__()
        self.backend = get_backend(backend)
        self.device = self.backend.device()
        self.stand_in = stand_ins.stand_in(self.backend.libraries)
        self.works, self.quick = not (self.stand_in and os.environ.get("GPUINTEROP_SIM_DOES_NOTHING")), quick
        make = {"cuda": CudaByHand, "hip": HipByHand}.get(self.backend.name)
        self.by_hand: Any = make and make(self.device.ordinal)

    def compare(self, rounds: int) -> Comparison:
        """Make a comparison. Without work there is nothing to check."""
        return Comparison(max(3, rounds // 30) if self.quick else rounds, checks=self.works)

    @cached_property
    def vulkan(self) -> Driver:
        """The device's Vulkan driver, one that shares semaphores if possible. Raises `DeviceNotFoundError` without one.

        With a stand-in there is none: its device has SwiftShader's identity, which the host backend measures.
        """
        drivers = [] if self.stand_in else [one for one in list_drivers() if one.identity.matches(self.device.identity)]
        if not drivers:
            raise DeviceNotFoundError(f"expected a Vulkan driver of {self.device.name}, got none")
        cells = [(Operation.IMPORT_SEMAPHORE, kind) for kind in (TimelineFd, OpaqueFd)]
        return max(drivers, key=lambda driver: any(map(driver.capabilities.supports, cells)))

    @cached_property
    def graphics(self) -> Exporter:
        """Vulkan on the device, as an independent exporter."""
        return self.enter_context(open_exporter("vulkan", device_index=self.vulkan.index))

    @cached_property
    def exporter(self) -> Exporter:
        """An independent exporter of memory and semaphores: Vulkan, or memfds without a GPU."""
        own = self.device.identity
        if own.is_cpu or self.stand_in:
            return self.enter_context(open_exporter("memfd", identity=None if own.is_cpu else own))
        return self.graphics
