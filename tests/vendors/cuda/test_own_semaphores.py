"""Semaphores of our own: CUDA's streams with each other, with the host and with the test's own loads and stores.

What the suites ask of every backend is not repeated here. The oracle is the page: its counter is read and stored
through a mapping of the test's.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.suites.base import held, new_stream
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from ..parties import watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

MAX = 2**63 - 1


class Counter:
    """The counter of a timeline's page, as plain memory."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("Q")

    @property
    def value(self) -> int:
        return self._words[2]

    @value.setter
    def value(self, value: int) -> None:
        self._words[2] = value

    def comes_to(self, value: int) -> bool:
        """Whether it gets there; asks nobody, and wakes nobody."""
        deadline = time.monotonic() + LIMIT
        while self.value != value:
            if time.monotonic() > deadline:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        self._words.release()
        self._memory.close()


@pytest.fixture
def host() -> gi.Device:
    return gi.get_backend("host").device()


def make(device: gi.Device, scope: ExitStack) -> tuple[Any, Counter]:
    """A new one, with its counter."""
    made: Any = device.create_semaphore(gi.TimelineFd)
    scope.callback(end, made)
    with made.export() as handle:
        counter = Counter(handle.fd)
    scope.callback(counter.close)
    return made, counter


def end(semaphore: Any) -> None:
    semaphore.close(timeout=LIMIT)


def imported(device: gi.Device, handle: Any, scope: ExitStack) -> Any:
    semaphore: Any = device.import_semaphore(handle)
    scope.callback(end, semaphore)
    return semaphore


# -- the page ----------------------------------------------------------------------------------------------------------


def test_plain_memory_is_all_there_is(device: gi.Device, scope: ExitStack) -> None:
    """A store to the page ends a stream's wait, and a stream's signal is a store to the page."""
    made, counter = make(device, scope)
    stream = new_stream(device, scope)
    for value in (1, 7, (1 << 32) + 1, MAX - 1):
        made.wait(stream, value)
        made.signal(stream, value + 1)
        assert held(stream)
        assert counter.value < value
        counter.value = value - 1
        assert held(stream), f"a wait for {value} passed at {value - 1}"
        assert counter.value == value - 1, "the signal came before the wait was over"
        counter.value = value
        assert counter.comes_to(value + 1)
        stream.synchronize(LIMIT)


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
    made, _ = make(device, scope)
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


def test_the_host_does_not_go_where_a_device_cannot_follow(
    device: gi.Device, host: gi.Device, scope: ExitStack
) -> None:
    """What the host signals is below 2**63 once a device has part in the timeline."""
    made, counter = make(device, scope)
    theirs = imported(host, made.export(), scope)
    with pytest.raises(gi.DriverError, match=r"below 2\*\*63"):
        theirs.host_signal(MAX + 1)
    assert counter.value == 0


# -- with a party that shares no code with ours -----------------------------------------------------------------------
