"""Readers that are stuck, exporters that do not answer, other versions, and processes of other users."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, needs_root, pair

READS: Final = """
def reads(count):
    for _ in range(count):
        with gi.attach(descriptor, timeout=5) as attached:
            attached.acquire(timeout=5)
            assert (np.asarray(attached.view) == 7).all()
            attached.release()
"""
READERS: Final = {
    "a thousand are silent": "kept = [links.connected(descriptor) for _ in range(1000)]",
    "an answer is not read": "[links.ask_on(large) for _ in range(9)]",
}


@pytest.mark.parametrize("stuck", READERS)
def test_others_are_served_beside_readers_that_are_stuck(stuck: str) -> None:
    with pair() as (exporter, reader), Shell() as other:
        exporter("rendezvous._PATIENCE_S = 0.5; share.acquire(); share.release()")
        exporter("large = gi.share({f'{number:0>1000}': array for number in range(1000)})")
        other("from tests.host import links")
        other("resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)")
        for name, share in (("descriptor", "share"), ("large", "large")):
            other(f"{name} = {exporter.descriptor(share)}")
        reader(READS)
        reader("reads(1)")
        exporter.until("leases() == 0")
        before = exporter("left()")
        other.give(READERS[stuck])
        reader("reads(50)")
        other.answer(60)
        exporter.until(f"leases() == 0 and grown({before}) == []")  # while the other one still has its connections
        reader("reads(1)")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("None", "is it alive and serving"),
        ("listener.accept()[0].close()", "is it alive and serving"),
        (
            "links.answer(listener, 9)",
            "expected an answer of version 1; install one version of gpuinterop on both sides",
        ),
    ],
)
def test_no_answer_and_one_of_another_version_are_peer_errors_in_time(answer: str, words: str, sockets: Path) -> None:
    with Shell() as exporter, Shell() as reader:
        exporter(f"from tests.host import links; listener, descriptor = links.listen({os.fspath(sockets)!r})")
        descriptor = exporter("descriptor")
        exporter.give(answer)
        begin = reader("time.monotonic()")
        with pytest.raises(Raised, match=f"PeerError: .*{words}"):
            reader(f"gi.attach(bytes.fromhex({descriptor!r}), timeout=0.3)")
        assert reader("time.monotonic()") - begin < 5
        exporter.answer()


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
