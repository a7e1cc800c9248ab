"""A side is killed at each step: what the other side gets, how soon, and what is left. ``-rP`` prints the table."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, pair

SOON: Final = 1000.0
"""Milliseconds in which a death is noticed."""
COUNT: Final = int(os.environ.get("GPUINTEROP_TEST_ATTACHES", "300"))
ATTACH: Final = "attached = gi.attach(descriptor, timeout=10)"
ENROL: Final = f"{ATTACH}; attached._turns()"
ACQUIRE: Final = f"{ATTACH}; attached.acquire(timeout=10)"
ASK: Final = "link = links.connected(descriptor, links.ATTACH)"
STEPS: Final = {
    "connected": "link = links.connected(descriptor)",
    "request sent": ASK,
    "answer half read": f"{ASK}; link.recv(5, socket.MSG_WAITALL)",
    "attached": ATTACH,
    "enrolled": ENROL,
    "acquired": ACQUIRE,
    "released": f"{ACQUIRE}; attached.release()",
    "detached": f"{ACQUIRE}; attached.release(); attached.close()",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_reader_dies(step: str) -> None:
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=10); share.release()")
        before = exporter("left()")
        reader(f"from tests.host import links; {STEPS[step]}")
        if step == "acquired":
            exporter.give("share.acquire(timeout=10)")
        begin = time.monotonic()
        reader.kill()
        exporter.answer() if step == "acquired" else exporter("share.acquire(timeout=10)")
        passed = (time.monotonic() - begin) * 1e3
        exporter("share.release()")
        gone = exporter.until(f"leases() == 0 and grown({before}) == []")
        print(f"reader {step}: the writer acquires in {passed:.1f} ms, nothing of it is left {gone:.1f} ms behind that")
        assert max(passed, gone) < SOON
        assert not [one for one in os.listdir("/dev/shm") if "gpuinterop" in one]


DIED: Final = "PeerError: the process that shared the arrays has ended"
GONE: Final = "PeerError: expected the exporter's socket at .* it is not there"
LOST: Final = "PeerError: the exporting process is not there"
CLOSED: Final = "PeerError: the peer closed the connection after 0 of"
ACQUIRES: Final = "attached.acquire(timeout=10)"
IN: Final = "share.acquire(timeout=10)"
DIES: Final = "rendezvous.ipc.send_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
TABLE: Final = {
    "shared": ("", "", ATTACH, GONE),
    "serving an answer": ("", DIES, ATTACH, CLOSED),
    "attached to": (ATTACH, "", ACQUIRES, LOST),
    "enrolling": (ATTACH, DIES, ACQUIRES, CLOSED),
    "enrolled at": (ENROL, "", ACQUIRES, DIED),
    "acquired": (ENROL, IN, ACQUIRES, DIED),
    "acquired, a stream waits": (ENROL, IN, "stream.synchronize(10)", DIED),
    "released": (ENROL, f"{IN}; share.release()", ACQUIRES, DIED),
    "read from": (ACQUIRE, "", "attached.release()", DIED),
    "closed, and attached": (ENROL, "share.close()", ACQUIRES, DIED),
    "closed": ("", "share.close()\nwhile threads() > idle: pass", ATTACH, GONE),
}
"""What the reader has done, what the exporter does then and dies behind, and what the reader gets at which call."""


@pytest.mark.parametrize("step", TABLE)
def test_an_exporter_dies(sockets: Path, step: str) -> None:
    has_done, then, call, words = TABLE[step]
    with pair() as (exporter, reader):
        reader("gi.attach(descriptor).close(); stream = gi.device().create_stream()")
        reader.until("threads() == idle + 1")  # the stream's
        before = reader("left()")
        reader(has_done or "pass")
        exporter(then or "pass")
        if "stream" in call:
            reader("attached.acquire(stream)")
        if step == "acquired":
            reader.give(call)
        begin = time.monotonic()
        if then != DIES:
            exporter.kill()
        if words == DIED and not {step, call} & {"acquired", "stream.synchronize(10)"}:
            reader.until("attached._turns().failure is not None")
        with pytest.raises(Raised, match=words) as raised:
            reader.answer() if step == "acquired" else reader(call)
        took = (time.monotonic() - begin) * 1e3
        print(f"exporter {step}: {call.split('(')[0]} raises in {took:.1f} ms: {str(raised.value)[:100]}")
        assert took < SOON
        exporter.kill()
        if has_done:
            assert reader("int(np.asarray(attached.view).sum(dtype=int))") == 7 * 4096  # the memory stays
            reader("attached.close()")
        reader.until(f"grown({before}) == []")
        stale = os.listdir(sockets)
        assert len(stale) == (step != "closed")
        with Shell() as other:
            other("array = array(); share = gi.share(array)")
            assert len(os.listdir(sockets)) == 1
            assert os.listdir(sockets) != stale
            other("share.close(); share = None")
            other.until("threads() == idle")
            assert os.listdir(sockets) == []


FIGURES: Final = """
def figures():
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as pages:
        return [*map(len, left()[:2]), threads(), len(maps.readlines()), int(pages.read().split()[1]) * 4]

def attaches(count):
    for number in range(count):
        with gi.attach(descriptor, timeout=10) as attached:
            if number % 2:
                attached.acquire(timeout=10)
                attached.release()
"""


@pytest.mark.timeout(60 + COUNT / 20)
def test_neither_process_grows_by_attaching() -> None:
    with pair() as (exporter, reader):
        found = []
        for one in (exporter, reader):
            one(FIGURES)
        for count in (100, COUNT):
            begin = reader("time.monotonic()")
            reader(f"attaches({count})", 30 + count / 20)
            took = reader("time.monotonic()") - begin
            reader.until("threads() == idle")
            exporter.until("leases() == 0 and not any(here._again or here._jobs for here in rendezvous._here)")
            found.append([exporter("figures()"), reader("figures()")])
        print(f"{COUNT} attaches in {took:.1f} s; descriptors, memfds, threads, mappings, KiB: {found}")
        for (*counts, maps, rss), (*now, more, grown) in zip(*found, strict=True):
            assert now == counts
            assert more <= maps + 8  # the allocator's
            assert grown < rss + 4096
