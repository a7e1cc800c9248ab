"""The table of docs/reference/calls.md: which of the driver's functions each method calls.

    python -m tools.native_calls cuda|hip

It calls each method once on the vendor's simulated driver, and writes the vendor's column between the page's two marks.
For hip, hip-python must be importable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.sharing.loop import loop
from gpuinterop.testing import simulated
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.peer import BackendPeer
from gpuinterop.testing.simulated import assert_simulated
from tests.idle_streams import destroy_idle_streams
from tests.programs import printed
from tests.simulated.driver import Simulator
from tests.spare_pages import unpin_spare_pages

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "calls.md"
VENDORS: Final = {"cuda": "CUDA", "hip": "HIP"}
BEGIN: Final = "<!-- Written by `python -m tools.native_calls`; do not edit between the two marks. -->"
END: Final = "<!-- The end of what is written. -->"
HEAD: Final = f"| method | {' | '.join(VENDORS.values())} |"
GAP: Final = "-"
NO_CALL: Final = "no call"
LIMIT: Final = 300.0
SIZE: Final = 1 << 16
STEP: Final = 2 << 20
OURS: Final = "memory from `Device.allocate`"
LEGACY: Final = "memory from `cudaMalloc` or `hipMalloc`"

EVERYWHERE: Final = {
    "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode",
    "hipGetDevice", "hipSetDevice", "hipThreadExchangeStreamCaptureMode",
}  # fmt: skip
"""The calls around others that make the device's context current. The page names them above the table."""

Sections: TypeAlias = Mapping[str, Mapping[str, str]]
"""A column of the page: cells by section and row."""

Scene: TypeAlias = Generator[tuple[str, Callable[[], Any]], Any, None]
"""Yields a row's text and its call, and is sent the call's result, or a `_Missing`.

A call without a text prepares later rows.
"""


class _Missing:
    """The result of an unsupported call. Every call of it is unsupported, too."""

    def __getattr__(self, name: str) -> _Missing:
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        raise _MissingError

    def __getitem__(self, _: object) -> _Missing:
        return self


class _MissingError(Exception):
    """A call needs the result of an unsupported call."""


def _need(*made: Any) -> None:
    if any(isinstance(one, _Missing) for one in made):
        raise _MissingError


