"""Binary and timeline semaphores, in one process and between several, some of which die."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuinterop import system, timeline
from gpuinterop.errors import DriverError, HandleError, PeerError, ResourceClosedError
from gpuinterop.handles import FdHandle, OpaqueFd, TimelineFd
from gpuinterop_host import semaphores
from gpuinterop_host.backend import Device, HostBackend
from gpuinterop_host.formats import swiftshader
from gpuinterop_host.semaphores import BinarySemaphore
from tests.core.forged import GROW, SHRINK, forge, put
from tests.limits import LIMIT

from . import peers

Kind = type[OpaqueFd] | type[TimelineFd]
BOTH = pytest.mark.parametrize("kind", [OpaqueFd, TimelineFd])


@pytest.fixture
def create(backend: HostBackend, device: Device) -> Iterator[Callable[[Kind], Any]]:
    made: list[Any] = []

    def begin(kind: Kind) -> Any:
        made.append(backend.create_semaphore(device, kind))
        return made[-1]

    yield begin
    for semaphore in made:
        backend.destroy_semaphore(semaphore)


@pytest.fixture
def export(backend: HostBackend) -> Iterator[Callable[[Any], Any]]:
    made: list[FdHandle] = []

    def begin(semaphore: Any) -> Any:
        handle = backend.export_semaphore(semaphore)
        assert isinstance(handle, FdHandle)
        made.append(handle)
        return handle

    yield begin
    for handle in made:
        handle.close()


def load(backend: HostBackend, device: Device, handle: Any) -> Any:
    """Import a second reference to what `handle` names."""
    return backend.import_semaphore(device, type(handle)(os.dup(handle.fd), trusted=True))


# -- both kinds --------------------------------------------------------------------------------------------------


@BOTH
def test_abandon(backend: HostBackend, device: Device, create: Any, kind: Kind) -> None:
    """Waits of a stream, of the calling thread's stream and of host_wait all end."""
    semaphore = create(kind)
    batch = backend.prepare([semaphore])
    stream = backend.create_stream(device)
    ready = threading.Barrier(3)
    caught: list[BaseException] = []

    def blocked(wait: Callable[[], Any]) -> None:
        ready.wait(LIMIT)
        try:
            wait()
        except BaseException as error:
            caught.append(error)

    calling = backend.adopt_stream(device, 0)
    threads = [
        threading.Thread(target=blocked, args=(lambda: backend.host_wait(semaphore, 1, None),)),
        threading.Thread(target=blocked, args=(lambda: backend.wait(batch, calling, [1], None),)),
    ]
    for thread in threads:
        thread.start()
    backend.wait(batch, stream, [1], None)
    ready.wait(LIMIT)
    backend.abandon_semaphore(semaphore)
    for thread in threads:
        thread.join(LIMIT)
    with pytest.raises(ResourceClosedError, match=semaphore.label):
        backend.synchronize(stream)
    backend.destroy_stream(stream)
    assert [type(error) for error in caught] == [ResourceClosedError] * 2
    with pytest.raises(ResourceClosedError, match="abandoned"):
        backend.host_signal(semaphore, 1)


@BOTH
def test_destroyed_under_a_wait(backend: HostBackend, device: Device, stream: Any, kind: Kind) -> None:
    """The page stays mapped until the waiter has left it; then it is gone."""
    semaphore = backend.create_semaphore(device, kind)
    backend.wait(backend.prepare([semaphore]), stream, [1], None)
    backend.destroy_semaphore(semaphore)
    backend.destroy_semaphore(semaphore)
    with pytest.raises(ResourceClosedError, match=semaphore.label):
        backend.synchronize(stream)
    with pytest.raises(ResourceClosedError):
        backend.host_wait(semaphore, 1, 0)


@BOTH
def test_a_closed_semaphore_is_not_exported(backend: HostBackend, device: Device, kind: Kind) -> None:
    """Its number may be somebody else's by now."""
    semaphore: Any = backend.create_semaphore(device, kind)
    number = semaphore.fd
    backend.destroy_semaphore(semaphore)
    fd = os.memfd_create("somebody else's")
    if fd != number:  # most often it is: the lowest that is free is given out
        os.dup2(fd, number)
    with pytest.raises(ResourceClosedError, match=semaphore.label):
        backend.export_semaphore(semaphore)
    for mine in {fd, number}:
        os.close(mine)


