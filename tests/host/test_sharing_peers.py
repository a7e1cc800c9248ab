"""Readers that are stuck, sharing processes that do not answer, other versions, and processes of other users."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, needs_root, pair, stop

STUCK: Final = """
from tests.host import links
kept += [links.connected(descriptor) for _ in range(20)]
kept += [links.half_asked(descriptor), links.connected(descriptor, links.HELLO, links.ATTACH)]
kept += [links.ask_on(large) for _ in range(4)]
attached = gi.attach(descriptor)
"""


def test_others_are_served_beside_readers_that_are_stuck() -> None:
    """They are silent, in the middle of a request, do not read what they have asked for, and are stopped."""
    with pair() as (exporter, reader), Shell() as other:
        exporter("large = gi.share({f'{number:0>1000}': array for number in range(1000)})")
        exporter("share.acquire(); share.release()")
        reader("gi.attach(descriptor).close()")
        before = exporter("left()")
        other(f"descriptor, large = {exporter.descriptor('share')}, {exporter.descriptor('large')}")
        other(STUCK)
        stop(other("os.getpid()"))
        reader("""for _ in range(50):
            with gi.attach(descriptor, timeout=300) as attached:
                attached.acquire(timeout=300)
                assert (np.asarray(attached.view) == 7).all()
                attached.release()
        """)
        exporter.until("leases() == 1")
        other.kill()
        exporter.until(f"leases() == 0 and grown({before}) == []")


def test_a_reader_that_goes_away_before_its_answer_ends_no_process() -> None:
    """Not even one in which SIGPIPE has its default action: one that embeds Python."""
    with pair() as (exporter, reader):
        exporter("signal.signal(signal.SIGPIPE, signal.SIG_DFL)")
        reader("from tests.host import links; from gpuinterop.sharing.messages import ATTACH, HELLO")
        for kinds in ("HELLO", "HELLO, ATTACH"):
            stop(process := int(exporter("os.getpid()")))
            reader(f"links.connected(descriptor, {kinds}).socket.close()")
            os.kill(process, signal.SIGCONT)
            reader("gi.attach(descriptor).close()")
        exporter.until("leases() == 0")


def test_a_stopped_process_holds_up_no_other() -> None:
    """Nor does an answer that comes after its call has given up, or was interrupted."""
    with pair() as (exporter, reader), Shell() as other:
        other("array = array(); share = gi.share(array)")
        exporter("more = gi.share(array[8:])")
        reader(f"more = {exporter.descriptor('more')}; gi.attach({other.descriptor('share')}).close()")
        reader("gi.attach(descriptor).close()")
        reader.until("rests()")
        before = reader("left()")
        reader("attached = gi.attach(descriptor)")
        stop(process := exporter("os.getpid()"))
        reader("late = []; thread = threading.Thread(target=lambda: late.append(gi.attach(more, timeout=300)))")
        reader("thread.start()")
        with pytest.raises(Raised, match=r"PeerError: .*did not answer"):
            reader("gi.attach(more, timeout=0.1)")
        reader(f"gi.attach({other.descriptor('share')}, timeout=300).close()")
        os.kill(process, signal.SIGCONT)
        reader("thread.join(); late.pop().close(); attached.acquire(timeout=300); attached.release()")
        reader("from gpuinterop.ipc import Connection; part = Connection.part")
        reader("def strikes(*_): Connection.part = part; raise KeyboardInterrupt\nConnection.part = strikes")
        with pytest.raises(Raised, match="KeyboardInterrupt"):
            reader("gi.attach(more)")
        reader("with gi.attach(more) as one: assert np.asarray(one.view).shape == (4088,)")
        reader("attached.close(); attached = one = None")
        reader.until(f"grown({before}) == []")
        exporter.until("leases() == 0")


@pytest.mark.parametrize("side", ["exporter", "reader"])
def test_a_process_of_another_version_is_told_so(side: str) -> None:
    with pair() as (exporter, reader):
        before = exporter("left()"), reader("left()")
        other = {"exporter": exporter, "reader": reader}[side]
        other("from gpuinterop import ipc; ipc.VERSION = 9")
        with pytest.raises(
            Raised, match=r"PeerError: .*version [29], got magic b'GIPH', version [29], .*; install one"
        ):
            reader("gi.attach(descriptor, timeout=300)")
        other("ipc.VERSION = 2")
        for one, had in zip((exporter, reader), before, strict=True):
            one.until(f"grown({had}) == []")
        reader("gi.attach(descriptor).close()")


@pytest.mark.parametrize(
    ("user", "users", "mode", "words"),
    [
        (1234, "()", 0o600, "Permission denied"),
        (1234, "(5678,)", 0o666, "expected a process of user 0, got one of user 1234; run both as one user"),
        (65534, "(65534,)", 0o666, "got one of user 65534, .*namespaces"),
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
            reader(f"descriptor = {exporter.descriptor('share')}; gi.device(); server.boot_id()")
            reader(f"os.setgroups([]); os.setuid({user})")
            if words and mode == 0o666:  # it is refused before it has sent anything
                reader("link = socket.socket(socket.AF_UNIX); link.settimeout(300)")
                reader(f"link.connect({os.fspath(socket)!r}); got = link.recv(4096); link.close()")
                assert str(user) in reader("got[16:].decode()")
            if words:
                with pytest.raises(Raised, match=f"PeerError: .*{words}"):
                    reader("gi.attach(descriptor, timeout=300, users=(0,))")
                assert exporter("leases()") == 0
                assert exporter("len(server.server()._sums._each)") == 1  # it has not got the page of counts
                return
            with pytest.raises(Raised, match=r"PeerError: .*user 1234\b.*user 0\b"):
                reader("gi.attach(descriptor, timeout=300)")
            reader("attached = gi.attach(descriptor, timeout=300, users=(0,)); attached.acquire(timeout=300)")
            assert reader("int(np.asarray(attached.view).sum(dtype=int))") == 7 * 4096
