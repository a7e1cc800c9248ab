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
        for name, share in (("first", "share"), ("other", "other"), ("both", "both"), ("again", "share")):
            reader(f"{name} = gi.attach({exporter.descriptor(share)})")
        reader("views = [first.view, again.view, other.view, both['all'], both['end']]")
        assert reader("[one.ptr - views[0].ptr for one in views]") == [0, 0, 100, 0, 4000]
        assert reader("[[int(one[0]), int(one[-1])] for one in map(np.asarray, views)] + [mapped()]") == [
            [0, 79], [0, 79], [100, 199], [0, 79], [235, 79], 1,
        ]  # fmt: skip
        reader("del views; first.close(); both.close(); np.asarray(other.view)[0] = 7")
        assert exporter("int(array[100])") == reader("int(np.asarray(again.view)[100])") == 7
        reader("again.close(); other.close()")
        reader.until("mapped() == 0")


def test_threads_that_attach_at_once_map_it_once() -> None:
    """And no memory is lost beside attachments that end meanwhile."""
    with pair() as (exporter, reader):
        reader("gi.attach(descriptor).close(); pool = ThreadPoolExecutor(8)")
        reader(COUNTS)
        reader("start = threading.Barrier(8)")
        reader("found = list(pool.map(lambda _: start.wait() < 0 or gi.attach(descriptor), range(8)))")
        before = reader("left()")
        assert reader("[mapped(), len({one.view.ptr for one in found})]") == [1, 1]
        reader("[one.close() for one in found]; found.clear(); sys.setswitchinterval(1e-5)")
        reader("list(pool.map(lambda _: gi.attach(descriptor).close(), range(240)))")
        reader.until(f"mapped() == 0 and grown({before}) == []")
        exporter.until("leases() == 0")


def test_messages_and_descriptors_do_not_grow_with_the_arrays() -> None:
    """Nor does an attachment of what this process has attached already, or of its own, send any."""
    with pair() as (exporter, reader):
        exporter(NAMED)
        exporter(COUNTS)
        reader(COUNTS)
        found = []
        for count in (100, 400):
            exporter(f"many = gi.share(named({count}))")
            reader(f"descriptor = {exporter.descriptor('many')}")
            found.append(
                [reader("counted(lambda: gi.attach(descriptor))"), *(len(one("left()")) for one in (exporter, reader))]
            )
            assert reader("counted(lambda: gi.attach(descriptor))") == 0
            assert reader(f"[int(kept[-1]['{count - 1}'].ptr - kept[-1]['0'].ptr), mapped()]") == [64 * (count - 1), 1]
        assert found[0][0] <= 2
        assert found[1] <= found[0]
        assert exporter("counted(lambda: gi.attach(bytes(many)))") == 0


BAD_TEXT: Final = """
class Array:
    armed = False

    def __init__(self, error):
        self.error, self.__dlpack_device__, self.__dlpack__ = error, array.__dlpack_device__, array.__dlpack__

    def data_ptr(self):
        if self.armed:
            raise self.error
        return 8

shares = [gi.share(Array(error)) for error in (RuntimeError("\\ud800"), SystemExit(3))]
Array.armed = True
sys.unraisablehook = lambda _: None  # it is reported, as what a thread raises
"""


def test_no_array_ends_the_loop_that_serves_others() -> None:
    with pair() as (exporter, reader):
        exporter(BAD_TEXT)
        for number, error in enumerate((r"RuntimeError: \?", "SystemExit: 3")):
            with pytest.raises(Raised, match=f"PeerError: in the sharing process: {error}"):
                reader(f"gi.attach({exporter.descriptor(f'shares[{number}]')})")
        reader("with gi.attach(descriptor) as attached: attached.acquire(timeout=300); attached.release()")
        exporter("Array.armed = False; [one.close(timeout=300) for one in shares]; share.close(timeout=300)")


FIRST: Final = """
def shares(room):
    # In a child, whose first share it is.
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    fill(room)
    try:
        gi.share(array)
    except gi.DriverError as error:
        os._exit(1 if "out of file descriptors" in str(error) and not offers() else 2)
    os._exit(0)

array = array()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
"""


def test_a_share_that_finds_no_descriptor_leaves_no_offer() -> None:
    with Shell() as exporter:
        exporter(FIRST)
        assert exporter("{shares(room) for room in range(12)} == {0, 1}")


def test_a_failed_attachment_to_an_own_share_holds_nothing() -> None:
    with pair() as (exporter, _):
        with pytest.raises(Raised, match="ArgumentTypeError: label"):
            exporter("gi.attach(descriptor, label=5)")
        assert exporter("leases()") == 0
        exporter("own = gi.attach(descriptor); share.close(); server.server().poll(); own.close()")
        exporter.until("offers() == 0")  # it has noticed that nobody holds it
        with pytest.raises(Raised, match=r"ResourceClosedError: .*share"):
            exporter("gi.attach(descriptor)")


