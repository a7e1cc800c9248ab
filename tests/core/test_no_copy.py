"""What owns something refuses to be copied and pickled: the end of a copy would end what the first still uses."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop._core.lifetime import alive
from gpuinterop.handles import HandleOrigin, OriginKind
from gpuinterop.testing.exporters.memfd import MemfdExporter
from tests.limits import LIMIT

WAYS: Final[tuple[Callable[[Any], object], ...]] = (copy.copy, copy.deepcopy, pickle.dumps)


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
        bridged.host_wait(timeout=LIMIT)
        batch.signal(stream, [1])
        stream.synchronize(LIMIT)
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
