"""Semaphores of our own on CUDA: what the driver is asked for, and the values that its streams can compare."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from tests.limits import LIMIT

from ..parties import watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")


def test_what_the_driver_is_asked_for(device: gi.Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store behind a fence to system scope, a wait for "or more", a page for every context."""
    from cuda.bindings import driver as cuda

    given: dict[str, Any] = {}
    backend: Any = device.driver

    def noted(call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            given[call] = arguments
            return real(*arguments)

        return note

    # The backend keeps the functions of its hot path.
    monkeypatch.setattr(backend, "_write", noted("cuStreamWriteValue64", backend._write))
    monkeypatch.setattr(backend, "_wait_for", noted("cuStreamWaitValue64", backend._wait_for))
    watch(monkeypatch, device, "MemHostRegister", lambda *arguments: given.update(cuMemHostRegister=arguments))
    stream = scope.enter_context(device.create_stream())
    made: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    made.signal(stream, 1)
    made.wait(stream, 1)
    stream.synchronize(LIMIT)
    assert given["cuMemHostRegister"][2] == cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    assert given["cuStreamWriteValue64"][3] == int(cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    assert given["cuStreamWaitValue64"][3] == int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


def test_the_host_does_not_go_where_a_device_cannot_follow(device: gi.Device) -> None:
    """What the host signals is below 2**63 once a device has part in the timeline."""
    made: Any = device.create_semaphore(gi.TimelineFd)
    with made, gi.get_backend("host").device().import_semaphore(made.export()) as theirs:
        with pytest.raises(gi.DriverError, match=r"below 2\*\*63"):
            theirs.host_signal(2**63)
        assert made.value == 0
