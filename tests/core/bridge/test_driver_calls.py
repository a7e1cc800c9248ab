"""The watcher calls no driver, and the core polls a binding that holds the GIL."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge
from tests.limits import LIMIT

from .scripted import Script, Scripted, bridged, end, fails, until


class Noting:
    """In front of a backend: notes which thread has made each call."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[tuple[str, int]] = []
        self.done: Counter[str] = Counter()
        self.holds_gil = False
        self.on_synchronize: Script = lambda: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append((name, threading.get_ident()))
            if name == "synchronize":
                self.on_synchronize()
            result = found(*arguments, **keywords)
            self.done[name] += 1
            return result

        return call

    @property  # type: ignore[misc]  # isinstance() is to see the backend's interfaces
    def __class__(self) -> type:
        return type(self._backend)


@pytest.fixture
def noting(host: Device) -> tuple[Device, Noting]:
    backend = Noting(host.driver)
    backend._backend.open_device(0)
    return Device(backend, host.info, host.capabilities), backend  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::gpuinterop.errors.LeakedResourceWarning")
def test_the_watcher_never_calls_the_driver(noting: tuple[Device, Noting], scope: ExitStack) -> None:
    """Not for waits, signals, failures and ends, nor for what the collector finds there."""
    device, backend = noting
    threads: set[int] = set()
    endpoint, failing = Scripted(), Scripted()

    def litter() -> None:
        stream = device.create_stream()
        things: list[Any] = [stream, stream.record(), device.create_semaphore(gi.TimelineFd), Bridge(device)]
        things += [things[-1].from_endpoint(Scripted()), things]

    def collect() -> None:
        gc.collect()
        threads.add(threading.get_ident())

    gc.collect()
    gc.disable()
    scope.callback(gc.enable)
    with Bridge(device) as bridge:
        first, second = (bridge.from_endpoint(one) for one in (endpoint, failing))
        stream, doomed = device.create_stream(), device.create_stream()
        litter()
        endpoint.on_wait = collect
        first.wait(stream, 1)
        until(lambda: threads)
        endpoint.on_wait = lambda: None
        endpoint.reached = 1
        first.signal(stream, 2)
        stream.synchronize(LIMIT)
        until(lambda: endpoint.told == [2])
        second.wait(doomed, 1)
        failing.on_wait = fails
        with pytest.raises(gi.DriverError):
            doomed.record().wait(LIMIT)
        end(second, doomed, bridge, stream)
    assert threading.get_ident() not in threads
    assert not [name for name, thread in backend.calls if thread in threads]

    def released() -> bool:
        device.drain()
        return backend.done["create_stream"] == backend.done["destroy_stream"] == 3

    until(released)  # what was found there, too, by others


def test_a_binding_that_holds_the_gil_is_polled(noting: tuple[Device, Noting], scope: ExitStack) -> None:
    """Blocked inside `synchronize`, with the GIL held, nobody could ever signal."""
    device, backend = noting
    backend.holds_gil = True
    backend.on_synchronize = lambda: pytest.fail("the core blocked in the binding")
    endpoint, semaphore, stream = bridged(device, scope)
    for value in range(1, 20, 2):
        semaphore.wait(stream, value)
        semaphore.signal(stream, value + 1)
        timer = threading.Timer(0.005, lambda value=value: setattr(endpoint, "reached", value))
        timer.start()
        stream.synchronize()
        device.synchronize()
        until(lambda value=value: endpoint.told[-1:] == [value + 1])
        timer.join()
