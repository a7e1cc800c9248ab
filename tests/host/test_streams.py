"""Order, failure, cancellation and exit of the host's streams."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import pytest

from gpuinterop import system
from gpuinterop.errors import DriverError, InvalidArgumentError, ResourceClosedError
from gpuinterop.handles import TimelineFd
from gpuinterop_host import streams
from gpuinterop_host.backend import Device, HostBackend
from tests.beside import beside
from tests.limits import LIMIT

from .peers import run


def fail() -> None:
    raise DriverError("test", 1, "BROKEN")


def test_failure_sticks(backend: HostBackend, device: Device) -> None:
    stream = backend.create_stream(device)
    semaphore: Any = backend.create_semaphore(device, TimelineFd)
    before = backend.record(stream)
    stream.submit(fail, ())
    backend.signal(backend.prepare([semaphore]), stream, [1])
    after = backend.record(stream)
    for _ in range(2):
        with pytest.raises(DriverError, match="BROKEN"):
            backend.synchronize(stream)
    assert backend.wait_done(before, LIMIT)
    for _ in range(2):
        with pytest.raises(DriverError, match="BROKEN") as first:
            backend.is_done(after)
        with pytest.raises(DriverError, match="BROKEN") as second:
            backend.wait_done(after, LIMIT)
        assert first.value is not second.value  # nobody shares a traceback
        assert first.value.symbol == "BROKEN"
    assert semaphore.value == 0  # the signal was not sent
    backend.destroy_stream(stream)
    backend.destroy_semaphore(semaphore)


def test_foreign_exceptions_are_kept_too(backend: HostBackend, stream: Any) -> None:
    class Odd(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__("odd")

    def odd() -> None:
        raise Odd(1, 2)

    stream.submit(odd, ())
    with pytest.raises(Odd):
        backend.synchronize(stream)


def test_wait_event_passes_failure_on(backend: HostBackend, device: Device, stream: Any) -> None:
    other = backend.create_stream(device)
    other.submit(fail, ())
    backend.wait_event(stream, backend.record(other))
    with pytest.raises(DriverError, match="BROKEN"):
        backend.synchronize(stream)
    backend.destroy_stream(other)


@pytest.mark.parametrize("behind", ["stream", "calling thread"])
def test_wait_event_ends_with_the_other_stream(backend: HostBackend, device: Device, stream: Any, behind: str) -> None:
    """The stream with the event is destroyed while it waits for what never comes."""
    other = backend.create_stream(device)
    semaphore: Any = backend.create_semaphore(device, TimelineFd)
    backend.wait(backend.prepare([semaphore]), other, [1], None)
    event = backend.record(other)
    if behind == "stream":
        backend.wait_event(stream, event)
        backend.destroy_stream(other)
        with pytest.raises(ResourceClosedError, match="destroyed"):
            backend.synchronize(stream)
    else:
        backend.destroy_stream(other)
        with pytest.raises(ResourceClosedError, match="destroyed"):
            backend.wait_event(backend.adopt_stream(device, 0), event)
    backend.destroy_semaphore(semaphore)


def test_destroying_a_stream_that_waits_for_an_event(backend: HostBackend, device: Device) -> None:
    gate = threading.Event()
    other, waiting = backend.create_stream(device), backend.create_stream(device)
    other.submit(gate.wait, (LIMIT,))
    backend.wait_event(waiting, backend.record(other))
    event = backend.record(waiting)
    backend.destroy_stream(waiting)
    with pytest.raises(ResourceClosedError, match="destroyed"):
        backend.wait_done(event, LIMIT)
    gate.set()
    backend.destroy_stream(other)


def test_after_destruction(backend: HostBackend, device: Device) -> None:
    stream = backend.create_stream(device)
    backend.destroy_stream(stream)
    assert stream.thread.join(LIMIT)
    other: Any = backend.create_stream(device)
    semaphore: Any = backend.create_semaphore(device, TimelineFd)
    batch = backend.prepare([semaphore])
    event = backend.record(other)
    memory = ctypes.create_string_buffer(4)
    address = ctypes.addressof(memory)
    for refused in (
        lambda: backend.synchronize(stream),
        lambda: backend.record(stream),
        lambda: backend.fill(stream, address, 7, 4),
        lambda: backend.copy(stream, address, address + 2, 2),
        lambda: backend.signal(batch, stream, [1]),
        lambda: backend.wait(batch, stream, [1], None),
        lambda: backend.wait_event(stream, event),
    ):
        with pytest.raises(ResourceClosedError, match=f"{stream.pointer} was destroyed"):
            refused()
    assert memory.raw == bytes(4)
    assert semaphore.value == 0
    assert backend.is_idle(stream)
    backend.destroy_stream(other)
    backend.destroy_semaphore(semaphore)


def test_an_idle_stream_keeps_nothing_alive(backend: HostBackend, stream: Any) -> None:
    class Thing:
        pass

    thing = Thing()
    alive = weakref.ref(thing)
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    stream.submit(lambda thing: None, (thing,))
    del thing
    assert system.until(gone.is_set, LIMIT)  # without the GIL it goes when this thread runs, which has made it
    assert alive() is None


# -- pointers ----------------------------------------------------------------------------------------------------


def test_pointers(backend: HostBackend, device: Device) -> None:
    first, second = backend.create_stream(device), backend.create_stream(device)
    pointer = backend.stream_pointer(first)
    assert streams.FIRST_POINTER <= pointer != backend.stream_pointer(second)
    assert backend.adopt_stream(device, pointer) is first
    backend.destroy_stream(first)
    for number in (pointer, 1, 2, 15, 1 << 40, -1):
        with pytest.raises(InvalidArgumentError, match="the calling thread") as caught:
            backend.adopt_stream(device, number)
        assert caught.value.argument == "stream"
    backend.destroy_stream(second)


def test_the_calling_thread(backend: HostBackend, device: Device) -> None:
    stream = backend.adopt_stream(device, 0)
    assert backend.stream_pointer(stream) == 0
    semaphore: Any = backend.create_semaphore(device, TimelineFd)
    batch = backend.prepare([semaphore])
    backend.signal(batch, stream, [1])
    assert semaphore.value == 1
    backend.wait(batch, stream, [1], None)
    memory = ctypes.create_string_buffer(4)
    backend.fill(stream, ctypes.addressof(memory), 7, 4)
    assert memory.raw == bytes([7]) * 4
    assert backend.is_done(backend.record(stream))
    with pytest.raises(DriverError, match="VALUE_NOT_GREATER"):
        backend.signal(batch, stream, [1])
    backend.synchronize(stream)  # failures were raised, and do not stick
    assert backend.is_done(backend.record(stream))
    backend.destroy_semaphore(semaphore)


def test_the_calling_thread_is_each_callers_own(backend: HostBackend, device: Device) -> None:
    stream = backend.adopt_stream(device, 0)
    semaphore: Any = backend.create_semaphore(device, TimelineFd)
    batch = backend.prepare([semaphore])
    with beside(lambda: backend.wait(batch, stream, [1], None)):
        backend.signal(batch, stream, [1])  # this thread is not held up by the other's wait
    backend.destroy_semaphore(semaphore)


INTERRUPT = """
import os, signal, sys, threading
from gpuinterop.handles import OpaqueFd, TimelineFd
from gpuinterop_host.backend import HostBackend
backend = HostBackend()
device = backend.open_device(0)
semaphore = backend.create_semaphore(device, {kind})
batch = backend.prepare([semaphore])
stream = backend.adopt_stream(device, 0)
other = backend.create_stream(device)
go = threading.Event()
other.submit(lambda: (go.wait(), os.kill(os.getpid(), signal.SIGINT)), ())
try:
    go.set()
    {wait}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("kind", ["OpaqueFd", "TimelineFd"])
