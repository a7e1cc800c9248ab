"""What the explorer plays: calls that meet in two or three threads, on a scripted driver that blocks as drivers do."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gpuinterop as gi
from gpuinterop._core import release
from gpuinterop._core.device import Device
from gpuinterop._core.lifetime import Lifetime
from gpuinterop._core.memory import Hold
from gpuinterop._core.streams import KnownStream, note_passed
from gpuinterop.backend import DriverHandle

from .explorer import Core, Run, explore, unsound
from .fake import FakeEverything, Handle

ALLOWED: Final = (
    gi.ResourceClosedError, gi.ResourceBusyError, gi.InvalidArgumentError, gi.HandleError, gi.SemaphoreTimeoutError,
)  # fmt: skip
LIMIT: Final = 5.0
"""Seconds, of the explorer's clock."""
BYTES: Final = bytes(16)


class Lasting(FakeEverything):
    """What its streams are given lasts until the other side lets it end. A launch waits and fills as was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: list[tuple[int, int, int]] = []

    def fill(self, stream: DriverHandle, target: int, byte: int, size: int) -> None:
        if stream[1] in self.captures:
            self.fills.append((target, byte, size))
        else:
            super().fill(stream, target, byte, size)
            self.blocked.add(self.number(stream))

    def launch(self, executable: int, stream: DriverHandle) -> None:
        super().launch(executable, stream)
        for node in itertools.chain(*self.graphs.values()):
            if not node.signals:
                self.wait([Handle(("semaphore", one)) for one in node.semaphores], stream, node.values, None)
        for fill in self.fills:
            self.fill(stream, *fill)

    def copy_level(self, stream: DriverHandle, *arguments: Any, **options: Any) -> None:
        super().copy_level(stream, *arguments, **options)
        self.blocked.add(self.number(stream))

    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None:
        super().signal(batch, stream, values)
        if stream[1] not in self.captures:
            self.blocked.add(self.number(stream))


class World:
    """What the calls of a scene are made on: each of `THINGS` is made when it is first asked for."""

    def __init__(self, devices: Sequence[Device], backend: FakeEverything) -> None:
        self.device, self.second = devices
        self.backend = backend
        self.made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name not in THINGS:
            raise AttributeError(name)
        self.__dict__[name] = THINGS[name](self)
        return self.__dict__[name]

    def make(self, thing: Any) -> Any:
        """What a call has made is closed in the end."""
        self.made.append(thing)
        return thing

    def end(self) -> None:
        """Everything is closed and released, and nothing dead was touched."""
        self._look()
        self.device.drain()  # while work is still pending
        self.backend.pass_all()
        self.made[:0] = [self.__dict__.pop(name) for name in THINGS if name in self.__dict__]
        while self.made:
            getattr(self.made.pop(), "close", lambda: None)()
        self.device.synchronize(timeout=300)
        if self._left():  # a cycle may keep it; without the GIL a collection takes longer than the schedule
            gc.collect()
            self.device.synchronize(timeout=300)
        self._look()
        assert self._left() == [], "not released"
        assert self.backend.count("pin") <= 2, "pages are left that are not used again"
        assert self.backend.count("stream") <= 2, "streams are left"

    def _look(self) -> None:
        found = [*self.backend.violations, *unsound()]
        assert not found, "; ".join(found)

    def _left(self) -> list[tuple[str, int]]:
        return sorted(native for native in self.backend.live if native[0] not in ("stream", "pin"))


Call = Callable[[World], object]


def _capture(world: World) -> Any:
    with world.stream.capture() as graph:
        world.semaphore.wait(world.stream, 5)
        world.shared.fill(1, stream=world.stream)
        world.semaphore.signal(world.stream, 6)
    return graph


THINGS: dict[str, Callable[[World], Any]] = {
    "stream": lambda w: w.device.create_stream(),
    "other": lambda w: w.device.create_stream(),
    "far": lambda w: w.second.create_stream(),
    "wrapped": lambda w: w.device.wrap_stream(64),
    "event": lambda w: w.stream.record(),
    "memory": lambda w: w.device.import_memory(gi.OpaqueWin32(handle=8), size=4096),
    "buffer": lambda w: w.memory.map_buffer(),
    "view": lambda w: w.buffer.view(16),
    "array": lambda w: w.memory.map_mipmapped_array("R8_UNORM", (4, 4)),
    "level": lambda w: w.array.level(0),
    "far_memory": lambda w: w.second.import_memory(gi.OpaqueWin32(handle=8), size=4096),
    "far_buffer": lambda w: w.far_memory.map_buffer(),
    "allocation": lambda w: w.device.allocate(4096),
    "shared": lambda w: w.allocation.buffer,
    "semaphore": lambda w: w.device.import_semaphore(gi.TimelineWin32(handle=8)),
    "signalled": lambda w: w.semaphore.signal(w.stream, 1),
    "own": lambda w: w.device.create_semaphore(gi.TimelineFd),
    "batch": lambda w: gi.SemaphoreBatch(w.semaphore),
    "graph": _capture,
}
"""By name, each made of those before it. They are closed in the opposite order."""


@dataclass(frozen=True)
class Scene:
    """Calls that meet, a thread for each.

    Attributes
    ----------
    things : str
        What is there already.
    begin : callable
        What has happened already.
    budget : int
        Pre-emptions.
    by_opcode : sequence of function
        Of which every instruction is a point.
    """

    things: str
    calls: Sequence[Call]
    begin: Call = lambda world: None
    budget: int = 1
    backend: type[FakeEverything] = FakeEverything
    by_opcode: Sequence[Callable[..., object]] = ()

    def build(self, core: Core, run: Run) -> Callable[[], None]:
        driver = self.backend()
        world = World(core.devices(run, driver), driver)
        for thing in self.things.split():
            getattr(world, thing)
        self.begin(world)

        def other_side() -> bool:
            waits = bool(driver.waiting or driver.blocked)
            driver.pass_all()
            return waits

        run.idle, run.allowed, run.codes = other_side, ALLOWED, {one.__code__ for one in self.by_opcode}
        for call in self.calls:
            run.thread(functools.partial(call, world))
        return world.end

    def play(self, core: Core, more: int = 0) -> int:
        """Return the number of schedules."""
        return explore(functools.partial(self.build, core), self.budget + more)


# -- a call beside a close of what it is made on ---------------------------------------------------------------------

USES: Mapping[str, Mapping[str, tuple[str, Call]]] = {
    "semaphore": {
        "signal": ("stream", lambda w: w.semaphore.signal(w.stream, 2)),
        "wait": ("stream", lambda w: w.semaphore.wait(w.stream, 9)),
        "signal of a batch": ("stream batch", lambda w: w.batch.signal(w.stream, (2,))),
        "wait of a batch": ("stream batch", lambda w: w.batch.wait(w.stream, (9,))),
    },
    "own": {
        "signal": ("stream", lambda w: w.own.signal(w.stream, 7)),
        "wait": ("stream", lambda w: w.own.wait(w.stream, 9)),
        "export": ("", lambda w: w.own.export().close()),
        "host_signal": ("", lambda w: w.own.host_signal(3)),
    },
    "memory": {
        "map_buffer": ("", lambda w: w.make(w.memory.map_buffer())),
        "map_mipmapped_array": ("", lambda w: w.make(w.memory.map_mipmapped_array("R8_UNORM", (4, 4)))),
        "fill": ("stream buffer", lambda w: w.buffer.fill(1, stream=w.stream)),
        "copy": ("buffer", lambda w: w.buffer.copy_from_host(BYTES)),
        "copy of a view": ("view shared stream", lambda w: w.shared.view(16).copy_from(w.view, stream=w.stream)),
        "__dlpack__": ("view", lambda w: w.view.__dlpack__(stream=-1)),
        "a close of a buffer": ("buffer", lambda w: w.buffer.close()),
    },
    "allocation": {
        "buffer": ("", lambda w: w.allocation.buffer),
        "export": ("", lambda w: w.allocation.export().close()),
        "copy": ("shared", lambda w: w.shared.copy_to_host(bytearray(16))),
        "copy of a view": ("shared view", lambda w: w.shared.view(16).copy_from(w.view)),
    },
    "array": {
        "copy_from_buffer": ("level shared stream", lambda w: w.level.copy_from_buffer(w.shared, stream=w.stream)),
        "copy_from_host": ("level stream", lambda w: w.level.copy_from_host(BYTES, stream=w.stream)),
    },
    "stream": {
        "capture": ("semaphore shared", lambda w: w.make(_capture(w))),
        "signal": ("semaphore", lambda w: w.semaphore.signal(w.stream, 2)),
        "wait, not the first,": ("semaphore signalled", lambda w: w.semaphore.wait(w.stream, 9)),
        "fill": ("buffer", lambda w: w.buffer.fill(1, stream=w.stream)),
        "capturing": ("", lambda w: w.stream.capturing),
        "query": ("", lambda w: w.stream.query()),
        "record": ("", lambda w: w.make(w.stream.record())),
        "done": ("event", lambda w: w.event.done),
        "synchronize": ("", lambda w: w.stream.synchronize(timeout=LIMIT)),
        "wait_stream": ("other", lambda w: w.stream.wait_stream(w.other)),
        "wait_stream of another": ("other", lambda w: w.other.wait_stream(w.stream)),
    },
    "graph": {
        "launch": ("other", lambda w: w.graph.launch(w.other)),
        "advance": ("", lambda w: w.graph.semaphores.advance(2)),
    },
}
"""By what is closed, then the calls beside it, each with what is there before. A new public call belongs here."""


# -- other scenes ------------------------------------------------------------------------------------------------------


def _close(name: str) -> Call:
    return lambda world: getattr(world, name).close()


def _wait(world: World) -> None:
    world.semaphore.wait(world.stream, 9)


def _waited(world: World) -> None:
    _wait(world)
    world.backend.pass_all()


def _wait_elsewhere(world: World) -> None:
    world.semaphore.wait(world.other, 9)


def _fill(world: World) -> None:
    world.shared.fill(1, stream=world.stream)


def _fill_own(world: World) -> None:
    """On the default stream of this thread, whose end comes with the thread's."""
    world.shared.fill(1, stream=world.device.wrap_stream(2))


