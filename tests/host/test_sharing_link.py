"""One link between two processes: what it costs, what it survives, and what is left of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, pair, stop

COUNTS: Final = """
from gpuinterop.sharing.link import Link
asked, ask = [], Link.ask

def asks(link, kind, *more):
    asked.append(kind)
    return ask(link, kind, *more)

Link.ask = asks

def counted(call):
    del asked[:]
    kept.append(call())
    return len(asked)

def mapped():
    with open("/proc/self/maps") as maps:
        return sum("gpuinterop.allocation" in line for line in maps)

kept = []
"""
NAMED: Final = """
memory = gi.device().allocate(1 << 20).buffer

def named(count):
    return {f"{number}": np.asarray(memory.view(8, offset=64 * number)) for number in range(count)}
"""


def test_memory_is_mapped_once_and_each_array_is_where_it_was_put() -> None:
    """Attachments that live at once: of one share, of two shares of one allocation, and of a share of both."""
    with pair() as (exporter, reader):
        exporter("other = gi.share(array[100:200]); both = gi.share({'all': array, 'end': array[4000:]})")
        exporter("array[:] = np.arange(4096) % 251")
        reader(COUNTS)
        reader("first, again = gi.attach(descriptor), gi.attach(descriptor)")
        reader(f"other = gi.attach({exporter.descriptor('other')}); both = gi.attach({exporter.descriptor('both')})")
        assert reader("mapped()") == 1
        base = reader("first.view.ptr")
        views = "again.view.ptr, other.view.ptr, both['all'].ptr, both['end'].ptr"
        assert reader(f"[{views}]") == [base, base + 100, base, base + 4000]
        reader("expected = (np.arange(4096) % 251).astype(np.uint8)")
        assert reader("bool((np.asarray(again.view) == expected).all())")
        assert reader("bool((np.asarray(other.view) == expected[100:200]).all())")
        assert reader("bool((np.asarray(both['end']) == expected[4000:]).all())")
        reader("first.close(); both.close(); np.asarray(other.view)[0] = 7")
        assert exporter("int(array[100])") == 7
        assert reader("int(np.asarray(again.view)[100])") == 7
        reader("again.close(); other.close()")
        reader.until("mapped() == 0")


def test_threads_that_attach_at_once_map_it_once() -> None:
    """And no memory is lost beside attachments that end meanwhile."""
    with pair() as (exporter, reader):
        reader("gi.attach(descriptor).close()")
        reader.until("rests()")
        before = reader("left()")
        reader(COUNTS)
        reader("found, start = [], threading.Barrier(8)")
        reader("def attaches(): start.wait(); found.append(gi.attach(descriptor))")
        reader("threads_ = [threading.Thread(target=attaches) for _ in range(8)]")
        reader("[one.start() for one in threads_]; [one.join() for one in threads_]")
        assert reader("[len(found), mapped(), len({one.view.ptr for one in found})]") == [8, 1, 1]
        reader("[one.close() for one in found]; found.clear(); sys.setswitchinterval(1e-5)")
        reader("def again():\n    for _ in range(60): gi.attach(descriptor).close()")
        reader("threads_ = [threading.Thread(target=again) for _ in range(4)]")
        reader("[one.start() for one in threads_]; [one.join() for one in threads_]")
        reader.until(f"mapped() == 0 and grown({before}) == []")
        exporter.until("leases() == 0")


def test_the_number_of_messages_does_not_grow_with_the_arrays() -> None:
    """Nor does an attachment of what this process has attached already, or of its own, send any."""
    with pair() as (exporter, reader):
        exporter(NAMED)
        reader(COUNTS)
        sent = []
        for count in (100, 400):
            exporter(f"many = gi.share(named({count}))")
            reader(f"descriptor = {exporter.descriptor('many')}")
            before = exporter("len(os.listdir('/proc/self/fd'))"), reader("len(os.listdir('/proc/self/fd'))")
            sent.append(reader("counted(lambda: gi.attach(descriptor))"))
            assert reader("counted(lambda: gi.attach(descriptor))") == 0
            assert reader(f"[int(kept[-1]['{count - 1}'].ptr - kept[-1]['0'].ptr), mapped()]") == [64 * (count - 1), 1]
            after = exporter("len(os.listdir('/proc/self/fd'))"), reader("len(os.listdir('/proc/self/fd'))")
            assert max(now - then for now, then in zip(after, before, strict=True)) <= 4 * (count == 100)
        assert sent[1] <= sent[0] <= 2
        exporter(COUNTS)
        assert exporter("counted(lambda: gi.attach(bytes(many)))") == 0


BAD_TEXT: Final = """
class Array:
    def __init__(self, error):
        self.error = error
        self.__dlpack_device__, self.__dlpack__ = array.__dlpack_device__, array.__dlpack__

    def data_ptr(self):
        if self.armed:
            raise self.error
        return 8

    armed = False

