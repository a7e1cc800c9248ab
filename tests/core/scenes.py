"""What the pairs do not have: three threads, two devices, work that lasts, finalizers, and some functions by opcode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gpuinterop as gi
from gpuinterop._core import drain
from gpuinterop._core.known_stream import KnownStream, settle
from gpuinterop._core.lifetime import Lifetime
from gpuinterop._core.memory import Hold
from gpuinterop.backend import DriverHandle

from .explored import Core
from .explorer import Explored
from .fake import FakeEverything
from .pairs import LIMIT, Call, World, play


class Lasting(FakeEverything):
    """What its streams are given lasts until the other side lets it end."""

    def fill(self, stream: DriverHandle, target: int, byte: int, size: int) -> None:
        super().fill(stream, target, byte, size)
        self.blocked.add(self.number(stream))

    def signal(self, batch: DriverHandle, stream: DriverHandle, values: Sequence[int]) -> None:
        super().signal(batch, stream, values)
        self.blocked.add(self.number(stream))

    def pass_all(self) -> None:
        self.blocked.clear()
        super().pass_all()


class KeepsGil(FakeEverything):
    """Its bindings keep the GIL in calls that block, releases among them."""

    holds_gil = True

    def copy(self, stream: DriverHandle, target: int, source: int, size: int) -> None:
        """Of pageable memory, which blocks until the stream gets there."""
        if pending := self._pending(stream):
            self.violate(f"a copy keeps the GIL, and waits for {pending}")
        super().copy(stream, target, source, size)


@dataclass(frozen=True)
class Scene:
    """Calls that meet, and how.

    Attributes
    ----------
    things : str
        What is there already, as `World` calls it.
    begin : callable
        What has happened already.
    budget : int
        Pre-emptions: two where a mutant is not found with one.
    """

    things: str
    calls: Sequence[Call]
    begin: Call = lambda world: None
    budget: int = 1
    backend: type[FakeEverything] = FakeEverything
    by_opcode: Sequence[Callable[..., object]] = ()

    def play(self, core: Core, more: int = 0, **how: Any) -> Explored:
        return play(
            core, self.things.split(), self.calls, backend=self.backend, begin=self.begin, budget=self.budget + more,
            by_opcode=self.by_opcode, **how,
        )  # fmt: skip


def _wait(world: World) -> None:
    world.semaphore.wait(world.stream, 9)


def _wait_of_ours(world: World) -> None:
    world.own.wait(world.stream, 9)


def _signal(world: World) -> None:
    world.semaphore.signal(world.stream, 9)


def _unmap(world: World) -> None:
    world.buffer.close()


def _fill(world: World) -> None:
    world.shared.fill(1, stream=world.stream)


def _copy(world: World) -> None:
    world.shared.copy_from_host(bytes(16), stream=world.stream)


def _wait_elsewhere(world: World) -> None:
    world.semaphore.wait(world.other, 9)


def _fill_own(world: World) -> None:
    """On the default stream of this thread, whose end comes with the thread's."""
    world.shared.fill(1, stream=world.device.wrap_stream(2))


def _arrive(world: World) -> None:
    world.backend.arrive(world.semaphore._handle, 9)


def _waited(world: World) -> None:
    _wait(world)
    world.backend.pass_all()


def _drop(world: World) -> None:
    del world.__dict__["view"], world.__dict__["buffer"], world.__dict__["memory"]


def _crowded(world: World) -> None:
    """One release is blocked already, and that is too many."""
    world.device.gate.limit = 0
    _wait(world)
    world.device.import_semaphore(gi.TimelineWin32(handle=8)).close()


def _frames(world: World) -> None:
    for frame in range(10, 13):
        world.semaphore.wait(world.stream, frame)
        world.backend.arrive(world.semaphore._handle, frame - 1)


def _round(world: World) -> None:
    world.device.import_semaphore(gi.TimelineWin32(handle=8)).close()


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


def _pass_and_drain(world: World) -> None:
    world.backend.pass_all()
    world.device.drain()


def _failed(world: World) -> None:
    world.wrapped._known_as().fail(gi.PeerError("gone"))


def _is_told(world: World) -> None:
    try:
        world.wrapped._check_failure()
    except gi.PeerError:
        return
    raise AssertionError("the failure is lost")


def _array(world: World) -> None:
    """One that is there already."""
    world.make(world.buffer.hold())


