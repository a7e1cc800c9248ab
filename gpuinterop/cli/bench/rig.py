"""What the figures are taken of: a backend's device, an independent party, and the yardsticks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Self

from ..._core.registry import GROUP, get_backend, top_package
from ...exporters import open_exporter
from ...exporters.vulkan.drivers import Instance, VulkanDriver, list_drivers

if TYPE_CHECKING:
    from ...exporters.base import Exporter

__all__ = ["Bench"]


class Bench:
    """A device to measure.

    Parameters
    ----------
    backend : str, optional
        Its backend; by default the one that gpuinterop chooses here.
    quick : bool
        Whether few times are enough: to see that it works.

    Attributes
    ----------
    backend : LoadedBackend
    device : Device
    by_hand : object or None
        The same calls by the vendor's binding alone: ``Yardsticks`` of the module ``yardsticks`` beside the backend's
        code. None if the backend has none.
    """

    def __init__(self, backend: str | None, *, quick: bool) -> None:
        self.backend = get_backend(backend)
        self.device = self.backend.device()
        self._quick = quick
        self._scope = ExitStack()
        self.by_hand: Any = next(self._yardsticks(), None)

    def _yardsticks(self) -> Iterator[Any]:
        for entry_point in entry_points(group=GROUP, name=self.backend.name):
            name = f"{top_package(entry_point)}.yardsticks"
            try:
                room = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise
            else:
                yield room.Yardsticks(self.device.ordinal)

    def rounds(self, wanted: int) -> int:
        """How many times to take."""
        return max(3, wanted // 30) if self._quick else wanted

    @cached_property
    def vulkan(self) -> VulkanDriver | None:
        """The Vulkan driver that shares memory with the device; None if there is none."""
        found = list_drivers()
        exact = [one for one in found if one.identity.matches(self.device.identity)]
        if exact or self.by_hand is not None:  # a GPU's; the host's device is any software driver's
            return next(iter(exact), None)
        return min(found, key=lambda one: "swiftshader" not in one.driver.lower(), default=None)

    @cached_property
    def party(self) -> Exporter:
        """An independent party that makes memory and semaphores: Vulkan, or on a simulated device memfds."""
        if self.vulkan is not None:
            party = open_exporter("vulkan", device_index=self.vulkan.index)
        else:
            party = open_exporter("memfd", identity=self.device.identity)
        return self._scope.enter_context(party)

    def families(self) -> list[int]:
        """The flags of the Vulkan driver's queue families."""
        assert self.vulkan is not None
        with Instance(validation=False) as instance:
            physical = instance.physical_devices()[self.vulkan.index]
            return [flags for flags, _ in physical.queue_families]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._scope.close()
