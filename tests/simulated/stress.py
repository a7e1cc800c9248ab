"""All public operations at random, by several threads, over objects that they share: nothing crashes, nothing is lost.

``python -m tests.simulated.stress --backend cuda --minutes 10 --threads 8 --switch 1e-6 --seed 1``

The driver is the simulated one; of HIP also AMD's runtime on the stand-in (GPUINTEROP_TEST_HIP=amd, as in
tests/vendors/hip/conftest.py). A run fails for a crash, for a standstill, for an exception that no race may give, for
stale bytes, for what the simulated driver calls a violation (a dead handle is one), and for whatever is not released
when all is closed.

Waits are always for what somebody signals: `Clock`'s thread for the values that were asked for, a stream for what was
enqueued there before. So whoever stands still is stuck for ever.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import os
import random
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import gpuinterop as gi
from gpuinterop.capabilities import Operation
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.simulated import build
from tests.limits import LIMIT
from tests.simulated.driver import Simulator, hide_rocm, preload
from tests.simulated.stand_in import StandIn
from tests.spare_pages import unpin_spare_pages

ROOT: Final = Path(__file__).resolve().parents[2]
SIZE: Final = 1 << 16
POOL: Final = 24
"""How many objects of a kind are open at once, about."""
STANDSTILL: Final = LIMIT
"""Seconds without an operation after which the run is stuck; every wait here has a time-out."""
ALLOWED: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (gi.ResourceClosedError, ""),
    (gi.ResourceBusyError, ""),
    (gi.SemaphoreTimeoutError, ""),
    (gi.HandleError, r"is closed|was consumed|is detached|closed or consumed"),
    (gi.InvalidArgumentError, r"is being captured|a timeline only grows|partial|overlap|is no stream of the host"),
)
"""What a race between two threads may give: an error of the library that says so."""
KEPT: Final = (
    "external_memory", "external_semaphore", "mapping", "mipmapped_array", "vmm_handle", "vmm_mapping", "registration",
    "reservation", "graph", "executable", "interop_mapping",
)  # fmt: skip
"""What must be gone at the end. Some streams and events are kept for later copies."""


WEIGHTS: Final = {
    "import_allocation": 1, "binary": 1, "bridge": 1, "synchronize_device": 1, "collect": 1, "detach": 2, "order": 2,
    "fill": 8, "wait_for_signal": 8, "signal": 10, "wait": 12, "leave": 26,
}  # fmt: skip
"""How often operations are made; others are made four times. What ends something leaves the pools full."""


class StaleBytesError(AssertionError):
    """A copy was not behind the work that wrote what it copies."""


class Pool:
    """Objects of a kind that all threads use. One that has to leave is closed, or dropped for the collector."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._things: list[Any] = []

    def put(self, thing: Any) -> None:
        self._things.append(thing)
        if len(self._things) > POOL:
            self.take().close()

    def any(self) -> Any:
        things = self.all()
        if not things:
            raise gi.ResourceClosedError("there is none yet.")
        return self._chance.choice(things)

    def take(self) -> Any:
        try:
            return self._things.pop(self._chance.randrange(max(1, len(self._things))))
        except IndexError:
            raise gi.ResourceClosedError("there is none yet.") from None

    def all(self) -> list[Any]:
        return self._things.copy()

    def clear(self) -> list[Any]:
        things, self._things = self._things, []
        return things

    def __len__(self) -> int:
        return len(self._things)