# -- timelines ---------------------------------------------------------------------------------------------------


def test_timeline_bytes(backend: HostBackend, create: Any, export: Any) -> None:
    """Byte by byte as documented; another exporter writes the same."""
    semaphore = create(TimelineFd)
    handle = export(semaphore)
    assert os.fstat(handle.fd).st_size == system.PAGE
    assert fcntl.fcntl(handle.fd, system.F_GET_SEALS) == 7
    backend.host_signal(semaphore, 5)
    backend.host_signal(semaphore, 0x0102030405060708)
    page = os.pread(handle.fd, system.PAGE, 0)
    assert struct.unpack_from("8sIIQI", page) == (b"GIPTLSM1", 2, 2, 0x0102030405060708, 0)
    assert page[28:] == bytes(system.PAGE - 28)


def test_a_timeline_only_grows(backend: HostBackend, stream: Any, create: Any) -> None:
    semaphore = create(TimelineFd)
    top = 2**64 - 1
    backend.host_signal(semaphore, 5)
    for value in (5, 4, 0):
        with pytest.raises(DriverError, match=rf"\b5\b.*\b{value}\b") as caught:
            backend.host_signal(semaphore, value)
        assert (caught.value.call, caught.value.symbol) == ("host timeline signal", "VALUE_NOT_GREATER")
    assert semaphore.value == 5
    backend.host_signal(semaphore, top)
    assert backend.host_wait(semaphore, top, 0)
    backend.signal(backend.prepare([semaphore]), stream, [6])
    with pytest.raises(DriverError, match="VALUE_NOT_GREATER"):
        backend.synchronize(stream)


@pytest.mark.parametrize("value", [None, 5])
def test_a_timeline_survives_a_death_in_its_lock(
    backend: HostBackend, create: Any, export: Any, start: Any, value: int | None
) -> None:
    semaphore = create(TimelineFd)
    process = start(peers.die_in_lock, export(semaphore), value)
    process.join()
    assert process.exitcode == -9
    if value:
        assert backend.host_wait(semaphore, value, LIMIT)
    backend.host_signal(semaphore, 6)
    backend.host_signal(semaphore, 7)
    assert backend.host_wait(semaphore, 7, 0)


