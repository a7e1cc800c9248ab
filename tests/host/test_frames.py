"""Frames by name, between processes: what readers see, who may publish, and what deaths and ends leave."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell

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
    writer("warnings.simplefilter('error'); camera._share._turns()._warned = False")
    reader("frame = camera.latest() or frame")
    with pytest.raises(Raised, match=r"RuntimeWarning: .* 2 slots, all in use; the writer waits for .*the reader in"):
        writer("write(4); write(5)")
    reader("del frame; camera.close()")
    writer("write(6)")


def test_the_writer_takes_the_first_slot_that_is_free(writer: Shell, reader: Shell) -> None:
    """The one that was published longest ago; with one too few, whichever of two readers gives its slot back first."""
    taken = "[(write(5), camera._share._turns().taken)[1] for _ in range(6)]"
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
    writer("refused = None; loop()._look()")
    writer("np.asarray(frame)[:] = 7; writes.__exit__(None, None, None)")
    assert reader("watch(1)") == [[7, 2, 0, False]]
    writer("writes = camera.write(); writes.__enter__(); del writes")
    writer.until("not camera._share._turns().inside")
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
        while frame is not None and frame.f_code.co_name != "_found":
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
    assert reader("watch(2)[-1]") == [3, 4, 2, False]
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
        file = sockets / "gpuinterop-camera.frames"
        file.unlink()  # as a cleaner of temporary files does
        writer(PUBLISH)
        other("camera.close()")
        assert file.exists()


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
    frame = await camera.next(timeout=300)
    with frame.read() as picture:
        found = [frame.number, int(np.asarray(picture)[0])]
    try:
        await camera.next(timeout=0.01)
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
