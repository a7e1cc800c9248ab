"""Each driver call of a backend fails once, with a status that no driver names: a program, on a simulated driver.

    python -m tests.simulated.unknown_status cuda

Each step below is done once as it is, for its calls; then once for each of them, which fails. A release that failed
leaves its object in the driver, so this is a process of its own. It prints what went wrong as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

import gpuinterop as gi
from gpuinterop._core.lifetime import RETIRED, alive
from gpuinterop._core.streams import KnownStream
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.simulated import assert_simulated
from tests.beside import elsewhere
from tests.idle_streams import destroy_idle_streams
from tests.limits import LIMIT
from tests.programs import printed
from tests.spare_pages import unpin_spare_pages

from .driver import Simulator

CODE: Final = 12345
SIZE: Final = 1 << 16
GLOBAL: Final = 0

ANSWERS: Final = re.compile(
    r"GetErrorName|GetErrorString|GetLastError"  # of an error, told all the same
    r"|DeviceGetAttribute"  # the table has a gap
    r"|cuDeviceGetUuid$"  # the whole GPU's, under MIG
    r"|PointerGetAttribute"  # memory that the driver does not know
    r"|StreamGetCtx|StreamGetId"  # a stream that has none to tell
    r"|StreamQuery|EventQuery|StreamIsCapturing|EventCreate|EventRecord"  # at a close: the work is taken for ended
)
"""Calls whose failure may be an answer: all others are told, by an error or a warning."""
SWITCHES: Final = re.compile(r"GetProcAddress|Current$|hipGetDevice$|SetDevice|ThreadExchange")
"""The bindings' own call, and calls round every other: test_faults.py has these."""
RELEASES: Final = re.compile(r"Destroy|Free|Unmap|Release|Unregister|Unload|Unbind|EndCapture|EventRecord|hipMalloc")
"""Where these fail, an object stays; where others do, nothing that was made does."""