def _fill_elsewhere(world: World) -> None:
    world.shared.fill(2, stream=world.other)


def _drain(world: World) -> None:
    world.device.drain()


def _pass_and_drain(world: World) -> None:
    world.backend.pass_all()
    world.device.drain()


def _drop(world: World) -> None:
    del world.__dict__["view"], world.__dict__["buffer"], world.__dict__["memory"]


def _is_told(world: World) -> None:
    try:
        world.wrapped._check_failure()
    except gi.PeerError:
        return
    raise AssertionError("the failure is lost")


def _closed_wrapper(world: World) -> None:
    """A wrapped stream that is closed under work: its end is known."""
    world.shared.fill(1, stream=world.wrapped)
    world.wrapped.close()


def _closed_under_a_wait(world: World) -> None:
    """Of another stream, so that only the gate holds the release."""
    _wait_elsewhere(world)
    world.buffer.close()


def _name_what_holds(world: World) -> None:
    assert world.buffer.mapping.what_holds()


def _array(world: World) -> None:
    world.make(world.buffer.hold())


def _two_arrays(world: World) -> None:
    _array(world)
    _array(world)


def _use_array(world: World) -> None:
    """One that comes and goes; what uses its bytes asks nothing."""
    token = world.buffer.hold()
    _name_what_holds(world)
    assert world.backend.count("mapping"), "the bytes are unmapped under an array"
    del token


