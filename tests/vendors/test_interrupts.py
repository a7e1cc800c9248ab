"""An exception out of a signal handler, at each place where one may come, in each method that calls the driver.

The places are those of `tests.strikes`: after every call of C's, at the entry of every function, and where every loop
turns back; in the backend, and in the Python's code of the bindings behind the driver's calls. And so in public calls,
which make and release through them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator
from tests.spare_pages import unpin_spare_pages
from tests.strikes import Strikes

from .interrupted import Table, table
from .table import VENDOR

LIMIT = 20.0
CALLS: dict[str, Callable[[Any], object]] = {
    "create_stream": lambda world: world.device.create_stream(),
    "wrap_stream": lambda world: world.device.wrap_stream(world.stream.ptr),
    "allocate": lambda world: world.device.allocate(4096),
    "create_semaphore": lambda world: world.device.create_semaphore(gi.TimelineFd),
    "import_semaphore": lambda world: world.device.import_semaphore(world.handle),
    "fill": lambda world: world.allocation.buffer.fill(1),
    "signal": lambda world: world.semaphore.signal(world.stream, 1),
    "wait": lambda world: world.semaphore.wait(world.stream, 0),
    "close of memory": lambda world: world.allocation.close(),
    "close of memory, timed": lambda world: world.allocation.close(timeout=LIMIT),
    "close of a semaphore": lambda world: world.semaphore.close(timeout=LIMIT),
    "close of a stream": lambda world: world.stream.close(timeout=LIMIT),
    "synchronize": lambda world: world.device.synchronize(),
}


@pytest.fixture
def methods(simulator: Simulator) -> Iterator[Table]:
    with table(VENDOR.name, simulator) as found:
        yield found


def test_an_interrupt_leaves_nothing(methods: Table) -> None:
    """Neither an object, nor a context or device, nor a mode; and what is released twice goes once."""
    places = {name: methods.strike(name) for name in methods.cases}
    assert min(places.values()) > 1, places
    assert sum(places.values()) >= VENDOR.interrupts, places


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_public_call_leaves_nothing(name: str, methods: Table, simulator: Simulator) -> None:
    """What it has made is released with what it was given, and the thread is as it was."""
    device, strikes = methods.device, Strikes()

    def prepare() -> Any:
        world = SimpleNamespace(device=device, stream=device.create_stream(), allocation=device.allocate(4096))
        world.semaphore = device.create_semaphore(gi.TimelineFd)
        world.handle = world.semaphore.export()
        assert world.allocation.buffer.size
        return world

    def end(world: Any, made: Any) -> dict[str, int]:
        for one in (made, world.allocation, world.semaphore, world.stream):
            if isinstance(one, gi.Allocation | gi.ExternalSemaphore | gi.Stream):
                one.close(timeout=LIMIT)
        world.handle.close()
        gc.collect()
        device.synchronize(LIMIT)
        unpin_spare_pages(device)
        live = methods.alive()
        live["stream"] -= len(device._copiers)
        return live

    def finish(struck: bool, world: Any, made: Any) -> None:
        assert methods.state() == state, strikes.where
        assert end(world, made) == alive, strikes.where
        assert simulator.violations() == [], strikes.where

    for _ in range(2):  # what is made once and kept is made
        world = prepare()
        alive = end(world, CALLS[name](world))
    state = methods.state()
    assert strikes.everywhere(prepare, CALLS[name], finish) > 20