@pytest.mark.parametrize("wait", ["backend.wait(batch, stream, [1], None)", "backend.host_wait(semaphore, 1, None)"])
def test_ctrl_c(kind: str, wait: str) -> None:
    done = run(INTERRUPT.format(kind=kind, wait=wait))
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


EXIT = """
from gpuinterop.handles import OpaqueFd, TimelineFd
from gpuinterop_host.backend import HostBackend
backend = HostBackend()
device = backend.open_device(0)
for kind in (OpaqueFd, TimelineFd):
    stream = backend.create_stream(device)
    backend.wait(backend.prepare([backend.create_semaphore(device, kind)]), stream, [1], None)
    other = backend.create_stream(device)
    backend.wait_event(other, backend.record(stream))
idle = backend.create_stream(device)
print("done")
"""


AFTER_THE_END = """
import atexit

@atexit.register
def late():
    for refused in (lambda: backend.signal(batch, stream, [1]), lambda: backend.record(stream)):
        try:
            refused()
        except ResourceClosedError as error:
            print(error)

from gpuinterop.errors import ResourceClosedError
from gpuinterop.handles import TimelineFd
from gpuinterop_host.backend import HostBackend
backend = HostBackend()
device = backend.open_device(0)
stream = backend.create_stream(device)
batch = backend.prepare([backend.create_semaphore(device, TimelineFd)])
"""


def test_submit_behind_the_end() -> None:
    done = run(AFTER_THE_END)
    assert (done.returncode, done.stdout.count("the interpreter is exiting"), done.stderr) == (0, 2, "")


def test_exit_with_waits_pending() -> None:
    done = run(EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


FORK = """
import os, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of every fork with threads, which is what this is about
import signal
from gpuinterop.errors import ResourceClosedError
from gpuinterop.handles import TimelineFd
from gpuinterop_host.backend import HostBackend
backend = HostBackend()
device = backend.open_device(0)
stream = backend.create_stream(device)
semaphore = backend.create_semaphore(device, TimelineFd)
batch = backend.prepare([semaphore])
backend.wait(batch, stream, [1], None)
event = backend.record(stream)
pid = os.fork()
if pid == 0:
    signal.alarm(300)
    refusals = 0
    for refused in (
        lambda: backend.synchronize(stream),
        lambda: backend.signal(batch, stream, [2]),
        lambda: backend.is_idle(stream),
        lambda: backend.wait_done(event, None),
    ):
        try:
            refused()
        except ResourceClosedError as error:
            refusals += "fork" in str(error)
    fresh = backend.create_stream(device)
    backend.synchronize(fresh)
    os._exit(3 + refusals)
_, status = os.waitpid(pid, 0)
backend.host_signal(semaphore, 1)
backend.synchronize(stream)
assert backend.is_done(event)
print(os.waitstatus_to_exitcode(status))
"""


def test_fork() -> None:
    done = run(FORK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