def test_a_timeline_lock_held_by_the_living(
    backend: HostBackend, create: Any, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error while it lasts, and no longer."""
    monkeypatch.setattr(timeline.patience, "seconds", 0.02)
    semaphore = create(TimelineFd)
    with open(f"/proc/self/fd/{export(semaphore).fd}", "rb+", buffering=0) as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(PeerError, match="held the lock"):
            backend.host_signal(semaphore, 1)
        assert semaphore.value == 0
    backend.host_signal(semaphore, 1)


@pytest.mark.parametrize("how", ["threads", "passed", "forked", "forked before"])
def test_a_signaller_does_not_move_the_value_back(create: Any, export: Any, how: str) -> None:
    """One stands between its look at the value and its store; another, in whatever way it came by the page, waits."""
    done = peers.run(BESIDE.replace("{how}", repr(how)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "9\n", "")


def test_what_is_forged_right_is_taken(backend: HostBackend, device: Device) -> None:
    """The specification alone is enough to make one."""
    semaphore = backend.import_semaphore(device, TimelineFd(forge()))
    backend.host_signal(semaphore, 1)
    backend.destroy_semaphore(semaphore)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forge(put(0, b"GIPTLSM2")), "begins with"),
        (lambda: forge(put(0, bytes(8))), "begins with"),
        (lambda: forge(put(8, b"\1")), "version is 1.*write into this process.*not 2"),
        (lambda: forge(put(8, b"\3")), "version is 3, not 2"),
        (lambda: forge(size=2 * system.PAGE), "one page"),
        (lambda: forge(size=100), "one page"),
        (lambda: forge(seals=SHRINK), "not sealed"),
        (lambda: forge(seals=GROW), "not sealed"),
    ],
)
def test_no_timeline(backend: HostBackend, device: Device, make: Callable[[], int], message: str) -> None:
    fd = make()
    with pytest.raises(HandleError, match=message):
        backend.import_semaphore(device, TimelineFd(fd))
    os.close(fd)  # still open


def test_an_allocation_is_no_semaphore(backend: HostBackend, device: Device) -> None:
    fd = system.create_memfd("memory", system.PAGE)
    with pytest.raises(HandleError, match="expected a binary"):
        backend.import_semaphore(device, OpaqueFd(fd))
    with pytest.raises(HandleError, match="GIPTLSM1"):
        backend.import_semaphore(device, TimelineFd(fd))
    os.close(fd)


# -- binary semaphores -------------------------------------------------------------------------------------------


def test_binary_bytes(backend: HostBackend, create: Any, export: Any) -> None:
    semaphore = create(OpaqueFd)
    handle = export(semaphore)
    at = swiftshader.REFERENCES
    assert fcntl.fcntl(handle.fd, system.F_GET_SEALS) == 7
    assert struct.unpack("i", os.pread(handle.fd, 4, 16))[0] == 0x80
    assert struct.unpack("i?", os.pread(handle.fd, 5, at)) == (2, False)
    backend.host_signal(semaphore, 0)
    assert struct.unpack("i?", os.pread(handle.fd, 5, at)) == (2, True)


def test_references_are_counted(backend: HostBackend, device: Device, export: Any) -> None:
    """One for each object, and one for descriptors under way, which stays: nobody destroys the mutex."""
    semaphore = backend.create_semaphore(device, OpaqueFd)
    handle = export(semaphore)
    other = load(backend, device, handle)
    assert other._page.references.value == 3
    backend.destroy_semaphore(semaphore)
    assert other._page.references.value == 2
    backend.destroy_semaphore(other)
    third = load(backend, device, handle)
    assert third._page.references.value == 2
    backend.destroy_semaphore(third)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (16, struct.pack("i", -1), "destroyed"),
        (16, struct.pack("i", 0), "kind 0x0"),
    ],
)
def test_no_binary(backend: HostBackend, device: Device, offset: int, data: bytes, message: str) -> None:
    semaphore = BinarySemaphore.create()
    fd = os.dup(semaphore.fd)
    semaphore.close()
    os.pwrite(fd, data, offset)
    with pytest.raises(HandleError, match=message):
        backend.import_semaphore(device, OpaqueFd(fd))
    os.close(fd)


def test_a_dead_lock_poisons(
    backend: HostBackend,
    device: Device,
    export: Any,
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer killed in the lock: a pending wait notices, and everything after it raises the same."""
    semaphore = backend.create_semaphore(device, OpaqueFd)
    handle = export(semaphore)
    stream = backend.create_stream(device)
    backend.wait(backend.prepare([semaphore]), stream, [0], None)
    process = start(peers.die_in_lock, handle, None)
    pid = process.pid
    process.join()
    assert process.exitcode == -9
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 0.1)  # only now: until then it may have lived in the lock
    with pytest.raises(PeerError, match=f"thread {pid}.*no longer exists"):
        backend.synchronize(stream)
    for operation in (backend.host_signal, lambda s, v: backend.host_wait(s, v, None)):
        with pytest.raises(PeerError, match=f"{semaphore.label} is unusable: thread {pid}"):
            operation(semaphore, 0)
    with pytest.raises(PeerError, match=f"thread {pid}"):
        backend.import_semaphore(device, OpaqueFd(handle.fd, trusted=True))
    backend.destroy_stream(stream)
    backend.destroy_semaphore(semaphore)


