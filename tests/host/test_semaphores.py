"""Binary and timeline semaphores, in one process and between several, some of which die."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuinterop import system, timeline
from gpuinterop.errors import DriverError, HandleError, PeerError, ResourceClosedError, SemaphoreTimeoutError
from gpuinterop.handles import FdHandle, OpaqueFd, TimelineFd
from gpuinterop_host import semaphores
from gpuinterop_host.backend import Device, HostBackend
from gpuinterop_host.formats import swiftshader
from gpuinterop_host.semaphores import BinarySemaphore, TimelineSemaphore

from . import peers

Kind = type[OpaqueFd] | type[TimelineFd]
LIMIT = 30.0
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
def test_signal_and_wait(backend: HostBackend, create: Any, kind: Kind) -> None:
    semaphore = create(kind)
    assert not backend.host_wait(semaphore, 1, 0)
    assert not backend.host_wait(semaphore, 1, 0.01)
    backend.host_signal(semaphore, 1)
    assert backend.host_wait(semaphore, 1, 0)
    assert backend.host_wait(semaphore, 1, 0) is (kind is TimelineFd)  # a binary one is consumed


@BOTH
def test_export(backend: HostBackend, device: Device, create: Any, export: Any, kind: Kind) -> None:
    semaphore = create(kind)
    handle: Any = export(semaphore)
    assert type(handle) is kind
    assert handle.owned
    assert not os.get_inheritable(handle.fd)
    other = load(backend, device, handle)
    again = backend.export_semaphore(other)
    assert isinstance(again, FdHandle)
    assert os.fstat(again.fd).st_ino == os.fstat(handle.fd).st_ino
    again.close()
    backend.host_signal(other, 1)
    assert backend.host_wait(semaphore, 1, 0)
    backend.destroy_semaphore(other)


@BOTH
def test_handle_outlives_its_semaphore(backend: HostBackend, device: Device, kind: Kind) -> None:
    semaphore = backend.create_semaphore(device, kind)
    handle = backend.export_semaphore(semaphore)
    backend.destroy_semaphore(semaphore)
    assert isinstance(handle, FdHandle)
    other = load(backend, device, handle)
    handle.close()
    backend.host_signal(other, 1)
    assert backend.host_wait(other, 1, 0)
    backend.destroy_semaphore(other)


@BOTH
def test_two_processes(backend: HostBackend, device: Device, create: Any, export: Any, start: Any, kind: Kind) -> None:
    there, back = create(kind), create(kind)
    process = start(peers.answer, export(there), export(back), 100)
    for value in range(1, 101):
        backend.host_signal(there, value)
        assert backend.host_wait(back, value, LIMIT)
    process.join()
    assert process.exitcode == 0


@BOTH
def test_many_threads(backend: HostBackend, device: Device, create: Any, kind: Kind) -> None:
    """A chain of streams, each waiting for the one before."""
    chain = [create(kind) for _ in range(9)]
    streams = [backend.create_stream(device) for _ in range(8)]
    for value in range(1, 51):
        for index, stream in enumerate(streams):
            backend.wait(backend.prepare([chain[index]]), stream, [value], 30_000)
            backend.signal(backend.prepare([chain[index + 1]]), stream, [value])
        backend.host_signal(chain[0], value)
        assert backend.host_wait(chain[-1], value, LIMIT)
    for stream in streams:
        backend.synchronize(stream)
        backend.destroy_stream(stream)


@BOTH
def test_batch(backend: HostBackend, stream: Any, create: Any, kind: Kind) -> None:
    batch = backend.prepare([create(kind), create(kind)])
    backend.signal(batch, stream, [3, 5])
    backend.wait(batch, stream, [3, 5], 30_000)
    backend.synchronize(stream)


@BOTH
def test_timeout(backend: HostBackend, stream: Any, create: Any, kind: Kind) -> None:
    semaphore = create(kind)
    backend.wait(backend.prepare([semaphore]), stream, [7], 20)
    with pytest.raises(SemaphoreTimeoutError) as caught:
        backend.synchronize(stream)
    assert semaphore.label in str(caught.value)
    assert "20 ms" in str(caught.value)
    if kind is TimelineFd:
        assert "7" in str(caught.value)
        assert "stands at 0" in str(caught.value)


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
@pytest.mark.parametrize("abandoned", [False, True], ids=["destroyed", "abandoned and destroyed"])
def test_destroyed_under_a_host_wait(backend: HostBackend, device: Device, kind: Kind, abandoned: bool) -> None:
    """At whatever moment: the waiter ends with an error, and the page is there as long as it looks at it."""
    caught: list[BaseException] = []

    def wait(semaphore: Any) -> None:
        try:
            backend.host_wait(semaphore, 1, None)
        except BaseException as error:
            caught.append(error)

    pauses = random.Random(5)
    for _ in range(50):
        semaphore = backend.create_semaphore(device, kind)
        threads = [threading.Thread(target=wait, args=(semaphore,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(pauses.choice([0, 1e-4, 3e-3]))
        if abandoned:
            backend.abandon_semaphore(semaphore)
        backend.destroy_semaphore(semaphore)
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert semaphore.ends == []
    assert [type(error) for error in caught] == [ResourceClosedError] * 150


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


@BOTH
def test_closed_by_its_own_user(kind: Kind) -> None:
    """As a finalizer may do, in the middle of anything: no deadlock, and the page stays until the user has left."""
    semaphore: Any = (BinarySemaphore if kind is OpaqueFd else TimelineSemaphore).create()

    def work() -> None:
        semaphore.close()
        assert ctypes.string_at(semaphore._address, 1)
        with pytest.raises(ResourceClosedError):
            semaphore.signal(1)

    semaphore._use(work)


@BOTH
def test_a_killed_waiter_harms_nobody(
    backend: HostBackend, device: Device, create: Any, export: Any, start: Any, kind: Kind
) -> None:
    semaphore, ready = create(kind), create(TimelineFd)
    for value in range(1, 4):
        process = start(peers.die_in_wait, export(semaphore), export(ready))
        assert backend.host_wait(ready, 1, LIMIT)
        process.kill()
        process.join()
        ready = create(TimelineFd)
        backend.host_signal(semaphore, value)
        assert backend.host_wait(semaphore, value, LIMIT)


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
        with pytest.raises(DriverError, match="stands at 5") as caught:
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
    monkeypatch.setattr(timeline, "LOCK_LIMIT", 0.02)
    semaphore = create(TimelineFd)
    with open(f"/proc/self/fd/{export(semaphore).fd}", "rb+", buffering=0) as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(PeerError, match="another process held the signallers' lock"):
            backend.host_signal(semaphore, 1)
        assert semaphore.value == 0
    backend.host_signal(semaphore, 1)


@pytest.mark.parametrize("how", ["threads", "passed", "forked", "forked before"])
def test_a_signaller_does_not_move_the_value_back(create: Any, export: Any, how: str) -> None:
    """One stands between its look at the value and its store; another, in whatever way it came by the page, waits."""
    done = peers.run(BESIDE.replace("{how}", repr(how)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "9\n", "")


def forge(change: Callable[[bytearray], None], *, size: int = system.PAGE, seals: int = 7) -> int:
    """A timeline's page, changed."""
    fd = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    original = TimelineSemaphore.create()
    page = bytearray(os.pread(original.fd, system.PAGE, 0))
    original.close()
    change(page)
    os.write(fd, page)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, system.F_ADD_SEALS, seals)
    return fd


