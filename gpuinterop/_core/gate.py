"""The gate between releases that block and waits.

A release such as ``cuMemFree`` waits for all work of its device, and every other call of the process waits for it. So
it runs only while no stream waits for a semaphore that is not signalled yet, and waits stand at the gate until it is
over. A wait notes itself, then looks at the gate; a release shuts the gate, then looks at the notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import system
from .lifetime import RETIRED, Lifetime, Marks, waiting_for_a_look
from .monitor import after_fork, locked

if TYPE_CHECKING:
    from .known_stream import KnownStream, Streams

MOMENT_S: Final = 0.004
"""Seconds for which waits stand aside when too many releases are blocked."""
MANY: Final = 8
"""Number of blocked releases from which on the next wait stands aside."""
TOO_MANY: Final = 256
"""Number of blocked releases at which a warning is issued."""

waiting: dict[KnownStream, None] = {}
"""Streams of all devices with waits that may be pending."""
blocking: dict[Gate, None] = {}
"""Gates with blocked releases."""


class Gate:
    """One per device, or one per backend if its releases wait for the work of all its devices."""

    def __init__(self) -> None:
        self.shut: list[None] = Marks()
        """One mark for each release that is under way or about to begin."""
        self.blocked: dict[Lifetime, str] = {}
        """Releases that only a pending wait holds up, each with the stream that may be waiting."""
        self.limit = MANY
        self.crowded = False
        """Whether so many releases are blocked that the next wait stands aside (`drain.relieve`)."""
        self.devices: list[Streams] = []

    def let_releases_end(self) -> None:
        """Block while a release is under way; waits do not hold a release up."""
        system.until(lambda: not self.shut, None)

    def held_by(self) -> str:
        """The label of a stream that may wait for a semaphore that is not signalled yet; empty if all have passed.

        Asks the driver; never blocks. The stream that has waited longest is asked first, and alone if it holds releases
        up: its wait costs the same beside few streams and beside hundreds.
        """
        for stream in self._waiting():
            if _holds_up(stream):
                return stream.label
        # If the release keeps the GIL, no thread of this process can signal what another library's work waits for.
        streams = [stream for device in self.devices if device.backend.releases_hold_gil for stream in device.known()]
        return next((stream.label for stream in streams if not stream.is_idle()), "")

    def before_default(self) -> KnownStream | None:
        """A stream that may hold the default one up, by a wait that is not signalled yet; asks the driver.

        Our streams block the default one only where the two share a hardware queue; another library's may.
        """
        for stream in self._waiting():
            if not stream.owned and stream.backend.blocks_default(stream.handle) and _holds_up(stream):
                return stream
        return None

    def _waiting(self) -> list[KnownStream]:
        return [stream for stream in list(waiting) if stream.device.gate is self]


def _holds_up(stream: KnownStream) -> bool:
    stream.look()
    return not all(wait.is_there() for wait in stream.waits.copy())


@locked
def block(gate: Gate, lifetime: Lifetime, held_by: str) -> None:
    """Put a release aside while a wait is pending."""
    if lifetime.state is not RETIRED:
        return
    if len(gate.blocked) >= gate.limit:
        gate.crowded = True
    gate.blocked[lifetime] = held_by
    blocking[gate] = None
    waiting_for_a_look.pop(lifetime, None)


@locked
def unblock(gate: Gate) -> None:
    """Have the next drain look at all blocked releases again."""
    waiting_for_a_look.update(dict.fromkeys(gate.blocked))
    gate.blocked.clear()
    blocking.pop(gate, None)


@locked
def relieved(gate: Gate, limit: int) -> None:
    """Make the next wait stand aside once `limit` releases are blocked."""
    gate.limit = limit
    gate.crowded = False


after_fork(waiting.clear)
after_fork(blocking.clear)
