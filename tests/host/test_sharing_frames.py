"""Frames by name, between processes: what readers see, who may publish, and what deaths and ends leave."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from gpuinterop import system
from tests.limits import LIMIT

from .shells import Raised, Shell, needs_root, stop

POINTS: Final = int(os.environ.get("GPUINTEROP_TEST_DEATHS", "10"))
PUBLISH: Final = "camera = gi.publish('camera', 1 << 16, 'int64')"
FRAMES: Final = """
def write(value):
    with camera.write(timeout=300) as frame:
        np.asarray(frame)[:] = value

def film(first):
    for value in range(first, first + 1_000_000):
        write(value)

def watch(count):
    # The values that frames had; each is whole.
    for frame in camera:
        with frame.read(timeout=300) as picture:
            values = np.asarray(picture)
            value = int(values[0])
            assert (values == value).all()
        seen.append((value, frame.number, frame.dropped, frame.restarted))
        if len(seen) == count:
            break
    return seen

import atexit
seen, camera = [], None
atexit.register(lambda: camera and camera.close())
"""


@pytest.fixture
def writer(sockets: Path) -> Iterator[Shell]:
    with Shell() as found:
        found(FRAMES)
        found(PUBLISH)
        yield found


@pytest.fixture
def reader(writer: Shell) -> Iterator[Shell]:
    with Shell() as found:
        found(FRAMES)
        found("camera = gi.subscribe('camera', timeout=3000)")
        yield found


def test_newest_wins_and_a_slow_reader_holds_nobody_up(writer: Shell, reader: Shell) -> None:
    """A reader that keeps a frame keeps its bytes; another one sees each frame meanwhile; nobody waits."""
    with Shell() as slow:
        slow("camera = gi.subscribe('camera', timeout=300)")
        writer("write(5); write(6)")
        slow("frame = camera.latest(); reads = frame.read(); picture = np.asarray(reads.__enter__())")
        with pytest.raises(Raised, match="ValueError: assignment destination is read-only"):
            slow("picture[0] = 1")
        assert slow("frame.number, int(picture.sum()), camera.latest()") == [2, 6 << 16, None]
        for value in range(7, 50):
            writer(f"write({value})")
            assert reader(f"watch({value - 6})[-1]") == [value, value - 4, 0, False]
        assert slow("int(picture.sum())") == 6 << 16
        slow("reads.__exit__(None, None, None)")
        assert slow("[(frame := camera.next(timeout=300)).number, frame.dropped]") == [45, 42]
        with pytest.raises(Raised, match=r"InvalidArgumentError: frame: .*got 2\b"):
            slow("with reads: pass")


def test_too_few_slots(writer: Shell, reader: Shell) -> None:
    """The writer waits, and says for whom: for a reader that has a frame, and for a stream that reads one."""
    writer("camera.close(); camera = gi.publish('camera', 1 << 16, 'int64', slots=2)")
    reader("camera.close(); camera = gi.subscribe('camera')")
    writer("write(1)")
    reader("stream = gi.device().create_stream(); gate = gi.device().create_semaphore(gi.TimelineFd)")
    reader("frame = camera.next(timeout=300)")
    writer("write(2)")
    for held in ("", "gate.wait(stream, 1)\nwith frame.read(stream): pass"):
        reader(held or "pass")
        writer("import warnings; warnings.simplefilter('ignore')")
        with pytest.raises(Raised, match=rf"SemaphoreTimeoutError: .*the reader in process {reader('os.getpid()')}"):
            writer("with camera.write(timeout=0.05): pass")
    writer.give("write(3)")
    reader("gate.host_signal(1)")
    writer.answer()
    writer("write(4)")
    reader("frame = camera.next(timeout=300)")  # and never reads it
    reader.give("frame = camera.next(timeout=300)")
    writer("write(5); write(6)")
    reader.answer()
    writer("warnings.simplefilter('error'); camera._share._side()._warned = False")
    reader("frame = camera.latest() or frame")
    with pytest.raises(Raised, match=r"RuntimeWarning: .* 2 slots, all in use; the writer waits for .*the reader in"):
        writer("write(4); write(5)")
    reader("del frame; camera.close()")
    writer("write(6)")


def test_the_writer_takes_the_first_slot_that_is_free(writer: Shell, reader: Shell) -> None:
    """The one that was published longest ago; with one too few, whichever of two readers gives its slot back first."""
    taken = "[(write(5), camera._share._side().buffer)[1] for _ in range(6)]"
    assert writer(taken) == [1, 0, 2, 1, 0, 2]
    with Shell() as slow:
        slow("camera = gi.subscribe('camera'); reads = camera.next(timeout=300).read(); picture = reads.__enter__()")
        writer("write(6)")
        reader("reads = camera.next(timeout=300).read(); reads.__enter__()")
        writer("write(7)")
        writer("import warnings; warnings.simplefilter('ignore')")
        writer.give("write(8)")
        reader("reads.__exit__(None, None, None)")
        writer.answer()
        slow("reads.__exit__(None, None, None); camera.close()")


def test_a_stream_that_writes_waits_for_the_newest_slots_reader(writer: Shell, reader: Shell) -> None:
    """A reader whose stream is stuck has an older one."""
    reads = """stream, gate = gi.device().create_stream(), gi.device().create_semaphore(gi.TimelineFd)