def nothing(page: bytearray) -> None:
    pass


def put(offset: int, data: bytes) -> Callable[[bytearray], None]:
    def change(page: bytearray) -> None:
        page[offset : offset + len(data)] = data

    return change


def test_what_is_forged_right_is_taken(backend: HostBackend, device: Device) -> None:
    """The specification alone is enough to make one."""
    semaphore = backend.import_semaphore(device, TimelineFd(forge(nothing)))
    backend.host_signal(semaphore, 1)
    backend.destroy_semaphore(semaphore)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forge(put(0, b"GIPTLSM2")), "begins with"),
        (lambda: forge(put(0, bytes(8))), "begins with"),
        (lambda: forge(put(8, b"\1")), "version is 1.*write into this process.*not 2"),
        (lambda: forge(put(8, b"\3")), "version is 3, not 2"),
        (lambda: forge(nothing, size=2 * system.PAGE), "one page"),
        (lambda: forge(nothing, size=100), "one page"),
        (lambda: forge(nothing, seals=system.SEAL_SHRINK), "not sealed"),
        (lambda: forge(nothing, seals=system.SEAL_GROW), "not sealed"),
    ],
)
def test_no_timeline(backend: HostBackend, device: Device, make: Callable[[], int], message: str) -> None:
    fd = make()
    with pytest.raises(HandleError, match=message):
        backend.import_semaphore(device, TimelineFd(fd))
    os.close(fd)  # still open


