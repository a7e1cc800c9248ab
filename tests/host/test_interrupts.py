"""An exception out of a signal handler, at each place where one may come, in what makes, uses and ends something.

The places are those of `tests.strikes`. Descriptors, mappings of memfds and threads are counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop_host.backend import HostBackend
from tests.strikes import Strikes

LIMIT: Final = 20.0
KINDS: Final[tuple[Any, ...]] = (gi.OpaqueFd, gi.TimelineFd)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))  # threading also counts one whose start was interrupted


def alive() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:gpuinterop")
    return len(os.listdir("/proc/self/fd")), maps


@pytest.mark.filterwarnings("ignore:unclosed file")  # Python's own, which it closes
def test_an_interrupt_leaves_nothing() -> None:
    backend = HostBackend()
    device, nothing = backend.open_device(0), lambda _: None
    allocation = backend.allocate(device, system.PAGE, gi.VmmFd)
    stream, calling = backend.create_stream(device), backend.adopt_stream(device, 0)
    signal = [backend.create_semaphore(device, kind) for kind in KINDS]

    def exported(kind: Any, semaphore: Any = None) -> Any:
        handle: Any = backend.export_semaphore(semaphore) if semaphore else backend.export_allocation(allocation)
        return kind(handle.detach(), trusted=True)

    def memory() -> Any:
        return backend.import_memory(device, exported(gi.OpaqueFd), size=system.PAGE, dedicated=False)

    def close(handle: Any) -> None:
        with suppress(OSError):
            os.close(handle.detach())

    def end(stream: Any) -> None:
        backend.destroy_stream(stream)
        stream.thread.join(LIMIT)

    def signalled(kind: Any) -> Any:
        semaphore = backend.create_semaphore(device, kind)
        semaphore.signal(1)
        return semaphore

    def unused(memory: Any) -> None:
        assert system.until(lambda: backend.is_idle(stream), LIMIT), "work that was never given counts as unfinished"
        backend.destroy_memory(memory)

    # What it is given, the call, how its result is ended, how what it was given is; an end is called again.
    cases: dict[str, tuple[Any, ...]] = {
        "create_stream": (lambda: None, lambda _: backend.create_stream(device), end, nothing),
        "destroy_stream": (lambda: backend.create_stream(device), backend.destroy_stream, None, nothing),
        "record": (lambda: None, lambda _: backend.record(stream), nothing, nothing),
        "synchronize": (lambda: None, lambda _: backend.synchronize(stream), nothing, nothing),
        "fill": (memory, lambda it: backend.fill(stream, it.data, 1, 8), nothing, unused),
        "fill 0": (memory, lambda it: backend.fill(calling, it.data, 1, 8), nothing, backend.destroy_memory),
        "import_memory": (
            lambda: exported(gi.OpaqueFd),
            lambda handle: backend.import_memory(device, handle, size=system.PAGE, dedicated=False),
            backend.destroy_memory, close,
        ),
        "destroy_memory": (memory, backend.destroy_memory, None, nothing),
        "allocate": (
            lambda: None, lambda _: backend.allocate(device, system.PAGE, gi.VmmFd), backend.release_allocation, nothing
        ),
        "release_allocation": (
            lambda: backend.allocate(device, system.PAGE, gi.VmmFd), backend.release_allocation, None, nothing
        ),
        "export_allocation": (lambda: None, lambda _: backend.export_allocation(allocation), close, nothing),
        "import_allocation": (
            lambda: exported(gi.VmmFd),
            lambda handle: backend.import_allocation(device, handle, size=system.PAGE),
            backend.release_allocation, close,
        ),
        "map_allocation": (
            lambda: None,
            lambda _: backend.map_allocation(allocation, [device]),
            lambda made: backend.unmap_allocation(made[0]), nothing,
        ),
        "unmap_allocation": (
            lambda: backend.map_allocation(allocation, [device])[0], backend.unmap_allocation, None, nothing
        ),
    }  # fmt: skip
    for kind, one in zip(KINDS, signal, strict=True):
        one.signal(1)  # it keeps the descriptor that a timeline's lock is taken by
        batch, name = backend.prepare([one]), kind.__name__
        cases |= {
            f"create_semaphore {name}": (
                lambda: None, lambda _, kind=kind: backend.create_semaphore(device, kind), backend.destroy_semaphore,
                nothing,
            ),
            f"export_semaphore {name}": (
                lambda: None, lambda _, one=one: backend.export_semaphore(one), close, nothing
            ),
            f"import_semaphore {name}": (
                lambda kind=kind, one=one: exported(kind, one),
                lambda handle: backend.import_semaphore(device, handle), backend.destroy_semaphore, close,
            ),
            f"destroy_semaphore {name}": (
                lambda kind=kind: signalled(kind), backend.destroy_semaphore, None, nothing
            ),
            f"signal {name}": (
                lambda one=one: getattr(one, "value", 0) + 1,
                lambda value, batch=batch: backend.signal(batch, calling, (value,)), nothing, nothing,
            ),
        }  # fmt: skip
    count = {name: strike(*case, name=name) for name, case in cases.items()}
    assert min(count.values()) > 1, count
    assert sum(count.values()) > 400, count
    for one in signal:
        backend.destroy_semaphore(one)
    backend.release_allocation(allocation)
    end(stream)


def strike(
    prepare: Callable[[], Any],
    act: Callable[[Any], Any],
    undo: Callable[[Any], Any] | None,
    clean: Callable[[Any], Any],
    *,
    name: str,
) -> int:
    strikes, before, running = Strikes(), alive(), threads()

    def finish(struck: bool, given: Any, made: Any) -> None:
        where = f"{name}, {strikes.where if struck else 'not struck'}"
        if undo is None:
            act(given)
            act(given)
        elif made is not None:
            undo(made)
        clean(given)
        deadline = time.monotonic() + LIMIT
        while threads() > running and time.monotonic() < deadline:
            time.sleep(0.001)  # a worker that was told to end
        assert (alive(), threads()) == (before, running), where

    return strikes.everywhere(prepare, act, finish)
