"""What the figures are taken of: a backend's device, an independent party, and the yardsticks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Self

from ..._core.registry import GROUP, get_backend, top_package
from ...capabilities import Operation
from ...errors import DeviceNotFoundError
from ...exporters import open_exporter, opengl
from ...exporters.base import Driver, DriverList
from ...exporters.vulkan import list_drivers
from ...handles import OpaqueFd, TimelineFd
from ...testing import stand_ins
from . import floor

if TYPE_CHECKING:
    from ...exporters.base import Exporter

__all__ = ["Bench"]

_SEMAPHORES: Final = (TimelineFd, OpaqueFd)


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
    quick : bool
    stand_in : str
        The test double in place of the driver or below it; empty without one.
    by_hand : object or None
        The same calls by the vendor's binding alone: ``Yardsticks`` of the module ``yardsticks`` beside the backend's
        code. None if the backend has none.
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
        """How many times to take."""
        return max(3, wanted // 30) if self.quick else wanted

    @cached_property
    def in_c(self) -> Any:
        """The yardsticks in C; None if they cannot be built, or the backend has no calls by hand for them."""
        return None if self.by_hand is None else floor.load()

    def _own(self, found: DriverList, api: str) -> tuple[list[Driver], str]:
        """The drivers of the device, those that share semaphores first; and what is said if there is none.

        SwiftShader, which a stand-in's device passes for, is measured on the host.
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
        """The Vulkan driver of the device; None if there is none."""
        return next(iter(self._drivers[0]), None)

    def need_vulkan(self) -> Driver:
        """The same.

        Raises
        ------
        DeviceNotFoundError
            There is none.
        """
        if self.vulkan is None:
            raise DeviceNotFoundError(self._drivers[1])
        return self.vulkan

    @cached_property
    def graphics(self) -> Exporter:
        """Vulkan on the device, as an independent party."""
        return self._scope.enter_context(open_exporter("vulkan", device_index=self.need_vulkan().index))

    @cached_property
    def opengl(self) -> opengl.HeadlessContext:
        """OpenGL on the device: a context that is current in this thread.

        Raises
        ------
        DeviceNotFoundError
            There is none.
        """
        own, missing = self._own(opengl.list_drivers(), "an OpenGL driver")
        if not own:
            raise DeviceNotFoundError(missing)
        return self._scope.enter_context(opengl.HeadlessContext(own[0].index))

    @cached_property
    def party(self) -> Exporter:
        """An independent party that makes memory and semaphores: Vulkan, or without a GPU memfds."""
        own = self.device.identity
        if own.is_cpu or self.stand_in:
            return self._scope.enter_context(open_exporter("memfd", identity=None if own.is_cpu else own))
        return self.graphics

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._scope.close()