gate.wait(stream, 1)
with camera.next(timeout=300).read(stream): pass"""
    writer("import warnings; warnings.simplefilter('ignore'); stream = gi.device().create_stream()")
    with Shell() as stuck:
        stuck("camera = gi.subscribe('camera')")
        for value, one in enumerate((stuck, reader)):
            writer(f"write({value})")
            one(reads)
        writer("write(2)")
        writer("with camera.write(stream): pass")
        reader("gate.host_signal(1)")
        writer("stream.synchronize(timeout=300)")
        stuck("gate.host_signal(1); stream.synchronize(timeout=300); camera.close()")


def test_a_late_frame_stays_claimed(writer: Shell, reader: Shell) -> None:
    writer("stream, gate = gi.device().create_stream(), gi.device().create_semaphore(gi.TimelineFd)")
    writer("gate.wait(stream, 1)\nwith camera.write(stream): pass")
    reader("frame, stream = camera.next(timeout=300), gi.device().create_stream()")
    with pytest.raises(Raised, match=r"SemaphoreTimeoutError: Subscription .* was not free in time: the writer"):
        reader("frame.read(stream, timeout=0.02).__enter__()")
    writer("gate.host_signal(1)")
    reader("with frame.read(stream, timeout=300): pass")


def test_what_a_dropped_with_releases(writer: Shell, reader: Shell) -> None:
    """Its own turn, as after an interrupt; one that was refused has none, and ends nobody else's."""
    writer("writes = camera.write(); writes.__enter__(); refused = camera.write()")
    with pytest.raises(Raised, match=r"InvalidArgumentError: order: .* Publisher .*; call release"):
        writer("refused.__enter__()")
    writer("writes.__exit__(None, None, None); writes = camera.write(); frame = writes.__enter__()")
    writer("refused = None; loop()._poll()")
    writer("np.asarray(frame)[:] = 7; writes.__exit__(None, None, None)")
    assert reader("watch(1)") == [[7, 2, 0, False]]
    writer("writes = camera.write(); writes.__enter__(); del writes")
    writer.until("not camera._share._side().inside")
    writer("write(8)")
    assert reader("watch(2)[-1][0]") == 8


def test_a_close_while_it_waits_for_another_writer(writer: Shell, reader: Shell) -> None:
    writer("write(1)")
    reader("thread = threading.Thread(target=watch, args=(9,)); thread.start()")
    reader.until("len(seen) == 1")
    writer.kill()
    reader.until("camera.ended")
    with pytest.raises(Raised, match=r"PeerError: .*'camera'"):
        reader("camera.next(timeout=0.01)")
    reader("""def looks_for_one():
        frame = sys._current_frames()[thread.ident]
        while frame is not None and frame.f_code.co_name != "_attach":
            frame = frame.f_back
        return frame is not None
    """)
    reader.until("looks_for_one()")
    reader("camera.close(); thread.join(300)")  # of the 3000 seconds that it may wait
    assert not reader("thread.is_alive()")


