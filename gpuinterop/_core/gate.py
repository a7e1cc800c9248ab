"""The gate between waits and blocking releases.

A release such as ``cuMemFree`` waits for all work of its device, and blocks all other calls of the process. So it runs
only while no stream waits for a missing signal, and new waits are delayed until it is over. A wait notes itself, then
checks the gate. A release shuts the gate, then checks the notes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import system
from .lifetime import RETIRED, Lifetime, Marks, after_fork, locked, waiting_for_a_look

if TYPE_CHECKING:
    from .known_stream import KnownStream, Streams

MOMENT_S: Final = 0.004  # seconds by which waits are delayed when too many releases are blocked
MANY: Final = 8  # with so many blocked releases, the next wait is delayed
TOO_MANY: Final = 256  # with so many blocked releases, a warning is issued

waiting: dict[KnownStream, None] = {}  # streams of all devices with waits that may be pending
blocking: dict[Gate, None] = {}  # gates with blocked releases


class Gate:
    """One per device, or one per backend if its releases wait for the work of all its devices."""

    def __init__(self) -> None:
        self.shut: list[None] = Marks()  # one mark for each release that is running or about to begin
        self.blocked: dict[Lifetime, str] = {}  # releases delayed by a pending wait, each with that stream's label
        self.limit = MANY
        self.crowded = False  # so many releases are blocked that the next wait is delayed (`drain.relieve`)
        self.devices: list[Streams] = []

    def let_releases_end(self) -> None:
        """Block while a release is running. Waits do not delay a running release."""
        system.until(lambda: not self.shut, None)

    def held_by(self) -> str:
        """Return the label of a stream that may wait for a missing signal; empty if there is none. Never blocks.

        Asks the driver about the stream that has waited longest, and about others only if that one has passed. So the
        cost does not grow with the number of streams.
        """
        for stream in self._waiting():
            if _holds_up(stream):
                return stream.label
        # If the release holds the GIL, no thread of this process can signal what another library's work waits for.
        streams = [stream for device in self.devices if device.backend.releases_hold_gil for stream in device.known()]
        return next((stream.label for stream in streams if not stream.is_idle()), "")

    def before_default(self) -> KnownStream | None:
        """Return a stream whose wait for a missing signal delays the default stream. Asks the driver.

        gpuinterop's streams delay it only if both share a hardware queue. Other libraries' streams can always do so.
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
    if lifetime.state is not RETIRED:
        return
    if len(gate.blocked) >= gate.limit:
        gate.crowded = True
    gate.blocked[lifetime] = held_by
    blocking[gate] = None
    waiting_for_a_look.pop(lifetime, None)


@locked
def unblock(gate: Gate) -> None:
    """Make the next drain check all blocked releases again."""
    waiting_for_a_look.update(dict.fromkeys(gate.blocked))
    gate.blocked.clear()
    blocking.pop(gate, None)


@locked
def relieved(gate: Gate, limit: int) -> None:
    """Delay the next wait once `limit` releases are blocked."""
    gate.limit = limit
    gate.crowded = False


after_fork(waiting.clear)
after_fork(blocking.clear)
