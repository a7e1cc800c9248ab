"""The gate between releases that block and waits.

A release such as ``cuMemFree`` waits for all work of its device, and every other call of the process waits for it. So
it runs only while no stream waits for a semaphore that somebody has yet to signal, and waits stand at the gate until it
is over. A wait notes itself, then looks at the gate; a release shuts the gate, then looks at the notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import system
from .monitor import after_fork, locked
from .native import RETIRED, Marks, Native, waiting_for_a_look

if TYPE_CHECKING:
    from .native_stream import NativeStream, Streams

MOMENT_S: Final = 0.004
"""For which waits stand aside where too many releases are blocked."""
_MANY: Final = 8
TOO_MANY: Final = 256
"""Blocked releases, of which a warning tells."""

waiting: dict[NativeStream, None] = {}
"""Streams with waits that may be pending, of all devices."""
blocking: dict[Gate, None] = {}
"""Those with blocked releases."""


class Gate:
    """One a device, or one a backend whose releases wait for the work of all its devices."""

    def __init__(self) -> None:
        self.shut: list[None] = Marks()
        """A mark for each release that is under way, or about to be."""
        self.blocked: dict[Native, str] = {}
        """What is ready but for pending waits, and the stream that may be waiting."""
        self.limit = _MANY
        self.crowded = False
        """So much is blocked that the next wait is to stand aside for a moment: `drain.relieve`."""
        self.devices: list[Streams] = []

    def let_releases_end(self) -> None:
        """Block while a release is under way; no wait holds that up."""
        system.until(lambda: not self.shut, None)

    def held_by(self) -> str:
        """The label of a stream that may wait for what is yet to be signalled; empty when there is none."""
        for stream in waiting.copy():
            if stream.device.gate is self and not all(wait.is_there() for _, wait in stream.waits.copy()):
                return stream.label
        return ""

    def look(self) -> str:
        """As `held_by`, once the driver was asked; never blocks."""
        for stream in waiting.copy():
            if stream.device.gate is self:
                stream.look()
        if held_by := self.held_by():
            return held_by
        # Where a blocking call keeps the GIL, nobody here could end what it waits for.
        used = [stream for device in self.devices if device.backend.holds_gil for stream in device.known()]
        return next((stream.label for stream in used if not stream.is_over()), "")


@locked
def block(native: Native, held_by: str) -> None:
    """Put a release aside until no wait is pending."""
    gate = native.gate
    if gate is None or native.state is not RETIRED:
        return
    if len(gate.blocked) >= gate.limit:
        gate.crowded = True
    gate.blocked[native] = held_by
    blocking[gate] = None


@locked
def unblock(gate: Gate) -> None:
    """Let all of them be looked at again."""
    waiting_for_a_look.update(dict.fromkeys(gate.blocked))
    gate.blocked.clear()
    blocking.pop(gate, None)


@locked
def relieved(gate: Gate, limit: int = _MANY) -> None:
    """From `limit` blocked releases on the next wait stands aside."""
    gate.limit = limit
    gate.crowded = False


@after_fork
def _forked() -> None:
    for gate in blocking:
        gate.blocked.clear()
    waiting.clear()
    blocking.clear()