def test_a_frame_that_is_given_up_is_never_seen(writer: Shell, reader: Shell) -> None:
    writer("write(1)")
    with pytest.raises(Raised, match="ZeroDivisionError"):
        writer("with camera.write() as frame: np.asarray(frame)[:9] = 2; 1 / 0")
    with pytest.raises(Raised, match="ResourceClosedError"):
        writer("stream = gi.device().create_stream()\nwith camera.write(stream): stream.close()")
    assert reader("watch(1)") == [[1, 1, 0, False]]
    assert reader("camera.latest()") is None
    writer("write(3)")
    assert reader("watch(2)[-1]") == [3, 2, 0, False]  # it has neither a number nor a place among those missed
    writer("writes = camera.write(); np.asarray(writes.__enter__())[:9] = 4")
    writer.kill()
    reader.until("camera.ended")
    with pytest.raises(Raised, match=r"PeerError: .*'camera'"):
        reader("camera.latest()")


def test_the_end(writer: Shell, reader: Shell) -> None:
    """A reader takes the last frame, and is told then; one that waits is told at once, whatever arrays are left."""
    writer("write(1)")
    reader("watch(1)")
    reader.give("watch(9)")
    writer("write(2); kept = np.asarray(camera._views[0]); camera.close()")  # at once
    assert reader.answer() == [[1, 1, 0, False], [2, 2, 0, False]]
    assert reader("camera.ended")
    for call in ("camera.latest()", "camera.next(timeout=300)"):
        with pytest.raises(Raised, match=r"ResourceClosedError: .*writer"):
            reader(call)
    with pytest.raises(Raised, match=r"PeerError: .*'camera'"):
        reader("gi.subscribe('camera', timeout=0)")
    with pytest.raises(Raised, match="ResourceClosedError"):
        writer("write(3)")


def test_names(writer: Shell, sockets: Path) -> None:
    with Shell() as other:
        for name in ("", "a/b", "a" * 101, "ä", "a b"):
            with pytest.raises(Raised, match="InvalidArgumentError: name: expected up to 100 letters"):
                other(f"gi.publish({name!r}, 4)")
        for one in (writer, other):
            with pytest.raises(Raised, match="ResourceBusyError: 'camera' is published already"):
                one("gi.publish('camera', 4)")
        writer("camera.close()")
        assert not list(sockets.glob("*.frames"))
        other("camera = gi.publish('camera', 4)")
        other("child = os.fork() or signal.pause()")
        other("camera.close()")
        writer(PUBLISH)  # a child of the last writer keeps nothing
        writer("camera.close()")
        other("os.kill(child, signal.SIGKILL); os.waitpid(child, 0); camera = gi.publish('camera', 4)")


def test_a_name_whose_file_a_cleaner_removes(writer: Shell, reader: Shell, sockets: Path) -> None:
    """It comes back. If another process was quicker, the writer is told."""
    file = sockets / "gpuinterop-camera.frames"
    file.unlink()
    assert system.until(file.exists, LIMIT)
    with Shell() as other:
        with pytest.raises(Raised, match="ResourceBusyError: 'camera' is published already"):
            other("gi.publish('camera', 4)")
        other("viewer = gi.subscribe('camera', timeout=300)")
        writer("write(5)")
        assert other("viewer.next(timeout=300).number") == 1
        writer("checks = dict(loop().on_pass); loop().on_pass.clear()")  # its loop is late
        file.unlink()
        other("camera = gi.publish('camera', 4)")
        writer("loop().on_pass.update(checks); loop().wake()")
        writer("""def is_told():
            try: write(6)
            except gi.ResourceBusyError as error: return "'camera'" in str(error)
        """)
        writer.until("is_told()")
        writer("camera.close()")
        assert file.exists()