def test_one_kind_given_as_the_other(backend: HostBackend, device: Device, create: Any, export: Any) -> None:
    binary, counter = export(create(OpaqueFd)), export(create(TimelineFd))
    with pytest.raises(HandleError, match="expected our own timeline semaphore"):
        backend.import_semaphore(device, TimelineFd(binary.fd))
    with pytest.raises(HandleError, match="expected a binary semaphore"):
        backend.import_semaphore(device, OpaqueFd(counter.fd))


def test_an_allocation_is_no_semaphore(backend: HostBackend, device: Device) -> None:
    fd = system.create_memfd("memory", system.PAGE)
    with pytest.raises(HandleError, match="expected a binary semaphore"):
        backend.import_semaphore(device, OpaqueFd(fd))
    with pytest.raises(HandleError, match="expected our own timeline semaphore"):
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
    assert other._page.ref_count == 3
    backend.destroy_semaphore(semaphore)
    assert other._page.ref_count == 2
    backend.destroy_semaphore(other)
    third = load(backend, device, handle)
    assert third._page.ref_count == 2
    backend.destroy_semaphore(third)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (16, struct.pack("i", -1), "destroyed"),
        (16, struct.pack("i", 0), "kind 0x0"),
        (16, struct.pack("i", 0x90), "kind 0x90"),
        ("count", struct.pack("i", -5), "ref_count -5"),
        ("signaled", b"\7", "signaled is 7"),
    ],
)
def test_no_binary(backend: HostBackend, device: Device, offset: int | str, data: bytes, message: str) -> None:
    semaphore = BinarySemaphore.create()
    fd = os.dup(semaphore.fd)
    semaphore.close()
    known = {"count": swiftshader.REFERENCES, "signaled": swiftshader.SIGNALED}
    where = known[offset] if isinstance(offset, str) else offset
    os.pwrite(fd, data, where)
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
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 0.1)
    semaphore = backend.create_semaphore(device, OpaqueFd)
    handle = export(semaphore)
    stream = backend.create_stream(device)
    backend.wait(backend.prepare([semaphore]), stream, [0], None)
    process = start(peers.die_in_lock, handle, None)
    pid = process.pid
    process.join()
    assert process.exitcode == -9
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
    assert semaphore._page.ref_count == 4  # ours, the other's, the dead peer's, those under way: nobody could take it
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