def test_the_folder_and_the_socket(sockets: Path) -> None:
    """Files of others stay, a relative folder is the process's own, and a socket that was removed is made anew."""
    others = {"gpuinterop-notes.sock": "text", "gpuinterop-other": "text"}
    for name, text in others.items():
        (sockets / name).write_text(text)
    with Shell() as exporter, Shell() as reader:
        exporter(f"os.umask(0); os.chdir({os.fspath(sockets)!r}); os.environ['GPUINTEROP_SHARE_DIR'] = '.'")
        exporter("array = array(); share = gi.share(array); os.chdir('/')")
        (path,) = (one for one in sockets.iterdir() if one.name not in others)
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
        descriptor = exporter.descriptor("share")
        assert path.is_socket()
        reader(f"attached = gi.attach({descriptor}, timeout=300); attached.close()")
        exporter("share.close()")
        with pytest.raises(
            Raised, match=r"ResourceClosedError: the share was closed|PeerError: .*closed its last share"
        ):
            reader(f"gi.attach({descriptor})")
        assert {name: (sockets / name).read_text() for name in others} == others


def test_a_time_out_that_a_program_gives_all_sockets_ends_no_link() -> None:
    with pair() as (exporter, reader):
        exporter("socket.setdefaulttimeout(0.05)")
        reader("from tests.host import links; other = links.half_asked(descriptor); gi.attach(descriptor).close()")
        with pytest.raises(Raised, match="BlockingIOError"):  # it is waited for
            reader("other.socket.recv(1, socket.MSG_DONTWAIT)")


def test_a_reader_that_leaves_beside_another_of_its_process_gives_its_place_back() -> None:
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=300); share.release()")
        reader("stays = gi.attach(descriptor)")
        reader("with gi.attach(descriptor) as goes: goes.acquire(timeout=300); goes.release()")
        exporter("share.acquire(timeout=300); share.release()")
        exporter.until("not share.lifetime.handle._writer.reader_timelines")
        assert exporter("leases()") == 1
        reader("stays._side()")  # in the same place
        exporter("server.server().poll()")
        reader("stays.acquire(timeout=300)")
        with pytest.raises(Raised, match="SemaphoreTimeoutError"):
            exporter("share.acquire(timeout=0.1)")
        reader("stays.release()")


def test_a_reader_has_one_place_in_the_order_however_often_it_asks_and_none_once_it_has_detached() -> None:
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=300); share.release(); offer = share.lifetime.handle")
        reader("from gpuinterop.sharing.messages import BLOCKS")
        for last in ("attached.close()", "attached.acquire(timeout=300); attached.release()"):
            reader("attached = gi.attach(descriptor)")
            stop(process := int(exporter("os.getpid()")))
            for _ in range(2):
                with pytest.raises(Raised, match=r"PeerError: .*did not answer"):
                    reader("attached.acquire(timeout=0.1)")
            os.kill(process, signal.SIGCONT)
            reader("attached.lifetime.handle.link.ask(BLOCKS, b'', lambda: 300.0)")  # it has answered both
            assert exporter("len(offer._places)") == 1
            reader(last)
            exporter.until(f"len(offer._places) == {'acquire' in last:d}")
        reader("attached.close()")
        exporter.until("not offer._places")


LATE: Final = """
offer = share.lifetime.handle
take_place, taken = offer.take_place, []

def late(guest, number):
    taken.append(guest)
    while len(taken) == 2 and offers() == 2: pass
    return take_place(guest, number)

offer.take_place = late
"""


def test_a_place_in_the_order_that_its_reader_gave_up_ends_with_the_share() -> None:
    """Also one that is given while the share ends."""
    with pair() as (exporter, reader):
        exporter("share.acquire(timeout=300); share.release(); more = gi.share(array[8:])")
        exporter(LATE)
        reader(f"attached = gi.attach(descriptor); other = gi.attach({exporter.descriptor('more')})")
        stop(process := int(exporter("os.getpid()")))
        for _ in range(2):
            with pytest.raises(Raised, match=r"PeerError: .*did not answer"):
                reader("attached.acquire(timeout=0.1)")
        os.kill(process, signal.SIGCONT)
        exporter.until("len(taken) == 2")
        reader("attached.close()")
        exporter("share.close(timeout=300)")
        assert exporter("leases()") == 1


MESSAGES: Final = int(os.environ.get("GPUINTEROP_TEST_MESSAGES", "40"))
GARBLED: Final = """
from tests.host import links

def tries(count):
    for _ in range(count):
        with contextlib.suppress(gi.GpuInteropError):
            with gi.attach(descriptor, timeout=0.2) as attached:
                attached._side(0.2)
                attached.acquire(timeout=0.2)
                attached.release()
"""