def test_a_loop_that_looks_at_a_name_after_its_close(writer: Shell, sockets: Path) -> None:
    """It leaves the file and its descriptor's number alone, which may be another file's by then."""
    writer("checks = list(loop().on_pass); camera.close(); other = os.memfd_create('other')")
    writer("for check in checks: check()")
    assert not list(sockets.glob("*.frames"))


def test_a_name_whose_file_cannot_be_written_again_at_once(writer: Shell, sockets: Path) -> None:
    """For want of space, for example: the next pass tries again, and keeps no descriptor of this one."""
    writer("checks = list(loop().on_pass); loop().on_pass.clear(); count = len(os.listdir('/proc/self/fd'))")
    (sockets / "gpuinterop-camera.frames").unlink()
    writer("limits = resource.getrlimit(resource.RLIMIT_FSIZE); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)")
    writer("resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))")
    with pytest.raises(Raised, match=r"DriverError: .*EFBIG"):
        writer("for check in checks: check()")
    writer("resource.setrlimit(resource.RLIMIT_FSIZE, limits)")
    writer("for check in checks: check()")
    assert writer("len(os.listdir('/proc/self/fd')) == count")
    with Shell() as other:
        other("gi.subscribe('camera', timeout=300).close()")


def test_who_looks_at_a_names_lock_is_no_writer(writer: Shell, sockets: Path) -> None:
    """However long it looks: who publishes waits for it."""
    writer("import fcntl; camera.close()")
    writer(f"held = os.open({os.fspath(sockets / 'gpuinterop-camera.frames')!r}, os.O_CREAT)")
    writer("fcntl.flock(held, fcntl.LOCK_SH)")
    with Shell() as other:
        other("""
from gpuinterop.sharing import frames, names
unlocks, waits = names.flock, []

def meets(*given):
    waits.append(given)
    unlocks(*given)

names.flock, frames.remove_unlocked = meets, lambda place: None
published = ThreadPoolExecutor(1).submit(gi.publish, "camera", 4)
""")
        other.until("waits")
        writer("os.close(held)")
        other("published.result(300).close()")


def test_names_of_killed_writers_are_removed(sockets: Path) -> None:
    for call in ("camera = gi.publish('new', 4)", "gi.subscribe('other', timeout=0)"):
        with Shell() as writer, Shell() as other:
            writer("cameras = [gi.publish(name, 4) for name in ('one', 'two')]; cameras[1].close()")
            other("beside = gi.publish('beside', 4)")
            writer.kill()
            with pytest.raises(Raised, match="PeerError") if "subscribe" in call else nullcontext():
                other(call)
            names = (
                {"gpuinterop-beside.frames", "gpuinterop-new.frames"} if "new" in call else {"gpuinterop-beside.frames"}
            )
            assert {one.name for one in sockets.glob("*.frames")} == names
            other("beside.close()")


FILES: Final = {
    "a pipe": ("os.mkfifo(path)", "InvalidArgumentError: name: expected .*, got prw"),
    "a link to a device": ("os.symlink('/dev/zero', path)", "DriverError: .*ELOOP"),
    "a folder": ("os.mkdir(path)", "InvalidArgumentError: name: .*got drw|DriverError: .*EISDIR"),
}


@pytest.mark.parametrize("file", [*FILES, pytest.param("another user's", marks=needs_root)])
def test_a_file_in_the_place_of_a_name(sockets: Path, file: str) -> None:
    """It is refused at once, and nothing is written to it."""
    make, words = FILES.get(file, ("open(path, 'w').close(); os.chown(path, 1234, -1)", "name: .*of user 1234"))
    with Shell() as shell:
        shell(f"path = {os.fspath(sockets / 'gpuinterop-camera.frames')!r}")
        shell(make)
        for call in ("gi.subscribe('camera', timeout=300)", "gi.publish('camera', 4)"):
            with pytest.raises(Raised, match=words):
                shell(call)
        assert (sockets / "gpuinterop-camera.frames").is_symlink() or shell("os.path.getsize(path)") in (0, 4096)


