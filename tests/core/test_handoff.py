"""The order of a handoff, and the values behind it."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.handoff import HandoffStep
from tests.limits import LIMIT

from .fake import FakeBackend


def test_a_timeline_serves_both_directions(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as timeline:
        handoff = gi.Handoff(timeline)
        assert handoff.mode == "timeline"
        for frame in range(3):
            assert handoff.next_submit() == HandoffStep(frame, 2 * frame if frame else None, 2 * frame + 1)
            handoff.acquire(stream)
            assert backend.calls[-1][2] == (2 * frame + 1,)
            handoff.release(stream)
            assert backend.calls[-1][2] == (2 * frame + 2,)
        assert handoff.frame == 3


def test_binary_takes_one_each_way(device: gi.Device, backend: FakeBackend) -> None:
    with (
        device.create_stream() as stream,
        device.import_semaphore(gi.OpaqueWin32(handle=8)) as to_compute,
        device.import_semaphore(gi.OpaqueWin32(handle=9)) as to_graphics,
    ):
        handoff = gi.Handoff(to_compute, to_graphics)
        assert handoff.mode == "binary"
        assert handoff.next_submit() == HandoffStep(0, None, 0)
        handoff.acquire(stream, timeout=LIMIT)
        handoff.release(stream)
        assert [call[0] for call in backend.calls[-2:]] == ["wait", "signal"]
        assert handoff.next_submit() == HandoffStep(1, 0, 0)


@pytest.mark.parametrize("tracks", [True, False])
def test_out_of_turn_raises_and_enqueues_nothing(device: gi.Device, backend: FakeBackend, tracks: bool) -> None:
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as timeline:
        handoff = gi.Handoff(timeline, tracks_submits=tracks)
        count, name = len(backend.calls), re.escape(timeline.label)
        if tracks:
            refused = f"^handoff: .*next_submit .*frame 0 of {name}.* acquire;"
            with pytest.raises(gi.InvalidArgumentError, match=refused):
                handoff.acquire(stream)
            handoff.next_submit()
        with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*(acquire .* next_submit;|tracks_submits)"):
            handoff.next_submit()
        refused = f"^handoff: .*acquire .*frame 0 of {name}.* release;"
        with pytest.raises(gi.InvalidArgumentError, match=refused):
            handoff.release(stream)
        assert len(backend.calls) == count
        handoff.acquire(stream)
        refused = f"^handoff: .*release .*frame 0 of {name}.* acquire;"
        with pytest.raises(gi.InvalidArgumentError, match=refused):
            handoff.acquire(stream)
        handoff.release(stream)
        assert [call[0] for call in backend.calls[count:]] == ["wait", "signal"]
        assert repr(handoff).endswith(f": frame 1 is due for {'submit' if tracks else 'acquire'}>")
    assert repr(handoff) == f"<Handoff of {timeline.label} closed>"
    with pytest.raises(gi.ResourceClosedError, match=f"^{name} is closed"):  # whatever its turn
        handoff.release(stream)


def test_semaphores_that_do_not_fit_are_refused(device: gi.Device) -> None:
    with (
        device.import_semaphore(gi.OpaqueWin32(handle=8)) as binary,
        device.import_semaphore(gi.TimelineWin32(handle=9)) as timeline,
        device.import_semaphore(gi.KeyedMutex(handle=9)) as keyed,
    ):
        for other in (None, 3, gi.TimelineWin32):
            with pytest.raises(gi.ArgumentTypeError, match="ExternalSemaphore") as caught:
                gi.Handoff(other)  # type: ignore[arg-type]
            assert caught.value.argument == "to_compute"
            if other is not None:
                with pytest.raises(gi.ArgumentTypeError, match="ExternalSemaphore") as caught:
                    gi.Handoff(binary, other)  # type: ignore[arg-type]
                assert caught.value.argument == "to_graphics"
        for wrong in ((binary,), (binary, timeline), (binary, binary), (timeline, binary), (keyed,), (3,)):
            with pytest.raises(gi.InvalidArgumentError, match=r"to_compute|to_graphics"):
                gi.Handoff(*wrong)


# -- over a timeline that was used before ----------------------------------------------------------------------------


def frames(handoff: gi.Handoff, stream: gi.Stream, count: int, graphics: Callable[[HandoffStep], None]) -> None:
    for _ in range(count):
        graphics(handoff.next_submit())
        handoff.acquire(stream)
        handoff.release(stream)


@pytest.fixture
def host(host: gi.Device) -> Iterator[tuple[gi.Stream, Any]]:
    with host.create_stream() as stream, host.create_semaphore(gi.TimelineFd) as timeline:
        yield stream, timeline
        stream.synchronize(LIMIT)


def test_a_second_handoff_goes_on_where_the_first_has_ended(host: tuple[gi.Stream, Any]) -> None:
    stream, timeline = host

    def graphics(step: HandoffStep) -> None:
        timeline.host_wait(step.wait_value or 0, timeout=LIMIT)
        timeline.host_signal(step.signal_value)

    frames(gi.Handoff(timeline), stream, 3, graphics)
    handoff = gi.Handoff(timeline)
    assert handoff.frame == 3
    with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*next_submit .*frame 3 .* acquire;"):
        handoff.acquire(stream)
    assert handoff.next_submit() == HandoffStep(3, 6, 7)
    handoff.acquire(stream)
    timeline.host_wait(6, timeout=LIMIT)
    assert not stream.query(), "it must wait for what nobody has submitted"
    timeline.host_signal(7)
    handoff.release(stream)
    stream.synchronize(LIMIT)
    timeline.host_wait(8, timeout=LIMIT)


def test_a_forgotten_submit_is_asked_for(host: tuple[gi.Stream, Any]) -> None:
    """And not where a stream waits for a semaphore that is no handoff's."""
    stream, timeline = host
    handoff = gi.Handoff(timeline, frame=7)
    handoff.next_submit()
    handoff.acquire(stream)
    with pytest.raises(gi.SemaphoreTimeoutError, match=r"#\d+ to reach 15 \(of a handoff: was frame 7 submitted\?\)"):
        stream.synchronize(0)
    timeline.host_signal(15)
    stream.synchronize(LIMIT)
    timeline.wait(stream, 16)  # as the graphics side does before frame 8
    with pytest.raises(gi.SemaphoreTimeoutError, match=r"#\d+ to reach 16 \(of a handoff: was frame 7 released\?\)"):
        stream.synchronize(0)
    timeline.host_signal(16)
    with stream.device.create_semaphore(gi.OpaqueFd) as ready, stream.device.create_semaphore(gi.OpaqueFd) as done:
        handoff = gi.Handoff(ready, done)
        handoff.next_submit()
        handoff.acquire(stream)
        with pytest.raises(gi.SemaphoreTimeoutError, match=r"#\d+ \(of a handoff\b"):
            stream.synchronize(0)
        ready.host_signal()
        stream.synchronize(LIMIT)
        done.wait(stream)
        with pytest.raises(gi.SemaphoreTimeoutError, match=r"waiting for opaque_fd semaphore #\d+\. If"):
            stream.synchronize(0)
        done.host_signal()
        stream.synchronize(LIMIT)