@pytest.mark.parametrize("side", ["exporter", "reader"])
@pytest.mark.timeout(1000 + MESSAGES / 20)
def test_mutated_messages(side: str) -> None:
    """An error of ours or none; the other side serves on, and neither keeps a descriptor."""
    with pair() as (exporter, reader), Shell() as other:
        other(f"array = array(); share = gi.share(array); descriptor = {exporter.descriptor('share')}")
        exporter("gi.device()")
        other("gi.attach(descriptor).close()")
        reader(f"gi.attach(descriptor).close(); gi.attach({other.descriptor('share')}).close()")
        exporter.until("leases() == 0")
        exporter("share.acquire(); share.release()")
        before = exporter("left()"), reader("left()")
        {"exporter": exporter, "reader": reader}[side](f"from tests.host import links; links.mutate({MESSAGES})")
        reader(GARBLED)
        reader(f"tries({MESSAGES})", 60 + MESSAGES)
        if side == "reader":
            other("gi.attach(descriptor).close()")
            exporter.until(f"leases() == 0 and grown({before[0]}) == []")
        else:
            reader(f"gi.attach({other.descriptor('share')}).close()")
            exporter.kill()  # what its other words have promised ends with it
        reader.until(f"grown({before[1]}) == []")


BREAKS: Final = {
    "the reader sends garbage": ("reader", "attached.lifetime.handle.link._connection.socket.send(b'x' * 64); asks()"),
    "the reader gets garbage": (
        "exporter",
        "[guest.connection.socket.send(b'x' * 64) for guest in server.server()._guests]",
    ),
    "the exporter has no memory for an answer": ("exporter", "fails(OSError(errno.ENOMEM, 'none'))"),
    "too many descriptors are on their way": ("exporter", "fails(OSError(errno.ETOOMANYREFS, 'none'))"),
    "the exporter is interrupted": ("exporter", "fails(KeyboardInterrupt())"),
}
"""Which process does what to a link while both of its processes live."""
BREAKING: Final = """
import errno
from gpuinterop.ipc import Connection
from gpuinterop.sharing.messages import BLOCKS
sys.unraisablehook = lambda _: None

def fails(error):
    # The next messages are not sent.
    flush, times = Connection.flush, [0]

    def flushes(one):
        if one._unsent and times[0] < 3:
            times[0] += 1
            raise error
        return flush(one)

    Connection.flush = flushes

def asks():
    with contextlib.suppress(gi.PeerError):
        attached.lifetime.handle.link.ask(BLOCKS, b"", lambda: 0.5).__exit__()
"""


@pytest.mark.parametrize("case", BREAKS)
def test_a_link_that_breaks_while_both_processes_live_ends_neither(case: str) -> None:
    """The exporter keeps waiting for the reader; other readers go on; the reader reads what it has attached."""
    side, breaks = BREAKS[case]
    with pair() as (exporter, reader), Shell() as other:
        other(f"descriptor = {exporter.descriptor('share')}")
        for one in (reader, other):
            one("attached = gi.attach(descriptor); attached.acquire(timeout=300); attached.release()")
        for one in (exporter, reader):
            one(BREAKING)
        reader("attached.acquire(timeout=300)")
        {"exporter": exporter, "reader": reader}[side](breaks)
        if "OSError" in breaks:  # the answer comes once there is room for it
            reader("attached.lifetime.handle.link.ask(BLOCKS, b'', lambda: 300.0).__exit__()")
        else:
            reader("asks()")
        with pytest.raises(Raised, match=r"SemaphoreTimeoutError: .*the reader in process"):
            exporter("share.acquire(timeout=0.1)")
        reader("attached.release()")
        for value in (8, 9):
            exporter(f"with share.write(timeout=300): array[:] = {value}")
            for one in (reader, other):
                one("with attached.read(timeout=300) as view: found = view.to_numpy()")
                assert one("[int(found.min()), int(found.max()), attached.ended]") == [value, value, False]


def test_garbage_in_the_pages() -> None:
    """A reader's counts and its slot, and the sharing process's page of serials, may have any words in them."""
    with pair() as (exporter, reader):
        before = exporter("left()")
        reader("attached = gi.attach(descriptor); attached.acquire(timeout=300); attached.release()")
        reader(
            "for row in attached.lifetime.handle.link.counts.rows[1:]: np.ctypeslib.as_array(row)[:4096] = 0xFFFFFFFF"
        )
        reader("attached.close(); attached = gi.attach(descriptor); turns = attached._side()")
        reader("turns.page.slots[turns._slot] = 2**63 + 5")
        exporter("gi.attach(descriptor).close(); other = gi.share(array); other.close()")
        reader.kill()
        exporter("share.acquire(timeout=300); share.release()")
        exporter("np.ctypeslib.as_array(server.server().me.counts.rows[0])[8:] = 0xFFFFFFFF")
        exporter("share.close(timeout=300)")
        exporter.until(f"offers() == 0 and not [one for one in grown({before}) if 'counts' in one]")
