"""Readers that lie, flood, drip and do not read: others are served meanwhile, and nothing of them is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, needs_root, pair

COUNT: Final = int(os.environ.get("GPUINTEROP_TEST_HOSTILE", "1000"))
READS: Final = """
def reads(count):
    took = []
    for _ in range(count):
        begin = time.monotonic()
        with gi.attach(descriptor, timeout=5) as attached:
            attached.acquire(timeout=5)
            assert (np.asarray(attached.view) == 7).all()
            attached.release()
        took.append(time.monotonic() - begin)
    return max(took) * 1e3
"""
ATTACKS: Final = {
    "liars": f"hostile.pester(descriptor, large, {COUNT}, 1)",
    "drips": "hostile.drip(descriptor)",
    "a thousand stay open": "links = [hostile.connected(descriptor) for _ in range(1000)]",
    "a flood": "hostile.flood(descriptor, 2)",
    "an answer is not read": "[hostile.ask_on(large) for _ in range(9)]",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_others_are_served_meanwhile(attack: str) -> None:
    with pair() as (exporter, reader), Shell() as hostile:
        exporter("rendezvous._PATIENCE_S = 0.5; share.acquire(); share.release()")
        exporter("large = gi.share({f'{number:0>1000}': array for number in range(1000)})")
        hostile("from tests.host import hostile")
        hostile("resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)")
        for name, share in (("descriptor", "share"), ("large", "large")):
            hostile(f"{name} = {exporter.descriptor(share)}")
        reader(READS)
        reader("reads(1)")
        exporter.until("leases() == 0")
        before = exporter("left()")
        hostile.give(ATTACKS[attack])
        took = reader("reads(50)")
        print(f"the slowest of 50 readers took {took:.1f} ms; {hostile.answer(60 + COUNT / 20)}")
        exporter.until(f"leases() == 0 and grown({before}) == []")  # while the hostile one still has its connections
        reader("reads(1)")


@pytest.mark.parametrize(
    ("user", "users", "mode", "words"),
    [
        (1234, "()", 0o600, "Permission denied"),
        (1234, "()", 0o666, "expected a process of user 0, got one of user 1234; run both as one user"),
        (1234, "(5678,)", 0o666, "expected a process of user 0, got one of user 1234"),
        (65534, "(65534,)", 0o666, "user 65534, which stands for users of other namespaces"),
        (1234, "(1234,)", 0o666, ""),
    ],
)
@needs_root
def test_other_users(user: int, users: str, mode: int, words: str, sockets: Path) -> None:
    with Shell() as exporter:
        exporter(f"os.umask(0o077); array = array(); array[:] = 7; share = gi.share(array, users={users})")
        (socket,) = sockets.iterdir()
        assert socket.stat().st_mode & 0o777 == (0o666 if users != "()" else 0o600)
        os.chmod(socket, mode)
        with Shell() as reader:
            reader(f"descriptor = {exporter.descriptor('share')}; gi.device(); rendezvous.boot_id()")
            reader(f"os.setgroups([]); os.setuid({user})")
            if words:
                with pytest.raises(Raised, match=f"PeerError: .*{words}"):
                    reader("gi.attach(descriptor, timeout=5, users=(0,))")
                assert exporter("leases()") == 0
                return
            with pytest.raises(Raised, match="PeerError: expected a process of user 1234, got one of user 0"):
                reader("gi.attach(descriptor, timeout=5)")
            reader("attached = gi.attach(descriptor, timeout=5, users=(0,)); attached.acquire(timeout=5)")
            assert reader("int(np.asarray(attached.view).sum(dtype=int))") == 7 * 4096
