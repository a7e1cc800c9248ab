"""The order of a handoff, and the values behind it."""

import pytest

import gpuinterop as gi
from gpuinterop.handoff import HandoffStep

from .fake import fake_device


def test_a_timeline_serves_both_directions() -> None:
    device, backend = fake_device()
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


def test_binary_takes_one_each_way() -> None:
    device, backend = fake_device()
    with (
        device.create_stream() as stream,
        device.import_semaphore(gi.OpaqueWin32(handle=8)) as to_compute,
        device.import_semaphore(gi.OpaqueWin32(handle=9)) as to_graphics,
    ):
        handoff = gi.Handoff(to_compute, to_graphics)
        assert handoff.mode == "binary"
        assert handoff.next_submit() == HandoffStep(0, None, 0)
        handoff.acquire(stream, timeout=2)
        handoff.release(stream)
        assert [call[0] for call in backend.calls[-2:]] == ["wait", "signal"]
        assert handoff.next_submit() == HandoffStep(1, 0, 0)


@pytest.mark.parametrize("tracks", [True, False])
def test_out_of_turn_raises_and_enqueues_nothing(tracks: bool) -> None:
    device, backend = fake_device()
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as timeline:
        handoff = gi.Handoff(timeline, tracks_submits=tracks)
        count = len(backend.calls)
        if tracks:
            with pytest.raises(gi.InvalidArgumentError, match=r"acquire is out of turn.*submit"):
                handoff.acquire(stream)
            handoff.next_submit()
        with pytest.raises(gi.InvalidArgumentError, match=r"submit|elsewhere"):
            handoff.next_submit()
        with pytest.raises(gi.InvalidArgumentError, match="out of turn"):
            handoff.release(stream)
        assert len(backend.calls) == count
        handoff.acquire(stream)
        with pytest.raises(gi.InvalidArgumentError, match="out of turn"):
            handoff.acquire(stream)
        handoff.release(stream)
        assert [call[0] for call in backend.calls[count:]] == ["wait", "signal"]


def test_semaphores_that_do_not_fit_are_refused() -> None:
    device, _ = fake_device()
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
