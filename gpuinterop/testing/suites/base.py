"""What all suites use: the device, the independent exporter, and objects that are cleaned up."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest

from ... import system
from ..._core.device import Device
from ..._core.memory import Buffer, ExternalMemory
from ..._core.semaphore import ExternalSemaphore
from ..._core.stream import Stream
from ...capabilities import Operation
from ...errors import GpuInteropError, InvalidArgumentError, ResourceBusyError, SemaphoreTimeoutError
from ...handles import Binary, Timeline
from ..exporters.base import Exporter, ExporterMemory, ExporterSemaphore
from ..plugin import kit_of
from ..requirements import HANDLE_TYPES as HANDLE_TYPES, skip_declared

_LIMIT_VARIABLE = "GPUINTEROP_KIT_LIMIT"
_A_DAY = 86400


def _limit(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= _A_DAY:  # also refuses NaN
        raise InvalidArgumentError(
            _LIMIT_VARIABLE, f"expected seconds, more than 0 and at most {_A_DAY}, got {text!r}; unset it for 20."
        )
    return seconds


LIMIT = _limit(os.environ.get(_LIMIT_VARIABLE) or "20")
"""Longest wait in seconds for something that is under way. No test asserts how much faster it was.

``GPUINTEROP_KIT_LIMIT`` sets it: lower it for a backend that is known to be broken, raise it for a slow simulator.
"""

GRACE = 0.02
"""Seconds to wait for something that must not happen. A longer wait only finds more bugs in a broken backend."""

SHORT_GRACE = 0.004
"""`GRACE` for tests with many rounds."""

KINDS = pytest.mark.parametrize("kind", [Binary, Timeline], ids=["binary", "timeline"])


class Suite:
    """Base class of the suites. A subclass named ``Test...`` in a test module runs it."""

    gpuinterop_suite: ClassVar[bool] = True

    @pytest.fixture
    def device(self, gpuinterop_device: Device) -> Device:
        """The device under test."""
        return gpuinterop_device

    @pytest.fixture
    def exporter(self, gpuinterop_exporter: Exporter) -> Exporter:
        """The independent exporter; tests share it until one of them fails."""
        return gpuinterop_exporter

    @pytest.fixture
    def exporter_spec(self, _gpuinterop_party: Any) -> Any:
        """The exporter's specification, for tests that open another one."""
        return _gpuinterop_party

    @pytest.fixture
    def scope(self) -> Generator[ExitStack, None, None]:
        """A stack that is closed at the end of the test."""
        with ExitStack() as stack:
            yield stack

    @pytest.fixture
    def stream(self, device: Device, scope: ExitStack) -> Stream:
        """A stream for this test only."""
        return new_stream(device, scope)

    @pytest.fixture
    def harness(self, device: Device, exporter: Exporter, scope: ExitStack, request: pytest.FixtureRequest) -> Harness:
        """Makes objects that device and exporter share."""
        simulated = kit_of(request.config).is_simulated(device.backend)
        return Harness(device, exporter, scope, simulated=simulated)