def test_a_killed_writers_longer_descriptor_leaves_no_byte_in_the_next_ones(sockets: Path) -> None:
    """It was killed after the next writer had removed the files of killed ones."""
    with Shell() as writer, Shell() as other:
        writer("from gpuinterop.sharing import frames; frames.remove_unlocked = lambda place: None")
        (sockets / "gpuinterop-camera.frames").write_bytes(bytes(3000))
        writer("camera = gi.publish('camera', 4)")
        other("gi.subscribe('camera', timeout=300).close()")
        writer("camera.close()")


WHY: Final = {
    "none": ("camera.close()", "expected a process that publishes 'camera', got none; start one"),
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "expected a process that publishes 'camera', got none; start one",
    ),
    "stopped": ("pass", "'camera' is published, .*did not answer"),
    "out of descriptors": (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024)); fill(0)",
        "'camera' is published, .*(did not answer|in the sharing process: .*descriptors)",
    ),
    "full": (
        "import gpuinterop.sharing.shares as shares; shares.SLOTS = 0",
        "'camera' is published, .*expected 0 readers or fewer",
    ),
}


@pytest.mark.parametrize("case", WHY)
def test_why_there_are_no_frames(writer: Shell, case: str) -> None:
    does, words = WHY[case]
    with Shell() as viewer:
        viewer("gi.device()")
        if case == "killed":
            writer.kill()
        else:
            writer(does)
        if case == "stopped":
            stop(int(writer("os.getpid()")))
        with pytest.raises(Raised, match=f"PeerError: {words}"):
            viewer("gi.subscribe('camera', timeout=0.2)")
        if case == "out of descriptors":
            writer("clear()")


TOUCHES: Final = """
def child(touch):
    # What a forked child gets that uses its parent's subscription.
    read, write = os.pipe()
    if not (pid := os.fork()):
        signal.alarm(300)
        try:
            got = repr(eval(touch))
        except BaseException as error:
            got = type(error).__name__
        gc.collect()
        os.write(write, got.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read) as found:
        return found.read()

frame = None
"""


def test_a_forked_child_touches_nothing_of_its_parent(writer: Shell, reader: Shell) -> None:
    """The parent's frame stays whole, and the writer's slots stay free, whatever the child calls or drops."""
    reader(TOUCHES)
    writer("write(1)")
    reader("frame = camera.next(timeout=300); reads = frame.read(); before = reads.__enter__()")
    for value, touch in enumerate(
        (
            *("camera.latest()", "camera.next(timeout=300)", "next(camera)", "camera._reader.claim(0)"),
            *("frame.read().__enter__()", "reads.__exit__(None, None, None)", "camera.close()"),
            *("globals().update(reads=None, frame=None, camera=None)", "camera._reader.unclaim()"),
        ),
        start=2,
    ):
        got = reader(f"child({touch!r})")
        assert got in ("None", "ResourceClosedError", "StopIteration"), (touch, got)
        for _ in range(4):
            writer(f"write({value})")
        assert reader("[int(before.to_numpy().min()), int(before.to_numpy().max())]") == [value - 1] * 2
        reader("reads.__exit__(None, None, None)")
        reader("frame = camera.next(timeout=300); reads = frame.read(); before = reads.__enter__()")
    reader("reads.__exit__(None, None, None)")


def test_a_forked_child_does_not_end_what_its_parent_writes(writer: Shell, reader: Shell) -> None:
    writer(TOUCHES)
    writer("write(1); writes = camera.write(); before = writes.__enter__()")
    assert writer("child('globals().update(writes=None, camera=None)')") == "None"
    assert reader("watch(1)") == [[1, 1, 0, False]]
    writer("share = gi.share(array()); writes = share.write(); writes.__enter__()")
    reader(f"attached = gi.attach({writer.descriptor('share')})")
    assert writer("child('globals().update(writes=None, share=None)')") == "None"
    with pytest.raises(Raised, match="SemaphoreTimeoutError"):
        reader("attached.acquire(timeout=0.1)")
    writer("writes.__exit__(None, None, None)")
    reader("with attached.read(timeout=300): pass")