def _use_array(world: World) -> None:
    """One that comes and goes; what uses its bytes asks nothing."""
    token = world.buffer.hold()
    _name_what_holds(world)
    assert world.backend.count("mapping"), "the bytes are unmapped under an array"
    del token


def _end_of_array(world: World) -> None:
    world.made.pop()


def _two_arrays(world: World) -> None:
    _array(world)
    _array(world)


def _call_back(world: World) -> None:
    told: list[int] = []
    world.memory.on_released(lambda: told.append(1))
    world.memory.close(timeout=LIMIT)
    assert told == [1]


def _join(world: World) -> None:
    with world.stream.capture() as graph:
        world.make(graph)
        world.other.wait_stream(world.stream)
        try:
            world.other.query()
        except gi.InvalidArgumentError:
            return
    raise AssertionError("a stream that has joined a capture was asked whether it is idle")


def _use_behind_a_closed_stream(world: World) -> None:
    """The closed one's work lasts longer than the other's."""
    world.stream.close()
    world.shared.fill(2, stream=world.other)
    world.backend.blocked.discard(world.other.ptr)
    world.allocation.close()


def _one_wait_passes(world: World) -> None:
    world.own.wait(world.stream, 1)
    world.own.wait(world.stream, 9)
    world.own.host_signal(1)


