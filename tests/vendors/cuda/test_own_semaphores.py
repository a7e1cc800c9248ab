"""Semaphores of our own: what CUDA's driver is asked for, and where there are none.

What the suites ask of every backend is not repeated here.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.suites.base import new_stream
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

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
    stream = new_stream(device, scope)
    made: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    made.signal(stream, 1)
    made.wait(stream, 1)
    stream.synchronize(LIMIT)
    assert given["cuMemHostRegister"][2] == cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    assert given["cuStreamWriteValue64"][3] == int(cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    assert given["cuStreamWaitValue64"][3] == int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


def test_without_the_attribute_there_are_none(simulator: Simulator) -> None:
    """A device that cannot wait for 64-bit words says so, makes none, and leaves a handle alone."""
    program = (
        "import os, gpuinterop as gi\n"
        "from tests.core.forged import forge\n"
        "from tests.simulated.driver import Simulator\n"
        "Simulator.attach().set_attribute(0, 122, 0)\n"
        "device = gi.get_backend('cuda').device()\n"
        "def refused(call):\n"
        "    try:\n"
        "        call()\n"
        "    except gi.UnsupportedError as error:\n"
        "        return 'attribute 122 is 0' in str(error)\n"
        "with gi.TimelineFd.adopt(forge()) as handle:\n"
        "    print(refused(lambda: device.create_semaphore(gi.TimelineFd)))\n"
        "    print(refused(lambda: device.import_semaphore(handle)), os.fstat(handle.fd).st_size)\n"
    )
    assert simulator.run(program) == f"True\nTrue {mmap.PAGESIZE}\n"


def test_the_host_does_not_go_where_a_device_cannot_follow(device: gi.Device) -> None:
    """What the host signals is below 2**63 once a device has part in the timeline."""
    host = gi.get_backend("host").device()
    with device.create_semaphore(gi.TimelineFd) as made, host.import_semaphore(made.export()) as theirs:
        with pytest.raises(gi.DriverError, match=r"below 2\*\*63"):
            theirs.host_signal(2**63)
        assert made.value == 0