class Methods:
    """One vendor's devices on its simulated driver, and scenes that call each method once."""

    def __init__(self, vendor: str) -> None:
        assert_simulated("cuda" if vendor == "cuda" else "hip")
        self.simulator = Simulator.attach("cuda" if vendor == "cuda" else "hip")
        self.device, self.peer = gi.get_backend(vendor).devices()
        self.exporter = open_exporter("memfd", identity=self.device.identity)
        # With bindings that keep the GIL in every call the core polls. The page shows the others.
        self.device.driver.holds_gil = False

    def cells(self) -> Sections:
        """Perform every scene."""
        scenes = {
            "Streams and events": self.streams,
            "External memory": self.memory,
            "Arrays": self.arrays,
            "External semaphores": self.semaphores,
            "Timelines from `create_semaphore`": self.own_timelines,
            "Shareable allocations": self.allocations,
            "Graphs": self.graphs,
            "Multicast": self.multicast,
            "Shared arrays": self.sharing,
        }
        return {title: dict(self.perform(scene())) for title, scene in scenes.items()}

    def perform(self, scene: Scene) -> Iterator[tuple[str, str]]:
        """Yield each row of a scene with its cell: the calls in order, each named once."""
        result: Any = None
        while True:
            try:
                row, call = scene.send(result)
            except StopIteration:
                return
            self.rest()
            self.simulator.forget_log()
            try:
                result = call()
            except (gi.UnsupportedError, _MissingError):
                result = _Missing()
            calls = dict.fromkeys(
                f"`{name.removesuffix('_v2')}`" for name in self.simulator.trace() if name not in EVERYWHERE
            )
            gap = isinstance(result, _Missing)
            assert not (gap and calls), f"{row} is refused, and calls {list(calls)}"
            if row:
                yield row, GAP if gap else ", ".join(calls) or NO_CALL

    def rest(self) -> None:
        """Wait until the devices have done all work, and release everything, also what is kept for reuse."""
        for device in (self.device, self.peer):
            assert self.simulator.note_passed(device.ordinal, LIMIT)
            device.drain()
            unpin_spare_pages(device)
            backend: Any = device.driver
            if device.backend == "hip":
                destroy_idle_streams(backend)
                backend._driver.free_ranges.clear()

    def closed(self, one: Any) -> Callable[[], None]:
        """Close it, and drain."""

        def close() -> None:
            one.close()
            self.device.drain()

        return close

    # -- the scenes ----------------------------------------------------------------------------------------------

    def streams(self) -> Scene:
        device = self.device
        stream = yield "`Device.create_stream()`", device.create_stream
        wrapped = yield "`Device.wrap_stream(pointer)`", lambda: device.wrap_stream(stream.ptr)
        default = yield "`Device.wrap_stream(0)`", lambda: device.wrap_stream(0)
        yield "`Stream.query()`", stream.query
        yield "`Stream.synchronize()`", stream.synchronize
        yield "`Stream.synchronize(timeout)`", lambda: stream.synchronize(LIMIT)
        yield "`Stream.capturing`", lambda: stream.capturing
        with device.create_stream() as other:
            yield "`Stream.wait_stream(other)`", lambda: stream.wait_stream(other)
        events = [(yield "`Stream.record()`", stream.record)]
        yield "`Event.done`", lambda: events[0].done
        yield "`Event.wait()`", events[0].wait

        def drop() -> None:
            del events[:]
            device.drain()

        yield "dropping an `Event`", drop
        yield "`Device.synchronize()`", device.synchronize
        yield "`Stream.close()` of a wrapped stream", self.closed(wrapped)
        default.close()
        yield "`Stream.close()`", self.closed(stream)

    def memory(self) -> Scene:
        device = self.device
        ones, room = np.ones(16, np.uint8), np.zeros(16, np.uint8)
        with self.exporter.create_memory(SIZE) as theirs, device.create_stream() as stream:
            handle: Any = theirs.export()
            memory = yield "`Device.import_memory(handle)`", lambda: device.import_memory(handle, size=theirs.size)
            buffer = yield "`ExternalMemory.map_buffer()`", memory.map_buffer
            part = yield "`ExternalMemory.map_buffer()` of mapped memory", lambda: memory.map_buffer(0, 64)
            yield "`Buffer.view(shape, dtype)`", lambda: buffer.view((16,), "uint8")
            yield "`Buffer.fill(byte)`", lambda: buffer.fill(7)
            yield "`Buffer.copy_from_host(source)`", lambda: buffer.copy_from_host(ones)
            yield "`Buffer.copy_to_host(target)`", lambda: buffer.copy_to_host(room)
            view, other = buffer.view(16), buffer.view(16, offset=64)
            yield "`View.to_numpy()`", view.to_numpy
            yield "`View.copy_from(view)`", lambda: other.copy_from(view)
            yield "`Buffer.fill(byte, stream=stream)`", lambda: buffer.fill(7, stream=stream)
            yield "`Buffer.fill(byte)` after a fill with `stream=`", lambda: buffer.fill(7)
            yield "`Buffer.copy_from_host(source, stream=stream)`", lambda: buffer.copy_from_host(ones, stream=stream)
            yield "`Buffer.copy_to_host(target, stream=stream)`", lambda: buffer.copy_to_host(room, stream=stream)
            yield "`Buffer.close()` while another buffer is open", self.closed(part)
            yield "`Buffer.close()`", self.closed(buffer)
            yield "`ExternalMemory.close()`", self.closed(memory)
        with self.exporter.create_memory(SIZE) as theirs:
            handle = theirs.export()
            handle.origin = None  # which names the first device
            with self.peer.import_memory(handle, size=theirs.size) as memory:
                yield "`Buffer.close()` on a device other than the first", self.closed(memory.map_buffer())

    def arrays(self) -> Scene:
        device = self.device
        host = np.zeros((16, 16), np.uint8)
        with (
            self.exporter.create_memory(SIZE) as theirs,
            device.import_memory(theirs.export(), size=theirs.size) as memory,
            memory.map_buffer() as buffer,
            device.create_stream() as stream,
        ):
            array = yield (
                "`ExternalMemory.map_mipmapped_array(format, extent)`",
                lambda: memory.map_mipmapped_array("R8_UNORM", (16, 16)),
            )
            level = yield "`MipmappedArray.level(n)`", lambda: array.level(0)
            yield "`ArrayLevel.copy_from_host(source)`", lambda: level.copy_from_host(host, stream=stream)
            yield "`ArrayLevel.copy_to_host(target)`", lambda: level.copy_to_host(host, stream=stream)
            yield "`ArrayLevel.copy_from_buffer(source)`", lambda: level.copy_from_buffer(buffer, stream=stream)
            yield "`ArrayLevel.copy_to_buffer(target)`", lambda: level.copy_to_buffer(buffer, stream=stream)
            yield "`MipmappedArray.close()`", self.closed(array)

    def semaphores(self) -> Scene:
        device = self.device
        with ExitStack() as scope:
            stream = scope.enter_context(device.create_stream())
            theirs: list[Any] = [scope.enter_context(self.exporter.create_semaphore(gi.Timeline)) for _ in range(2)]
            first, second = (scope.enter_context(one.export()) for one in theirs)
            one = yield "`Device.import_semaphore(handle)`", lambda: device.import_semaphore(first)
            two = yield "", lambda: device.import_semaphore(second)
            yield "`ExternalSemaphore.signal(stream, value)`", lambda: one.signal(stream, 1)
            yield "`ExternalSemaphore.wait(stream, value)`", lambda: one.wait(stream, 1)

            def batched() -> gi.SemaphoreBatch:
                _need(one, two)
                return gi.SemaphoreBatch(one, two)

            batch = yield "`SemaphoreBatch(a, b)`", batched
            yield "`SemaphoreBatch.signal(stream, values)`", lambda: batch.signal(stream, (2, 2))
            yield "`SemaphoreBatch.wait(stream, values)`", lambda: batch.wait(stream, (2, 2))
            yield "`ExternalSemaphore.close()`", self.closed(one)
            yield "", self.closed(two)

    def own_timelines(self) -> Scene:
        device = self.device
        with device.create_stream() as stream:
            one = yield "`Device.create_semaphore(TimelineFd)`", lambda: device.create_semaphore(gi.TimelineFd)
            yield "`ExternalSemaphore.signal(stream, value)`", lambda: one.signal(stream, 1)
            yield "`ExternalSemaphore.wait(stream, value)`", lambda: one.wait(stream, 1)
            yield "`ExternalSemaphore.host_signal(value)`", lambda: one.host_signal(2)
            yield "`ExternalSemaphore.host_wait(value)`", lambda: one.host_wait(2, timeout=LIMIT)
            yield "`ExternalSemaphore.value`", lambda: one.value
            handle = yield "`ExternalSemaphore.export()`", one.export
            again = yield "`Device.import_semaphore(handle)`", lambda: self.peer.import_semaphore(handle)
            again.close()
            yield "`ExternalSemaphore.close()`", self.closed(one)

    def allocations(self) -> Scene:
        device, team = self.device, [self.peer]
        yield "`Device.allocation_granularity()`", device.allocation_granularity
        yield "`Device.can_access(peer)`", lambda: device.can_access(self.peer)
        made = yield "`Device.allocate(size, access=[peer])`", lambda: device.allocate(SIZE, access=team)
        yield "`Allocation.buffer`", lambda: made.buffer
        theirs = yield "`Allocation.buffer_on(peer)`", lambda: made.buffer_on(self.peer)
        yield "`Allocation.view(shape, dtype)`", lambda: made.view((16,), "uint8")
        handle = yield "`Allocation.export()`", made.export
        again = yield "`Device.import_allocation(handle, size)`", lambda: device.import_allocation(handle, made.size)
        yield "`Allocation.close()` before it has a buffer", self.closed(again)
        yield "`Buffer.close()` of an allocation", self.closed(theirs)
        yield "`Allocation.close()`", self.closed(made)
        array = yield "`Device.empty(shape, dtype)`", lambda: device.empty(16, "uint8")
        yield "`DeviceArray.close()`", self.closed(array)

    def graphs(self) -> Scene:
        device = self.device
        with ExitStack() as scope:
            stream = scope.enter_context(device.create_stream())
            theirs = scope.enter_context(self.exporter.create_semaphore(gi.Timeline))
            handle: Any = scope.enter_context(theirs.export())
            one = yield "", lambda: device.import_semaphore(handle)
            capture = yield "", stream.capture
            graph = yield "`with Stream.capture() as graph`, at the start", capture.__enter__
            yield "", lambda: one.signal(stream, 1)
            yield "", lambda: one.wait(stream, 1)

            def end() -> None:
                _need(graph)
                capture.__exit__(None, None, None)

            yield "`with Stream.capture() as graph`, at the end", end
            yield "`Graph.launch(stream)`", lambda: graph.launch(stream)
            steps = yield "`Graph.semaphores`", lambda: graph.semaphores
            yield "`GraphSemaphores.advance(by)`", lambda: steps.advance(1)
            yield "`GraphStep.set(value)` of a signal", lambda: steps.signals[0].set(3)
            yield "`GraphStep.set(value)` of a wait", lambda: steps.waits[0].set(3)
            foreign = yield (
                "`GraphSemaphores(device, graph, executable)`",
                lambda: gi.GraphSemaphores(device, graph.ptr, graph.executable_ptr),
            )
            yield "`GraphSemaphores.close()`", self.closed(foreign)
            yield "`Graph.close()`", self.closed(graph)
            yield "", self.closed(one)

    def multicast(self) -> Scene:
        device, peer = self.device, self.peer
        team = [device, peer]
        with device.allocate(STEP) as first, peer.allocate(STEP) as second:
            address = second.buffer.ptr
            yield "`Device.multicast_granularity(devices, size)`", lambda: device.multicast_granularity(team, STEP)
            group = yield "`create_multicast(devices, size)`", lambda: gi.create_multicast(2, STEP, gi.VmmFd)
            yield "`MulticastObject.add_device(device)`", lambda: group.add_device(device)
            handle = yield "`MulticastObject.export()`", group.export

            def imported() -> gi.MulticastObject:
                _need(handle)
                return gi.import_multicast(handle, 2, STEP, device=peer)

            theirs = yield "`import_multicast(handle, devices, size)`", imported
            yield "", lambda: theirs.add_device(peer)
            one = yield (
                "`MulticastObject.bind_memory(allocation)`",
                lambda: group.bind_memory(first, assume_all_added=True),
            )
            two = yield (
                "`MulticastObject.bind_address(device, address, size)`",
                lambda: theirs.bind_address(peer, address, STEP, assume_all_added=True),
            )
            mapping = yield "`MulticastObject.map()`", lambda: group.map(assume_all_added=True)
            yield "`MulticastMapping.close()`", self.closed(mapping)
            yield "`MulticastBinding.close()`", self.closed(one)
            yield "`MulticastObject.unbind(device, offset, size)`", lambda: theirs.unbind(peer, 0, STEP)
            yield "`MulticastObject.close()`", self.closed(group)
            yield "", self.closed(two)
            yield "", self.closed(theirs)

    def sharing(self) -> Scene:
        from tests.vendors.foreign_memory import memory  # of the vendor in the environment

        device = self.device
        with ExitStack() as scope:
            stream = scope.enter_context(device.create_stream())
            mine = scope.enter_context(device.allocate(SIZE)).buffer.view(SIZE)
            legacy = scope.enter_context(memory("legacy", SIZE))
            shares = []
            for array, words in ((mine, OURS), (legacy, LEGACY)):
                shares.append((yield f"`share(array)`, {words}", partial(gi.share, array)))
                peer = scope.enter_context(BackendPeer(device))
                descriptor = bytes(shares[-1])
                yield f"another process attaches, {words}", partial(peer.attach, descriptor, "")
                peer.close()
            shared, other = shares
            yield "", partial(other.close, LIMIT)
            yield "the first `ArrayShare.acquire(stream)`", lambda: shared.acquire(stream)
            yield "`ArrayShare.release(stream)`", lambda: shared.release(stream)
            here_too = yield "`attach(descriptor)` in the sharing process", lambda: gi.attach(bytes(shared))
            yield "", lambda: here_too.acquire(stream)
            with device.create_stream() as writers:

                def waits() -> None:
                    shared.acquire(writers)
                    here_too.release(stream)

                yield "`ArrayShare.acquire(stream)`, and the `AttachedArrays.release(stream)` that it waits for", waits
                yield "", lambda: shared.release(writers)
                yield "`ArrayShare.acquire(stream)` while no reader uses the arrays", lambda: shared.acquire(writers)
                yield "", lambda: shared.release(writers)
            here_too.close()
            yield "`ArrayShare.close(timeout)`", lambda: shared.close(LIMIT)

            descriptors = self.shares_elsewhere(scope)
            for text, words in zip(descriptors, (OURS, LEGACY), strict=True):
                attached = yield f"`attach(descriptor)`, {words}", partial(gi.attach, text)
                yield f"`AttachedArrays.close()`, {words}", self.closed(attached)
            attached = yield "", partial(gi.attach, descriptors[0])
            yield "the first `AttachedArrays.acquire(stream)`", lambda: attached.acquire(stream)
            yield "`AttachedArrays.release(stream)`", lambda: attached.release(stream)
            yield "`AttachedArrays.acquire(stream)` while the writer is not writing", lambda: attached.acquire(stream)
            yield "", lambda: attached.release(stream)
            yield "", attached.close
            assert system.until(lambda: not loop()._repeated, LIMIT)  # the attachment has ended

    def shares_elsewhere(self, scope: ExitStack) -> list[str]:
        """Descriptors of another process's memory: an allocation, and another library's memory."""
        environment = {**os.environ, "GPUINTEROP_BACKEND": self.device.backend}
        program = [sys.executable, "-m", "tools.native_calls", "_share"]
        child = subprocess.Popen(
            program, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        scope.enter_context(child)
        assert child.stdin is not None
        assert child.stdout is not None
        scope.callback(child.stdin.close)
        return child.stdout.readline().split()


def share_until_the_end() -> None:
    """Share memory of each kind until standard input ends."""
    from tests.vendors.foreign_memory import memory

    device = gi.device()
    with (
        device.allocate(SIZE) as allocation,
        memory("legacy", SIZE) as legacy,
        gi.share(allocation.buffer.view(SIZE)) as one,
        gi.share(legacy) as other,
    ):
        print(one, other, flush=True)
        sys.stdin.read()


# -- the page ----------------------------------------------------------------------------------------------------------


def run(vendor: str) -> Sections:
    """The column, from a process that uses the simulated driver."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUINTEROP_")}
    clean |= {"GPUINTEROP_SIM_DEVICES": "2", "GPUINTEROP_TEST_VENDOR": vendor}
    environment = simulated.environment(vendor, clean)
    program = ("-X", "faulthandler", "-W", "error", "-m", "tools.native_calls", "_here", vendor)
    found: Sections = json.loads(printed(*program, cwd=ROOT, env=environment, seconds=100))
    return found


def read(vendor: str, page: Path = PAGE) -> Sections:
    """The column in the page."""
    found: dict[str, dict[str, str]] = {}
    for line in page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
            found[title] = {}
        elif line.startswith("| ") and not line.startswith(HEAD):
            _, row, *cells, _ = (cell.strip() for cell in line.split("|"))
            found[title][row] = cells[list(VENDORS).index(vendor)]
    return found


def write(vendor: str, column: Sections, page: Path = PAGE) -> None:
    """Replace the column in the page; the other column stays."""
    columns = {one: column if one == vendor else read(one, page) for one in VENDORS}
    lines = [BEGIN]
    for title, rows in column.items():
        lines += ["", f"## {title}", "", HEAD, "|---" * (1 + len(VENDORS)) + "|"]
        lines += [
            f"| {row} | {' | '.join(one.get(title, {}).get(row, '') for one in columns.values())} |" for row in rows
        ]
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + "\n".join([*lines, "", END]) + rest.partition(END)[2], encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["_here", vendor] if vendor in VENDORS:
            methods = Methods(vendor)
            methods.cells()  # a first time, for everything that is loaded or queried only once
            print(json.dumps(methods.cells()))
            return 0
        case ["_share"]:
            share_until_the_end()
            return 0
        case [vendor] if vendor in VENDORS:
            write(vendor, run(vendor))
            return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
