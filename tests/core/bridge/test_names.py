"""A bridged semaphore has one name in all messages, whichever part of the library says what is wrong with it."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge, SemaphoreEndpoint
from tests.limits import LIMIT

from .scripted import Scripted, bridged, until, word_of


@pytest.mark.parametrize("of", ["scripted", "timeline"])
def test_one_name_in_all_messages(host: Device, bridge: Bridge, scope: ExitStack, of: str) -> None:
    made = scope.enter_context(host.create_semaphore(gi.TimelineFd))
    given: Any = Scripted() if of == "scripted" else gi.bridge.OwnTimelineEndpoint(made.export())
    semaphore: Any = scope.enter_context(bridge.from_endpoint(given))
    stream = scope.enter_context(host.create_stream())
    name = re.escape(semaphore.label)
    if of == "timeline":
        semaphore.host_signal(3)
        assert made.value == 3
        with pytest.raises(gi.DriverError, match=name):  # its page says so
            semaphore.host_signal(2)
    else:  # a wait whose value is there is named no more, whether the stream has passed it or not
        given.reached = 5
        for value in (5, 9):
            semaphore.wait(stream, value)
        until(lambda: word_of(semaphore) == 5)
        assert "to reach 5" not in stream._known_as().waiting_for()
    semaphore.wait(stream, 9)
    with pytest.raises(gi.SemaphoreTimeoutError, match=f"waiting for {name} to reach 9"):
        stream.synchronize(0.01)
    with pytest.raises(gi.ResourceBusyError, match=name):
        semaphore.close(timeout=0.01)
    with pytest.raises(gi.ResourceClosedError, match=f"{name} was closed"):
        stream.synchronize(LIMIT)


def test_an_endpoint_that_keeps_its_label(host: Device, bridge: Bridge, scope: ExitStack) -> None:
    """A property cannot be set: messages then have the endpoint's, which the semaphore's contains."""

    class Fixed(Scripted):
        label: Any = property(lambda self: "my own")

    semaphore = scope.enter_context(bridge.from_endpoint(Fixed()))
    assert re.fullmatch(r"bridged my own #\d+ \(of Bridge #\d+\)", semaphore.label)


def test_an_endpoint_for_semaphores_that_the_cpu_cannot_reach(device: Device) -> None:
    with (
        device.import_semaphore(gi.TimelineWin32(handle=8)) as semaphore,
        pytest.raises(gi.UnsupportedError, match="without a stream"),
    ):
        SemaphoreEndpoint(semaphore)


def test_the_counter_of_an_endpoint(device: Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridged timeline has its endpoint's; one without is a gap, from which a handoff begins at 0."""
    endpoint, semaphore, _ = bridged(device, scope)
    endpoint.reached = 6
    with pytest.raises(gi.UnsupportedError, match=r"Endpoint|counter"):
        _ = semaphore.value
    assert gi.Handoff(semaphore).frame == 0
    monkeypatch.setattr(Scripted, "counter", lambda endpoint: endpoint.reached)
    assert semaphore.value == 6
    assert gi.Handoff(semaphore).frame == 3
