"""A scripted backend: it does its work on the CPU at once, records every call, and fails where a test says so.

It stands for a driver whose habits the core must bear: one that closes the fd of a failed import, keeps that of a
successful one, never finishes an event.

It is strict: whatever a call is given must be alive when the call starts, inside, and when it ends. What is not is an
AssertionError, and stands in `violations` as well, which a fixture looks at when the test is over (conftest.py): also
one that somebody swallowed fails its test. `FakeDriver` also blocks where drivers do.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.backend import (
    INTERFACES,
    ArrayBackend,
    Backend,
    DeviceInfo,
    DriverHandle,
    GraphBackend,
    MulticastBackend,
    SemaphoreNode,
    StreamMemoryBackend,
)
from gpuinterop.capabilities import DOMAIN, Capabilities, Capability, Operation, Scope, Support
from gpuinterop.handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    ArrayLayout,
    FabricHandle,
    FdHandle,
    Granularity,
    MemoryHandle,
    VmmFd,
)
from tests.limits import LIMIT

VIOLATIONS: list[str] = []
"""Of all backends since the last test; a test that provokes some takes them out."""

BACKENDS: weakref.WeakSet[FakeBackend] = weakref.WeakSet()
"""All that there are: at the end of a test their streams go on."""

_NO_DRIVER = frozenset({"versions", "libraries", "devices", "capabilities", "multicast_granularity", "can_access"})
CALLS = {
    name
    for interface in {Backend, *itertools.chain(*INTERFACES.values())}
    for name, value in vars(interface).items()
    if inspect.isfunction(value) and not name.startswith("_") and name not in _NO_DRIVER
}
"""The backend's methods that call a driver."""
RELEASES = {
    "destroy_stream", "destroy_event", "unmap_buffer", "destroy_memory", "destroy_semaphore", "destroy_array", "unpin",
    "unmap_allocation", "release_allocation", "destroy_graph", "destroy_executable",
}  # fmt: skip
CREATES = {
    "create_stream", "record", "import_memory", "map_buffer", "import_semaphore", "map_array", "pin", "allocate",
    "import_allocation", "map_allocation", "create_multicast", "import_multicast",
}  # fmt: skip
_NUMBERS = {
    name: [
        (each, index - 1)
        for index, each in enumerate(inspect.signature(method).parameters)
        if each in ("graph", "executable")
    ]
    for name, method in vars(GraphBackend).items()
    if name in CALLS
}
"""Graphs are numbers, not handles: what they are, and which argument."""


class Handle(tuple[str, int]):
    """What the backend calls a thing: its kind and a number; for an adopted stream, its pointer."""

    device: DriverHandle = 0
    parent: Handle | None = None


@dataclass(eq=False)
class Held:
    """One wait that a stream was given."""

    there: Callable[[], bool]
    before: frozenset[Held]
    """The stream's earlier ones."""


def _strict(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: FakeBackend, *args: Any, **kwargs: Any) -> Any:
        given = (name, [*_handles([*args, *kwargs.values()]), *_numbers(name, args)])
        if (under_way := self._under_way())[-1:] == [given]:  # an override's call of what it overrides
            return function(self, *args, **kwargs)
        self.at(name, "start", given[1])
        self._stand_behind_releases(name)
        self._refuse_dead(*given)
        under_way.append(given)
        self._calls_under_way.append(given)
        try:
            self.at(name, "inside", given[1])
            self._refuse_dead(*given)
            result = function(self, *args, **kwargs)
        finally:
            del under_way[-1]  # no call: a second interrupt could come behind it
            self._calls_under_way.remove(given)
        try:
            self.at(name, "end", given[1])
        except BaseException:  # as backends do: what was made is undone
            self.live.difference_update(_handles([result]) if name in CREATES else ())
            raise
        return result

    return call


def _handles(values: Iterable[Any]) -> list[Handle]:
    found: list[Handle] = []
    for value in values:
        if isinstance(value, Handle):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _handles(value)
    return found


def _numbers(name: str, args: Sequence[Any]) -> list[Handle]:
    return [Handle((kind, args[index])) for kind, index in _NUMBERS.get(name, ())]


