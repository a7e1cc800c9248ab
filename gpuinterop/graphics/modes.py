"""Modes of a handoff: the semaphores that both sides support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from .._arguments import check_sequence
from ..capabilities import Cell, Operation, Scope
from ..errors import InvalidArgumentError, UnsupportedError
from ..handles import Handle, OpaqueFd, OpaqueWin32, TimelineFd, TimelineWin32, is_here
from .sides import Graphics, GraphicsSide

if TYPE_CHECKING:
    from .._core.device import Device

_OPERATIONS: Final = (Operation.IMPORT_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE)
_SHARED: Final[Mapping[str, tuple[type[Handle], ...]]] = {
    "timeline": (TimelineFd, TimelineWin32),
    "binary": (OpaqueFd, OpaqueWin32),
}
"""The handle types of semaphores that both sides use. In a bridged handoff the compute side has no semaphore."""
BRIDGED: Final = "bridged"
MODES: Final = (*_SHARED, BRIDGED)
"""The best mode first."""


def mode_gaps(graphics: Graphics, device: Device) -> dict[str, UnsupportedError | None]:
    """Return for each mode, the best first, why the two sides cannot use it; None if they can."""
    return {mode: _mode_gap(graphics, device, mode) for mode in MODES}


def _mode_gap(graphics: Graphics, device: Device, mode: str) -> UnsupportedError | None:
    try:
        if mode != BRIDGED:
            cells = [(operation, kind) for kind in _SHARED[mode] if is_here(kind) for operation in _OPERATIONS]
            device.capabilities.require(*cells)
            graphics.capabilities.require(*cells)
        else:
            device.capabilities.require(Operation.STREAM_MEMORY_OPS)
            if graphics.endpoint_gap:
                gap = Cell(Operation.WAIT_SEMAPHORE, TimelineFd).gap(
                    Scope.DRIVER, f"{graphics.endpoint_gap}.", "gpuinterop.bridge.Endpoint"
                )
                raise UnsupportedError(gap, context=graphics.identity.name)
    except UnsupportedError as error:
        return error
    return None


def agree_on_mode(
    graphics: GraphicsSide, device: Device, gaps: Mapping[str, UnsupportedError | None], allow: Sequence[str]
) -> str:
    """Return the first mode that both sides support. If there is none, raise the reason for every mode."""
    check_sequence(allow, "allow", "a sequence such as ('timeline', 'binary')")
    if not allow:
        raise InvalidArgumentError("allow", "expected one mode or more of 'timeline', 'binary', 'bridged', got none.")
    if unknown := [mode for mode in allow if mode not in MODES]:
        raise InvalidArgumentError("allow", f"expected 'timeline', 'binary' or 'bridged', got {unknown[0]!r}.")
    for mode in allow:
        if gaps[mode] is None:
            return mode
    allowed = ", ".join(allow)
    both = f"{graphics.side}'s {graphics.identity.name} and {device.name} both"
    lines = [f"expected a mode that {both} support, got {allowed}."]
    alike: dict[str, list[str]] = {}
    for mode, gap in gaps.items():
        alike.setdefault(gap.capability.reason if gap else mode, []).append(mode)
    for mode, *others in alike.values():
        outcome = gaps[mode] or f"works here; pass allow={tuple(dict.fromkeys((*allow, mode)))}."
        lines.append(f"  {', '.join((mode, *others))}: {outcome}")
    first = gaps[allow[0]]
    assert first is not None
    raise UnsupportedError(first.capability, message="\n".join(lines))
