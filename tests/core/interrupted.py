"""Every public call, interrupted at every place (`tests.strikes`), on what `pairs` makes the calls on."""

from __future__ import annotations

import gc
import warnings

import gpuinterop as gi
from tests.strikes import OURS, Strikes

from .explored import forget
from .fake import FakeEverything, fake_team
from .pairs import Action, World, actions, needs

_MAY = (gi.GpuInteropError, AssertionError)
_NEVER = ("is held", "is shut")
"""Of what `unsound` finds: it would wedge others."""


def _world(action: Action) -> World:
    backend = FakeEverything()
    backend.struck = True
    world = World(fake_team(backend=backend)[0], backend)
    for thing in sorted(needs(action)):
        getattr(world, thing)
    world.device.import_semaphore(gi.TimelineWin32(handle=8))  # dropped: the next drain's
    return world


def interrupted(name: str, *, second: int = 0, enough: int = 100) -> tuple[int, list[str]]:
    """How many places a call was struck at, and where that left something behind.

    `second` strikes once more, so many instructions later: that may leak, and never wedges nor reaches a driver with
    what is dead. `enough` failures end it. CPython loses an interrupt at the entry of a finalizer, and the finalizer
    with it: what that was to release may stay.
    """
    action = next(action for action in actions() if action.name == name)
    failed: list[str] = []
    strikes = Strikes(OURS, second)

    def act(world: World) -> None:
        action.call(world)  # what it gives is dropped

    def finish(struck: bool, world: World, made: object) -> bool:
        if (why := _end(world, twice=second > 0)) and not ("__del__" in strikes.where and "not released" in why):
            failed.append(f"struck{strikes.where}: {why}")
        return len(failed) >= enough

    needs(action)  # asks all of them, the first time
    forget()
    gc.collect()
    gc.freeze()  # so that a collection looks at what the strikes have made; nothing thaws it, as in `tests.conftest`
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count = strikes.everywhere(lambda: _world(action), act, finish)
    finally:
        gc.collect()
    return count, failed


def _end(world: World, *, twice: bool) -> str:
    world.patience = 0.02 if twice else 1.0
    try:
        world.end()
    except _MAY as error:
        forget()
        if not twice or world.backend.violations or any(what in str(error) for what in _NEVER):
            return f"{type(error).__name__}: {str(error)[:200]}"
    return ""