class FakeBackend(ArrayBackend):
    name = "fake"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if name in CALLS and inspect.isfunction(value):
                setattr(cls, name, _strict(name, value))

    def __init__(self) -> None:
        BACKENDS.add(self)
        self.calls: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        self.blocked: set[int] = set()  # streams whose events are not done
        self.gone: set[int] = set()  # adopted streams that their owners have destroyed
        self.at: Callable[[str, str, Sequence[Handle]], None] = lambda call, place, handles: None
        """At the start of each call of the driver, inside and at its end."""
        self.on_is_done: Callable[[], None] = lambda: None
        self.on_synchronize: Callable[[], None] = lambda: None
        self.on_map: Callable[[], None] = lambda: None
        self.on_record: Callable[[], None] = lambda: None
        self.live: set[tuple[str, int]] = set()
        self.dead: set[tuple[str, int]] = set()
        self.used: dict[Handle, set[int]] = {}
        """The streams that were given work with a thing."""
        self.on_import: Callable[[FdHandle], None] = lambda handle: os.close(handle.fd)
        self.memory = ctypes.create_string_buffer(1 << 16)
        """What was mapped last."""
        self._mapped: list[tuple[Handle, range, Any]] = []
        self._serial = itertools.count(0x1000)  # 0 to 2 are names of default streams
        self._thread = threading.local()
        self._calls_under_way: list[tuple[str, list[Handle]]] = []
        self.event_streams: dict[DriverHandle, DriverHandle] = {}
        self._recorded_on: dict[DriverHandle, int] = {}

    # -- what it refuses --

    def violate(self, what: str) -> None:
        """Note it, for whoever swallows the AssertionError."""
        self.violations.append(what)
        VIOLATIONS.append(what)
        raise AssertionError(what)

    def _under_way(self) -> list[tuple[str, list[Handle]]]:
        """The calls of this thread, the innermost last."""
        found: list[tuple[str, list[Handle]]] = self._thread.__dict__.setdefault("calls", [])
        return found

    def pass_all(self) -> None:
        """Every stream goes on, and finishes its work."""
        self.blocked.clear()

    def _is_dead(self, handle: Handle) -> bool:
        if handle[0] == "adopted":
            return handle[1] in self.gone
        return handle in self.dead or (handle not in self.live and handle[0] not in ("graph", "executable"))

    def _refuse_dead(self, call: str, handles: Iterable[Handle]) -> None:
        for handle in handles:
            if self._is_dead(handle):
                self.violate(f"{call} of a dead {handle[0]}: {handle[1]}")
            stream = self.event_streams.get(handle)
            if stream is not None and call != "destroy_event" and self._is_dead(stream):  # AMD's runtime looks there
                self.violate(f"{call} of an event whose stream is dead: {stream}")

    def _refuse_unmapped(self, call: str, stream: DriverHandle, *addresses: int) -> None:
        for address in addresses:
            found = [handle for handle, where, _ in self._mapped if address in where]
            for handle in found:
                self._use(stream, handle)
            if found and not any(handle in self.live for handle in found):
                self.violate(f"{call} of bytes whose {found[-1]} is unmapped")

    def _stand_behind_releases(self, call: str) -> None:
        """Wait where another thread's call stops this one."""

    def _map(self, parent: Handle, memory: Any) -> tuple[Handle, int]:
        mapping = self._new("mapping", parent=parent)
        address = ctypes.addressof(memory)
        self._mapped.append((mapping, range(address, address + len(memory)), memory))
        return mapping, address

    def _new(self, what: str, device: DriverHandle = 0, parent: Handle | None = None) -> Handle:
        native = Handle((what, next(self._serial)))
        native.device, native.parent = device if parent is None else parent.device, parent
        self.live.add(native)
        return native

    def _end(self, native: Handle) -> None:
        """What is released has no use left, nothing that stands on it, and no call that is under way with it."""
        mine = self._under_way()[-1:]
        for call in [call for call in list(self._calls_under_way) if call not in mine]:
            if native in call[1]:
                self.violate(f"{native} is released while {call[0]} is under way with it")
        for other in list(self.live):
            if isinstance(other, Handle) and other.parent == native:
                self.violate(f"{native} is released before {other}, which stands on it")
        if native[0] == "stream" and native[1] in self.blocked:
            self.violate(f"{native} is released before its work is done")
        for stream in self._unfinished(native):
            self.violate(f"{native} is released before the work of stream {stream} with it is done")
        if native not in self.live:
            self.violate(f"{native} is released twice")
        self.live.remove(native)
        self.dead.add(native)

    def _drop(self, native: DriverHandle) -> None:
        self.calls.append(("destroy", native[0]))
        self._end(native)

    def _use(self, stream: DriverHandle, *natives: DriverHandle) -> None:
        for native in natives:
            self.used.setdefault(native, set()).add(self.number(stream))

    def _unfinished(self, native: Handle) -> list[int]:
        """The streams whose work with it is not done."""
        return sorted(self.used.pop(native, set()) & self.blocked)

    def number(self, stream: DriverHandle) -> int:
        """The stream's pointer; of 2, which names a stream of each thread's own, another number for each."""
        pointer = int(stream[1])
        return -threading.get_ident() if pointer == 2 else pointer

    def count(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.live)

    # -- backend --

    def versions(self) -> Mapping[str, str]:
        return {}

    def devices(self) -> Sequence[DeviceInfo]:
        return [fake_info()]

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return ()

    def open_device(self, ordinal: int) -> DriverHandle:
        return ordinal

    def create_stream(self, device: DriverHandle, *, high_priority: bool = False) -> DriverHandle:
        self.calls.append(("create_stream", high_priority))
        return self._new("stream", device)

    def adopt_stream(self, device: DriverHandle, pointer: int) -> DriverHandle:
        native = Handle(("adopted", pointer))
        native.device = device
        return native

    def stream_pointer(self, stream: DriverHandle) -> int:
        return int(stream[1])

    def stream_key(self, stream: DriverHandle) -> int:
        return 0 if stream in (("adopted", 0), ("adopted", 1)) else int(stream[1])

    def destroy_stream(self, stream: DriverHandle) -> None:
        self._drop(stream)

    def synchronize(self, stream: DriverHandle) -> None:
        self.calls.append(("synchronize", stream))
        self.on_synchronize()

    def wait_event(self, stream: DriverHandle, event: DriverHandle) -> None:
        self.calls.append(("wait_event", stream, self.event_streams[event]))

    def record(self, stream: DriverHandle) -> DriverHandle:
        self.on_record()
        event = self._new("event", stream.device)
        self.event_streams[event] = stream
        self._recorded_on[event] = self.number(stream)
        return event

    def is_done(self, event: DriverHandle) -> bool:
        self.on_is_done()
        return self._recorded_on[event] not in self.blocked

    def destroy_event(self, event: DriverHandle) -> None:
        self._end(event)
        self.event_streams.pop(event, None)

    def copy(self, stream: DriverHandle, target: int, source: int, size: int) -> None:
        self.calls.append(("copy", stream, size))
        self._refuse_unmapped("copy", stream, target, source)
        ctypes.memmove(target, source, size)

    def fill(self, stream: DriverHandle, target: int, byte: int, size: int) -> None:
        self.calls.append(("fill", stream, byte, size))
        self._refuse_unmapped("fill", stream, target)
        ctypes.memset(target, byte, size)

    def import_memory(self, device: DriverHandle, handle: MemoryHandle, *, size: int, dedicated: bool) -> DriverHandle:
        self.calls.append(("import_memory", type(handle).__name__, size, dedicated))
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        return self._new("memory", device)

    def map_buffer(self, memory: DriverHandle, *, size: int) -> tuple[DriverHandle, int]:
        self.calls.append(("map_buffer", size))
        self.on_map()
        self.memory = ctypes.create_string_buffer(min(size, 1 << 16))
        return self._map(memory, self.memory)

    def unmap_buffer(self, mapping: DriverHandle) -> None:
        self._drop(mapping)

    def destroy_memory(self, memory: DriverHandle) -> None:
        self._drop(memory)

    def import_semaphore(self, device: DriverHandle, handle: AnySemaphoreHandle) -> DriverHandle:
        self.calls.append(("import_semaphore", type(handle).__name__))
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        return self._new("semaphore", device)

    def prepare(self, semaphores: Sequence[DriverHandle]) -> DriverHandle:
        return tuple(semaphores)

    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None:
        self._use(stream, *batch)
        self.calls.append(("signal", stream, tuple(values)))

    def wait(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], timeout_ms: int | None) -> None:
        self._use(stream, *batch)
        self.calls.append(("wait", stream, tuple(values), timeout_ms))

    def destroy_semaphore(self, semaphore: DriverHandle) -> None:
        self._drop(semaphore)

    def abandon_semaphore(self, semaphore: DriverHandle) -> None:
        self.calls.append(("abandon", semaphore))

    def map_array(self, memory: DriverHandle, layout: ArrayLayout) -> DriverHandle:
        self.calls.append(("map_array", layout))
        return self._new("array", parent=memory)

    def copy_level(
        self, stream: DriverHandle, array: DriverHandle, level: int, address: int, size: int, *, to_array: bool
    ) -> None:
        self.calls.append(("copy_level", level, size, to_array))
        self._use(stream, array)
        self._refuse_unmapped("copy_level", stream, address)

    def destroy_array(self, array: DriverHandle) -> None:
        self._drop(array)