class Check:
    """One driver, its steps, and what was found."""

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor
        self.simulator = Simulator.attach("cuda" if vendor == "cuda" else "hip")
        self.device, self.peer = gi.get_backend(vendor).devices()
        self.exporter = open_exporter("memfd", identity=self.device.identity)
        self.problems: list[str] = []
        self.unraisable: list[BaseException] = []
        sys.unraisablehook = lambda hook: self.unraisable.append(hook.exc_value or hook.exc_type())
        self.native: Any = self.device.driver._driver  # type: ignore[attr-defined]

    # -- the steps -----------------------------------------------------------------------------------------------

    def table(self) -> None:
        """What the driver is asked for once."""
        backend: Any = self.device.driver
        type(backend)()
        vars(backend).pop("_infos", None)
        for info in backend.devices():
            list(backend.capabilities(info.ordinal))
        backend.versions()
        backend.open_device(0)

    def error(self) -> None:
        """What an error is called."""
        read, write = os.pipe()
        try:
            self.device.import_memory(gi.OpaqueFd(read), size=SIZE).close()
        except gi.DriverError as error:
            if error.code == CODE:
                raise
        finally:
            os.close(read)
            os.close(write)

    def streams(self) -> None:
        with self.device.create_stream() as stream:
            stream.record().wait(LIMIT)
            with self.device.wrap_stream(stream.ptr) as other:
                other.wait_stream(stream)
            stream.query()
            self.device.driver.synchronize(stream._handle)

    def other_stream(self) -> None:
        """A stream of the other device, which is refused."""
        with self.peer.create_stream() as stream, suppress(gi.InvalidArgumentError):
            self.device.wrap_stream(stream.ptr).close()

    def default_stream(self) -> None:
        """From a thread with no context: the calls need the device's own."""

        def work() -> None:
            with self.device.wrap_stream(0) as stream, self.semaphore() as semaphore:
                semaphore.signal(stream, 1)
                semaphore.wait(stream, 1)
                _ = stream.capturing

        elsewhere(work)

    @contextmanager
    def semaphore(self) -> Iterator[Any]:
        """Imported where the driver takes them; else one of our own."""
        with ExitStack() as scope:
            if self.vendor == "cuda":
                theirs = scope.enter_context(self.exporter.create_semaphore(gi.Timeline))
                yield scope.enter_context(self.device.import_semaphore(theirs.export()))
            else:
                yield scope.enter_context(self.device.create_semaphore(gi.TimelineFd))

    @contextmanager
    def memory(self, device: gi.Device | None = None) -> Iterator[gi.ExternalMemory]:
        with self.exporter.create_memory(SIZE) as theirs:
            handle = theirs.export()
            handle.origin = None  # the other device may have it, too
            with (device or self.device).import_memory(handle, size=theirs.size) as memory:
                yield memory

    def memories(self) -> None:
        with self.memory() as memory, memory.map_buffer() as buffer, self.device.create_stream() as stream:
            buffer.fill(7, stream=stream)
            buffer.copy_from_host(np.zeros(16, np.uint8))
            buffer.copy_to_host(np.zeros(16, np.uint8))
            buffer.view(16).copy_from(buffer.view(16, offset=64))
            self.device.driver.is_pageable(self.device._handle, buffer.ptr)

    def peers_memory(self) -> None:
        """What is freed on a device other than 0."""
        with self.memory(self.peer) as memory, memory.map_buffer() as buffer:
            buffer.fill(7)

    def arrays(self) -> None:
        with (
            self.memory() as memory,
            self.device.create_stream() as stream,
            memory.map_mipmapped_array("R8_UNORM", (16, 16)) as array,
        ):
            array.level(0).copy_from_host(np.zeros((16, 16), np.uint8), stream=stream)
            array.level(0).copy_to_host(np.zeros((16, 16), np.uint8), stream=stream)

    def semaphores(self) -> None:
        with self.semaphore() as semaphore, self.device.create_stream() as stream:
            semaphore.signal(stream, 1)
            semaphore.wait(stream, 1)

    def fences(self) -> None:
        """Semaphores of Windows, past the table."""
        backend, device = self.device.driver, self.device._handle
        self.simulator.set_platform("windows")
        with ExitStack() as scope:
            scope.callback(self.simulator.set_platform, "linux")
            native = backend.import_semaphore(device, gi.D3D12Fence(handle=1))
            scope.callback(backend.destroy_semaphore, native)
            scope.callback(self.simulator.note_passed, self.device.ordinal, LIMIT)
            stream = scope.enter_context(self.device.create_stream())
            batch = backend.prepare([native])
            backend.signal(batch, stream._handle, (1,))
            backend.wait(batch, stream._handle, (1,), None)
            stream.synchronize(LIMIT)

    def own_semaphores(self) -> None:
        with self.device.create_semaphore(gi.TimelineFd) as made, self.device.create_stream() as stream:
            made.signal(stream, 1)
            with made.export() as handle, self.peer.import_semaphore(handle) as again:
                again.host_wait(1, timeout=LIMIT)
            made.wait(stream, 1)

    def allocations(self) -> None:
        with self.device.allocate(SIZE, access=[self.peer]) as made:
            made.buffer.fill(1)
            made.buffer_on(self.peer).fill(2)
            with made.export() as handle, self.device.import_allocation(handle, made.size) as again:
                again.buffer.fill(3)

    def graphs(self) -> None:
        with self.semaphore() as semaphore, self.device.create_stream() as stream:
            try:
                with stream.capture() as graph:
                    semaphore.signal(stream, 1)
                    semaphore.wait(stream, 1)
            except gi.DriverError:  # a driver ends the capture also where it says that something was wrong
                made = ctypes.c_void_p()
                if not self.native.status("StreamEndCapture", stream.ptr, ctypes.byref(made)):
                    self.native.call("GraphDestroy", made)
                raise
            with graph:
                graph.launch(stream)
                graph.semaphores.advance(1)
                graph.launch(stream)

    def multicast(self) -> None:
        team = [self.device, self.peer]
        step = self.device.multicast_granularity(team, 1, gi.VmmFd).minimum
        backend: Any = self.device.driver
        backend._kernels.clear()  # they are loaded again
        with ExitStack() as scope:
            memory = [scope.enter_context(device.allocate(step)) for device in team]
            group = scope.enter_context(gi.create_multicast(team, step, gi.VmmFd))
            group.bind_address(self.device, memory[0].buffer.ptr, step)
            group.bind_memory(memory[1]).close(timeout=LIMIT)
            group.bind_memory(memory[1])
            with group.map() as mapping, self.device.create_stream() as stream:
                backend.multimem_store(stream._handle, mapping.ptr, 1, 4)
                backend.multimem_add(stream._handle, memory[0].buffer.ptr, mapping.ptr, 4)
                stream.synchronize(LIMIT)
            with group.export() as handle:
                try:
                    gi.import_multicast(handle, team, step).close()
                except gi.DriverError as error:
                    if error.code == CODE:
                        raise

    # -- one by one ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        steps: list[Callable[[], None]] = [
            self.table, self.error, self.streams, self.other_stream, self.default_stream, self.memories,
            self.peers_memory,
            self.arrays, self.semaphores, self.fences, self.own_semaphores, self.allocations,
        ]  # fmt: skip
        if self.vendor == "cuda":
            steps += [self.graphs, self.multicast]
        for step in steps:
            try:
                step()  # what is made once and kept is made
                self.rest()
                gc.freeze()  # else every collection goes through all that was loaded
                self.begin_anew()
                self.simulator.forget_log()
                step()
                self.rest()
            except gi.GpuInteropError as error:
                self.problems.append(f"{step.__name__}: works no more behind what has failed: {error!r}")
                continue
            calls = self.simulator.trace()
            for call in dict.fromkeys(call for call in calls if not SWITCHES.search(call)):
                # What an answer is asked for is the same every time; what is put in place and put back is not.
                for nth in range(1, (1 if ANSWERS.search(call) else calls.count(call)) + 1):
                    self.fail(step, call, nth)
        for (first, second), step in self.undone().items():
            self.fail_both(step, first, second)

    def undone(self) -> dict[tuple[str, str], Callable[[], None]]:
        """Calls that fail, and those by which what was made before them is taken back."""
        if self.vendor == "cuda":
            return {
                ("cuEventRecord", "cuEventDestroy"): self.streams,
                ("cuMemMap", "cuMemAddressFree"): self.allocations,
                ("cuMemSetAccess", "cuMemUnmap"): self.allocations,
                ("cuMemHostGetDevicePointer", "cuMemHostUnregister"): self.own_semaphores,
                ("cuModuleGetFunction", "cuModuleUnload"): self.multicast,
            }
        return {
            ("hipEventRecord", "hipEventDestroy"): self.streams,
            ("hipMemSetAccess", "hipMemUnmap"): self.allocations,
            ("hipHostGetDevicePointer", "hipHostUnregister"): self.own_semaphores,
        }

    def fail_both(self, step: Callable[[], None], first: str, second: str) -> None:
        """What is raised is the first failure."""
        for call in (first, second):
            self.simulator.fail(call, code=CODE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step()
                raised = "nothing"
            except BaseException as error:
                raised = repr(error)
            self.rest()  # what may block is taken back late
        told = [str(warning.message) for warning in caught]
        if f"DriverError('{first} failed with" not in raised or not any(f"{second} failed with" in one for one in told):
            self.problems.append(f"{step.__name__}: {first} and then {second}: raised {raised}, {told}")
        self.simulator.clear_faults()
        self.rest()
        self.simulator.violations()

    def fail(self, step: Callable[[], None], call: str, nth: int) -> None:
        self.begin_anew()
        before, fds = self.rest(), self.fds()
        self.simulator.fail(call, code=CODE, nth=nth)
        errors: list[BaseException] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for attempt in (step, self.rest):  # a release may come late, and its calls with it
                try:
                    attempt()
                except BaseException as error:
                    errors.append(error.with_traceback(None))
            struck = not self.simulator.clear_faults()
            gc.collect()
            after = self.rest()
        left_current, rules = self.restore(), self.simulator.violations()
        errors += self.unraisable
        self.unraisable.clear()
        if not struck:
            return  # it polls, and the answer was there sooner
        told = [str(warning.message) for warning in caught]
        found = [f"raised {error!r}" for error in errors if not isinstance(error, gi.GpuInteropError)]
        says = re.compile(rf"{call.removesuffix('_v2')}(_v2)? failed with .*{CODE}")
        heard = any(map(says.search, [*told, *map(str, errors)]))
        if not ANSWERS.search(call) and not heard:
            found.append("told nobody")
        if not RELEASES.search(call):
            if left := {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind]}:
                found.append(f"left {left}")
            if (now := self.fds()) != fds:
                found.append(f"{fds} descriptors before, {now} after")
            found += () if ANSWERS.search(call) else rules
            if left_current and not heard:
                found.append(f"the thread is left with {left_current}")
        self.problems += [f"{step.__name__}: {call} number {nth}: {one}; {errors}, {told}" for one in found]

    def restore(self) -> str:
        """Put back what the thread's driver remembers: the context or device, and the mode of captures."""
        native, left = self.native, []
        if self.vendor == "hip":
            if found := native.ask("GetCurrent"):
                left.append(f"device {found}")
            native.call("MakeCurrent", 0)
        else:
            while native.ask("GetCurrent", kind=ctypes.c_void_p):
                left.append("a context")
                native.ask("RestoreCurrent", kind=ctypes.c_void_p)
        mode = ctypes.c_int(GLOBAL)
        native.call("ThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if mode.value != GLOBAL:
            left.append(f"mode {mode.value}")
        return ", ".join(left)

    def begin_anew(self) -> None:
        """Let the next step make its streams: it takes those that are kept. No failure may be pending."""
        if self.vendor == "hip":
            destroy_idle_streams(self.device.driver)

    def rest(self) -> dict[str, int]:
        """Wait until the devices have done all, and release; what is alive then."""
        for device in (self.device, self.peer):
            self.simulator.note_passed(device.ordinal, LIMIT)
        for device in (self.device, self.peer):
            device._last_stream = None
            while device._copiers:  # kept for later copies, and perhaps with an event that could not be released
                device._copiers.pop().close()
            device.drain()
            unpin_spare_pages(device)
        if self.vendor == "hip":
            self.native.free_ranges.clear()  # else the first has reserved what all others need
        live = self.simulator.live()
        live["stream"] -= sum(isinstance(one, KnownStream) and one.stays for one in alive() if one.state is RETIRED)
        if "module" in live:  # those that are loaded stay; each has two functions
            live["module"] = 2 * live["module"] - live.pop("function")
        return live

    def fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))


def run(vendor: str, environment: Mapping[str, str]) -> Any:
    """What the program prints, in a process that finds the simulated driver."""
    root = Path(__file__).resolve().parents[2]
    return json.loads(printed("-X", "faulthandler", "-m", __name__, vendor, cwd=root, env=environment))


def main() -> None:
    vendor = sys.argv[1]
    assert_simulated(vendor)
    check = Check(vendor)
    check.run()
    print(json.dumps(check.problems))


if __name__ == "__main__":
    main()
