"""What an independent party can do: make memory and semaphores by its own means, and use them by its own means.

The demo and the conformance kit drive these. An exporter never calls the backend under test: what it
writes, reads, signals and waits for goes through Vulkan, or through its own mapping of the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ..capabilities import Capabilities
from ..errors import InvalidArgumentError
from ..handles import AnySemaphoreHandle, DeviceIdentity, MemoryHandle

__all__ = ["Exporter", "ExporterMemory", "ExporterSemaphore", "Fill", "Submission", "Wave", "WaveParameters"]


class _Closing(ABC):
    @abstractmethod
    def close(self) -> None:
        """Idempotent. Blocks until the exporter's own pending work is done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ExporterMemory(_Closing):
    """A memory object that the exporter owns.

    Attributes
    ----------
    size : int
        Of the whole allocation, in bytes; at least what was asked for.
    dedicated : bool
        Whether the allocation is a dedicated one.
    """

    size: int
    dedicated: bool

    @abstractmethod
    def export(self) -> MemoryHandle:
        """A new handle that the caller owns, with its origin filled in."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Write by the exporter's own means; returns when the bytes are there for everybody."""

    @abstractmethod
    def read(self, offset: int, size: int) -> bytes:
        """Read by the exporter's own means."""


class ExporterSemaphore(_Closing):
    """A semaphore that the exporter owns; `kind` is ``gpuinterop.handles.Binary`` or ``Timeline``."""

    kind: type

    @abstractmethod
    def export(self) -> AnySemaphoreHandle:
        """A new handle that the caller owns, with its origin filled in."""

    @abstractmethod
    def signal(self, value: int = 0) -> None:
        """Signal by the exporter's own means; returns when the signal is on its way."""

    @abstractmethod
    def wait(self, value: int = 0, *, timeout: float) -> bool:
        """Wait by the exporter's own means, consuming a binary one; False when `timeout` seconds passed.

        After False a binary wait is still pending on Vulkan's queue: it consumes the next signal.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Work for a submission: set `size` bytes from `offset` to the 32-bit word `word` (both multiples of 4)."""

    memory: Any
    offset: int
    size: int
    word: int


class Submission(_Closing):
    """Asynchronous work of the exporter."""

    @abstractmethod
    def done(self, timeout: float = 0.0) -> bool:
        """Whether the work has finished; waits up to `timeout` seconds. After True nothing is left to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveParameters:
    """The demo's wave: two slots of ``height x width`` float32, the field of frame k in slot ``k % 2``.

    A step computes slot ``(k + 1) % 2`` in place over frame k - 1:
    ``next = damping * (2 * u - previous + courant2 * (north + south + west + east - 4 * u))``
    with the border held at zero.
    """

    width: int = 512
    height: int = 512
    courant2: float = 0.25
    damping: float = 0.999

    @property
    def slot_bytes(self) -> int:
        return self.width * self.height * 4

    @property
    def size(self) -> int:
        return 2 * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        """Where a slot starts, in bytes."""
        if slot not in (0, 1):
            raise InvalidArgumentError("slot", f"must be 0 or 1, not {slot!r}.")
        return slot * self.slot_bytes


class Wave(_Closing):
    """The exporter's half of the demo. Handles are made once, with `export_*`; then one `submit` a frame.

    Frame k (from 0): wait for the consumer's signal of frame k - 1 (none for k = 0), step slot ``k % 2`` into slot
    ``(k + 1) % 2``, signal. Binary: one semaphore each way. Timeline: one semaphore; the exporter signals
    ``2 k + 1``, the consumer ``2 k + 2``.

    Attributes
    ----------
    parameters : WaveParameters
    kind : type or None
        ``Binary`` or ``Timeline``; None: no semaphores (a driver that shares none), the host orders the frames.
    memory_size : int
        Of the whole allocation, in bytes.
    dedicated : bool
    """

    parameters: WaveParameters
    kind: type | None
    memory_size: int
    dedicated: bool

    @abstractmethod
    def export_memory(self) -> MemoryHandle: ...

    @abstractmethod
    def export_semaphores(self) -> tuple[AnySemaphoreHandle, AnySemaphoreHandle | None]:
        """(signalled by the exporter, signalled by the consumer); the second is None for a timeline.

        Raises `InvalidArgumentError` on a wave without semaphores, whose `submit` takes ``wait=False, signal=False``.
        """

    @abstractmethod
    def submit(self, frame: int, *, wait: bool = True, signal: bool = True) -> Submission:
        """Enqueue a frame and return at once. `wait` and `signal` are taken out only to prove that they matter."""

    @abstractmethod
    def read(self, slot: int) -> bytes:
        """A slot's bytes, copied out by the exporter's own means: what a program without sharing does each frame."""

    @abstractmethod
    def write(self, slot: int, data: bytes) -> None:
        """Replace a slot's bytes by the exporter's own means; returns when they are there."""

    @abstractmethod
    def abort(self) -> None:
        """Release whatever waits for a signal that will never come, so that `close` cannot hang."""


class Exporter(_Closing):
    """An independent party.

    Attributes
    ----------
    name : str
        ``vulkan``, ``memfd`` or ``process``.
    driver, device : str
        By name and version, for reports.
    identity : DeviceIdentity
        For ``gpuinterop.match_device``.
    """

    name: str
    driver: str
    device: str
    identity: DeviceIdentity

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """A usable cell: this party can play the other part in that operation."""

    @abstractmethod
    def create_memory(self, size: int) -> ExporterMemory: ...

    @abstractmethod
    def create_semaphore(self, kind: type) -> ExporterSemaphore: ...

    @abstractmethod
    def submit(
        self,
        *,
        wait: Sequence[tuple[ExporterSemaphore, int]] = (),
        fill: Sequence[Fill] = (),
        signal: Sequence[tuple[ExporterSemaphore, int]] = (),
    ) -> Submission:
        """Enqueue: after `wait`, do `fill`, then `signal`. Returns at once."""

    @abstractmethod
    def create_wave(self, parameters: WaveParameters, kind: type | None) -> Wave: ...
