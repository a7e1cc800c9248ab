"""What a GPU backend's methods leave where an interrupt strikes them: a table of them, and how each is tried.

See `tests.strikes` for the places. Afterwards the thread's context or device is what it was, and so is its mode of
captures; the simulated driver counts what is alive, and says what was used or released against its documentation.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import gpuinterop as gi
from gpuinterop.backend import left_to_core
from gpuinterop.exporters import open_exporter
from gpuinterop.handles import ArrayLayout, FdHandle
from tests.kept_streams import destroy_kept_streams
from tests.simulated.driver import Simulator
from tests.strikes import Strikes

LIMIT: Final = 20.0
SIZE: Final = 1 << 16
STEP: Final = 2 << 20


@dataclass
class Case:
    """A method: what it is given, the call, how its result is taken back, and what then goes that it was given."""

    act: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    undo: Callable[[Any], object] | None = None
    clean: Callable[[Any], object] = lambda _: None
    once: tuple[str, ...] | None = None
    """Of a method that releases, and is called again: the driver's calls that are then made once."""


@dataclass
class Table:
    """The methods of a backend, on its last device."""

    vendor: str
    simulator: Simulator
    scope: ExitStack
    cases: dict[str, Case] = field(default_factory=dict)
    on_windows: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.device = gi.get_backend(self.vendor).devices()[-1]
        self.backend: Any = self.device._backend
        self.native: Any = self.device._native
        self.exporter = self.scope.enter_context(open_exporter("memfd", identity=self.device.identity))
        self.theirs = self.scope.enter_context(self.exporter.create_memory(SIZE))
        self.streams()
        self.memory()
        self.allocations()
        self.words()
        if self.vendor == "cuda":
            self.arrays()
            self.graphs()
            self.multicast()
        self.semaphores()

    def call(self, hip: str, cuda: str) -> str:
        return cuda if self.vendor == "cuda" else hip

    # -- what is made for the length of a test -------------------------------------------------------------------

    def stream(self) -> Any:
        stream = self.backend.create_stream(self.native)
        self.scope.callback(self.backend.destroy_stream, stream)
        self.scope.callback(self.simulator.settle, self.device.ordinal, LIMIT)
        return stream

    def handle(self) -> gi.OpaqueFd:
        exported: Any = self.theirs.export()
        return gi.OpaqueFd(exported.detach())

    def imported(self) -> Any:
        return self.backend.import_memory(self.native, self.handle(), size=self.theirs.size, dedicated=False)

    # -- the table -----------------------------------------------------------------------------------------------

    def streams(self) -> None:
        backend, native, stream = self.backend, self.native, self.stream()
        event = backend.record(stream)
        self.scope.callback(backend.destroy_event, event)

        def made() -> Any:
            return backend.create_stream(native)

        def recorded() -> Any:
            return backend.record(stream)

        def failed() -> Any:
            one = made()
            self.simulator.fail_stream(one.pointer, code=719)
            with suppress(gi.DriverError):  # whoever is told first
                backend.wait_event(one, event)
                backend.synchronize(one)
            return one

        self.cases |= {
            "create_stream": Case(lambda _: made(), undo=backend.destroy_stream),
            # HIP's are kept: one is given back once, or the count is wrong.
            "destroy_stream": Case(
                backend.destroy_stream, made, once=() if self.vendor == "hip" else ("cuStreamDestroy",)
            ),
            "adopt_stream": Case(lambda _: backend.adopt_stream(native, stream.pointer)),
            "adopt_stream 0": Case(lambda _: backend.adopt_stream(native, 0)),
            "stream_key": Case(lambda _: backend.stream_key(stream)),
            "is_capturing": Case(lambda _: backend.is_capturing(backend.adopt_stream(native, 0))),
            "is_idle": Case(lambda _: backend.is_idle(stream)),
            "synchronize": Case(lambda _: backend.synchronize(stream)),
            "record": Case(lambda _: recorded(), undo=backend.destroy_event),
            "destroy_event": Case(
                backend.destroy_event, recorded, once=(self.call("hipEventDestroy", "cuEventDestroy"),)
            ),
            "is_done": Case(lambda _: backend.is_done(event)),
            "wait_event": Case(lambda _: backend.wait_event(stream, event)),
        }
        if self.vendor == "hip":
            self.cases |= {
                "create_stream anew": Case(
                    lambda _: made(), lambda: destroy_kept_streams(backend), undo=backend.destroy_stream
                ),
                "destroy_stream failed": Case(backend.destroy_stream, failed, once=("hipStreamDestroy",)),
            }

    def memory(self) -> None:
        backend, native, stream = self.backend, self.native, self.stream()
        memory = self.imported()
        self.scope.callback(backend.destroy_memory, memory)
        mapping, pointer = backend.map_buffer(memory, size=SIZE)
        self.scope.callback(backend.unmap_buffer, mapping)

        def mapped() -> tuple[Any, Any]:
            fresh = self.imported()
            return backend.map_buffer(fresh, size=SIZE)[0], fresh

        self.cases |= {
            "import_memory": Case(
                lambda handle: backend.import_memory(native, handle, size=SIZE, dedicated=False),
                self.handle, backend.destroy_memory, close_if_open,
            ),
            "destroy_memory": Case(
                backend.destroy_memory, self.imported,
                once=(self.call("hipDestroyExternalMemory", "cuDestroyExternalMemory"),),
            ),
            "map_buffer": Case(
                lambda fresh: backend.map_buffer(fresh, size=SIZE), self.imported,
                lambda made: backend.unmap_buffer(made[0]), backend.destroy_memory,
            ),
            "unmap_buffer": Case(
                lambda given: backend.unmap_buffer(given[0]), mapped,
                clean=lambda given: backend.destroy_memory(given[1]),
                once=("cuMemFree",) if self.vendor == "cuda" else (),  # hipFree frees another byte each time
            ),
            "copy": Case(lambda _: backend.copy(stream, pointer, pointer + SIZE // 2, 64)),
            "fill": Case(lambda _: backend.fill(stream, pointer, 7, 64)),
            "is_pageable": Case(lambda _: backend.is_pageable(native, pointer)),
        }  # fmt: skip

    def allocations(self) -> None:
        backend, native = self.backend, self.native
        allocation = backend.allocate(native, STEP, gi.VmmFd)
        self.scope.callback(backend.release_allocation, allocation)

        def made() -> Any:
            return backend.allocate(native, STEP, gi.VmmFd)

        def mapped() -> Any:
            return backend.map_allocation(allocation, [native])[0]

        def exported() -> gi.VmmFd:
            return gi.VmmFd(backend.export_allocation(allocation).detach())

        self.cases |= {
            "granularity": Case(lambda _: backend.granularity(native, gi.VmmFd)),
            "allocate": Case(lambda _: made(), undo=backend.release_allocation),
            "release_allocation": Case(
                backend.release_allocation, made, once=(self.call("hipMemRelease", "cuMemRelease"),)
            ),
            "export_allocation": Case(
                lambda _: backend.export_allocation(allocation), undo=lambda handle: handle.close()
            ),
            "import_allocation": Case(
                lambda handle: backend.import_allocation(native, handle, size=STEP),
                exported, backend.release_allocation, close_if_open,
            ),
            "map_allocation": Case(
                lambda _: backend.map_allocation(allocation, [native]),
                undo=lambda made: backend.unmap_allocation(made[0]),
            ),
            "unmap_allocation": Case(
                backend.unmap_allocation, mapped, once=(self.call("hipMemUnmap", "cuMemUnmap"),)
            ),
            "location": Case(lambda _: backend.location(allocation)),
        }  # fmt: skip

    def words(self) -> None:
        backend, native = self.backend, self.native
        self.pages = (ctypes.c_char * (2 * mmap.PAGESIZE)).from_buffer(mmap.mmap(-1, 2 * mmap.PAGESIZE))
        address = ctypes.addressof(self.pages)
        pinned, word = backend.pin(native, address + mmap.PAGESIZE, mmap.PAGESIZE)
        self.scope.callback(backend.unpin, pinned)
        stream = self.stream()

        def pin() -> Any:
            return backend.pin(native, address, mmap.PAGESIZE)

        self.cases |= {
            "pin": Case(lambda _: pin(), undo=lambda made: backend.unpin(made[0])),
            "unpin": Case(
                backend.unpin, lambda: pin()[0], once=(self.call("hipHostUnregister", "cuMemHostUnregister"),)
            ),
            "write_value": Case(lambda _: backend.write_value(stream, word, 1)),
            "wait_value": Case(lambda _: backend.wait_value(stream, word, 0)),
            "wait_value 0": Case(lambda _: backend.wait_value(backend.adopt_stream(native, 0), word, 0)),
        }

    def semaphores(self) -> None:
        """On HIP those of Windows, past the table."""
        backend, native, stream = self.backend, self.native, self.stream()
        default = backend.adopt_stream(native, 0)
        if self.vendor == "cuda":
            counter = self.scope.enter_context(self.exporter.create_semaphore(gi.Timeline))
        else:
            self.simulator.set_platform("windows")

        def handle() -> Any:
            if self.vendor == "hip":
                return gi.D3D12Fence(handle=1)
            exported: Any = counter.export()
            return gi.TimelineFd(exported.detach())

        def imported() -> Any:
            return backend.import_semaphore(native, handle())

        semaphore = imported()
        self.scope.callback(backend.destroy_semaphore, semaphore)
        self.scope.callback(self.simulator.settle, self.device.ordinal, LIMIT)
        if self.vendor == "hip":
            self.scope.callback(self.simulator.set_platform, "windows")
        batch, values = backend.prepare([semaphore]), itertools.count(1)
        before = set(self.cases)
        self.cases |= {
            "import_semaphore": Case(
                lambda given: backend.import_semaphore(native, given), handle, backend.destroy_semaphore, close_if_open
            ),
            "destroy_semaphore": Case(
                backend.destroy_semaphore, imported,
                once=(self.call("hipDestroyExternalSemaphore", "cuDestroyExternalSemaphore"),),
            ),
            "prepare": Case(lambda _: backend.prepare([semaphore])),
            "signal": Case(lambda value: backend.signal(batch, stream, (value,)), lambda: next(values)),
            "signal 0": Case(lambda value: backend.signal(batch, default, (value,)), lambda: next(values)),
            "wait": Case(lambda _: backend.wait(batch, stream, (0,), None)),
            "wait 0": Case(lambda _: backend.wait(batch, default, (0,), None)),
        }  # fmt: skip
        self.simulator.set_platform("linux")
        self.on_windows = self.cases.keys() - before if self.vendor == "hip" else set()

    def arrays(self) -> None:
        backend, stream, memory = self.backend, self.stream(), self.imported()
        self.scope.callback(backend.destroy_memory, memory)
        layout = ArrayLayout(format="R8_UNORM", extent=(16, 16, 0))
        array = backend.map_array(memory, layout)
        self.scope.callback(backend.destroy_array, array)
        mapping, pointer = backend.map_buffer(memory, size=SIZE)
        self.scope.callback(backend.unmap_buffer, mapping)
        self.scope.callback(self.simulator.settle, self.device.ordinal, LIMIT)

        def made() -> Any:
            return backend.map_array(memory, layout)

        self.cases |= {
            "map_array": Case(lambda _: made(), undo=backend.destroy_array),
            "destroy_array": Case(backend.destroy_array, made, once=("cuMipmappedArrayDestroy",)),
            "copy_level": Case(lambda _: backend.copy_level(stream, array, 0, pointer, 256, to_array=True)),
        }

    def graphs(self) -> None:
        backend, native, stream = self.backend, self.native, self.stream()

        def capture() -> None:
            backend.begin_capture(stream)

        def captured() -> Any:
            capture()
            return backend.end_capture(stream)

        def end(graph: Any) -> None:
            backend.destroy_graph(native, graph)

        def stop(_: Any) -> None:
            if backend.is_capturing(stream):
                end(backend.end_capture(stream))

        graph = captured()
        self.scope.callback(end, graph)
        executable = backend.instantiate(native, graph)
        self.scope.callback(backend.destroy_executable, native, executable)
        self.cases |= {
            "begin_capture": Case(lambda _: capture(), clean=stop),
            "end_capture": Case(lambda _: backend.end_capture(stream), capture, end, stop),
            "destroy_graph": Case(end, captured, once=("cuGraphDestroy",)),
            "instantiate": Case(
                lambda _: backend.instantiate(native, graph), undo=lambda made: backend.destroy_executable(native, made)
            ),
            "destroy_executable": Case(
                lambda made: backend.destroy_executable(native, made), lambda: backend.instantiate(native, graph),
                once=("cuGraphExecDestroy",),
            ),
            "launch": Case(lambda _: backend.launch(executable, stream)),
        }  # fmt: skip

    def multicast(self) -> None:
        backend, native, kinds = self.backend, self.native, (gi.VmmFd,)
        size = backend.multicast_granularity(1, STEP, kinds).minimum
        allocation = backend.allocate(native, size, gi.VmmFd)
        self.scope.callback(backend.release_allocation, allocation)
        group = backend.create_multicast(native, 1, size, kinds)
        self.scope.callback(backend.release_allocation, group)
        backend.add_device(group, native)

        def bind(_: Any = None) -> None:
            backend.bind_memory(group, native, 0, allocation, 0, size)

        def unbind(_: Any = None) -> None:
            backend.unbind(group, native, 0, size)

        self.cases |= {
            "create_multicast": Case(
                lambda _: backend.create_multicast(native, 1, size, kinds), undo=backend.release_allocation
            ),
            "export_multicast": Case(
                lambda _: backend.export_multicast(group, gi.VmmFd), undo=lambda handle: handle.close()
            ),
            "bind_memory": Case(bind, clean=unbind),
            "unbind": Case(unbind, bind, once=("cuMulticastUnbind",)),
            "is_shareable": Case(lambda _: backend.is_shareable(native, 4096)),
        }

    # -- trying it -----------------------------------------------------------------------------------------------

    def state(self) -> tuple[int, int]:
        """The thread's context or device, and its mode of captures."""
        driver, mode = self.backend._driver, ctypes.c_int()
        if self.vendor == "cuda":
            exchange, found = driver.entry("cuThreadExchangeStreamCaptureMode"), driver.call("cuCtxGetCurrent")
        else:
            exchange, found = driver.library.hipThreadExchangeStreamCaptureMode, driver.call("hipGetDevice")
        exchange(ctypes.byref(mode))
        before = mode.value
        exchange(ctypes.byref(mode))
        return int(found), before

    def alive(self) -> dict[str, int]:
        for device in gi.get_backend(self.vendor).devices():
            self.simulator.settle(device.ordinal, LIMIT)
        live = {**self.simulator.live(), "descriptors": len(os.listdir("/proc/self/fd"))}
        # HIP's address ranges are kept: a lost one is replaced by the next that is wanted.
        return live | {"reservation": self.simulator.count("reservation")}

    def strike(self, name: str) -> int:
        """Interrupt the method at each place; returns how many there were."""
        case, strikes = self.cases[name], Strikes()
        self.simulator.set_platform("windows" if name in self.on_windows else "linux")
        for _ in range(2):  # what is made once and kept is made
            given = case.prepare()
            made = case.act(given)
            if case.undo is not None:
                case.undo(made)
            case.clean(given)
        state, alive = self.state(), self.alive()
        calls: dict[str, int] = {}

        def prepare() -> Any:
            given = case.prepare()
            calls.update({call: self.simulator.calls(call) for call in case.once or ()})
            return given

        def finish(struck: bool, given: Any, made: Any) -> None:
            where = f"{name}, {strikes.where if struck else 'not struck'}"
            if (release := left_to_core(strikes.raised)) is not None:  # as the core does
                release()
            assert self.state() == state, where
            if case.once is not None:
                case.act(given)
                case.act(given)
                assert {call: self.simulator.calls(call) - before for call, before in calls.items()} == dict.fromkeys(
                    calls, 1
                ), where
            elif made is not None and case.undo is not None:
                case.undo(made)
            case.clean(given)
            assert self.alive() == alive, where
            assert self.simulator.violations() == [], where

        return strikes.everywhere(prepare, case.act, finish)


def close_if_open(handle: gi.Handle) -> None:
    """The number, which nobody else has taken meanwhile."""
    if isinstance(handle, FdHandle):
        with suppress(OSError):
            os.close(handle.detach())


@contextmanager
def table(vendor: str, simulator: Simulator) -> Iterator[Table]:
    with ExitStack() as scope:
        yield Table(vendor, simulator, scope)
