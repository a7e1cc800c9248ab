"""A peer writes what it likes, when it likes, over every byte of a semaphore's page.

What is done here may fail by name, and wait in vain up to its limit. It does not crash, and writes nothing outside the
page. ``GPUINTEROP_TEST_SCRIBBLE=60`` does it for a minute.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from typing import Any

import pytest

from gpuinterop import system
from gpuinterop.errors import PeerError
from gpuinterop.handles import OpaqueFd, TimelineFd
from gpuinterop_host.backend import Device, HostBackend
from gpuinterop_host.formats import swiftshader
from gpuinterop_host.semaphores import BinarySemaphore

from . import peers

LIMIT = 30.0
SECONDS = float(os.environ.get("GPUINTEROP_TEST_SCRIBBLE", "0.5"))

SCRIBBLER = """
import mmap, os, random, sys
page = mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE)
fresh = bytes.fromhex(sys.argv[2])  # a page that was not touched
parent, count, likely = os.getppid(), 0, (0, 1, 2, 0x80, 0x90, 0xA0, 0xFF)
print("go", flush=True)
while os.getppid() == parent:
    if count % 64 == 0:
        page[:128] = os.urandom(128)
    if count % 4096 == 0:
        page[:] = os.urandom(mmap.PAGESIZE)
    page[random.randrange(128)] = random.choice(likely)
    page[16:20] = bytes((0x80, 0, 0, 0))  # most of the time a mutex that is taken
    if count % 2:
        page[:4] = bytes(4)
    if count // 4096 % 2:  # half of the time a condition that was not slept on
        page[40:88] = fresh[40:88]
    count += 1
"""

VICTIM = """
import ctypes, mmap, os, random, subprocess, sys, time
from collections import Counter
from gpuinterop import system, timeline
from gpuinterop.errors import GpuInteropError
from gpuinterop_host import semaphores
from gpuinterop_host.semaphores import BinarySemaphore, TimelineSemaphore

kind, seconds = {kind}, {seconds}
semaphores.LOCK_LIMIT = timeline.LOCK_LIMIT = 0.005
first = kind.create()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, *[ctypes.c_size_t] * 5)
PAGE, ROOM = mmap.PAGESIZE, 64

def place():
    # Pages of ours lie before and behind, and hold what nobody but the test has written.
    room = libc.mmap(None, (2 * ROOM + 1) * PAGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 2**64 - 1, 0)
    ctypes.memset(room, 0xA5, (2 * ROOM + 1) * PAGE)
    assert libc.mmap(room + ROOM * PAGE, PAGE, 3, mmap.MAP_SHARED | 0x10, first.fd, 0) == room + ROOM * PAGE
    return room

def intact(room):
    around = ctypes.string_at(room, ROOM * PAGE) + ctypes.string_at(room + (ROOM + 1) * PAGE, ROOM * PAGE)
    return around == bytes([0xA5]) * len(around)

room = place()
heap = bytearray(b"\\x5a") * (8 << 20)
scribbler = [sys.executable, "-c", os.environ["SCRIBBLER"], str(first.fd), os.pread(first.fd, 128, 0).hex()]
writers = [subprocess.Popen(scribbler, pass_fds=[first.fd], stdout=subprocess.PIPE) for _ in range(2)]
for writer in writers:
    writer.stdout.readline()
outcomes = Counter()
end = time.monotonic() + seconds
values = random.Random(3)
release = kind.release
kind.release = lambda self: os.close(self.fd)  # the page stays where it is, for the next one
while time.monotonic() < end and len(os.listdir("/proc/self/task")) < 64:
    for operation in (
        lambda one: one.signal((getattr(one, "value", 0) + 1) % 2**64),
        lambda one: one.wait(values.getrandbits(64), time.monotonic() + 1e-3, lambda: None),
        lambda one: one.describe(1),
    ):
        semaphore = kind(os.dup(first.fd), room + ROOM * PAGE)  # as if imported before the first byte was changed
        try:
            outcomes[repr(operation(semaphore))[:5]] += 1  # None: it was signalled
        except GpuInteropError as error:
            outcomes[f"{type(error).__name__}: {error}".partition(" unusable: ")[2][:13] or type(error).__name__] += 1
        semaphore.close()
assert intact(room)
assert heap.count(0x5A) == len(heap)
for writer in writers:
    writer.kill()
    writer.communicate()
kind.release = release
print(*outcomes, sep="\\n")
sys.stdout.flush()
os._exit(0)  # threads may stand in a broadcast for ever
"""


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("BinarySemaphore", {"None", "True", "the broadcast", "it does not b"}),
        ("TimelineSemaphore", {"None", "True", "DriverError"}),
    ],
)
def test_a_peer_that_scribbles(kind: str, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIBBLER", SCRIBBLER)
    end = time.monotonic() + SECONDS
    outcomes: set[str] = set()
    while (left := end - time.monotonic()) > 0 or (not seen <= outcomes and left > -LIMIT):
        done = peers.run(VICTIM.replace("{kind}", kind).replace("{seconds}", str(min(max(left, 0.5), 10.0))))
        assert (done.returncode, done.stderr) == (0, ""), done
        outcomes.update(done.stdout.splitlines())
    assert seen <= outcomes
    print(outcomes)


def test_list_pointers_lead_nowhere(backend: HostBackend, device: Device) -> None:
    """Those of version 1 of the timeline, and of a mutex that becomes robust behind the last look at its kind."""
    private = ctypes.create_string_buffer(b"\x11" * 4096, 4096)
    pointers = struct.pack("Q", ctypes.addressof(private) + 2048) * 3
    timeline: Any = backend.create_semaphore(device, TimelineFd)
    os.pwrite(timeline.fd, struct.pack("i", 0x90) + bytes(4) + pointers, 64 + 16)
    timeline.signal(1)
    backend.destroy_semaphore(timeline)
    binary: Any = backend.create_semaphore(device, OpaqueFd)
    os.pwrite(binary.fd, struct.pack("i", 0x90) + bytes(4) + pointers, 16)
    with pytest.raises(PeerError, match="kind 0x90"):
        binary.signal(0)
    binary._page.mutex.run(lambda: None, 1.0)
    backend.destroy_semaphore(binary)
    assert private.raw == b"\x11" * 4096


def test_what_can_be_truncated_wants_trust(backend: HostBackend, device: Device) -> None:
    """Never mapped, so that there is nothing to die of: a name is all that it has of SwiftShader."""
    for name, take in (
        (swiftshader.MEMORY_NAME, lambda h: backend.import_memory(device, h, size=4096, dedicated=False)),
        (swiftshader.SEMAPHORE_NAME, lambda h: backend.import_semaphore(device, h)),
    ):
        fd = os.memfd_create(f"{name}truncatable", os.MFD_CLOEXEC)
        page = BinarySemaphore.create()
        os.write(fd, os.pread(page.fd, system.PAGE, 0))
        page.close()
        with pytest.raises(Exception, match=r"nothing says who holds it.*SIGBUS.*trusted=True") as caught:
            take(OpaqueFd(fd))
        assert caught.type.__name__ == "HandleError"
        assert not any("truncatable" in one.path for one in system.mappings())
        taken: Any = take(OpaqueFd(os.dup(fd), trusted=True))
        (backend.destroy_memory if name == swiftshader.MEMORY_NAME else backend.destroy_semaphore)(taken)
        os.close(fd)