def test_signal_into_a_dead_lock(
    backend: HostBackend, stream: Any, create: Any, export: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(semaphores, "LOCK_LIMIT", 0.1)
    semaphore = create(OpaqueFd)
    start(peers.die_in_lock, export(semaphore), None).join()
    backend.signal(backend.prepare([semaphore]), stream, [0])
    with pytest.raises(PeerError):
        backend.synchronize(stream)


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
    if float(system.libc_version()[1]) < 2.41:
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
        with pytest.raises(PeerError, match=r"broadcast.*not returned.*killed in its wait"):
            backend.host_signal(semaphore, 0)
    assert len(stuck) == 1
    assert not semaphore._page.mutex.held
    backend.destroy_semaphore(semaphore)
    assert semaphore.ends
    leave.set()
    assert system.until(lambda: not semaphore.ends, LIMIT)


@pytest.mark.parametrize("kind", [-1, 0, 0x90, 0xA0])
def test_the_kind_is_looked_at_before_each_lock(backend: HostBackend, create: Any, export: Any, kind: int) -> None:
    semaphore = create(OpaqueFd)
    backend.host_signal(semaphore, 0)
    os.pwrite(export(semaphore).fd, struct.pack("i", kind), 16)
    for operation in (backend.host_signal, lambda s, v: backend.host_wait(s, v, LIMIT)):
        with pytest.raises(PeerError, match="destroyed" if kind == -1 else f"kind {kind:#x}"):
            operation(semaphore, 0)
    assert not semaphore._page.mutex.held


def test_a_binary_semaphore_from_elsewhere_wants_trust(
    backend: HostBackend, device: Device, create: Any, export: Any
) -> None:
    handle = export(create(OpaqueFd))
    before = os.pread(handle.fd, system.PAGE, 0)
    with pytest.raises(HandleError, match=r"nothing says who holds it.*trusted=True"):
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
        assert not semaphore._page.signaled
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
timeline.LOCK_LIMIT = 20.0
lock = timeline.Page._lock
reading, writing = os.pipe()
begins, begin = os.pipe()

def second(semaphore):  # says when it is held up, or else when it is through
    def look(page, fd):
        os.write(writing, b"x")
        return lock(page, fd)
    os.read(begins, 1)
    timeline.Page._lock = look
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
        signal.alarm(20)
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
    system.fence = lambda: (inside.set(), go_on.wait(20), fence())
    thread = threading.Thread(target=theirs.signal, args=(5,))
    thread.start()
    inside.wait(20)
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
print(semaphore._page.ref_count)
backend.destroy_semaphore(other)
print(semaphore._page.ref_count)
"""
)

FORKED_WAIT = (
    FORK
    + """
semaphore = backend.create_semaphore(device, {kind})
thread = threading.Thread(target=backend.host_wait, args=(semaphore, 1, None))
thread.start()
while not semaphore.users:
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


def test_interrupted_between_lock_and_result(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C right after the call that took the lock leaves no lock behind."""
    real = system.until

    def interrupted(condition: Callable[[], bool], timeout: float | None) -> bool:
        assert real(condition, timeout)
        raise KeyboardInterrupt

    binary, counting = create(OpaqueFd), create(TimelineFd)
    for semaphore in (binary, counting):
        # A timeline's signal polls only while another one has the lock.
        busy = os.open(f"/proc/self/fd/{semaphore.fd}", os.O_RDWR)
        if semaphore is counting:
            fcntl.flock(busy, fcntl.LOCK_EX)
            threading.Timer(0.05, lambda busy=busy: fcntl.flock(busy, fcntl.LOCK_UN)).start()
        with monkeypatch.context() as patch:
            patch.setattr(system, "until", interrupted)
            with pytest.raises(KeyboardInterrupt):
                semaphore.signal(1)
        if semaphore is counting:
            fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(busy)
        semaphore.signal(1)


@pytest.mark.parametrize(
    "kind", [OpaqueFd, pytest.param(TimelineFd, marks=pytest.mark.leaves("memfd:gpuinterop.timeline"))]
)
def test_interrupted_at_each_step(create: Any, kind: Kind) -> None:
    """A Ctrl-C wherever Python looks for one leaves no lock behind, and the next signal works."""
    semaphore: Any = create(kind)
    files = {swiftshader.__file__, timeline.__file__, system.__file__, semaphores.__file__}

    def signal_interrupted_at(step: int) -> bool:
        left = step

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal left
            code = frame.f_code
            if event in ("call", "c_return") and code.co_filename in files and code.co_name != "pauses":
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

        value = semaphore.value + 1 if kind is TimelineFd else 0
        sys.setprofile(profile)
        try:
            semaphore.signal(value)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    semaphore.signal(1)  # it keeps the descriptor that a timeline's lock is taken by
    other = os.open(f"/proc/self/fd/{semaphore.fd}", os.O_RDWR)
    step = 1
    while signal_interrupted_at(step):
        if kind is OpaqueFd:
            assert not semaphore._page.mutex.held, step
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_UN)
        step += 1
    os.close(other)
    assert step > 8
    semaphore.signal(semaphore.value + 1 if kind is TimelineFd else 0)


def test_ctypes_sees_the_page(create: Any, export: Any) -> None:
    """What is stored through ctypes is what the file holds: one object, not a copy."""
    semaphore = create(TimelineFd)
    semaphore.signal(9)
    assert ctypes.string_at(semaphore._address, system.PAGE) == os.pread(semaphore.fd, system.PAGE, 0)
