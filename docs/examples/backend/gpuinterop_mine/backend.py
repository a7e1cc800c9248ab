"""The backend and its facts. Each base class translates part of the contract."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from gpuinterop import system
from gpuinterop.backend import DeviceInfo
from gpuinterop.capabilities import Capability, Rules
from gpuinterop.errors import BackendUnavailableError

from .memory import Memory
from .semaphores import Semaphores
from .streams import Streams

RULES = Rules(files(__package__) / "capabilities.toml")


class MyBackend(Streams, Memory, Semaphores):
    """The CPU as a device: streams are threads, memory and semaphores are memfds.

    To support more, inherit from `ArrayBackend`, `AllocationBackend` and others; all else is a gap.
    """

    name = "mine"
    priority = -10
    pageable_copies_block = False

    def __init__(self) -> None:
        """Load the driver, or raise the reason. Do not create a context."""
        if sys.platform != "linux":
            raise BackendUnavailableError(f"expected Linux, for memfds, got {sys.platform}.", fix="Use it on Linux.")
        super().__init__()

    def versions(self) -> Mapping[str, str]:
        """Ask the driver, the runtime and the bindings."""
        return {"mine": "0.1"}

    def devices(self) -> Sequence[DeviceInfo]:
        """Ask the driver. A GPU has a ``uuid``, ``dlpack=(2, ordinal)`` and ``__cuda_array_interface__``."""
        return [DeviceInfo(ordinal=0, name="Mine", is_cpu=True, dlpack=(1, 0), array_interface="__array_interface__")]

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        """Ask the driver for facts; with them, ``capabilities.toml`` decides each cell."""
        return RULES.table({"futex": system.SYS_FUTEX is not None})

    def open_device(self, ordinal: int) -> int:
        """Retain the device's context; other methods get the result as `device`."""
        return ordinal