for _name in CALLS & vars(FakeBackend).keys():
    setattr(FakeBackend, _name, _strict(_name, vars(FakeBackend)[_name]))


class FakeWords(FakeBackend, StreamMemoryBackend):
    """Its streams write words, at once; they wait for nothing, and what they were to wait for is in `calls`.

    Devices know a page by another address than the process does, `APART` higher.
    """

    APART = 1 << 52

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[DriverHandle, int] = {}
        self.capturing: set[int] = set()
        self.on_pin: Callable[[], None] = lambda: None
        self.on_unpin: Callable[[int], None] = lambda address: None

    def is_capturing(self, stream: DriverHandle) -> bool:
        return stream[1] in self.capturing

    def is_idle(self, stream: DriverHandle) -> bool:
        return self.number(stream) not in self.blocked

    def pin(self, device: DriverHandle, address: int, size: int) -> tuple[DriverHandle, int]:
        self.calls.append(("pin", address, size))
        self.on_pin()
        pin = self._new("pin", device)
        self.pins[pin] = address
        return pin, address + self.APART

    def unpin(self, pin: DriverHandle) -> None:
        self.on_unpin(self.pins.pop(pin, 0))
        self._drop(pin)

    def write_value(self, stream: DriverHandle, word: int, value: int) -> None:
        self._use_word("write_value", stream, word)
        self.calls.append(("write_value", stream, word, value))
        ctypes.c_uint64.from_address(word - self.APART).value = value

    def wait_value(self, stream: DriverHandle, word: int, value: int) -> None:
        self._use_word("wait_value", stream, word)
        self.calls.append(("wait_value", stream, word, value))

    def _use_word(self, call: str, stream: DriverHandle, word: int) -> None:
        assert word >= self.APART, "the process's own address was given to the device"
        for pin, address in list(self.pins.items()):
            if 0 <= word - self.APART - address < 1 << 12:
                self._use(stream, pin)
                return
        self.violate(f"{call} of a word that is not pinned")