def test_a_dead_lock_holds_nobody_up(
    backend: HostBackend, device: Device, export: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing does not wait for it at all, an import next to not: others wait for the import.

    What waited for the lock as long as its users do would wait for ever here.
    """
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 1e9)
    semaphore: Any = backend.create_semaphore(device, OpaqueFd)
    handle = export(semaphore)
    other = load(backend, device, handle)
    start(peers.die_in_lock, handle, None).join()
    backend.destroy_semaphore(other)
    assert semaphore._page.references.value == 4  # ours, the other's, the dead peer's, those under way
    with pytest.raises(PeerError, match=r"no longer exists"):
        load_or_close(backend, device, handle)
    with pytest.raises(ResourceClosedError, match="is closed"):
        backend.host_signal(other, 0)
    backend.destroy_semaphore(semaphore)


def load_or_close(backend: HostBackend, device: Device, handle: Any) -> Any:
    fd = os.dup(handle.fd)
    try:
        return backend.import_semaphore(device, OpaqueFd(fd, trusted=True))
    except BaseException:
        os.close(fd)
        raise


def test_a_waiter_killed_in_its_sleep_poisons(
    backend: HostBackend,
    create: Any,
    export: Any,
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """libc's broadcast may wait for the dead for ever. It is given a limit, by name, and nothing is tried again."""
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 0.5)
    semaphore = create(OpaqueFd)
    outcomes = []
    for _ in range(4):  # a broadcast waits for those who slept before those who sleep now
        ready = create(TimelineFd)
        process = start(peers.sleep_on_condition, export(semaphore), export(ready))
        assert backend.host_wait(ready, 1, LIMIT)
        semaphore._page.mutex.run(lambda: None, LIMIT)  # the wait has given the mutex back: it sleeps
        process.kill()
        process.join()
        try:
            backend.host_signal(semaphore, 0)
        except PeerError as error:
            outcomes.append(str(error))
            break
    for _ in range(2):
        if outcomes:
            with pytest.raises(PeerError, match=f"^{re.escape(outcomes[0])}$"):
                backend.host_signal(semaphore, 0)
    assert all("killed in its wait" in text for text in outcomes)
    if outcomes:
        request.node.add_marker(pytest.mark.leaves("broadcast", "memfd:gpuinterop.binary"))
    if float(platform.libc_ver()[1]) < 2.41:
        assert outcomes


