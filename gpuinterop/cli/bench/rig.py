"""What the bench measures: a backend's device, an independent exporter, and the yardsticks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Self

from ..._core.discovery import get_backend
from ..._core.entry_points import GROUP, top_package
from ...capabilities import Operation
from ...errors import DeviceNotFoundError
from ...handles import OpaqueFd, TimelineFd
from ...testing import stand_ins
from ...testing.exporters import open_exporter, opengl
from ...testing.exporters.base import Driver, DriverList
from ...testing.exporters.vulkan import list_drivers
from . import floor

if TYPE_CHECKING:
    from ...testing.exporters.base import Exporter

__all__ = ["Bench"]

_SEMAPHORES: Final = (TimelineFd, OpaqueFd)


class Bench:
    """A device to measure.

    `backend` defaults to the one that gpuinterop chooses; `quick` takes only a few times, to see that it works.
    `stand_in` names the test double that replaces the driver, or is below it; empty without one. `by_hand` makes the
    same calls with the vendor's binding: ``Yardsticks`` in the module ``yardsticks`` of the backend's package, or None.
    """

    def __init__(self, backend: str | None, *, quick: bool) -> None:
        self.backend = get_backend(backend)
        self.device = self.backend.device()
        self.stand_in = stand_ins.stand_in(self.backend.libraries)
        self.quick = quick
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
        return max(3, wanted // 30) if self.quick else wanted

    @cached_property
    def in_c(self) -> Any:
        """The yardsticks in C; None if they cannot be built, or the backend has no calls by hand for them."""
        return None if self.by_hand is None else floor.load()

    def _own(self, found: DriverList, api: str) -> tuple[list[Driver], str]:
        """Return the device's drivers, those that share semaphores first, and a message in case there are none.

        With a stand-in there are none: its device has SwiftShader's identity, which the host backend measures.
        """
        own = [one for one in found if one.identity.matches(self.device.identity) and not self.stand_in]
        own.sort(
            key=lambda one: not any(one.capabilities.supports((Operation.IMPORT_SEMAPHORE, s)) for s in _SEMAPHORES)
        )
        names = ", ".join(one.name for one in found) or found.reason
        return own, f"expected {api} of {self.device.name}, got {names}"

    @cached_property
    def _drivers(self) -> tuple[list[Driver], str]:
        return self._own(list_drivers(), "a Vulkan driver")

    @property
    def vulkan(self) -> Driver | None:
        """The device's Vulkan driver, or None."""
        return next(iter(self._drivers[0]), None)

    def need_vulkan(self) -> Driver:
        """Return the device's Vulkan driver. Raises `DeviceNotFoundError` if there is none."""
        if self.vulkan is None:
            raise DeviceNotFoundError(self._drivers[1])
        return self.vulkan

    @cached_property
    def graphics(self) -> Exporter:
        """Vulkan on the device, as an independent exporter."""
        return self._scope.enter_context(open_exporter("vulkan", device_index=self.need_vulkan().index))

    @cached_property
    def opengl(self) -> opengl.HeadlessContext:
        """OpenGL on the device: a context that is current in this thread. Raises `DeviceNotFoundError` without one."""
        own, missing = self._own(opengl.list_drivers(), "an OpenGL driver")
        if not own:
            raise DeviceNotFoundError(missing)
        return self._scope.enter_context(opengl.HeadlessContext(own[0].index))

    @cached_property
    def party(self) -> Exporter:
        """An independent exporter of memory and semaphores: Vulkan, or memfds without a GPU."""
        own = self.device.identity
        if own.is_cpu or self.stand_in:
            return self._scope.enter_context(open_exporter("memfd", identity=None if own.is_cpu else own))
        return self.graphics

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._scope.close()