class FakeDriver(FakeWords):
    """Its streams wait, and it blocks as drivers do.

    `unmap_buffer`, `destroy_array`, `destroy_semaphore` and `unpin` block until no stream of the device waits; while a
    thread is in there, every other call stands. Nobody can end a wait that stands: to call them then is a violation.

    What a stream is given behind a wait happens when the wait has passed: it passes when its value is there, through
    `signal`, `write_value` or `arrive`, which is the other side's. `pass_all` lets all go on.
    """

    releases_block = True

    def __init__(self) -> None:
        super().__init__()
        self.on_wait: Callable[[], None] = lambda: None
        self.on_release: Callable[[], None] = lambda: None
        self.looks = 0  # how often whether a stream is idle
        self.waiting: dict[tuple[DriverHandle, int], list[Held]] = {}  # by device and stream
        self.values: dict[Handle, int] = {}
        self._later: list[tuple[frozenset[Held], Callable[[], object]]] = []
        self._behind: dict[Handle, frozenset[Held]] = {}  # events
        self._passed: set[Held] = set()
        self._uses: dict[DriverHandle, list[tuple[int, frozenset[Held]]]] = {}
        self._releasing: list[int] = []  # threads that are in a release
        self.block: Callable[[Callable[[], bool], str], None] = self._block

    # -- the streams --

    def pass_all(self) -> None:
        """Every wait passes, and what was enqueued behind it happens."""
        super().pass_all()
        while any(self.waiting.values()):
            for held in itertools.chain(*self.waiting.values()):
                held.there = lambda: True
            self.note_passed()

    def arrive(self, semaphore: Handle, value: int) -> None:
        """The other side has signalled."""
        self.values[semaphore] = max(value, self.values.get(semaphore, 0))
        self.note_passed()

    def note_passed(self) -> None:
        """Let the streams go as far as they can."""
        progress = True
        while progress:
            progress = False
            for key, held in list(self.waiting.items()):
                for one in list(held):
                    if one in self._passed or (one.before <= self._passed and one.there()):
                        self._passed.add(one)
                        held.remove(one)
                        progress = True
                if not held:
                    del self.waiting[key]
            for entry in list(self._later):
                if entry[0] <= self._passed:
                    self._later.remove(entry)
                    entry[1]()
                    progress = True

    def _pending(self, stream: DriverHandle) -> frozenset[Held]:
        self.note_passed()
        return frozenset(self.waiting.get((stream.device, self._queue(stream)), ()))

    def _queue(self, stream: DriverHandle) -> int:
        """Which native stream it is: 0 and 1 are one."""
        number = self.number(stream)
        return 0 if number == 1 else number

    def _use(self, stream: DriverHandle, *natives: DriverHandle) -> None:
        super()._use(stream, *natives)
        for native in natives:
            self._uses.setdefault(native, []).append((self.number(stream), self._pending(stream)))

    def _unfinished(self, native: Handle) -> list[int]:
        behind = [number for number, held in self._uses.pop(native, ()) if not held <= self._passed]
        return super()._unfinished(native) + behind

    def _hold(self, stream: DriverHandle, there: Callable[[], bool]) -> None:
        held = Held(there, self._pending(stream))
        self.waiting.setdefault((stream.device, self._queue(stream)), []).append(held)
        self.note_passed()

    def _enqueue(self, stream: DriverHandle, effect: Callable[[], object]) -> None:
        self._later.append((self._pending(stream), effect))
        self.note_passed()

    def is_idle(self, stream: DriverHandle) -> bool:
        self.looks += 1
        return self.number(stream) not in self.blocked and not self._pending(stream)

    def record(self, stream: DriverHandle) -> DriverHandle:
        event = super().record(stream)
        self._behind[event] = self._pending(stream)
        return event

    def is_done(self, event: DriverHandle) -> bool:
        self.note_passed()
        return super().is_done(event) and self._behind[event] <= self._passed

    def synchronize(self, stream: DriverHandle) -> None:
        super().synchronize(stream)
        if self.holds_gil and not self.is_idle(stream):
            self.violate("synchronize blocks, and keeps the GIL")
        number = self.number(stream)
        self.block(lambda: number not in self.blocked and not self._pending(stream), f"synchronize of {stream}")

    def wait_event(self, stream: DriverHandle, event: DriverHandle) -> None:
        super().wait_event(stream, event)
        behind = self._behind[event]
        if not behind <= self._passed:
            self._hold(stream, lambda: behind <= self._passed)

    def wait(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], timeout_ms: int | None) -> None:
        self.on_wait()
        super().wait(batch, stream, values, timeout_ms)
        wanted = list(zip(batch, values, strict=True))
        self._hold(stream, lambda: all(self.values.get(one, 0) >= value for one, value in wanted))

    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None:
        super().signal(batch, stream, values)
        wanted = list(zip(batch, values, strict=True))
        self._enqueue(stream, lambda: self.values.update(wanted))

    def wait_value(self, stream: DriverHandle, word: int, value: int) -> None:
        self.on_wait()
        super().wait_value(stream, word, value)
        self._hold(stream, lambda: ctypes.c_uint64.from_address(word - self.APART).value >= value)

    def write_value(self, stream: DriverHandle, word: int, value: int) -> None:
        self._use_word("write_value", stream, word)
        self.calls.append(("write_value", stream, word, value))
        there = ctypes.c_uint64.from_address(word - self.APART)
        self._enqueue(stream, lambda: setattr(there, "value", value))

    def copy(self, stream: DriverHandle, target: int, source: int, size: int) -> None:
        self.calls.append(("copy", stream, size))
        self._refuse_unmapped("copy", stream, target, source)
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def fill(self, stream: DriverHandle, target: int, byte: int, size: int) -> None:
        self.calls.append(("fill", stream, byte, size))
        self._refuse_unmapped("fill", stream, target)
        self._enqueue(stream, lambda: ctypes.memset(target, byte, size))

    # -- what blocks --

    def _block(self, condition: Callable[[], bool], what: str) -> None:
        """Until it is so, in real threads; a test that explores puts its own here."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if time.monotonic() > deadline:
                self.violate(f"{what} blocks for ever")
            time.sleep(1e-4)

    def _stand_behind_releases(self, call: str) -> None:
        me = threading.get_ident()
        if self.releases_block and any(thread != me for thread in self._releasing):
            self.block(lambda: not any(thread != me for thread in self._releasing), call)

    def _waits_of(self, device: DriverHandle) -> list[tuple[DriverHandle, int]]:
        self.note_passed()
        return [key for key in self.waiting if self.releases_block_for_all or key[0] == device]

    def _release(self, native: DriverHandle) -> None:
        self._releasing.append(threading.get_ident())
        try:
            self.on_release()
            if self.releases_block and (waits := self._waits_of(native.device)):
                self.violate(f"a release of {native} blocks while streams wait: {sorted(waits)}")
            if self.releases_hold_gil and self.blocked:
                self.violate(f"a release of {native} blocks and keeps the GIL while {sorted(self.blocked)} run")
            self._drop(native)
        finally:
            self._releasing.remove(threading.get_ident())

    def unmap_buffer(self, mapping: DriverHandle) -> None:
        self._release(mapping)

    def destroy_semaphore(self, semaphore: DriverHandle) -> None:
        self._release(semaphore)

    def destroy_array(self, array: DriverHandle) -> None:
        self._release(array)

    def unpin(self, pin: DriverHandle) -> None:
        self.on_unpin(self.pins.get(pin, 0))
        self._release(pin)
        self.pins.pop(pin, None)


class FakeMulticast(FakeBackend, MulticastBackend):
    """Devices with shareable allocations and multicast.

    What changes something is in `calls`, what only asks in `asked`. `on` runs, or fails, at a call of that name.
    """

    name = "team"
    COUNT = 4
    ALLOCATIONS = Granularity(1 << 12, 1 << 14)
    GROUPS = Granularity(1 << 13, 1 << 15)

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []
        self.on: dict[str, Callable[[], None]] = {}
        self.strangers: set[tuple[int, int]] = set()  # (device, peer) without access
        self.lies_on: int | None = None  # what `location` says
        self.shareable = True
        self.bytes: dict[DriverHandle, Any] = {}

    def _note(self, call: str, *arguments: Any) -> None:
        self.calls.append((call, *arguments))
        self.on.get(call, lambda: None)()

    def devices(self) -> Sequence[DeviceInfo]:
        return [
            replace(fake_info((2, ordinal)), ordinal=ordinal, name=f"fake {ordinal}", uuid=bytes([ordinal]) * 16,
                    pci_bus_id=f"0000:0{ordinal}:00.0")
            for ordinal in range(self.COUNT)
        ]  # fmt: skip

    # -- allocations --

    def granularity(self, device: DriverHandle, handle_type: type[AllocationHandle]) -> Granularity:
        return self.ALLOCATIONS

    def allocate(self, device: DriverHandle, size: int, handle_type: type[AllocationHandle]) -> DriverHandle:
        self._note("allocate", device, size, handle_type)
        native = self._new("allocation", device)
        self.bytes[native] = ctypes.create_string_buffer(size)
        return native

    def export_allocation(self, allocation: DriverHandle) -> AllocationHandle:
        handle = VmmFd.adopt(os.memfd_create("allocation"))
        os.ftruncate(handle.fd, len(self.bytes[allocation]))
        return handle

    def import_allocation(self, device: DriverHandle, handle: AllocationHandle, *, size: int) -> DriverHandle:
        self._note("import_allocation", device, size)
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        native = self._new("allocation", device)
        self.bytes[native] = ctypes.create_string_buffer(size)
        return native

    def map_allocation(self, allocation: DriverHandle, devices: Sequence[DriverHandle]) -> tuple[DriverHandle, int]:
        self._note("map_allocation", allocation, tuple(devices))
        memory = self.bytes.get(allocation)
        return (
            self._map(allocation, memory) if memory is not None else (self._new("mapping", parent=allocation), 1 << 40)
        )

    def unmap_allocation(self, mapping: DriverHandle) -> None:
        self._note("unmap_allocation", mapping)
        self._end(mapping)

    def release_allocation(self, allocation: DriverHandle) -> None:
        self._note("release_allocation", allocation)
        self._end(allocation)

    def can_access(self, ordinal: int, peer: int) -> bool:
        self.asked.append(("can_access", ordinal, peer))
        return (ordinal, peer) not in self.strangers

    def location(self, allocation: DriverHandle) -> int | None:
        return self.lies_on

    # -- multicast --

    def multicast_granularity(
        self, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Granularity:
        self.asked.append(("multicast_granularity", devices, size, tuple(handle_types)))
        return self.GROUPS

    def create_multicast(
        self, device: DriverHandle, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> DriverHandle:
        self._note("create_multicast", device, devices, size, tuple(handle_types))
        return self._new("group", device)

    def export_multicast(self, group: DriverHandle, handle_type: type[AllocationHandle]) -> AllocationHandle:
        self._note("export_multicast", group, handle_type)
        return VmmFd.adopt(os.memfd_create("group")) if handle_type is VmmFd else FabricHandle(bytes(64))

    def import_multicast(
        self, device: DriverHandle, handle: AllocationHandle, *, devices: int, size: int
    ) -> DriverHandle:
        self._note("import_multicast", device, devices, size)
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        return self._new("group", device)

    def add_device(self, group: DriverHandle, device: DriverHandle) -> None:
        self._note("add_device", group, device)

    def bind_memory(
        self, group: DriverHandle, device: DriverHandle, offset: int, allocation: DriverHandle, start: int, size: int
    ) -> None:
        self._note("bind_memory", group, device, offset, allocation, start, size)

    def bind_address(self, group: DriverHandle, device: DriverHandle, offset: int, address: int, size: int) -> None:
        self._note("bind_address", group, device, offset, address, size)

    def unbind(self, group: DriverHandle, device: DriverHandle, offset: int, size: int) -> None:
        self._note("unbind", group, device, offset, size)

    def is_shareable(self, device: DriverHandle, address: int) -> bool:
        self.asked.append(("is_shareable", device, address))
        return self.shareable

    def multimem_store(self, stream: DriverHandle, address: int, value: int, count: int) -> None:
        self._note("multimem_store", stream, address, value, count)

    def multimem_add(self, stream: DriverHandle, target: int, address: int, count: int) -> None:
        self._note("multimem_add", stream, target, address, count)


class FakeGraphs(FakeBackend, GraphBackend):
    """Captures signals and waits; knows by number what it has captured."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: dict[int, list[SemaphoreNode]] = {}
        self.graphs: dict[int, list[SemaphoreNode]] = {}
        self.recorded_in_a_capture = 0

    def is_capturing(self, stream: DriverHandle) -> bool:
        return stream[1] in self.captures

    def begin_capture(self, stream: DriverHandle) -> None:
        self.captures[stream[1]] = []

    def end_capture(self, stream: DriverHandle) -> int:
        graph = self._new("graph")[1]
        self.graphs[graph] = self.captures.pop(stream[1])
        return graph

    def instantiate(self, device: DriverHandle, graph: int) -> int:
        self.calls.append(("instantiate", graph))
        return self._new("executable")[1]

    def launch(self, executable: int, stream: DriverHandle) -> None:
        self.calls.append(("launch", executable, stream))

    def destroy_graph(self, device: DriverHandle, graph: int) -> None:
        self._drop(("graph", graph))

    def destroy_executable(self, device: DriverHandle, executable: int) -> None:
        self._drop(("executable", executable))

    def semaphore_pointer(self, semaphore: DriverHandle) -> int:
        return int(semaphore[1])

    def semaphore_nodes(self, graph: int) -> Sequence[SemaphoreNode]:
        return self.graphs[graph]

    def set_node(
        self, executable: int, node: SemaphoreNode, semaphores: Sequence[DriverHandle], values: Sequence[int]
    ) -> None:
        self.calls.append(("set_node", executable, node.native, tuple(semaphores), tuple(values)))

    def record(self, stream: DriverHandle) -> DriverHandle:
        self.recorded_in_a_capture += stream[1] in self.captures
        return super().record(stream)

    def _node(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], *, signals: bool) -> bool:
        nodes = self.captures.get(stream[1])
        if nodes is not None:
            nodes.append(
                SemaphoreNode(
                    native=("node", len(nodes)),
                    signals=signals,
                    semaphores=tuple(one[1] for one in batch),
                    values=tuple(values),
                )
            )
        return nodes is not None

    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None:
        if not self._node(batch, stream, values, signals=True):
            super().signal(batch, stream, values)

    def wait(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], timeout_ms: int | None) -> None:
        if not self._node(batch, stream, values, signals=False):
            super().wait(batch, stream, values, timeout_ms)


