"""Every public call, interrupted at every place (`tests.strikes`), on what `pairs` makes the calls on."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Final

import gpuinterop as gi
from gpuinterop._core.device import Device
from tests.leftovers import fds
from tests.spare_pages import unpin_spare_pages
from tests.strikes import OURS, Strikes

from .explored import forget
from .fake import FakeEverything, fake_team
from .pairs import LIMIT, Action, World, actions, needs

_MAY = (gi.GpuInteropError, AssertionError)
_NEVER = ("is held", "is shut")
"""Of what `unsound` finds: it would wedge others."""
_THERE = frozenset({"buffer", "own", "semaphore", "stream"})
"""What a call comes upon that is made on the device alone."""
CALLS: Final = {
    action.name: action
    for action in (
        *actions(),
        # Beside others they are as their like in the pairs; an interrupt has places of its own in them.
        Action("Buffer.close, timed", lambda world: world.buffer.close(timeout=LIMIT)),
        Action("Buffer.fill", lambda world: world.buffer.fill(1)),
        Action(
            "Device.import_semaphore, of ours", lambda world: world.make(world.device.import_semaphore(world.exported))
        ),
        Action("ExternalSemaphore.close, of ours, timed", lambda world: world.own.close(timeout=LIMIT)),
    )
}


def _world(things: Iterable[str]) -> World:
    backend = FakeEverything()
    backend.struck = True
    world = World(fake_team(backend=backend)[0], backend)
    for thing in things:
        getattr(world, thing)
    world.device.import_semaphore(gi.TimelineWin32(handle=8))  # dropped: the next drain's
    return world


def interrupted(name: str, *, second: int = 0, enough: int = 100) -> tuple[int, list[str]]:
    """How many places a call was struck at, and where that left something behind.

    `second` strikes once more, so many instructions later: that may leak, and never wedges nor reaches a driver with
    what is dead. `enough` failures end it. CPython loses an interrupt at the entry of a finalizer, and the finalizer
    with it: what that was to release may stay.
    """
    action = CALLS[name]
    failed: list[str] = []
    twice: list[int] = []
    strikes = Strikes(OURS, second)

    def act(world: World) -> None:
        action.call(world)  # what it gives is dropped

    def finish(struck: bool, world: World, made: object) -> bool:
        if (why := _end(world, twice=second > 0)) and not ("__del__" in strikes.where and "not released" in why):
            failed.append(f"struck{strikes.where}: {why}")
        if twice and not second:
            failed.append(
                f"struck{strikes.where}: a descriptor was closed twice, which may be another thread's by then"
            )
        twice.clear()
        return len(failed) >= enough

    things = sorted(needs(action) or _THERE)
    open_before = fds()
    forget()
    gc.collect()
    gc.freeze()  # so that a collection looks at what the strikes have made; nothing thaws it, as in `tests.conftest`
    try:
        with warnings.catch_warnings(), _closed_twice(twice):
            warnings.simplefilter("ignore")
            count = strikes.everywhere(lambda: _world(things), act, finish)
    finally:
        forget()
        gc.collect()
        for fd in fds() - open_before:  # the scripted backend loses some, and two interrupts may lose any
            with contextlib.suppress(OSError):
                os.close(int(fd))
    return count, failed


@contextlib.contextmanager
def _closed_twice(found: list[int]) -> Iterator[None]:
    """Note each descriptor that is closed, and is not open."""
    close = os.close

    def noted(fd: int) -> None:
        try:
            close(fd)
        except OSError:
            found.append(fd)
            raise

    os.close = noted
    try:
        yield
    finally:
        os.close = close


def _end(world: World, *, twice: bool) -> str:
    world.patience = 0.02 if twice else 1.0
    try:
        world.end()
    except _MAY as error:
        if not twice or world.backend.violations or any(what in str(error) for what in _NEVER):
            forget()
            return f"{type(error).__name__}: {str(error)[:200]}"
    try:
        _use(world.device)
    except _MAY as error:
        return f"it cannot be used any more: {type(error).__name__}: {str(error)[:200]}"
    finally:
        if twice:
            forget()
        unpin_spare_pages(world.device)  # or each strike would leave its pages
    return ""


def _use(device: Device) -> None:
    """Whatever was left behind holds up nothing that comes later."""
    with device.create_stream() as stream, device.import_memory(gi.OpaqueWin32(handle=8), size=4096) as memory:
        memory.map_buffer().fill(1, stream=stream)
    memory.close(timeout=0.2)
