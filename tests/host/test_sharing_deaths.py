"""A side is killed at each step and at many calls: what the other side gets, and that nothing is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, pair

POINTS: Final = int(os.environ.get("GPUINTEROP_TEST_DEATHS", "50"))
ATTACH: Final = "attached = gi.attach(descriptor, timeout=300)"
ENROL: Final = f"{ATTACH}; attached._side()"
ACQUIRE: Final = f"{ATTACH}; attached.acquire(timeout=300)"
DIED: Final = "PeerError: the process that shared the arrays has ended"
CLOSED: Final = "PeerError: the (sharing process is not there|process that shared)"
ACQUIRES: Final = "attached.acquire(timeout=300)"
IN: Final = "share.acquire(timeout=300)"
DIES: Final = "server.Connection.send = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"
TABLE: Final = {
    "shared": ("", "", ATTACH, "PeerError: the process that listened at .* has ended"),
    "serving an answer": ("", DIES, ATTACH, CLOSED),
    "attached to": (ATTACH, "", ACQUIRES, CLOSED),
    "enrolling": (ATTACH, DIES, ACQUIRES, CLOSED),
    "enrolled at": (ENROL, "", ACQUIRES, DIED),
    "acquired": (ENROL, IN, ACQUIRES, DIED),
    "acquired, a stream waits": (ENROL, IN, "stream.synchronize(300)", DIED),
    "released": (ENROL, f"{IN}; share.release()", ACQUIRES, DIED),
    "read from": (ACQUIRE, "", "attached.release()", DIED),
    "closed, and attached": (ENROL, "share.close()", ACQUIRES, DIED),
}
"""What the reader has done, what the exporter does then and dies after, and what the reader gets at which call."""


@pytest.mark.parametrize("step", TABLE)
def test_an_exporter_dies(sockets: Path, step: str) -> None:
    has_done, then, call, words = TABLE[step]
    with pair() as (exporter, reader):
        reader("stream = gi.device().create_stream(); stream.synchronize()")
        before = reader("left()")
        reader(has_done or "pass")
        exporter(then or "pass")
        if "stream" in call:
            reader("attached.acquire(stream)")
        if step == "acquired":
            reader.give(call)
        if then != DIES:
            exporter.kill()
        if words == DIED and not {step, call} & {"acquired", "stream.synchronize(300)"}:
            reader.until("attached._side().failure is not None")
        with pytest.raises(Raised, match=words):
            reader.answer() if step == "acquired" else reader(call)
        exporter.kill()
        if has_done:
            assert reader("int(np.asarray(attached.view).sum(dtype=int))") == 7 * 4096  # the memory stays
            reader("attached.close(); attached = None")
        reader.until(f"grown({before}) == []")
        (stale,) = os.listdir(sockets)
        with Shell() as other:
            other("share = gi.share(array())")
            assert stale not in os.listdir(sockets)
        assert os.listdir(sockets) == []


@pytest.mark.parametrize("look", ["stream.synchronize(300)", "queries()", "event.wait(300)", "awaits()"])
@pytest.mark.parametrize("kind", ["a share", "frames"])
def test_a_wait_that_passes_because_another_reader_has_noticed_the_death(sockets: Path, kind: str, look: str) -> None:
    """The reader that has not noticed is told wherever it looks, and has not taken old bytes for new ones."""
    with Shell() as exporter, Shell() as first, Shell() as late:
        exporter("stream, gate = gi.device().create_stream(), gi.device().create_semaphore(gi.TimelineFd)")
        exporter("gate.wait(stream, 1)")
        if kind == "frames":
            exporter("camera = gi.publish('camera', 4096, 'uint8')\nwith camera.write(stream): pass")
            attach, read = "attached = gi.subscribe('camera')", "with attached.next(timeout=300).read(stream): pass"
        else:
            exporter("array = array(); share = gi.share(array)\nwith share.write(stream): pass")
            attach, read = (
                f"attached = gi.attach({exporter.descriptor('share')})",
                "with attached.read(stream): pass",
            )
        late("from gpuinterop.sharing.link import Link; ends, Link.end = Link.end, lambda link: None")
        late("""