SCENES: dict[str, Scene] = {
    "a wait beside a release that blocks": Scene("semaphore buffer", [_wait, _unmap], budget=2),
    "a batch's wait beside a release that blocks": Scene(
        "semaphore batch buffer", [lambda w: w.batch.wait(w.stream, (9,)), _unmap], budget=2
    ),
    "a wait of ours beside a release that blocks": Scene("own stream buffer", [_wait_of_ours, _unmap]),
    "a wait beside a release that keeps the GIL": Scene("semaphore buffer", [_wait, _unmap], backend=KeepsGil),
    "a wait beside a copy that keeps the GIL": Scene("semaphore shared stream", [_wait, _copy], backend=KeepsGil),
    "a wait of others beside a copy that keeps the GIL": Scene(
        "semaphore shared stream other", [lambda w: w.stream.wait_stream(w.other), _copy], begin=_wait_elsewhere,
        backend=KeepsGil,
    ),
    "a wait, a release that blocks, and a close": Scene(
        "semaphore buffer", [_wait, _unmap, lambda w: w.semaphore.close()]
    ),
    "a wait, a question and a release that blocks": Scene(
        "semaphore stream array", [_wait, lambda w: w.stream.query(), lambda w: w.array.close()]
    ),
    "a wait beside two releases of one drain": Scene(
        "semaphore buffer array", [_wait, lambda w: w.memory.close()]
    ),
    "a stream and what it has used are closed": Scene(
        "buffer", [lambda w: w.stream.close(), lambda w: w.memory.close()], budget=2
    ),
    "a signal that lasts beside a close": Scene(
        "semaphore", [_signal, lambda w: w.semaphore.close()], begin=lambda w: w.backend.pass_all(), backend=Lasting,
    ),
    "two releases that block, and a wait": Scene(
        "semaphore buffer array", [_wait, _unmap, lambda w: w.array.close()]
    ),
    "a wait that comes to its end beside a release": Scene(
        "semaphore buffer", [_arrive, _unmap, lambda w: w.stream.query()], begin=_wait
    ),
    "a chain over two devices": Scene(
        "semaphore far far_buffer", [lambda w: w.far.wait_stream(w.stream), lambda w: w.far_buffer.close()], begin=_wait
    ),
    "a chain over two devices, and back": Scene(
        "semaphore other buffer far far_buffer",
        [lambda w: w.far.wait_stream(w.stream), lambda w: w.other.wait_stream(w.far), lambda w: w.far_buffer.close()],
        begin=_wait,
    ),
    "a chain whose beginning is closed": Scene(
        "semaphore far far_buffer",
        [lambda w: w.far.wait_stream(w.stream), lambda w: w.stream.close(), lambda w: w.far_buffer.close()],
        begin=_wait,
    ),
    "a capture beside a close of what the stream has used": Scene(
        "semaphore shared stream", [World.capture, lambda w: w.allocation.close()], begin=_fill, backend=Lasting
    ),
    "a capture beside a copy, and a drain": Scene(
        "semaphore shared stream", [World.capture, lambda w: w.shared.copy_from_host(bytes(16))], begin=_fill,
    ),
    "work that lasts beside a close": Scene("shared stream", [_fill, lambda w: w.allocation.close()], backend=Lasting),
    "work that lasts, a close and a drain": Scene(
        "shared stream", [_fill, lambda w: w.allocation.close(), lambda w: w.device.drain()], backend=Lasting
    ),
    "a stream closed under work that lasts": Scene(
        "shared stream", [_fill, lambda w: w.stream.close(), lambda w: w.allocation.close()], backend=Lasting
    ),
    "a thread's own default stream beside a close": Scene(
        "shared stream", [_fill_own, lambda w: w.allocation.close()], backend=Lasting
    ),
    "a thread's own default stream, dropped in between": Scene(
        "shared stream", [_fill_own, lambda w: w.allocation.close(), lambda w: w.device.drain()], backend=Lasting,
    ),
    "finalizers beside a drain": Scene("view stream", [_drop, lambda w: w.device.drain()], backend=Lasting),
    "finalizers beside a close": Scene(
        "view stream", [_drop, lambda w: w.stream.close(), lambda w: w.device.drain()]
    ),
    "a signal, a close and a drain": Scene(
        "semaphore", [_signal, lambda w: w.semaphore.close(), lambda w: w.device.drain()]
    ),
    "two threads map what a third closes": Scene(
        "memory", [lambda w: w.make(w.memory.map_buffer())] * 2 + [lambda w: w.memory.close()]
    ),
    "a thread waits for what two others use": Scene(
        "shared stream other",
        [_fill, lambda w: w.shared.fill(2, stream=w.other), lambda w: w.allocation.close(timeout=LIMIT)],
    ),
    "a pipeline that is never idle": Scene("semaphore", [_frames, _round], begin=_crowded),
    "a look at a closed stream beside one that wraps it again": Scene(
        "shared wrapped", [lambda w: w.make(w.device.wrap_stream(64)), lambda w: w.allocation.close()],
        begin=_closed_wrapper, backend=Lasting,
    ),
    "a stream is closed, and another uses the same": Scene(
        "shared stream other", [_use_behind_a_closed_stream], begin=_fill, backend=Lasting
    ),
    "a wait that has passed, one that has not, and a release": Scene(
        "own stream array", [lambda w: w.array.close()], begin=_one_wait_passes
    ),
    "a stream joins a capture": Scene("stream other", [_join]),
    "a look at a thread's own default stream beside its end": Scene(
        "shared stream", [_pass_and_drain, lambda w: w.allocation.close()], begin=_fill_own, backend=Lasting,
        by_opcode=[drain._end_of],
    ),
    "who is told of a failure beside one that wraps the stream again": Scene(
        "wrapped", [_is_told, lambda w: w.make(w.device.wrap_stream(64))], begin=_failed,
        by_opcode=[KnownStream.tell_failure],
    ),
    "what holds a release beside that release": Scene(
        "semaphore buffer other", [_name_what_holds, _pass_and_drain], begin=_closed_under_a_wait,
        by_opcode=[Lifetime.what_holds],
    ),
    "an array beside a close": Scene(
        "buffer", [_use_array, lambda w: w.memory.close()], by_opcode=[Hold.__del__]
    ),
    "an array beside a close of its buffer, and a drain": Scene(
        "buffer", [_use_array, _unmap, lambda w: w.device.drain()]
    ),
    "an array's end beside a close": Scene("buffer", [_end_of_array, lambda w: w.memory.close()], begin=_array),
    "an array's end beside a close that waits": Scene(
        "buffer", [_end_of_array, lambda w: w.memory.close(timeout=LIMIT)], begin=_array
    ),
    "two arrays' ends beside a close under work that lasts": Scene(
        "buffer", [_end_of_array, _end_of_array, lambda w: w.memory.close()], begin=_two_arrays,
        backend=Lasting,
    ),
    "two threads add callbacks to what is released": Scene(
        "memory", [_call_back] * 2, begin=lambda w: w.memory.close(), by_opcode=[drain._call_back]
    ),
    "notes of waits by opcode": Scene(
        "semaphore", [_wait, lambda w: w.stream.query()],
        begin=_waited, by_opcode=[KnownStream.note, inspect.unwrap(settle)],
    ),
}  # fmt: skip
