"""A call that has failed may have enqueued its work: the release waits for the stream. One that was refused has not."""

from __future__ import annotations

from typing import Any

import pytest

import gpuinterop as gi

from .fake import FakeEverything, fake_team
from .scenes import BYTES, Call, World


def world_of(things: str) -> World:
    backend = FakeEverything()
    world = World(fake_team(backend=backend)[0], backend)
    for thing in things.split():
        getattr(world, thing)
    return world


def block_all(world: World) -> None:
    world.backend.blocked.update(number for kind, number in world.backend.live if kind == "stream")


@pytest.mark.parametrize(
    ("things", "call", "fails", "closed", "kind"),
    [
        ("semaphore stream", lambda w: w.semaphore.signal(w.stream, 2), "signal", "semaphore", "semaphore"),
        ("semaphore stream", lambda w: w.semaphore.wait(w.stream, 2), "wait", "semaphore", "semaphore"),
        ("buffer stream", lambda w: w.buffer.fill(1, stream=w.stream), "fill", "memory", "mapping"),
        ("buffer", lambda w: w.buffer.copy_from_host(BYTES), "copy", "memory", "mapping"),
        ("buffer", lambda w: w.buffer.copy_from_host(BYTES), "synchronize", "memory", "mapping"),
        ("level stream", lambda w: w.level.copy_from_host(BYTES, stream=w.stream), "copy_level", "memory", "array"),
        ("graph other", lambda w: w.graph.launch(w.other), "launch", "graph", "executable"),
    ],
)
def test_the_release_waits_for_a_call_that_has_failed(
    things: str, call: Call, fails: str, closed: str, kind: str
) -> None:
    world = world_of(things)

    def at(name: str, place: str, handles: Any) -> None:
        if (name, place) == (fails, "inside"):
            block_all(world)
            raise gi.DriverError(name, 1, "CUDA_ERROR_INVALID_VALUE")

    world.backend.at = at
    with pytest.raises(gi.DriverError):
        call(world)
    getattr(world, closed).close()
    assert world.backend.count(kind) == 1
    world.backend.blocked.clear()
    world.device.drain()
    assert world.backend.count(kind) == 0
    world.end()


def test_no_release_waits_for_a_launch_that_was_refused() -> None:
    world = world_of("graph other")
    world.graph.close()
    with pytest.raises(gi.ResourceClosedError):
        world.graph.launch(world.other)
    block_all(world)
    world.backend.blocked.discard(world.stream.ptr)
    world.allocation.close()
    assert world.backend.count("mapping") == 0
    world.end()
