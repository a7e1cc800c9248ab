"""The graphics side and the compute side: whether they are one GPU, and what both support."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .._arguments import check_type
from ..capabilities import Capabilities, Operation
from ..errors import InvalidArgumentError, UnsupportedError
from ..handles import DeviceIdentity

if TYPE_CHECKING:
    from .._core.device import Device


class Graphics(Protocol):
    """What the choice of a mode needs from the graphics side.

    `capabilities` has the form of :func:`gpuinterop.vulkan.capabilities`. `endpoint_gap` is why a bridge cannot wait
    for its timelines or signal them; empty if it can.
    """

    @property
    def identity(self) -> DeviceIdentity: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def endpoint_gap(self) -> str: ...


class GraphicsSide(Graphics, Protocol):
    """A graphics API's device, with the API's name and the call for `gpuinterop.match_device` in messages."""

    @property
    def side(self) -> str: ...

    @property
    def how_to_match(self) -> str: ...


def check_same_device(graphics: GraphicsSide, device: Device) -> None:
    """Refuse a device that is certainly another GPU: drivers would import its memory without an error."""
    from .._core.device import Device

    check_type(device, Device, "device", "a device of gpuinterop")
    if graphics.identity.conflicts(device.identity):
        raise InvalidArgumentError(
            "device",
            f"{device.name} is not {graphics.side}'s {graphics.identity.name}; "
            f"use gpuinterop.match_device({graphics.how_to_match}).",
        )


def agree(
    graphics: GraphicsSide, device: Device, operations: Sequence[Operation], types: Sequence[type[Any]]
) -> type[Any]:
    """The first handle type with which both sides support all of `operations`; else raise the first gap."""
    gap = None
    for kind in types:
        cells = [(operation, kind) for operation in operations]
        for table, owner in ((device.capabilities, device.name), (graphics.capabilities, graphics.identity.name)):
            if missing := table.missing(*cells):
                gap = gap or UnsupportedError(missing[0], context=owner)
                break
        else:
            return kind
    assert gap is not None  # because no caller passes empty `types`
    raise gap