def test_a_coroutine_waits_anew_for_each_writer(writer: Shell, reader: Shell) -> None:
    """After a second death as long as after the first."""
    reader("import asyncio; camera._timeout = 1000.0; thread = ThreadPoolExecutor(1)")
    writer("write(1)")
    reader("watch(1); waits = thread.submit(lambda: asyncio.run(camera.__anext__()))")
    writer.kill()
    reader.until("camera.ended")
    with Shell() as second:
        second(FRAMES)
        second(PUBLISH)
        reader.until("not camera.ended")
        reader("camera._timeout = 0.0")
        second.kill()
    with pytest.raises(Raised, match="PeerError"):
        reader("waits.result(300)", limit=300)


def test_coroutines(writer: Shell, reader: Shell, tmp_path: Path) -> None:
    """`await` lets other tasks run; so does ``async for``, which ends; a time-out is told."""
    os.mkfifo(ticks := tmp_path / "ticks")  # open() waits there for the other side, and read() until it closes
    reader(f"ticks = {str(ticks)!r}")
    reader("""
import asyncio
async def both():
    number, told_at = 0, 100
    async def tick():
        nonlocal number
        while True:
            number += 1
            if number == told_at:
                open(ticks, "w").close()
            await asyncio.sleep(0)
    ticker = asyncio.create_task(tick())
    frame = await camera.next_async(timeout=300)
    with frame.read() as picture:
        found = [frame.number, int(np.asarray(picture)[0])]
    try:
        await camera.next_async(timeout=0.01)
    except gi.SemaphoreTimeoutError:
        found.append("late")
    told_at = number + 100
    async for frame in camera:
        found.append(frame.number)
    ticker.cancel()
    return found
""")
    reader.give("asyncio.run(both())")
    hundred = f"with open({str(ticks)!r}) as told: told.read()"
    writer(hundred)
    writer("write(7)")
    writer(hundred)
    writer("write(8); camera.close()")
    assert reader.answer() == [1, 7, "late", 2]


def test_a_name_that_its_writer_gives_up_while_another_takes_it(writer: Shell) -> None:
    """The other has opened the file, which is then gone: it makes one that readers find."""
    writer("""from gpuinterop.sharing import frames, names
takes, before = names.take_lock, camera

def late(file):
    names.take_lock = takes
    before.close()
    return takes(file)

names.take_lock, frames.remove_unlocked = late, lambda place: None  # which looks at the lock first
    """)
    writer(PUBLISH)
    writer("write(5)")
    with Shell() as other:
        other(FRAMES)
        other("camera = gi.subscribe('camera', timeout=300)")
        assert other("watch(1)") == [[5, 1, 0, False]]


def test_a_closed_subscription_leaves_its_place_to_the_next_reader(writer: Shell, reader: Shell) -> None:
    """Whatever is called on it: the next one's frame stays whole."""
    writer("write(1)")
    reader("frame = camera.next(timeout=300); camera.close()")
    writer.until("not camera._share.lifetime.handle._places")
    with Shell() as other:
        other("camera = gi.subscribe('camera'); frame = camera.next(timeout=300)")
        with pytest.raises(Raised, match="StopIteration"):
            reader("next(camera)")
        writer("for value in range(2, 9): write(value)")
        other("reads = frame.read(); picture = np.asarray(reads.__enter__())")
        assert other("[int(picture.min()), int(picture.max())]") == [1, 1]
        other("reads.__exit__(None, None, None); camera.close()")


WAITS: Final = "task = tasks.create_task(waits({})); tasks.run_until_complete(asyncio.sleep(0))"