@pytest.mark.parametrize("stands", [1, 2, 5, 6, 1000, 1001, 2**40 + 1, 2**62])
def test_the_counter_says_the_frame_where_it_can_be_seen(host: tuple[gi.Stream, Any], stands: int) -> None:
    """Of frames that others have handed over; the graphics side, elsewhere, may have submitted the one under way."""
    stream, timeline = host
    timeline.host_signal(stands)
    handoff = gi.Handoff(timeline, tracks_submits=False)
    assert handoff.frame == stands // 2
    handoff.acquire(stream)
    if stands % 2:
        stream.synchronize(LIMIT)
    else:
        assert not stream.query()
        timeline.host_signal(stands + 1)


def test_a_driver_s_timeline_goes_by_what_was_signalled_here(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as timeline:
        frames(gi.Handoff(timeline), stream, 3, lambda step: None)
        handoff = gi.Handoff(timeline)
        assert handoff.next_submit() == HandoffStep(3, 6, 7)
        again = gi.Handoff(timeline)  # and what was asked for is submitted, or will be
        with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*acquire .*frame 3 .* next_submit;"):
            again.next_submit()
        again.acquire(stream)
        assert backend.calls[-1][2] == (7,)
        again.release(stream)
        assert again.next_submit() == HandoffStep(4, 8, 9)
        again.undo_submit()
        assert gi.Handoff(timeline).next_submit() == HandoffStep(4, 8, 9)


@pytest.mark.parametrize("tracks", [True, False])
def test_where_no_frame_begins_the_caller_says_which_is_next(device: gi.Device, tracks: bool) -> None:
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as timeline:
        timeline.signal(stream, 7)
        with pytest.raises(gi.InvalidArgumentError, match=r"\b7\b.*frame=4\b.*\b9 and 10\b") as caught:
            gi.Handoff(timeline, tracks_submits=tracks)
        assert caught.value.argument == "frame"
        handoff = gi.Handoff(timeline, tracks_submits=tracks, frame=4)
        assert handoff.frame == 4
        if tracks:
            assert handoff.next_submit() == HandoffStep(4, None, 9)  # nobody will signal 8


@pytest.mark.parametrize("tracks", [True, False])
def test_a_frame_that_has_gone_by_is_refused(host: tuple[gi.Stream, Any], tracks: bool) -> None:
    _, timeline = host
    timeline.host_signal(6)
    for frame in (-1, 0, 2):
        with pytest.raises(gi.InvalidArgumentError, match=rf"\b3\b.* got {frame}: .* 6\.") as caught:
            gi.Handoff(timeline, tracks_submits=tracks, frame=frame)
        assert caught.value.argument == "frame"
    assert gi.Handoff(timeline, tracks_submits=tracks, frame=3).frame == 3


def test_binary_ones_go_on_as_the_caller_says(device: gi.Device) -> None:
    with (
        device.import_semaphore(gi.OpaqueWin32(handle=8)) as to_compute,
        device.import_semaphore(gi.OpaqueWin32(handle=9)) as to_graphics,
    ):
        assert gi.Handoff(to_compute, to_graphics, frame=3).next_submit() == HandoffStep(3, 0, 0)