bad = Array(RuntimeError("\\ud800")), Array(SystemExit(3))
shares = [gi.share(one) for one in bad]
Array.armed = True
sys.unraisablehook = lambda _: None  # it is reported, as what a thread raises
"""


def test_no_array_ends_the_loop_that_serves_others() -> None:
    with pair() as (exporter, reader):
        exporter(BAD_TEXT)
        for number in range(2):
            with pytest.raises(Raised, match=r"HandleError: RuntimeError: \?|PeerError: "):
                reader(f"gi.attach({exporter.descriptor(f'shares[{number}]')})")
        reader("with gi.attach(descriptor) as attached: attached.acquire(timeout=5); attached.release()")
        exporter("Array.armed = False; [one.close(timeout=20) for one in shares]; share.close(timeout=20)")


def test_a_share_that_fails_leaves_no_offer() -> None:
    """At a full table of descriptors, whatever was missing; and where its contents are too large."""
    with Shell() as exporter:
        exporter("array = array(); gi.share(array).close(timeout=20); kept = []")
        exporter.until("rests()")
        before, failed = exporter("left()"), 0
        exporter("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))")
        for room in range(8):
            exporter("while len(kept) < 99:\n    try: kept.append(os.open('/dev/null', 0))\n    except OSError: break")
            exporter(f"for one in kept[:{room}]: os.close(one)\nkept = kept[{room}:]")
            try:
                exporter("share = gi.share(array)")
            except Raised as error:
                failed += "out of file descriptors" in str(error)
            exporter("for one in kept: os.close(one)\nkept, share = [], share.close() if 'share' in scope else None")
            exporter("scope.pop('share')")
            exporter.until("rests()")
            assert exporter("sum(len(one.offers) for one in rendezvous._servers)") == 0
        assert 0 < failed < 8
        with pytest.raises(
            Raised, match=r"InvalidArgumentError: arrays: .*names and layouts take .* share them in parts"
        ):
            exporter("gi.share({'x' * (65 << 20): array})")
        exporter.until(f"rests() and grown({before}) == []")


def test_a_failed_attachment_to_an_own_share_holds_nothing() -> None:
    with pair() as (exporter, _):
        with pytest.raises(Raised, match="ArgumentTypeError: label"):
            exporter("gi.attach(descriptor, label=5)")
        assert exporter("leases()") == 0
        exporter("share.close()")
        exporter.until("rests()")
        with pytest.raises(Raised, match="ResourceClosedError: the share was closed"):
            exporter("gi.attach(descriptor)")
        exporter("share = gi.share(array); own = gi.attach(bytes(share)); share.close()")
        exporter("rendezvous.server().look()")
        exporter("own.close()")
        exporter.until("rests()")  # the share has noticed that nobody holds it


def test_a_forked_child_holds_and_drops_nothing() -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor)")
        reader("child = os.fork() or (attached.close(), gc.collect(), os._exit(0))")
        reader("assert os.waitpid(child, 0)[1] == 0")
        assert exporter("leases()") == 1
        reader("attached.close()")
        exporter.until("leases() == 0")


def test_the_folder_and_the_socket(sockets: Path) -> None:
    """Files of others stay, a relative folder is the process's own, and a socket that was removed is made anew."""
    others = {"gpuinterop-notes.sock": "text", "gpuinterop-other": "text"}
    for name, text in others.items():
        (sockets / name).write_text(text)
    with Shell() as exporter, Shell() as reader:
        exporter(f"os.chdir({os.fspath(sockets)!r}); os.environ['GPUINTEROP_SHARE_DIR'] = '.'; array = array()")
        exporter("share = gi.share(array); os.chdir('/')")
        assert {name: (sockets / name).read_text() for name in others} == others
        (path,) = (one for one in sockets.iterdir() if one.name not in others)
        path.unlink()
        descriptor = exporter.descriptor("share")
        assert path.is_socket()
        reader(f"attached = gi.attach({descriptor}, timeout=3)")
        exporter("share.close()")
        with pytest.raises(Raised, match="ResourceClosedError: the share was closed"):
            reader(f"attached.close(); gi.attach({descriptor})")
    assert {one.name for one in sockets.iterdir()} == set(others)


