"""Bad descriptors, shares that are over, arrays that cannot be shared, and processes that are full or fork."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, needs_root, pair

PARTS: Final = """
from gpuinterop.sharing.server import driver_lock
from gpuinterop.sharing.messages import Descriptor
parts = Descriptor.parse(descriptor)

def attaches(given, **changes):
    gi.attach(bytes(parts._replace(**changes)) if given is parts else given, timeout=300).close()

class Image:
    def __init__(self, interface):
        self.__array_interface__ = interface

def shares(given, folder=None):
    if folder is not None:
        os.environ["GPUINTEROP_SHARE_DIR"] = folder
    gi.share(given)
"""
TOUCH: Final = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
base = libc.mmap(None, 3 * 4096, 0, 0x22, -1, 0)
files = [os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in "ab"]
for at, file in enumerate(files):
    os.truncate(file, 2 * 4096)
    os.pwrite(file, bytes([at + 1]) * 2 * 4096, 0)
for at, file, first in ((0, files[0], 0), (4096, files[1], 0), (8192, files[0], 4096)):
    assert libc.mmap(base + at, 4096, 3, 0x11, file, first) == base + at

def at(place):
    return np.ctypeslib.as_array((ctypes.c_uint8 * 4).from_address(base + place))

two = gi.share({"a": at(0), "b": at(4096)})
"""
BAD: Final = [
    ("attaches(descriptor[:-1])", r"InvalidArgumentError: descriptor: expected all of bytes\(share\)"),
    ("attaches(os.urandom(99))", r"InvalidArgumentError: descriptor: expected all of bytes\(share\)"),
    ("attaches(b'GIPS' + bytes([1]) + descriptor[5:])", "InvalidArgumentError: .*expected version 2, got 1; install"),
    ("attaches(parts, boot=bytes(16))", "PeerError: the share .*another host"),
    ("attaches(parts, process=bytes(16))", "PeerError: another process has this address now"),
    ("attaches(parts, serial=99)", "ResourceClosedError: the share was closed"),
    ("attaches(parts, slot=99)", "ResourceClosedError: the share was closed"),
    ("attaches(parts, token=bytes(16))", "PeerError: the token is not this share's"),
    ("attaches(parts, process=bytes(16), address='/gone' + parts.address)", "PeerError: .*is not there"),
    (
        "attaches(parts, process=bytes(16), address='/dev/null')",
        "PeerError: the process that listened at /dev/null has ended",
    ),
    ("attaches(parts, process=bytes(16), address='x' * 255)", "PeerError: .*path too long"),
    ("gi.share(array(), users=5)", "ArgumentTypeError: users"),
    ("shares(array()[1:5].view('f4'))", "InvalidArgumentError: array: .*a multiple of 4, .* for float32"),
    ("shares(np.array([object()]))", "InvalidArgumentError: array: expected an array that DLPack can describe"),
    ("shares({})", "InvalidArgumentError: arrays"),
    ("shares({1: array()})", "ArgumentTypeError: arrays"),
    (r"shares({'\ud800': array()})", "InvalidArgumentError: arrays: .*UTF-8"),
    ("shares(Image({'shape': (3,)}))", "InvalidArgumentError: array"),
    ("shares({'a': array(), 'b': np.ones(4)})", "UnsupportedError: .*'b'"),
    ("shares({'x' * (65 << 20): array()})", "InvalidArgumentError: arrays: .*share them in parts"),
]


@pytest.fixture(scope="module")
def reader() -> Iterator[Shell]:
    with pair() as (_, made):
        made(PARTS)
        made("attaches(descriptor); gi.share(array()).close()")
        yield made


@pytest.mark.parametrize(("code", "words"), BAD)
def test_what_is_refused_leaves_nothing(code: str, words: str, reader: Shell) -> None:
    reader.until("rests()")
    before = reader("left()")
    with pytest.raises(Raised, match=words):
        reader(code)
    reader.until(f"grown({before}) == [] and offers() == 0")
    reader("attaches(descriptor)")