class Harness:
    """Makes shared objects, and cleans them up: first the device's half, then the exporter's."""

    def __init__(self, device: Device, exporter: Exporter, scope: ExitStack, *, simulated: bool = False) -> None:
        self.device = device
        self.exporter = exporter
        self.scope = scope
        self.simulated = simulated

    def export(self, size: int = 1 << 16) -> ExporterMemory:
        """Make memory of the exporter's."""
        return self.scope.enter_context(self.exporter.create_memory(size))

    def memory(self, size: int = 1 << 16) -> tuple[ExporterMemory, ExternalMemory]:
        """Make memory on both sides, not mapped."""
        theirs = self.export(size)
        ours = self.device.import_memory(theirs.export(), size=theirs.size)
        self.scope.callback(end, ours)
        return theirs, ours

    def buffer(self, size: int = 1 << 16) -> tuple[ExporterMemory, Buffer]:
        """Make memory on both sides, mapped completely."""
        theirs, ours = self.memory(size)
        return theirs, self.scope.enter_context(ours.map_buffer())

    def semaphore(self, kind: type) -> tuple[ExporterSemaphore, ExternalSemaphore[Any]]:
        """Make a semaphore on both sides."""
        theirs = self.scope.enter_context(self.make_semaphore(kind))
        ours = self.import_semaphore(theirs)
        self.scope.callback(end, ours)
        return theirs, ours

    def make_semaphore(self, kind: type) -> ExporterSemaphore:
        """Make a semaphore of the exporter's, for `import_semaphore`; the caller closes it."""
        return self.exporter.create_semaphore(kind)

    def import_semaphore(self, theirs: ExporterSemaphore) -> ExternalSemaphore[Any]:
        """Import the exporter's semaphore; the caller closes the import."""
        ours: ExternalSemaphore[Any] = self.device.import_semaphore(theirs.export())
        return ours

    def stream(self, *, high_priority: bool = False) -> Stream:
        return new_stream(self.device, self.scope, high_priority=high_priority)


def new_stream(device: Device, scope: ExitStack, *, high_priority: bool = False) -> Stream:
    """Make a stream that is closed at the end of the test."""
    return scope.enter_context(device.create_stream(high_priority=high_priority))


def end(resource: Any) -> None:
    """Close at the end of a test, even if a failure has left work pending."""
    with contextlib.suppress(ResourceBusyError):
        resource.close(timeout=LIMIT / 10)


def held(stream: Stream, grace: float = GRACE) -> bool:
    """Whether the stream still waits after `grace` seconds.

    A stream that waits is held on a machine of any speed. A stream that does not wait has that time to become idle.
    """
    try:
        stream.record().wait(grace)
    except SemaphoreTimeoutError:
        return True
    return False


def becomes_idle(stream: Stream) -> bool:
    """Whether the stream becomes idle within `LIMIT` seconds.

    Uses no `query`, which may lag because it looks at a point that it has just added to the stream's work. Tests assert
    of `query` only that it is never true too early.
    """
    try:
        stream.record().wait(LIMIT)
    except SemaphoreTimeoutError:
        return False
    return True


def args(kind: type, value: int) -> tuple[int, ...]:
    """Arguments for `value` with a semaphore of this kind."""
    return (value,) if kind is Timeline else ()


def read(buffer: Buffer, offset: int = 0, size: int | None = None) -> bytes:
    """Let the device copy out a buffer's bytes."""
    target = np.zeros(buffer.size - offset if size is None else size, np.uint8)
    buffer.copy_to_host(target, offset=offset)
    return target.tobytes()


def write(buffer: Buffer, data: bytes, offset: int = 0) -> None:
    """Let the device copy bytes into a buffer."""
    buffer.copy_from_host(np.frombuffer(data, np.uint8), offset=offset)


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes without a period, so that a wrong offset always shows."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def differ(found: bytes | Sequence[bytes], expected: bytes | Sequence[bytes]) -> str:
    """Describe in one line where the two differ; empty if they are equal.

    For long data: if CI is set, pytest does not truncate its own comparison, which then takes minutes.
    """
    ours = [found] if isinstance(found, bytes) else list(found)
    others = [expected] if isinstance(expected, bytes) else list(expected)
    for index, (mine, theirs) in enumerate(zip(ours, others, strict=True)):
        if mine != theirs:
            at = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), "the end")
            return f"entry {index}: {len(mine)} bytes, {len(theirs)} expected; they differ from byte {at} on"
    return ""


def word(byte: int) -> int:
    """A 32-bit word of four equal bytes."""
    return byte * 0x01010101


def fds() -> set[str]:
    """Open descriptors of this process, if the system lists them."""
    try:
        return set(os.listdir("/proc/self/fd"))
    except OSError:
        return set()