class Clock:
    """A timeline that the CPU signals, some time after somebody has asked for a value.

    Its own semaphore is nobody else's to close; others import what `export` gives.
    """

    def __init__(self, signal: Callable[[int], object], export: Callable[[], Any], close: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._signal = signal
        self.export = export
        self.close = close
        self.asked = self.done = 0

    def ask(self, ahead: int) -> int:
        with self._lock:
            self.asked = max(self.asked, self.done + ahead)
            return self.asked

    def tick(self) -> None:
        with self._lock:
            value = self.asked
        if value > self.done:
            self._signal(value)
            self.done = value


class Out:
    """A timeline that one stream signals, a value after the other; everybody may wait for those, and close both."""

    def __init__(self, stream: Any, semaphore: Any) -> None:
        self.stream = stream
        self.semaphore = semaphore
        self.value = self._next = 0
        self._lock = threading.Lock()

    def signal(self) -> None:
        with self._lock:
            self._next += 1  # first: a signal that an exception interrupts may have been given
            self.semaphore.signal(self.stream, self._next)
            self.value = self._next

    def close(self) -> None:
        self.semaphore.close()
        self.stream.close()


class Consumed:
    """An array that a library has taken out of a DLPack capsule."""

    _get, _rename = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName
    _get.argtypes, _get.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    _rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    _OLD, _NEW = b"dltensor", b"used_dltensor"

    def __init__(self, capsule: Any) -> None:
        self._managed = self._get(capsule, self._OLD)
        self._rename(capsule, self._NEW)

    def close(self) -> None:
        managed, self._managed = self._managed, None
        if managed:
            deleter = ctypes.c_void_p.from_address(managed + 56).value or 0  # behind DLTensor and manager_ctx
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(deleter)(managed)

    def __del__(self) -> None:
        self.close()


class Kept:
    """Whatever ends by being dropped."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def close(self) -> None:
        self.thing = None


class Patron:
    """Another library's stream, by CUDA's protocol: its owner keeps it open."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.ptr


class World:
    """What the threads share, of one device."""

    def __init__(self, device: gi.Device, seed: str, scope: contextlib.ExitStack) -> None:
        self.device = device
        chance = random.Random(seed)
        can = device.capabilities.of
        names = "streams memories buffers allocations imports arrays events ins outs graphs holds handles levels"
        self.pools = {name: Pool(chance) for name in names.split()}
        exporter = scope.enter_context(open_exporter("memfd", identity=device.identity))
        kind = gi.OpaqueFd
        self.memories = []
        if can((Operation.IMPORT_MEMORY, kind)) and can((Operation.MAP_BUFFER, kind)):
            self.memories = [scope.enter_context(exporter.create_memory(SIZE)) for _ in range(4)]
        self.allocates = bool(can((Operation.EXPORT_ALLOCATION, gi.VmmFd)))
        self.imports_allocations = bool(can((Operation.IMPORT_ALLOCATION, gi.VmmFd)))
        self.captures = bool(can((Operation.GRAPH_CAPTURE, None)))
        self.maps_arrays = bool(self.memories and can((Operation.MAP_MIPMAPPED_ARRAY, kind)))
        self.makes_timelines = bool(can((Operation.CREATE_SEMAPHORE, gi.TimelineFd)))
        self.bridges = bool(can((Operation.STREAM_MEMORY_OPS, None)))
        self.binaries = bool(can((Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)))
        self.exporter = exporter
        self.driver_clocks: list[Clock] = []
        self.own_clocks: list[Clock] = []
        if can((Operation.IMPORT_SEMAPHORE, gi.TimelineFd)) and device.backend != "host":
            for _ in range(3):
                theirs = scope.enter_context(exporter.create_semaphore(gi.Timeline))
                self.driver_clocks.append(Clock(theirs.signal, theirs.export, theirs.close))
        if self.makes_timelines:
            host = gi.get_backend("host").device()
            for _ in range(3):
                mine = scope.enter_context(host.create_semaphore(gi.TimelineFd))
                self.own_clocks.append(Clock(mine.host_signal, mine.export, mine.close))
        self.clocks = [*self.driver_clocks, *self.own_clocks]
        self.patrons = [scope.enter_context(device.create_stream()) for _ in range(3)]
        # Not AMD's default stream: a map spoils what it has still to do (test_facts.py). Each thread's own is not that.
        numbers = (2,) if _is_amd(device.backend) else (0, 1, 2)
        self.defaults = [pointer for pointer in numbers if self._takes(pointer)]
        self.later: collections.deque[Callable[[], object]] = collections.deque()
        """What the clock's thread does, once each."""

    def _takes(self, pointer: int) -> bool:
        try:
            self.device.wrap_stream(pointer).close()
        except gi.GpuInteropError:
            return False
        return True


class Thread:
    """One of the threads: its operations, each a method that is named ``do_...``; and what came of them."""

    def __init__(self, worlds: list[World], seed: str, run: Run) -> None:
        self.chance = random.Random(seed)
        self.worlds = worlds
        self.run = run
        self.world = worlds[0]
        self.done: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.bad: dict[str, str] = {}
        self.streams: dict[World, Any] = {}
        self._operations = [(name[3:], getattr(self, name)) for name in dir(self) if name.startswith("do_")]
        self._weights = [WEIGHTS.get(name, 4) for name, _ in self._operations]

    def work(self) -> None:
        while not self.run.stopping:
            name, operation = self.choose()
            try:
                operation()
                self.done[name] += 1
            except BaseException as error:
                self.note(name, error)
            self.run.steps[threading.get_ident()] += 1
        for stream in self.streams.values():
            stream.close()

    def choose(self) -> tuple[str, Callable[[], None]]:
        """The next operation, and its name."""
        # Most of it on one device: the second is there for what devices share.
        self.world = self.chance.choices(self.worlds, [8] + [1] * (len(self.worlds) - 1))[0]
        return self.chance.choices(self._operations, self._weights)[0]

    def note(self, name: str, error: BaseException) -> None:
        text = str(error)
        for kind, pattern in ALLOWED:
            if isinstance(error, kind) and re.search(pattern, text):
                self.errors[f"{name}: {type(error).__name__}"] += 1
                return
        line = re.sub(r"#?\b(0x)?[0-9a-f]*\d[0-9a-f]*\b", "N", f"{type(error).__name__}: {text}")[:160]
        self.errors[f"{name}: UNEXPECTED {line}"] += 1
        self.bad.setdefault(f"{name}: {line}", "".join(traceback.format_exception(error)[-4:]))

    def any(self, pool: str) -> Any:
        return self.world.pools[pool].any()

    def put(self, pool: str, thing: Any) -> None:
        self.world.pools[pool].put(thing)

    def leave(self, pool: str) -> None:
        """Close one, in use or not; or forget it."""
        thing = self.world.pools[pool].take()
        match self.chance.randrange(6):
            case 0:
                del thing
            case 1 if isinstance(thing, gi.Buffer | gi.Stream | gi.ExternalMemory | gi.Allocation):
                thing.close(timeout=self.chance.choice([0.0, 0.01]))
            case 2:
                other = threading.Thread(target=thing.close)
                other.start()
                thing.close()
                other.join()
            case _:
                thing.close()

    def private(self) -> Any:
        """A stream that no other thread closes."""
        found = self.streams.get(self.world)
        if found is None or found.closed:
            found = self.streams[self.world] = self.world.device.create_stream()
        return found

    # -- streams ---------------------------------------------------------------------------------------------------

    def do_create_stream(self) -> None:
        self.put("streams", self.world.device.create_stream(high_priority=self.chance.random() < 0.2))

    def do_wrap_stream(self) -> None:
        world = self.world
        patron = self.chance.choice(world.patrons)
        owned = Patron(patron) if world.device.info.array_interface == "__cuda_array_interface__" else patron.ptr
        self.put("streams", world.device.wrap_stream(self.chance.choice([patron.ptr, owned, *world.defaults])))

    def do_query(self) -> None:
        self.any("streams").query()

    def do_synchronize(self) -> None:
        self.any("streams").synchronize(self.chance.choice([0, 0.002, 0.02]))

    def do_record(self) -> None:
        self.put("events", Kept(self.any("streams").record()))

    def do_event(self) -> None:
        event = self.any("events").thing
        if event is not None and not event.done:
            event.wait(self.chance.choice([0, 0.002]))

    def do_wait_stream(self) -> None:
        other = self.chance.choice(self.worlds).pools["streams"].any()
        self.any("streams").wait_stream(other)

    # -- memory ----------------------------------------------------------------------------------------------------

    def do_import_memory(self) -> None:
        if self.world.memories:
            theirs = self.chance.choice(self.world.memories)
            with theirs.export() as handle:
                self.put("memories", self.world.device.import_memory(handle, size=theirs.size))

    def do_export(self) -> None:
        """A handle that several threads import, duplicate, detach and close."""
        if self.world.memories:
            self.put("handles", self.chance.choice(self.world.memories).export())

    def do_import_shared(self) -> None:
        self.put("memories", self.world.device.import_memory(self.any("handles"), size=SIZE))

    def do_duplicate(self) -> None:
        self.put("handles", self.any("handles").duplicate())

    def do_detach(self) -> None:
        os.close(self.any("handles").detach())

    def do_map_array(self) -> None:
        if self.world.maps_arrays:
            self.put("levels", self.any("memories").map_mipmapped_array("R32_SFLOAT", (32, 32, 0)))

    def do_copy_level(self) -> None:
        if self.world.maps_arrays:
            level = self.any("levels").level(0)
            copy = level.copy_to_buffer if self.chance.random() < 0.5 else level.copy_from_buffer
            copy(self.any("allocations").buffer, stream=self.any("streams"))

    def do_map_buffer(self) -> None:
        if self.world.memories:
            offset = self.chance.randrange(0, SIZE - 256, 256)
            self.put("buffers", self.any("memories").map_buffer(offset, self.chance.choice([256, SIZE - offset])))

    def do_allocate(self) -> None:
        if self.world.allocates:
            peers = self.chance.choice([[], list(self.world.device.peers)])
            self.put("allocations", self.world.device.allocate(SIZE, access=peers))

    def do_import_allocation(self) -> None:
        if self.world.imports_allocations:
            allocation = self.any("allocations")
            with allocation.export() as handle:
                self.put("imports", self.world.device.import_allocation(handle, size=allocation.size))

    def buffer(self) -> Any:
        if self.world.allocates and self.chance.random() < 0.4:
            return self.any(self.chance.choice(["allocations", "imports"])).buffer
        return self.any("buffers")

    def stream_or_none(self) -> Any:
        return self.any("streams") if self.chance.random() < 0.8 else None

    def do_fill(self) -> None:
        buffer = self.buffer()
        offset = self.chance.randrange(0, buffer.size, 64)
        buffer.fill(self.chance.randrange(256), offset=offset, size=64, stream=self.stream_or_none())

    def do_copy_from_host(self) -> None:
        self.buffer().copy_from_host(np.zeros(32, np.uint8), stream=self.stream_or_none())

    def do_copy_to_host(self) -> None:
        self.buffer().copy_to_host(np.zeros(32, np.uint8), stream=self.stream_or_none())

    def do_copy_view(self) -> None:
        self.buffer().view(32).copy_from(self.buffer().view(32, offset=64), stream=self.stream_or_none())

    def do_to_numpy(self) -> None:
        self.buffer().view((4, 2), strides=(-8, 1), offset=24).to_numpy()

    def do_empty(self) -> None:
        if self.world.allocates:
            Kept(self.world.device.empty((4, 4), "float32").__dlpack__(stream=-1))

    def do_array(self) -> None:
        view = self.buffer().view(32, "uint8")
        if self.world.device.info.is_cpu:
            self.put("arrays", Kept(np.from_dlpack(view)))
            return
        # A bare number must outlive its use: a patron's does, and that of a stream that nobody else closes.
        mine = self.private()
        pointer = self.chance.choice([-1, mine.ptr, self.chance.choice(self.world.patrons).ptr])
        capsule = view.__dlpack__(stream=pointer)
        if self.chance.random() < 0.2:
            mine.close()
        self.put("arrays", Consumed(capsule) if self.chance.random() < 0.7 else Kept(capsule))

    def do_hold(self) -> None:
        self.put("holds", Kept(self.buffer().hold()))

    def do_order(self) -> None:
        """Two streams write to two halves of memory that nobody else uses: a copy is behind both."""
        world = self.world
        with contextlib.ExitStack() as scope:
            if world.allocates:
                buffer = scope.enter_context(world.device.allocate(SIZE)).buffer
            elif world.memories:
                theirs = scope.enter_context(world.exporter.create_memory(SIZE))
                with theirs.export() as handle:
                    memory = scope.enter_context(world.device.import_memory(handle, size=SIZE))
                buffer = memory.map_buffer()
                scope.callback(memory.close, 30)
            else:
                return
            bytes_ = [self.chance.randrange(1, 256), self.chance.randrange(1, 256)]
            streams = [self.any("streams"), self.any("streams")]
            for half, (byte, stream) in enumerate(zip(bytes_, streams, strict=True)):
                self.wait_for_clock(stream)
                buffer.fill(byte, offset=half * 1024, size=1024, stream=stream)
            found = np.zeros(2048, np.uint8)
            buffer.copy_to_host(found)
            if [set(found[:1024].tolist()), set(found[1024:].tolist())] != [{byte} for byte in bytes_]:
                for stream in streams:
                    if not stream.closed:
                        stream.query()  # raises, where it has failed
                raise StaleBytesError(f"expected {bytes_}, got {sorted(set(found.tolist()))}")

    # -- semaphores ------------------------------------------------------------------------------------------------

    def wait_for_clock(self, stream: Any) -> None:
        clock, semaphore = self.any("ins").thing
        semaphore.wait(stream, clock.ask(self.chance.randrange(3)))

    def do_import_semaphore(self) -> None:
        if self.world.clocks:
            clock = self.chance.choice(self.world.clocks)
            with clock.export() as handle:
                self.put("ins", In(clock, self.world.device.import_semaphore(handle)))

    def do_wait(self) -> None:
        self.wait_for_clock(self.any("streams"))

    def do_host_wait(self) -> None:
        clock, semaphore = self.any("ins").thing
        try:
            semaphore.host_wait(clock.ask(1), timeout=0.002)
        except gi.UnsupportedError:
            if self.world.device.backend == "host":
                raise

    def do_create_semaphore(self) -> None:
        if self.world.makes_timelines:
            device = self.world.device
            self.put("outs", Out(device.create_stream(), device.create_semaphore(gi.TimelineFd)))

    def do_signal(self) -> None:
        out = self.any("outs")
        self.wait_for_clock(out.stream)
        out.signal()

    def do_wait_for_signal(self) -> None:
        out = self.any("outs")
        out.semaphore.wait(self.any("streams"), out.value)

    def do_batch(self) -> None:
        (first, one), (second, two) = self.any("ins").thing, self.any("ins").thing
        bridged = isinstance(one, gi.bridge.BridgedSemaphore) or isinstance(two, gi.bridge.BridgedSemaphore)
        if one is not two and not bridged and (first in self.world.own_clocks) == (second in self.world.own_clocks):
            gi.SemaphoreBatch(one, two).wait(self.any("streams"), (first.ask(1), second.ask(1)))

    def do_binary(self) -> None:
        if self.world.binaries:
            theirs = self.world.exporter.create_semaphore(gi.Binary)
            with theirs.export() as handle, self.world.device.import_semaphore(handle) as semaphore:
                stream = self.any("streams")
                self.world.later.append(lambda: (theirs.signal(), theirs.close()))
                semaphore.wait(stream)

    def do_bridge(self) -> None:
        """One for a while; streams wait through it. It is closed when they have been let go."""
        world = self.world
        if not (world.bridges and world.own_clocks):
            return
        with gi.bridge.Bridge(world.device, grace=20) as bridge:
            clock = self.chance.choice(world.own_clocks)
            with clock.export() as handle:
                semaphore = bridge.import_semaphore(handle)
            for _ in range(3):
                semaphore.wait(self.any("streams"), clock.ask(1))
            if self.chance.random() < 0.5:
                self.put("ins", In(clock, semaphore))

    # -- graphs ----------------------------------------------------------------------------------------------------

    def do_capture(self) -> None:
        if self.world.captures:
            buffer = self.buffer()
            with self.world.device.create_stream() as stream, stream.capture() as graph:
                buffer.fill(7, size=64, stream=stream)
                if self.world.driver_clocks:
                    clock, semaphore = self.any("ins").thing
                    if clock in self.world.driver_clocks and not isinstance(semaphore, gi.bridge.BridgedSemaphore):
                        semaphore.wait(stream, clock.done)
            self.put("graphs", graph)

    def do_launch(self) -> None:
        if self.world.captures:
            self.any("graphs").launch(self.any("streams"))

    def do_leave(self) -> None:
        self.leave(self.chance.choice(list(self.world.pools)))

    # -- the device ------------------------------------------------------------------------------------------------

    def do_drain(self) -> None:
        self.world.device.drain()

    def do_synchronize_device(self) -> None:
        self.world.device.synchronize(timeout=self.chance.choice([0, 0.002, 0.01]))

    def do_find_device(self) -> None:
        device = self.world.device
        assert gi.get_backend(device.backend).device(device.ordinal) is device

    def do_collect(self) -> None:
        gc.collect(self.chance.randrange(3))


class In(Kept):
    """A semaphore that a clock signals, with that."""

    def __init__(self, clock: Clock, semaphore: Any) -> None:
        super().__init__((clock, semaphore))
        self._semaphore = semaphore

    def close(self) -> None:
        self._semaphore.close()


class Run:
    """The driver, the threads, and what is left when all is closed."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.stopping = False
        self.steps: collections.Counter[int] = collections.Counter()
        self.simulator, self.live = _driver(given.backend)
        backend = gi.get_backend(given.backend)
        self.devices = list(backend.devices())
        for device in self.devices:  # opened, so that what the process keeps is there before the first count
            device.create_stream().close(timeout=LIMIT)
        self.before = self.live()
        self.failures: list[str] = []

    def __call__(self) -> int:
        given = self.given
        if given.switch != "default":
            sys.setswitchinterval(float(given.switch))
        with contextlib.ExitStack() as scope:
            worlds = [World(device, f"{given.seed}-{device.ordinal}", scope) for device in self.devices]
            workers = [Thread(worlds, f"{given.seed}/{index}", self) for index in range(given.threads)]
            ticking = threading.Event()
            ticker = threading.Thread(target=self._tick, args=(worlds, ticking), name="clock")
            ticker.start()
            threads = [threading.Thread(target=worker.work, name=f"stress-{i}") for i, worker in enumerate(workers)]
            for thread in threads:
                thread.start()
            self._watch(given.minutes * 60, worlds)
            self.stopping = True
            stop = time.monotonic() + STANDSTILL
            for thread in threads:
                thread.join(max(0.1, stop - time.monotonic()))
                if thread.is_alive():
                    self._stuck(f"{thread.name} does not end", worlds)
            self._end(worlds, scope, ticking)
            ticking.set()
            ticker.join()
        self._check_left()
        self._report(workers)
        return 1 if self.failures else 0

    def _tick(self, worlds: list[World], ended: threading.Event) -> None:
        while not ended.wait(0.002):
            for world in worlds:
                for clock in world.clocks:
                    clock.tick()
                while world.later:
                    world.later.popleft()()

    def _watch(self, seconds: float, worlds: list[World]) -> None:
        moved, steps, end = time.monotonic(), 0, time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            time.sleep(min(0.2, max(0.0, end - now)))
            total = sum(self.steps.copy().values())
            if total > steps:
                moved = time.monotonic()
            elif time.monotonic() - moved > STANDSTILL:
                self._stuck(f"no operation has ended for {STANDSTILL:g} s", worlds)
            steps = total

    def _end(self, worlds: list[World], scope: contextlib.ExitStack, ticking: threading.Event) -> None:
        """Close everything; the clocks still tick, so that all that waits comes to its end."""
        for world in worlds:
            for pool in world.pools.values():
                for thing in pool.clear():
                    with contextlib.suppress(gi.GpuInteropError):
                        thing.close()
        gc.collect()
        for device in self.devices:
            try:
                device.synchronize(timeout=STANDSTILL)
            except gi.SemaphoreTimeoutError as error:
                self.failures.append(f"at the end: {error}")
            except gi.GpuInteropError as error:  # a stream that had failed before
                print(f"at the end: {error}", flush=True)
        scope.callback(ticking.set)

    def _stuck(self, why: str, worlds: list[World]) -> None:
        for world in worlds:
            print([(clock.asked, clock.done) for clock in world.clocks], "were asked of the clocks, and signalled")
            for stream in [*world.pools["streams"].clear(), *(out.stream for out in world.pools["outs"].clear())]:
                print(f"{stream!r}{stream._known_as().waiting_for()}")
        print(f"FAILED stuck: {why}", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(3)

    def _check_left(self) -> None:
        limit = time.monotonic() + LIMIT
        while True:
            gc.collect()
            for device in self.devices:
                device.drain()
                unpin_spare_pages(device)
            after = self.live()
            left = {kind: after[kind] - self.before.get(kind, 0) for kind in after}
            if not any(left.get(kind) for kind in KEPT) or time.monotonic() > limit:
                break
            time.sleep(0.01)
        self.left = {kind: count for kind, count in left.items() if count}
        if unreleased := {kind: count for kind, count in self.left.items() if kind in KEPT}:
            self.failures.append(f"not released at the end: {unreleased}")
        if self.simulator is not None and (found := self.simulator.violations()):
            kinds = collections.Counter(re.sub(r"(0x)?[0-9a-f]*\d[0-9a-f]*", "N", line) for line in found)
            self.failures += [f"violation, {count} times: {line}" for line, count in kinds.most_common()]

    def _report(self, workers: list[Thread]) -> None:
        def total(name: str) -> collections.Counter[str]:
            return sum((getattr(worker, name) for worker in workers), collections.Counter())

        print(f"operations that succeeded: {dict(total('done'))}")
        print(f"exceptions: {dict(total('errors'))}")
        print(f"objects left: {self.left or 'none'}")
        traces = {name: trace for worker in workers for name, trace in worker.bad.items()}
        for name, trace in traces.items():
            self.failures.append(f"unexpected: {name}")
            print(trace)
        for failure in self.failures:
            print(f"FAILED {failure}")
        print("passed" if not self.failures else "failed", flush=True)


def _driver(backend: str) -> tuple[Simulator | None, Callable[[], dict[str, int]]]:
    """The simulated driver of this process, and how to count its objects."""
    if backend == "host":
        return None, _held
    os.environ.setdefault("GPUINTEROP_SIM_DEVICES", "2")
    os.environ.setdefault("GPUINTEROP_STANDIN_DEVICES", "2")
    amd = _is_amd(backend)
    if amd and importlib.util.find_spec("rocm") is None:
        # hip-python 7.2 keeps the GIL in a copy: behind a neighbour's wait in one hardware queue it would never end.
        os.environ.setdefault("GPU_MAX_HW_QUEUES", "200")
    library = Path(os.environ["GPUINTEROP_TEST_HIP_AMD"]).resolve() if amd else build(backend)
    if backend == "hip":
        hide_rocm(library.parent)
    preload(library)
    if amd:
        stand_in = StandIn()
        kinds = ("interop_mapping", "mapping", "registration", "allocation", "queue")
        return None, lambda: {kind: stand_in.live(kind) for kind in kinds}
    simulator = Simulator(library)
    return simulator, simulator.live


def _is_amd(backend: str) -> bool:
    return backend == "hip" and os.environ.get("GPUINTEROP_TEST_HIP") == "amd"


def _held() -> dict[str, int]:
    """The host backend's objects are descriptors and mappings of memfds."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = sum("/memfd:" in line for line in maps)
    return {"mapping": mapped, "descriptor": len(os.listdir("/proc/self/fd"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "hip", "host"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--switch", default="default", help="the interpreter's switch interval in seconds, or default")
    parser.add_argument("--seed", type=int, default=1)
    faulthandler.enable()
    warnings.simplefilter("ignore", gi.LeakedResourceWarning)
    return Run(parser.parse_args())()


if __name__ == "__main__":
    sys.exit(main())