FOLDERS: Final = {
    "/missing": "InvalidArgumentError: GPUINTEROP_SHARE_DIR: expected a folder",
    "/proc/self": r"DriverError: bind\(/proc/",
    "x" * 100: "InvalidArgumentError: GPUINTEROP_SHARE_DIR: expected a path of 107 bytes or fewer",
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_refused(folder: str, tmp_path: Path) -> None:
    """The next share looks for one again."""
    (tmp_path / ("x" * 100)).mkdir()
    with pair() as (_, exporter):
        exporter(PARTS)
        before = exporter("left()")
        with pytest.raises(Raised, match=FOLDERS[folder]):
            exporter(f"shares(array(), {os.fspath(tmp_path / folder)!r})")
        exporter.until(f"grown({before}) == []")
        exporter(f"shares(array(), {os.fspath(tmp_path)!r})")


SHORT = "out of file descriptors (limit 64)", "with a free descriptor?"


@pytest.mark.parametrize("side", ["exporter", "reader"])
def test_full_tables_of_descriptors(side: str) -> None:
    """Whatever is missing: an error of ours, and with room all goes on, for a reader by a new attach."""
    outcomes, limit = set(), 0.5 if side == "exporter" else 300  # such an exporter may not answer
    with pair() as (exporter, reader):
        full = {"exporter": exporter, "reader": reader}[side]
        full("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024)); gi.device()")
        for room in range(12):
            exporter("share = gi.share(array)")  # with an order that is not made yet
            reader(f"attached, descriptor = None, {exporter.descriptor('share')}")
            full(f"fill({room})")
            try:
                reader(f"attached = gi.attach(descriptor, timeout={limit}); attached.acquire()")
                outcomes.add("")
            except Raised as error:
                outcomes.add(next((words for words in SHORT if words in str(error)), str(error)))
            full("clear()")
            reader(
                "attached and attached.close()\nwith gi.attach(descriptor) as attached: attached.acquire(timeout=300)"
            )
            exporter.until("leases() == 0")
            exporter("share.acquire(timeout=300); share.close()")
    assert outcomes == {"", SHORT[0], *(SHORT if side == "exporter" else ())}


@pytest.mark.parametrize("dies", ["exporter", "reader"])
def test_a_child_of_fork_keeps_no_lease(dies: str) -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor, timeout=300); attached._side()")
        parent = {"exporter": exporter, "reader": reader}[dies]
        parent("""if not (child := os.fork()):
            "attached" in scope and attached.close()
            os.close(0), os.close(1), signal.alarm(300), signal.pause()
        """)
        assert exporter("leases()") == 1
        child = parent("child")
        try:
            parent.kill()
            if dies == "reader":
                exporter.until("leases() == 0")
                return
            with pytest.raises((Raised, AssertionError), match="PeerError"):
                reader.until("attached.acquire(timeout=300) or attached.release()")
        finally:
            os.kill(child, 9)


def test_a_child_of_fork_takes_no_lock_that_its_parent_held() -> None:
    with pair() as (_, reader):
        reader(PARTS)
        reader("""def forks():
            global child
            if not (child := os.fork()):
                signal.alarm(300)
                with gi.attach(descriptor), gi.share(array()):
                    os._exit(7)
        """)
        reader("thread = threading.Thread(target=forks)")
        reader("from gpuinterop.sharing.server import server")
        reader("with driver_lock, server._lock, loop._lock: thread.start(); thread.join()")
        assert reader("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == 7


def test_in_one_process() -> None:
    """Attach to an own share, after whose end the share goes on."""
    with pair() as (one, _):
        one("attached = gi.attach(descriptor); attached.acquire(timeout=300); attached.release(); attached.close()")
        one.until("leases() == 0")
        one("share.acquire(timeout=300); share.release()")  # the control page is still the share's
        one("own = gi.attach(descriptor); share.acquire(timeout=300)")
        with pytest.raises(Raised, match="InvalidArgumentError: order: expected ArrayShare"):  # this thread writes
            one("own.acquire(timeout=0.05)")
        one("share.close()")
        assert one("int(np.asarray(own.view).sum(dtype=int))") == 7 * 4096
        one("own.close()")
        one.until("offers() == 0")


def test_what_readers_are_told() -> None:
    """The newest version, by a wait that blocks; the end, whatever arrays are left; and whether a wait was too long."""
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor)")
        reader("with attached.read(timeout=0): pass")  # its first request has attach's time-out
        assert reader("attached.version, attached.wait(newer_than=-1), attached.ended") == [0, 0, False]
        with pytest.raises(Raised, match=r"SemaphoreTimeoutError: AttachedArrays .*newer than 0\b"):
            reader("attached.wait(newer_than=0, timeout=0.01)")
        reader.give("attached.wait(newer_than=1, timeout=300)")
        for version in (1, 2):
            exporter("with share.write(timeout=300) as written: np.asarray(written)[:] = 5")
            assert exporter("share.version") == version
        assert reader.answer() == 2
        reader("reads = attached.read(timeout=300); found = np.asarray(reads.__enter__())")
        exporter("stream = gi.device().create_stream(); share.acquire(stream); share.release(stream)")
        assert reader("attached.version, int(found[0])") == [2, 5]  # the one that it reads
        reader("reads.__exit__(None, None, None)")
        assert reader("attached.wait(newer_than=2, timeout=300)") == 3
        reader.give("attached.wait(newer_than=3, timeout=300)")
        exporter("kept = np.asarray(share.view); share.close()")
        with pytest.raises(Raised, match=r"ResourceClosedError: .*writer"):
            reader.answer()
        assert reader("attached.ended, int(np.asarray(attached.view)[0])") == [True, 5]
        reader("attached.acquire(timeout=300); attached.release()")  # the last version stays
        with pytest.raises(Raised, match="ResourceClosedError: the share was closed"):
            reader("gi.attach(descriptor)")  # though it has all that it needs


