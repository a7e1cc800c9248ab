"""A semaphore has one name in all messages, whichever part of the library says what is wrong with it."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, Endpoint, SemaphoreEndpoint

from .scripted import LIMIT, Scripted, WordsBackend, end, until

OTHER_NAMES = re.compile(r"semaphore #?\d|this \w+ semaphore|bridged|eventfd|scripted")


def problem(call: Callable[[], object], kind: type[BaseException] = gi.GpuInteropError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def check(semaphore: Any, *messages: str) -> None:
    for message in messages:
        assert semaphore.label in message
        assert not OTHER_NAMES.search(message.replace(semaphore.label, "")), message


def late(semaphore: Any, stream: gi.Stream) -> list[str]:
    """What is said of a wait that does not pass."""
    said = [
        problem(lambda: stream.synchronize(0.01), gi.SemaphoreTimeoutError),
        problem(lambda: stream.record().wait(0.01), gi.SemaphoreTimeoutError),
        problem(lambda: stream.device.synchronize(0.01), gi.SemaphoreTimeoutError),
        problem(lambda: semaphore.host_wait(*[9] * semaphore.takes_value, timeout=0.01), gi.SemaphoreTimeoutError),
    ]
    assert all("signal it here: by host_signal" in message for message in said[:3])
    return said


def closed(semaphore: Any, stream: gi.Stream) -> list[str]:
    """What is said of one that is closed while a stream waits for it."""
    value = [9] * semaphore.takes_value
    busy = problem(lambda: semaphore.close(timeout=0.01), gi.ResourceBusyError)
    assert "it may be waiting for" in busy
    return [busy, *(problem(call, gi.ResourceClosedError) for call in (
        lambda: semaphore.wait(stream, *value),
        lambda: semaphore.host_signal(*value),
        lambda: gi.SemaphoreBatch(semaphore),
    ))]  # fmt: skip


@pytest.mark.parametrize("kind", [gi.TimelineFd, gi.OpaqueFd])
def test_one_of_the_host(host: Device, scope: ExitStack, kind: Any) -> None:
    made: Any = host.create_semaphore(kind)
    semaphore: Any = host.import_semaphore(made.export())
    stream, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    values = [9] * semaphore.takes_value
    check(
        semaphore,
        problem(semaphore.export),
        problem(lambda: semaphore.wait(stream, *[None, 7][: 1 + (not values)][-1:])),
    )
    if values:
        semaphore.host_signal(3)
        check(semaphore, problem(lambda: semaphore.host_signal(2), gi.DriverError))
        semaphore.signal(other, 5)
        other.synchronize(LIMIT)
        check(semaphore, problem(lambda: semaphore.signal(other, 4)))
    semaphore.wait(stream, *values)
    check(semaphore, *late(semaphore, stream), *closed(semaphore, stream))
    check(semaphore, problem(lambda: stream.synchronize(LIMIT), gi.ResourceClosedError))  # the host could cancel it
    with scope.enter_context(host.create_stream()) as third:
        if semaphore.takes_timeout:
            made.wait(third, *values, timeout=0.01)
            check(made, problem(lambda: third.synchronize(LIMIT), gi.SemaphoreTimeoutError))
    made.close()


def test_one_of_words(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    made: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    semaphore: Any = device.import_semaphore(made.export())
    stream = scope.enter_context(device.create_stream())
    semaphore.host_signal(3)
    check(
        semaphore,
        problem(lambda: semaphore.host_signal(2), gi.DriverError),
        problem(lambda: semaphore.signal(stream, 2)),
        problem(lambda: semaphore.wait(stream, None)),
        problem(lambda: semaphore.wait(stream, 9, timeout=1.0), gi.UnsupportedError) + semaphore.label,
    )
    backend.capturing.add(stream.ptr)
    check(semaphore, problem(lambda: semaphore.signal(stream, 4)))
    check(made, problem(lambda: gi.SemaphoreBatch(made).wait(stream, (4,))))
    backend.capturing.clear()
    semaphore.wait(stream, 9)
    check(semaphore, *late(semaphore, stream), *closed(semaphore, stream))
    made.host_signal(9)
    stream.synchronize(LIMIT)
    again: Any = device.create_semaphore(gi.TimelineFd)
    with pytest.warns(gi.LeakedResourceWarning) as warned:
        label = again.label
        del again
        warnings.warn("at least one", gi.LeakedResourceWarning, stacklevel=1)
    assert label in str(warned[0].message)


def test_a_page_that_is_used_again_has_the_new_name(device: Device) -> None:
    labels = []
    for _ in range(2):
        with device.create_semaphore(gi.TimelineFd) as semaphore:
            semaphore.host_signal(3)
            check(semaphore, problem(functools.partial(semaphore.host_signal, 2), gi.DriverError))
            labels.append(semaphore.label)
    assert len(set(labels)) == 2


@pytest.mark.parametrize("of", ["eventfd", "timeline", "scripted", "semaphore"])
def test_one_that_is_bridged(host: Device, bridge: Bridge, scope: ExitStack, of: str) -> None:
    stream, other = (scope.enter_context(host.create_stream()) for _ in range(2))
    made = scope.enter_context(host.create_semaphore(gi.TimelineFd))
    semaphore: Any
    if of == "eventfd":
        semaphore = bridge.import_semaphore(gi.EventFd(os.eventfd(0)))
    elif of == "timeline":
        semaphore = bridge.import_semaphore(made.export())
    else:
        endpoint: Endpoint = Scripted() if of == "scripted" else SemaphoreEndpoint(made)
        semaphore = bridge.from_endpoint(endpoint)
    assert semaphore.endpoint.label == semaphore.label
    if of == "timeline":
        semaphore.host_signal(3)
        check(semaphore, problem(lambda: semaphore.host_signal(2), gi.DriverError))
    semaphore.wait(stream, *[9] * semaphore.takes_value)
    check(semaphore, *late(semaphore, stream), *closed(semaphore, stream))
    check(semaphore, problem(lambda: stream.synchronize(LIMIT), gi.ResourceClosedError))
    end(semaphore)
    if of == "scripted":
        broken = Scripted()
        broken.on_wait = lambda: 1 / 0
        semaphore = scope.enter_context(bridge.from_endpoint(broken))
        semaphore.wait(other, 1)
        check(semaphore, problem(lambda: other.synchronize(LIMIT), gi.PeerError))
        until(lambda: not semaphore._handle.busy)


def test_an_endpoint_that_keeps_its_label(host: Device, scope: ExitStack) -> None:
    """A property cannot be set: messages then have the endpoint's, which the semaphore's contains."""

    class Fixed(Scripted):
        label: Any = property(lambda self: "my own")

    semaphore = scope.enter_context(scope.enter_context(Bridge(host)).from_endpoint(Fixed()))
    assert re.fullmatch(r"bridged my own #\d+ \(of Bridge #\d+\)", semaphore.label)