import asyncio
def queries():
    while not stream.query(): pass
def awaits():
    async def awaited(): await event
    asyncio.run(awaited())
""")
        for one in (first, late):
            one(attach)
            one("stream = gi.device().create_stream()")
            one(read)
        late("event = stream.record()")
        exporter.kill()
        with pytest.raises(Raised, match=DIED):
            first("stream.synchronize(300)")
        with pytest.raises(Raised, match=f"{DIED}.* new stream"):
            late(look)
        late("Link.end = ends; attached.close()")


BEFORE_THE_WATCH: Final = """
imports = gi.Device.import_semaphore

def late(device, handle):
    os.kill(writer, signal.SIGKILL)
    while not attached.ended: pass
    return imports(device, handle)

gi.Device.import_semaphore = late
"""


def test_an_exporter_dies_after_its_answer_before_it_is_watched() -> None:
    """The reader knows it, and does not wait for the release."""
    with pair() as (exporter, reader):
        exporter(IN)
        reader(ATTACH)
        reader(f"writer = {exporter('os.getpid()')}")
        reader(BEFORE_THE_WATCH)
        with pytest.raises(Raised, match=DIED):
            reader(ACQUIRES)
        exporter.kill()


MANY: Final = """
import mmap
page = mmap.mmap(-1, 4096)
calls = np.frombuffer(page, np.int64)  # made so far; the length of the descriptor, and its bytes

def dies(run, at):
    # In a child, which is killed at that call of the library, or after the last one.
    if child := os.fork():
        return child
    signal.alarm(300)
    calls[0] = 0

    def seen(frame, event, _):
        if event == "call" and "/gpuinterop/" in frame.f_code.co_filename:
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.setprofile(seen)
        run()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)

def reads():
    with gi.attach(descriptor, timeout=300) as attached:
        attached.acquire(timeout=300)
        attached.release()

def serves():
    loop().start = lambda: None  # this thread makes the loop's passes, which the profile then sees
    loop().repeat(lambda: False)
    share = gi.share(array())
    page[16 : 16 + len(bytes(share))] = bytes(share)
    calls[1] = len(bytes(share))
    while True:
        with contextlib.suppress(gi.SemaphoreTimeoutError):
            share.acquire(timeout=0)
            share.release()
        with loop()._passing:
            loop()._pass()
"""


def test_a_reader_dies_at_many_calls() -> None:
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=300); share.release()")
        before = exporter("left()")
        reader(MANY)
        reader("os.waitpid(dies(reads, 0), 0)")
        for point in points(reader("int(calls[0])")):
            reader(f"os.waitpid(dies(reads, {point}), 0)")
            exporter("share.acquire(timeout=300); share.release()")
        exporter.until(f"leases() == 0 and grown({before}) == []")


def test_an_exporter_dies_at_many_calls() -> None:
    with Shell() as exporter, Shell() as reader:
        exporter(MANY)
        reader(MANY)
        before, met = reader("gi.device() and left()"), list[str]()

        def dies(point: int) -> None:
            exporter(f"child = dies(serves, {point})")
            exporter.until("calls[1] or os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG)")
            if share := exporter("page[16 : 16 + int(calls[1])].hex()"):
                try:
                    met.append(reader(f"descriptor = bytes.fromhex({share!r}); reads()") or "")
                except Raised as error:
                    met.append(str(error))
            exporter("os.kill(child, signal.SIGKILL); os.waitpid(child, 0); calls[1] = 0")

        dies(0)
        assert met == [""]
        for point in points(exporter("int(calls[0])")):
            dies(point)
        assert not [one for one in met if one and ("time-out" in one or "PeerError" not in one)]
        reader.until(f"grown({before}) == []")


def points(total: int) -> list[int]:
    """Numbers of calls all over the run that made so many."""
    assert total > 100
    return [1 + total * point // POINTS for point in range(POINTS)]
