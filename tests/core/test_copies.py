"""What owns something refuses to be copied and pickled: the end of a copy would end what the first still uses."""

from __future__ import annotations

import copy
import enum
import gc
import importlib
import inspect
import os
import pickle
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop._core.lifetime import alive
from gpuinterop.exporters.memfd import MemfdExporter
from gpuinterop.handles import HandleOrigin, OriginKind

WAYS: Final[tuple[Callable[[Any], object], ...]] = (copy.copy, copy.deepcopy, pickle.dumps)

MAY_BE_COPIED: Final[dict[type, str]] = {
    gi.backend.Backend: "one a process, which no user meets",
    gi.Capabilities: "a table",
    gi.capabilities.Rules: "a table",
    gi.FabricHandle: "bytes",
    gi.IpcMemHandle: "bytes",
    gi.InstalledBackend: "the name of a distribution",
    **dict.fromkeys([gi.ArrayLevel, gi.GraphStep, gi.View], "a part of what it keeps"),
    **dict.fromkeys([gi.Binary, gi.Fence, gi.Keyed, gi.SciSync, gi.Timeline], "a name of a kind; has no objects"),
}
"""The public classes that own nothing and are no plain values, and why. A new one stands here, or refuses."""


def public() -> Iterator[type]:
    """The classes among the names of all modules that have a name for users."""
    for name in ("gpuinterop", *(found.name for found in pkgutil.walk_packages(gi.__path__, "gpuinterop."))):
        if not any(part.startswith("_") or part in ("cli", "testing", "torch") for part in name.split(".")):
            module = importlib.import_module(name)
            values = (getattr(module, one) for one in getattr(module, "__all__", ()))
            yield from (one for one in values if inspect.isclass(one) and one.__module__.startswith("gpuinterop"))


def is_value(kind: type) -> bool:
    parameters: Any = getattr(kind, "__dataclass_params__", None)
    plain = issubclass(kind, BaseException | enum.Enum | tuple | dict | list) or (parameters and parameters.frozen)
    return bool(plain) or kind in MAY_BE_COPIED or issubclass(kind, gi.backend.Backend)


def copies(thing: object) -> list[str]:
    """The ways that do not refuse in words."""
    found = []
    for way in WAYS:
        try:
            way(thing)
        except gi.ArgumentTypeError as error:
            if "expected one owner of what it holds, got a request for a copy or a pickle; " in str(error):
                continue
        except Exception:  # of what it is made of: not in words
            pass
        found.append(f"{type(thing).__name__}: {way.__name__}")
    return found


def test_every_public_class_that_owns_something_refuses() -> None:
    owners = {kind for kind in public() if not is_value(kind)}
    assert len(owners) > 60
    found = []
    for kind in owners:
        bare: Any = type(kind)(kind.__name__, (kind,), {})
        bare.__abstractmethods__ = frozenset()
        found += copies(object.__new__(bare))
    assert sorted(found) == []


def test_the_end_of_a_copy_ends_nothing(host: Device, tmp_path: Path) -> None:
    """`copy.copy(bridge)` was a second bridge, whose end closed the first."""

    def count() -> object:
        host.drain()
        return len(alive()), len(os.listdir("/proc/self/fd")), threading.active_count()

    gc.collect()
    before = count()
    with ExitStack() as scope:
        use = scope.enter_context
        semaphore = use(host.create_semaphore(gi.TimelineFd))
        stream, allocation, exporter = use(host.create_stream()), use(host.allocate(4096)), use(MemfdExporter())
        bridge, transport = use(gi.bridge.Bridge(host)), use(gi.exchange.SocketTransport(tmp_path, rank=0, size=1))
        bridged = bridge.import_semaphore(gi.EventFd(os.eventfd(0)))
        memory = use(exporter.create_memory(4096))
        team, batch, event = gi.exchange.Team(transport), gi.SemaphoreBatch(semaphore), stream.record()
        owners = [
            host, gi.get_backend("host"), semaphore, stream, allocation, allocation.buffer, bridge, bridged,
            bridged.endpoint, exporter, memory, transport, team, batch, event, gi.Handoff(semaphore),
            use(allocation.export()),
        ]  # fmt: skip
        there = len(alive())
        assert [problem for owner in owners for problem in copies(owner)] == []
        gc.collect()
        assert len(alive()) == there
        assert [owner for owner in owners if getattr(owner, "closed", False)] == []
        bridged.signal(stream)
        bridged.host_wait(timeout=20)
        batch.signal(stream, [1])
        stream.synchronize(20)
        assert event.done
        team.vote("ready")
        memory.write(0, b"there")
        assert memory.read(0, 5) == b"there"
    del team, batch, event, owners, bridged
    assert system.until(lambda: count() == before, 20)


def test_values_are_copied(host: Device) -> None:
    origin = HandleOrigin(kind=OriginKind.MEMORY, device=host.identity, size=4096)
    for value in (host.identity, host.info, origin, gi.TimelineFd, gi.Granularity(1, 2)):
        assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
    table = copy.deepcopy(host.capabilities)
    assert dict(pickle.loads(pickle.dumps(table))) == dict(table) == dict(host.capabilities)
    handle = copy.copy(gi.FabricHandle(bytes(range(64))))
    assert handle.data == bytes(range(64))