class FakeEverything(FakeDriver, FakeMulticast, FakeGraphs):
    """Every interface, with streams that wait and releases that block.

    To ask a stream that is being captured, or an event that went into the capture, makes the capture invalid.
    """

    COUNT = 2

    def __init__(self) -> None:
        super().__init__()
        self._captured: set[Handle] = set()
        self._recorded: dict[int, list[Callable[[], object]]] = {}
        """What a stream that is captured was given, then what its graph and the executable do."""

    def is_capturing(self, stream: DriverHandle) -> bool:
        return stream[1] in self.captures

    def _enqueue(self, stream: DriverHandle, effect: Callable[[], object]) -> None:
        if stream[1] in self.captures:
            self._recorded.setdefault(stream[1], []).append(effect)
        else:
            super()._enqueue(stream, effect)

    def end_capture(self, stream: DriverHandle) -> int:
        graph = super().end_capture(stream)
        self._recorded[graph] = self._recorded.pop(stream[1], [])
        return graph

    def instantiate(self, device: DriverHandle, graph: int) -> int:
        executable = super().instantiate(device, graph)
        self._recorded[executable] = self._recorded[graph]
        return executable

    def launch(self, executable: int, stream: DriverHandle) -> None:
        super().launch(executable, stream)
        for effect in self._recorded[executable]:
            self._enqueue(stream, effect)

    def _spare_the_capture(self, call: str, captured: bool) -> None:
        if captured:
            self.violate(f"{call} makes a capture invalid")

    def is_idle(self, stream: DriverHandle) -> bool:
        self._spare_the_capture("is_idle", stream[1] in self.captures)
        return super().is_idle(stream)

    def synchronize(self, stream: DriverHandle) -> None:
        self._spare_the_capture("synchronize", stream[1] in self.captures)
        super().synchronize(stream)

    def record(self, stream: DriverHandle) -> DriverHandle:
        event = super().record(stream)
        if stream[1] in self.captures:
            self._captured.add(event)
        return event

    def is_done(self, event: DriverHandle) -> bool:
        self._spare_the_capture("is_done", event in self._captured)
        return super().is_done(event)

    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None:
        (FakeGraphs if stream[1] in self.captures else FakeDriver).signal(self, batch, stream, values)

    def wait(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int], timeout_ms: int | None) -> None:
        (FakeGraphs if stream[1] in self.captures else FakeDriver).wait(self, batch, stream, values, timeout_ms)