def test_each_exit_releases() -> None:
    """Of a `with` after an error or a close, and of an attachment that is dropped: the writer goes on."""
    with pair() as (exporter, reader):
        reader("def fails(then):\n with attached.read(timeout=300): exec(then, globals())")
        for then, error in (("1 / 0", "ZeroDivisionError"), ("attached.close()", ""), ("attached = None", "")):
            reader("attached = gi.attach(descriptor)")
            with pytest.raises(Raised, match=error) if error else nullcontext():
                reader(f"fails({then!r})")
            exporter("share.acquire(timeout=300); share.release()")
        reader("import warnings; warnings.simplefilter('ignore')")
        reader("attached = gi.attach(descriptor); attached.acquire(timeout=300); attached = None; gc.collect()")
        reader("gi.device().drain()")
        exporter("share.acquire(timeout=300); share.release()")
        with pytest.raises(Raised, match="ZeroDivisionError"):
            exporter("with share.write(timeout=300): 1 / 0")
        assert exporter("share.version") == 5


def test_one_share_writes_bytes() -> None:
    """A second one whose bytes overlap is refused each time, until the first is closed; one beside it is not."""
    with Shell() as one:
        one("whole = array(); first, second, beside = (gi.share(whole[at : at + 1024]) for at in (0, 1023, 2048))")
        one("first.acquire(); first.release(); beside.acquire(); beside.release()")
        for _ in range(3):
            with pytest.raises(Raised, match=r"InvalidArgumentError: arrays: .*ArrayShare"):
                one("second.acquire(timeout=20)")
        one(
            "part = gi.share(whole[1100:1200]); part.acquire(timeout=20); part.release(); part.close()"
        )  # of the second
        one("class Interrupt(dict):\n def values(self): raise KeyboardInterrupt")
        one("mine = server.server(); offers, mine.offers = mine.offers, Interrupt()")
        with pytest.raises(Raised, match="KeyboardInterrupt"):  # in the check itself
            one("second.acquire(timeout=20)")
        one("mine.offers = offers")
        with pytest.raises(Raised, match=r"InvalidArgumentError: arrays: .*ArrayShare"):
            one("second.acquire(timeout=20)")
        one("first.close(); second.acquire(); second.release(); second.close(); beside.close()")


def test_memfds_whose_mappings_touch() -> None:
    """An array is of the file that is mapped there, however large the file before it is; a part of one is refused."""
    with pair() as (exporter, reader):
        exporter(TOUCH)
        reader(f"two = gi.attach({exporter.descriptor('two')})")
        assert reader("[int(np.asarray(two[name])[0]) for name in two]") == [1, 2]
        with pytest.raises(Raised, match=r"UnsupportedError: .*host memory"):
            exporter("gi.share(at(8192))")


