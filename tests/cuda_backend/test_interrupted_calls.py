"""Ctrl-C anywhere in a call: what it has made is released, and the thread's current context is what it was."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
import gpuinterop_cuda
from tests.core.interrupts import as_c, strikes
from tests.simulated.driver import Simulator

LIMIT = 20.0
ROOTS = tuple(os.path.dirname(package.__file__ or "") + os.sep for package in (gi, gpuinterop_cuda))


class Through:
    """The bindings, each of whose functions is seen to be C."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._seen: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._api, name)
        if not name.startswith("cu") or isinstance(found, type):
            return found
        return self._seen.setdefault(name, as_c(found))


CALLS: dict[str, Callable[[Any], object]] = {
    "create_stream": lambda world: world.made.append(world.device.create_stream()),
    "allocate": lambda world: world.made.append(world.device.allocate(4096)),
    "create_semaphore": lambda world: world.made.append(world.device.create_semaphore(gi.TimelineFd)),
    "import_semaphore": lambda world: world.made.append(world.device.import_semaphore(world.handle)),
    "fill": lambda world: world.allocation.buffer.fill(1),
    "signal": lambda world: world.semaphore.signal(world.stream, 1),
    "close": lambda world: world.allocation.close(),
    "close, timed": lambda world: world.allocation.close(timeout=LIMIT),
    "close of a semaphore": lambda world: world.semaphore.close(timeout=LIMIT),
    "close of a stream": lambda world: world.stream.close(timeout=LIMIT),
    "synchronize": lambda world: world.device.synchronize(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_nothing_behind(name: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    device = gi.get_backend("cuda").device()
    native: Any = device._backend
    device.create_stream().close(timeout=LIMIT)  # opens it
    with device.allocate(4096) as warm:
        warm.buffer.fill(1)
    warm.close(timeout=LIMIT)
    device.synchronize()
    base, current = simulator.live(), int(driver.cuCtxGetCurrent()[1])
    monkeypatch.setattr(native._driver, "api", Through(native._driver.api))

    def make() -> Any:
        world: Any = SimpleNamespace(device=device, made=[])
        world.stream, world.allocation = device.create_stream(), device.allocate(4096)
        world.semaphore = device.create_semaphore(gi.TimelineFd)
        world.handle = world.semaphore.export()
        assert world.allocation.buffer.size
        return world

    found: list[str] = []
    count = 0
    for world, struck in strikes(make, CALLS[name], roots=ROOTS):
        count += 1
        try:
            depth = 0
            while int(driver.cuCtxGetCurrent()[1]) != current:
                driver.cuCtxPopCurrent()
                depth += 1
            assert depth == 0, f"{depth} contexts stay current"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for one in (world.allocation, world.semaphore, world.stream, *world.made):
                    one.close(timeout=0.2)
                world.handle.close()
                world.made.clear()
                gc.collect()
                device.synchronize()
            left = {kind: n - base[kind] for kind, n in simulator.live().items() if n > base[kind] + (kind == "stream")}
            base = {kind: max(n, base[kind]) for kind, n in simulator.live().items()}
            assert left == {}, f"leaked {left}"
        except Exception as error:
            found.append(f"struck {struck.first}: {type(error).__name__}: {str(error)[:150]}")
            with contextlib.suppress(gi.GpuInteropError):
                device.synchronize(timeout=1.0)
    assert found == [], f"{len(found)} of {count} places"
    assert simulator.violations() == []