@pytest.mark.parametrize(
    ("wait", "end"),
    [
        ("with contextlib.suppress(gi.SemaphoreTimeoutError): camera.next(timeout=0)", "camera.latest().number"),
        (WAITS.format("camera.next_async"), "tasks.run_until_complete(task)"),
        (WAITS.format("camera.__anext__"), "tasks.run_until_complete(task)"),
    ],
    ids=["thread", "await", "async for"],
)
def test_who_waits_keeps_no_slot(writer: Shell, reader: Shell, wait: str, end: str) -> None:
    """Two are enough for the writer, also if the one that waits does not look for a while."""
    writer("camera.close(); camera = gi.publish('camera', 1 << 16, 'int64', slots=2)")
    reader("camera.close(); camera = gi.subscribe('camera')")
    reader("import asyncio; tasks = asyncio.new_event_loop(); atexit.register(tasks.close)")
    reader("async def waits(call): return (await call()).number")
    writer("write(1)")
    reader("frame = camera.next(timeout=300)")
    reader(wait)
    writer("write(2); write(3)")
    assert reader(end) == 3


@pytest.mark.parametrize("call", ["camera.next(timeout=0.2)", "asyncio.run(waits())"])
def test_a_time_out_of_next_ends_it_after_the_writer_has_exited(writer: Shell, reader: Shell, call: str) -> None:
    """Also if `subscribe` has none."""
    reader("camera.close(); camera = gi.subscribe('camera', timeout=None)")
    reader("import asyncio\nasync def waits(): await camera.next_async(timeout=0.2)")
    writer("write(1)")
    reader("watch(1)")
    writer.kill()
    reader.until("camera.ended")
    with pytest.raises(Raised, match=r"(PeerError|SemaphoreTimeoutError): .*'camera'"):
        reader(call)


def test_another_writer_begins_anew(writer: Shell, reader: Shell) -> None:
    """A reader that has taken the first one's ninth frame takes the next one's first, and keeps only its memory."""
    writer("for value in range(9): write(value)")
    assert reader("watch(1)") == [[8, 9, 0, False]]
    writer.kill()
    with Shell() as other:
        other(FRAMES)
        other(PUBLISH)
        other("write(7)")
        assert reader("watch(2)[1]") == [7, 1, 0, True]
        other("write(8)")
        assert reader("watch(3)[2]") == [8, 2, 0, False]
        reader.until("sum('gpuinterop.allocation' in line for line in open('/proc/self/maps')) == 1")


def test_deaths(sockets: Path) -> None:
    """Writers are killed at many points, and take over from each other; readers are killed, too. All others go on."""
    pick = random.Random(7)
    with Shell() as reader:
        reader(FRAMES)
        reader(f"""def watches():
            global camera
            camera = gi.subscribe("camera", timeout=300)
            with contextlib.suppress(gi.PeerError):
                watch({1 << 40})
        """)
        reader("thread = threading.Thread(target=watches); thread.start()")
        for turn in range(POINTS):
            with Shell() as writer, Shell() as other:
                writer(FRAMES)
                other(FRAMES)
                writer(PUBLISH)  # the file of the one that was killed is still there
                writer.give(f"film({turn} * 1_000_000)")
                other("camera = gi.subscribe('camera', timeout=300)")
                other.give(f"watch({1 << 40})")
                for killed in (other, writer):
                    now = reader("len(seen)")
                    goal = now + pick.randrange(100)
                    reader.until(f"len(seen) > {goal}")
                    killed.kill()
        seen = reader("camera.close() or thread.join(300) or seen")
    assert [value // 1_000_000 for value, *_, restarted in seen if restarted] == [*range(1, POINTS)]
    for (before, *_), (value, number, dropped, restarted) in pairwise(seen):
        assert number == value % 1_000_000 + 1
        assert restarted or (value > before and dropped == value - before - 1)


def test_a_hundred_readers(writer: Shell) -> None:
    with ExitStack() as scope:
        shells = [scope.enter_context(Shell()) for _ in range(4)]
        for one in shells:
            one("cameras = [gi.subscribe('camera') for _ in range(25)]")
        writer("write(1)")
        for one in shells:
            one("taken = [each.next(timeout=300) for each in cameras]")
        for value in (2, 3, 4):
            writer(f"write({value})")
        for one in shells:
            one("""for frame in taken:
                with frame.read(timeout=300) as picture:
                    assert (np.asarray(picture) == 1).all()
            """)
            assert one("[each.latest().number for each in cameras]") == [4] * 25
            one("for each in cameras: each.close()")