def test_a_peer_that_keeps_the_control_pages_lock() -> None:
    """Readers of other shares are served, and the share closes."""
    with pair() as (exporter, reader), Shell() as other:
        exporter("another = gi.share(array[:8]); share.acquire(timeout=300)")
        reader("many = [gi.attach(descriptor) for _ in range(20)]; pages = [one._side().page for one in many]")
        reader("import fcntl; held = os.open(f'/proc/self/fd/{pages[0].handle.fd}', os.O_RDWR)")
        reader("fcntl.flock(held, fcntl.LOCK_EX)")
        reader("from gpuinterop.sharing.link import links")
        reader("for one in list(links.values()): one._connection.socket.shutdown(socket.SHUT_RDWR)")
        other(f"gi.attach({exporter.descriptor('another')}, timeout=300).close()")
        exporter("share.close()")
        with pytest.raises(Raised, match="ResourceClosedError"):
            other(f"gi.attach(bytes.fromhex({reader('descriptor.hex()')!r}))")
        reader("os.close(held)")
        exporter("share.close(timeout=300); another.close()")


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR", "GPUINTEROP_SHARE_DIR"])
@pytest.mark.parametrize("whose", ["others can write it", pytest.param("another user's", marks=needs_root)])
def test_a_folder_that_is_not_only_this_users_is_refused(variable: str, whose: str) -> None:
    with tempfile.TemporaryDirectory() as place, Shell(
        **{"TMPDIR": "", "GPUINTEROP_SHARE_DIR": "", "XDG_RUNTIME_DIR": "", variable: place}
    ) as shell:  # fmt: skip
        folder = Path(place, f"gpuinterop-{os.geteuid()}") if variable == "TMPDIR" else Path(place)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700 if whose == "another user's" else 0o720)
        os.chown(folder, 1234 if whose == "another user's" else -1, -1)
        for call in ("gi.share(array())", "gi.publish('camera', 4)", "gi.subscribe('camera', timeout=0)"):
            with pytest.raises(Raised, match=rf"InvalidArgumentError: .*'{folder}' to be a folder of user"):
                shell(call)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("call", ["gi.share(array())", "gi.publish('camera', 4)", "gi.subscribe('camera', timeout=0)"])
@pytest.mark.parametrize("tempdir", ["/proc/self", "missing"])
def test_without_a_folder_to_write_to_the_error_names_the_variable(call: str, tempdir: str) -> None:
    with Shell(GPUINTEROP_SHARE_DIR="", XDG_RUNTIME_DIR="") as shell:
        shell("import errno, tempfile")
        shell(
            f"tempfile.tempdir = {tempdir!r}"
            if tempdir != "missing"
            else """
def gettempdir(): raise FileNotFoundError(errno.ENOENT, "no usable one")
tempfile.gettempdir = gettempdir
"""
        )
        with pytest.raises(Raised, match=r"DriverError: .* set GPUINTEROP_SHARE_DIR to a folder"):
            shell(call)


def test_a_busy_exporter_keeps_its_socket(sockets: Path) -> None:
    """Only a socket that nobody listens at is tidied away."""
    path = sockets / "gpuinterop-busy.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waits, Shell() as exporter:
        listener.bind(os.fspath(path))
        listener.listen(0)
        waits.connect(os.fspath(path))  # there is no more room
        exporter("gi.share(array()).close()")
        assert path.exists()


def test_a_process_that_looks_for_dead_sockets_connects_to_no_live_one(sockets: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, Shell() as exporter:
        listener.bind(os.fspath(sockets / "gpuinterop-live.sock"))
        listener.listen()
        listener.setblocking(False)
        exporter("gi.share(array()).close()")
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("side", ["exporter", "reader"])
def test_a_close_beside_an_acquire_that_waits(side: str) -> None:
    with pair() as (exporter, reader):
        reader("attached = gi.attach(descriptor); attached.acquire(); attached.release()")
        one, other, name = {"exporter": (exporter, reader, "share"), "reader": (reader, exporter, "attached")}[side]
        other(f"{'attached' if side == 'exporter' else 'share'}.acquire()")
        one(f"turns, waits = {name}._side(), ThreadPoolExecutor(1).submit({name}.acquire)")
        one.until("turns.inside")
        one(f"{name}.close()")
        one.until("isinstance(waits.exception(5), gi.ResourceClosedError)")  # though the other side is still in