def _call_back(world: World) -> None:
    told: list[int] = []
    world.memory.on_released(lambda: told.append(1))
    world.memory.close(timeout=LIMIT)
    assert told == [1]


def _one_ends(name: str) -> Call:
    """Of two streams, of which one is closed."""

    def call(world: World) -> None:
        ends = getattr(world, name).ptr
        world.stream.close()
        _fill_elsewhere(world)
        world.allocation.close()
        world.backend.blocked.discard(ends)
        world.device.drain()

    return call


def _launch(world: World) -> None:
    world.graph.launch(world.other)


def _read(world: World) -> None:
    found = bytearray(16)
    world.shared.copy_to_host(found)
    assert found == bytes([1]) * 16


def _wait_beside_what_is_exported(world: World) -> None:
    world.own.export().close()
    _wait(world)


SCENES: dict[str, Scene] = {
    "a wait beside a release that blocks": Scene("semaphore buffer", [_wait, _close("buffer")], budget=2),
    "a wait of ours beside a release that blocks": Scene(
        "own stream buffer", [lambda w: w.own.wait(w.stream, 9), _close("buffer")]
    ),
    "a launch beside a release that blocks": Scene(
        "graph other buffer", [_launch, _close("buffer")], budget=2, backend=Lasting
    ),
    "a wait, a release that blocks, and a close": Scene(
        "semaphore buffer", [_wait, _close("buffer"), _close("semaphore")]
    ),
    "a wait beside two releases of one drain": Scene("semaphore buffer array", [_wait, _close("memory")]),
    "a wait beside what is exported, and its close": Scene(
        "own semaphore", [_close("own")], begin=_wait_beside_what_is_exported
    ),
    "a chain whose beginning is closed": Scene(
        "semaphore far far_buffer",
        [lambda w: w.far.wait_stream(w.stream), _close("stream"), _close("far_buffer")], begin=_wait,
    ),
    "notes of waits by opcode": Scene(
        "semaphore", [_wait, lambda w: w.stream.query()], begin=_waited,
        by_opcode=[KnownStream.note, inspect.unwrap(note_passed)],
    ),
    "a stream and what it has used are closed": Scene(
        "stream buffer", [_close("stream"), _close("memory")], budget=2,
        begin=lambda w: w.buffer.fill(1, stream=w.stream),
    ),
    "a signal that lasts beside a close": Scene(
        "semaphore stream", [lambda w: w.semaphore.signal(w.stream, 9), _close("semaphore")], backend=Lasting
    ),
    "work that lasts, a close and a drain": Scene(
        "shared stream", [_fill, _close("allocation"), _drain], backend=Lasting
    ),
    "a launch that lasts, and a copy of its bytes": Scene(
        "graph other", [_read], begin=_launch, backend=Lasting
    ),
    "a copy that lasts beside a close of its image": Scene(
        "level stream", [lambda w: w.level.copy_from_host(BYTES, stream=w.stream), _close("array")], backend=Lasting
    ),
    "a capture beside a close of what the stream has used": Scene(
        "semaphore shared stream", [lambda w: w.make(_capture(w)), _close("allocation")], begin=_fill, backend=Lasting
    ),
    "of two streams that use what is closed, the first ends": Scene(
        "shared stream other", [_one_ends("stream")], begin=_fill, backend=Lasting
    ),
    "of two streams that use what is closed, the second ends": Scene(
        "shared stream other", [_one_ends("other")], begin=_fill, backend=Lasting
    ),
    "a stream closed under work that lasts": Scene(
        "shared stream", [_fill, _close("stream"), _close("allocation")], backend=Lasting
    ),
    "a thread's own default stream, a close and a drain": Scene(
        "shared stream", [_fill_own, _close("allocation"), _drain], backend=Lasting
    ),
    "a look at a thread's own default stream beside its end": Scene(
        "shared stream", [_pass_and_drain, _close("allocation")], begin=_fill_own, backend=Lasting,
        by_opcode=[release._end_of],
    ),
    "a look at a closed stream beside one that wraps it again": Scene(
        "shared wrapped", [lambda w: w.make(w.device.wrap_stream(64)), _close("allocation")], begin=_closed_wrapper,
        backend=Lasting,
    ),
    "who is told of a failure beside one that wraps the stream again": Scene(
        "wrapped", [_is_told, lambda w: w.make(w.device.wrap_stream(64))],
        begin=lambda w: w.wrapped._known_as().fail(gi.PeerError("gone")), by_opcode=[KnownStream.take_failure],
    ),
    "finalizers beside a close": Scene("view stream", [_drop, _close("stream"), _drain]),
    "an array beside a close": Scene("buffer", [_use_array, _close("memory")], by_opcode=[Hold.__del__]),
    "an array beside a close of its buffer, and a drain": Scene("buffer", [_use_array, _close("buffer"), _drain]),
    "two arrays' ends beside a close under work that lasts": Scene(
        "buffer", [lambda w: w.made.pop(), lambda w: w.made.pop(), _close("memory")],
        begin=_two_arrays, backend=Lasting,
    ),
    "what holds a release beside that release": Scene(
        "semaphore buffer other", [_name_what_holds, _pass_and_drain], begin=_closed_under_a_wait,
        by_opcode=[Lifetime.what_holds],
    ),
    "two threads add callbacks to what is released": Scene(
        "memory", [_call_back] * 2, begin=_close("memory"), by_opcode=[release._call_back]
    ),
}  # fmt: skip
SCENES |= {
    f"{call} beside a close of {thing}": Scene(
        f"{thing} {things}", [use, _close(thing)], budget=1 if call.startswith("copy") else 2
    )
    for thing, uses in USES.items()
    for call, (things, use) in uses.items()
}