def mappings() -> int:
    """Number of this process's mappings of memory objects, if the system lists them."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            return sum("memfd:" in line or "dmabuf" in line or "/dev/" in line for line in lines)
    except OSError:
        return 0


def leaves_nothing(round_trip: Callable[[int], object], *, rounds: int = 10) -> None:
    """Check that repeated rounds leave no descriptor and no mapping; the first rounds may set something up."""
    for turn in range(3):
        round_trip(turn)
    gc.collect()
    open_before, mapped_before = fds(), mappings()
    for turn in range(rounds):
        round_trip(turn)
    # A thread may still have to close what another process has released; a leak stays.
    system.until(lambda: len(fds()) <= len(open_before) and mappings() < mapped_before + rounds, LIMIT)
    now = fds()
    more = {one: system.link(int(one)) for one in now - open_before}
    assert len(now) <= len(open_before), f"descriptors leak: {more}"
    assert mappings() < mapped_before + rounds, "mappings leak"  # a driver's threads may map something, too


def together(calls: list[Callable[[], object]]) -> None:
    """Run all calls at once, each in a thread; raises a call's error, or if a thread does not end."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * LIMIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"


def same_file(fd: int, other: os.stat_result) -> bool:
    """Whether `fd` is open, and refers to that object."""
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (other.st_dev, other.st_ino)


class NotToBeCalled:
    """Replaces a backend to check that the driver is not called.

    Calls named in `nothing` do nothing: they prepare objects that have no native half.
    """

    def __init__(self, backend: Any, *, nothing: Sequence[str] = ()) -> None:
        self._backend = backend
        self._nothing = nothing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def refuse(*arguments: Any, **keywords: Any) -> Any:
            if name in self._nothing:
                return None
            self.calls.append(name)
            raise AssertionError(f"the backend's {name}() was called")

        return refuse

    @property  # type: ignore[misc]  # isinstance() is to see the backend's interfaces
    def __class__(self) -> type:
        return type(self._backend)


def raises(
    error: type[GpuInteropError], call: Callable[..., object], *, argument: str | None = None, match: str | None = None
) -> Any:
    """Check that `call` raises a gpuinterop error that names the argument; returns the error."""
    with pytest.raises(error, match=match) as caught:
        call()
    found: Any = caught.value.with_traceback(None)
    del caught  # their cycle with this frame would keep what `call` refers to, and `end` would wait for it
    if argument is not None:
        named = getattr(found, "argument", None) or str(found).partition(":")[0]
        assert named == argument, f"{found!r} names {named!r}, not {argument!r}"
    assert str(found).strip(), "an error must have a text"
    return found


class Gate:
    """Holds a stream until it is opened, so that work enqueued later is certainly pending."""

    def __init__(self, harness: Harness) -> None:
        kind = _gate_kind(harness)
        self.kind = kind
        self.theirs, self.ours = harness.semaphore(kind)
        self._next = 1

    def block(self, stream: Stream) -> int:
        """Hold `stream`; returns the value that it waits for."""
        self.ours.wait(stream, *args(self.kind, self._next))
        return self._next

    def open(self) -> None:
        """Release one stream."""
        self.theirs.signal(self._next if self.kind is Timeline else 0)
        self._next += 1


def _gate_kind(harness: Harness) -> type:
    reasons = []
    for kind in (Timeline, Binary):
        handle_type = HANDLE_TYPES[kind]
        missing = harness.device.capabilities.missing(
            (Operation.IMPORT_SEMAPHORE, handle_type), (Operation.WAIT_SEMAPHORE, handle_type)
        ) or harness.exporter.capabilities.missing((Operation.IMPORT_SEMAPHORE, handle_type))
        if not missing:
            return kind
        reasons.append(missing[0].reason)
    skip_declared(f"no semaphore to hold a stream up with: {reasons[0]}")
    raise AssertionError