class Pinned(FakeEverything):
    pageable_copies_block = False


def fake_team(*gaps: Operation, backend: FakeMulticast | None = None) -> tuple[list[Device], FakeMulticast]:
    """Its devices, all usable but for `gaps`."""
    found = backend or FakeMulticast()
    devices: list[Device] = []
    devices += [Device(found, info, table(*gaps), lambda: devices) for info in found.devices()]
    return devices, found


def fake_info(dlpack: tuple[int, int] = (1, 0)) -> DeviceInfo:
    interface = "__array_interface__" if dlpack[0] == 1 else "__cuda_array_interface__"
    return DeviceInfo(
        ordinal=0, name="fake", uuid=b"f" * 16, pci_bus_id="0000:01:00.0", dlpack=dlpack, array_interface=interface
    )


@functools.cache
def table(*gaps: Operation) -> Capabilities:
    """Everything usable but `gaps`: one for all, because it is read-only, and dearer than the device."""
    return Capabilities(
        [
            Capability(
                operation=cell.operation,
                handle_type=cell.handle_type,
                support=Support.UNSUPPORTED if cell.operation in gaps else Support.UNVERIFIED,
                scope=Scope.DRIVER,
                reason="the test says so.",
                reference="tests",
            )
            for cell in DOMAIN
        ],
        owner="fake",
    )


def fake_device(
    *gaps: Operation, dlpack: tuple[int, int] = (1, 0), backend: FakeBackend | None = None, ordinal: int = 0
) -> tuple[Device, FakeBackend]:
    found = backend or FakeBackend()
    return Device(found, replace(fake_info(dlpack), ordinal=ordinal), table(*gaps)), found


def memory_of(device: Device, size: int = 4096) -> gi.ExternalMemory:
    """Memory that the device imports; with a Win32 handle, which it does not consume."""
    return device.import_memory(gi.OpaqueWin32(handle=8), size=size)


def semaphore_of(device: Device, kind: Any = gi.TimelineWin32) -> Any:
    """The same for a semaphore."""
    return device.import_semaphore(kind(handle=8))