def test_a_broadcast_that_blocks(backend: HostBackend, create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever glibc does: bounded, named, poisoned; and the page stays mapped under the call."""
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 0.05)
    semaphore = create(OpaqueFd)
    leave, stuck = threading.Event(), []

    def block(page: swiftshader.Page) -> None:
        stuck.append(page)
        leave.wait(LIMIT)

    monkeypatch.setattr(swiftshader.Page, "broadcast", block)
    ctypes.c_uint8.from_address(semaphore._address + swiftshader.MUTEX_SIZE).value = 2  # somebody has slept on it
    for _ in range(2):
        with pytest.raises(PeerError, match=r"broadcast.* 0\.05 s"):
            backend.host_signal(semaphore, 0)
    assert len(stuck) == 1
    assert not semaphore._page.mutex.held
    backend.destroy_semaphore(semaphore)
    assert semaphore.releases
    leave.set()
    assert system.until(lambda: not semaphore.releases, LIMIT)


def test_a_binary_semaphore_from_elsewhere_wants_trust(
    backend: HostBackend, device: Device, create: Any, export: Any
) -> None:
    handle = export(create(OpaqueFd))
    before = os.pread(handle.fd, system.PAGE, 0)
    with pytest.raises(HandleError, match="trusted=True"):
        backend.import_semaphore(device, OpaqueFd(handle.fd))
    assert os.pread(handle.fd, system.PAGE, 0) == before
    backend.destroy_semaphore(load(backend, device, handle))


def test_one_signal_for_one_waiter(backend: HostBackend, device: Device, create: Any) -> None:
    semaphore = create(OpaqueFd)
    taken = create(TimelineFd)
    streams = [backend.create_stream(device) for _ in range(4)]
    lock = threading.Lock()
    count = 0

    def took() -> None:
        nonlocal count
        with lock:
            count += 1
            backend.host_signal(taken, count)

    for stream in streams:
        backend.wait(backend.prepare([semaphore]), stream, [0], None)
        stream.submit(took, ())
    for expected in range(1, 5):
        backend.host_signal(semaphore, 0)
        assert backend.host_wait(taken, expected, LIMIT)
        assert not semaphore._page.signaled.value
        assert count == expected
    for stream in streams:
        backend.synchronize(stream)
        backend.destroy_stream(stream)


BESIDE = """
import os, socket, threading
from gpuinterop import ipc, system, timeline
from gpuinterop.handles import TimelineFd
from gpuinterop_host.semaphores import TimelineSemaphore

semaphore = TimelineSemaphore.create()
real, inside, go_on = system.fence, threading.Event(), threading.Event()
first = threading.get_ident()

def fence():  # between the look and the store
    if threading.get_ident() != first:
        inside.set()
        go_on.wait()
    real()

def other():
    if {how} == "passed":
        here, there = socket.socketpair()
        with here, there, TimelineFd(semaphore.fd) as handle:
            ipc.send_handle(here, handle)
            return TimelineSemaphore.load(ipc.receive_handle(there, TimelineFd).detach(), trusted=False)
    return semaphore

system.fence = fence
type(timeline.patience).seconds = 300.0  # of every thread
lock = timeline.Lock._wait
reading, writing = os.pipe()
begins, begin = os.pipe()

def second(semaphore):  # says when it is held up, or else when it is through
    def look(page, fd):
        os.write(writing, b"x")
        return lock(page, fd)
    os.read(begins, 1)
    timeline.Lock._wait = look
    semaphore.signal(9)
    os.write(writing, b"x")

def fork():
    pid = os.fork()
    if pid == 0:
        second(semaphore)
        os._exit(0)
    return pid

thread = threading.Thread(target=semaphore.signal, args=(5,))
if {how} == "forked before":
    semaphore.signal(1)  # the thread's signal will use what this one opened
    pid = fork()
thread.start()
inside.wait()
if {how} == "forked":
    pid = fork()
if "forked" in {how}:
    waits = lambda: os.waitpid(pid, 0)
else:
    beside = threading.Thread(target=second, args=(other(),))
    waits = beside.join
    beside.start()
    first = beside.ident  # it runs through
os.write(begin, b"x")
os.read(reading, 1)
go_on.set()
waits()
thread.join()
print(semaphore.value)
"""

FORK = """
import os, signal, threading, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of every fork with threads, which is what this is about
from gpuinterop.handles import OpaqueFd, TimelineFd
from gpuinterop_host.backend import HostBackend
backend = HostBackend()
device = backend.open_device(0)

def mapped():
    return sum("/memfd:" in line for line in open("/proc/self/maps"))

def in_child(*semaphores):
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        for semaphore in semaphores:
            backend.destroy_semaphore(semaphore)
        os._exit(mapped())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

FORKED_BESIDE = """
import os, threading, warnings
warnings.simplefilter("ignore")  # as below
from gpuinterop import system
from gpuinterop_host.semaphores import TimelineSemaphore
semaphore = TimelineSemaphore.create()
shared = os.dup(semaphore.fd)
reading, writing = os.pipe()
signaller = os.fork()
if signaller == 0:
    theirs = TimelineSemaphore.load(shared, trusted=True)
    inside, go_on = threading.Event(), threading.Event()
    fence = system.fence
    system.fence = lambda: (inside.set(), go_on.wait(300), fence())
    thread = threading.Thread(target=theirs.signal, args=(5,))
    thread.start()
    inside.wait(300)
    if (worker := os.fork()) == 0:  # it lives on
        os.read(reading, 1)
        os._exit(0)
    go_on.set()
    thread.join()
    system.fence = lambda: os._exit(9)
    theirs.signal(6)  # the signaller dies with the lock
assert os.waitstatus_to_exitcode(os.waitpid(signaller, 0)[1]) == 9
semaphore.signal(7)
print(semaphore.value)
os.write(writing, b"x")
"""


def test_a_fork_beside_a_signal_does_not_keep_the_lock() -> None:
    """The child has the description that the signal used; the signaller dies in a later one."""
    done = peers.run(FORKED_BESIDE)
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


FORKED_REFERENCES = (
    FORK
    + """
semaphore = backend.create_semaphore(device, OpaqueFd)
other = backend.import_semaphore(device, OpaqueFd(backend.export_semaphore(semaphore).detach(), trusted=True))
for _ in range(3):
    assert in_child(semaphore, other) == 0
print(semaphore._page.references.value)
backend.destroy_semaphore(other)
print(semaphore._page.references.value)
"""
)

FORKED_WAIT = (
    FORK
    + """
semaphore = backend.create_semaphore(device, {kind})
thread = threading.Thread(target=backend.host_wait, args=(semaphore, 1, None))
thread.start()
while not semaphore._users:
    pass
print(in_child(semaphore))
backend.host_signal(semaphore, 1)
thread.join()
"""
)


def test_a_forked_child_gives_no_reference_back() -> None:
    done = peers.run(FORKED_REFERENCES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n2\n", "")


@pytest.mark.parametrize("kind", ["OpaqueFd", "TimelineFd"])
def test_a_forked_child_is_not_held_up_by_threads_that_it_lacks(kind: str) -> None:
    """It closes a semaphore that the parent's threads are in the middle of, and has its page unmapped at once."""
    done = peers.run(FORKED_WAIT.replace("{kind}", kind))
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