def test_a_time_out_that_a_program_gives_all_sockets_ends_no_link() -> None:
    with pair() as (exporter, reader):
        exporter("socket.setdefaulttimeout(0.05)")
        reader("attached = gi.attach(descriptor); attached.acquire(timeout=5); attached.release()")
        exporter("share.acquire(timeout=5); time.sleep(0.2)")
        assert exporter("leases()") == 1


def test_a_reader_that_leaves_beside_another_of_its_process_gives_its_place_back() -> None:
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=5); share.release()")
        reader("stays = gi.attach(descriptor)")
        reader("with gi.attach(descriptor) as goes: goes.acquire(timeout=5); goes.release()")
        exporter("share.acquire(timeout=5); share.release()")
        exporter.until("not share.lifetime.handle._writer.leases")
        assert exporter("leases()") == 1


def test_a_place_in_the_order_that_its_reader_gave_up_ends_with_the_share() -> None:
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=5); share.release(); more = gi.share(array[8:])")
        reader(f"attached = gi.attach(descriptor); other = gi.attach({exporter.descriptor('more')})")
        stop(process := int(exporter("os.getpid()")))
        for _ in range(2):
            with pytest.raises(Raised, match=r"PeerError: .*did not answer within the time-out"):
                reader("attached.acquire(timeout=0.1)")
        os.kill(process, signal.SIGCONT)
        reader("attached.close()")
        exporter("share.close(timeout=10)")
        assert exporter("leases()") == 1


MESSAGES: Final = int(os.environ.get("GPUINTEROP_TEST_MESSAGES", "40"))
GARBLED: Final = """
from tests.host import links

def tries(count):
    for _ in range(count):
        with contextlib.suppress(gi.GpuInteropError):
            with gi.attach(descriptor, timeout=0.2) as attached:
                attached._turns(0.2)
                attached.acquire(timeout=0.2)
                attached.release()
"""


@pytest.mark.parametrize("side", ["exporter", "reader"])
@pytest.mark.timeout(120 + MESSAGES / 20)
def test_mutated_messages(side: str) -> None:
    """An error of ours or none; the other side serves on, and neither keeps a descriptor."""
    with pair() as (exporter, reader), Shell() as other:
        other(f"array = array(); share = gi.share(array); descriptor = {exporter.descriptor('share')}")
        for one in (exporter, reader):
            one("gi.device()")
        other("gi.attach(descriptor).close()")
        reader(f"gi.attach(descriptor).close(); gi.attach({other.descriptor('share')}).close()")
        exporter.until("leases() == 0")
        exporter("share.acquire(); share.release()")
        before = exporter("left()"), reader("left()")
        {"exporter": exporter, "reader": reader}[side](f"from tests.host import links; links.mutate({MESSAGES})")
        reader(GARBLED)
        reader(f"tries({MESSAGES})", 60 + MESSAGES)
        other("gi.attach(descriptor).close()" if side == "reader" else "pass")
        reader(f"gi.attach({other.descriptor('share')}).close()" if side == "exporter" else "pass")
        if side == "exporter":  # what its other words have promised ends with it
            exporter.kill()
        reader.until(f"grown({before[1]}) == []")
        if side == "reader":
            exporter.until(f"leases() == 0 and grown({before[0]}) == []")


def test_garbage_in_the_pages() -> None:
    """A reader's counts, and the sharing process's page of serials, may have any words in them."""
    with pair() as (exporter, reader):
        before = exporter("left()")
        reader("attached = gi.attach(descriptor); attached.acquire(timeout=5); attached.release()")
        reader("page = attached.lifetime.handle.link.counts.rows")
        reader("for row in page[1:]: np.ctypeslib.as_array(row)[:4096] = 0xFFFFFFFF")
        reader("attached.close()")
        exporter("gi.attach(descriptor).close(); other = gi.share(array); other.close()")
        exporter("share.acquire(timeout=5); share.release()")
        reader.kill()
        exporter("words = rendezvous.server().me.counts.rows[0]")
        exporter("np.ctypeslib.as_array(words)[8:] = 0xFFFFFFFF; share.close(timeout=20)")
        exporter.until("rests()")
        assert exporter("sum(len(one.offers) for one in rendezvous._servers)") == 0
        assert not [one for one in exporter(f"grown({before})") if "counts" in one]


def test_a_stopped_reader_keeps_its_share_and_a_dead_one_does_not() -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor)")
        os.kill(reader("os.getpid()"), signal.SIGSTOP)
        with pytest.raises(Raised, match=r"ResourceBusyError: .* 1 reader\(s\) are attached"):
            exporter("share.close(timeout=0.1)")
        reader.kill()
        exporter("share.close(timeout=20)")
