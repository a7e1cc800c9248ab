"""A handoff makes its submissions once: what may change from frame to frame, and what two calls share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.limits import LIMIT

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

pytestmark = pytest.mark.signals_beside  # lavapipe's semaphores are bridged

NBYTES = 4096
ALLOW = ("timeline", "binary", "bridged")


@pytest.fixture
def shared(application: Application, device: gi.Device) -> Iterator[Any]:
    with gi.vulkan.share_buffer(application.vk, device, NBYTES) as buffer:
        yield buffer


@pytest.fixture
def handoff(application: Application, device: gi.Device) -> Iterator[Any]:
    with gi.vulkan.share_handoff(application.vk, device, allow=ALLOW) as handoff:
        yield handoff
        application.api.vkQueueWaitIdle(application.queue)  # before its semaphores go


class Frames:
    """Command buffers that each fill the shared buffer with a word of their own, and frames that submit them."""

    def __init__(self, application: Application, shared: Any, handoff: Any, stream: gi.Stream) -> None:
        self._application, self._shared, self._handoff, self._stream = application, shared, handoff, stream

    def commands(self, word: int) -> Any:
        def record(commands: Any) -> None:
            self._shared.acquire(commands)
            self._application.api.vkCmdFillBuffer(commands, self._shared.vk_buffer, 0, NBYTES, word)
            self._shared.release(commands)

        return self._application.record(record)

    def run(self, commands: Any, **options: Any) -> int:
        """One frame; returns the word that the compute side has found."""
        self._handoff.submit(command_buffers=commands, **options)
        self._handoff.acquire(self._stream)
        found = np.zeros(NBYTES // 4, np.uint32)
        self._stream.synchronize(timeout=LIMIT)
        self._shared.copy_to_host(found)
        self._shared.fill(0, stream=self._stream)
        self._handoff.release(self._stream)
        self._stream.synchronize(timeout=LIMIT)
        assert (found == found[0]).all()
        return int(found[0])


@pytest.fixture
def frames(application: Application, device: gi.Device, shared: Any, handoff: Any) -> Iterator[Frames]:
    with device.create_stream() as stream:
        yield Frames(application, shared, handoff, stream)


def test_each_frame_submits_its_own_commands(frames: Frames, application: Application) -> None:
    """Also from a list that the application changes in place, and from a handle whose value changes."""
    one, two = frames.commands(1), frames.commands(2)
    assert [frames.run([one]), frames.run([one]), frames.run([two]), frames.run((one, two))] == [1, 1, 2, 2]
    commands = [one]
    assert frames.run(commands) == 1
    commands[0] = two
    assert frames.run(commands) == 2
    assert frames.run([]) == 0, "nothing was submitted that fills"
    number = ctypes.c_void_p()
    for word, each in ((1, one), (2, two)):
        number.value = application.number(each)
        assert frames.run([number]) == word
    assert [frames.run([application.number(each)]) for each in (one, one, two)] == [1, 1, 2]


def test_what_a_frame_waits_for_and_in_which_stage(frames: Frames, handoff: Any, monkeypatch: Any) -> None:
    """The structs as the driver gets them: the first frame waits for nothing, and a stage is that frame's alone."""
    functions = handoff._vk.functions
    submit = functions.vkQueueSubmit
    seen: list[tuple[int, int, int]] = []

    def look(queue: Any, count: int, info: Any, fence: Any) -> int:
        waits = info.waitSemaphoreCount
        seen.append((waits, info.pWaitDstStageMask[0] if waits else 0, info.commandBufferCount))
        code: int = submit(queue, count, info, fence)
        return code

    monkeypatch.setitem(functions.__dict__, "vkQueueSubmit", look)
    commands = [frames.commands(1)]
    for options in ({}, {}, {"stage": 0x1000}, {}):
        frames.run(commands, **options)
    assert seen == [(0, 0, 1), (1, 0x10000, 1), (1, 0x1000, 1), (1, 0x10000, 1)]


def test_two_calls_never_share_a_submission(frames: Frames, handoff: Any, device: gi.Device, monkeypatch: Any) -> None:
    """While the driver reads one, another thread may have come as far as the next frame's."""
    if handoff.mode == "binary":
        pytest.skip("declared: a binary semaphore's signal must be submitted before the next frame's wait")
    frames.run([])  # which leaves a submission for the next call
    functions = handoff._vk.functions
    submit = functions.vkQueueSubmit
    infos: list[Any] = []

    def overtaken(queue: Any, count: int, info: Any, fence: Any) -> int:
        infos.append(info)
        first = len(infos) == 1
        code: int = submit(queue, count, info, fence)
        if first:
            with device.create_stream() as other:
                handoff.acquire(other)
                handoff.release(other)
                handoff.submit()
                other.synchronize(timeout=LIMIT)
        return code

    monkeypatch.setitem(functions.__dict__, "vkQueueSubmit", overtaken)
    handoff.submit()
    assert len(infos) == 2
    assert infos[0] != infos[1]


def test_lists_of_an_earlier_frame_are_changed_in_place(handoff: Any, device: gi.Device) -> None:
    """What the next call would return, in the same lists; and `next_submit` has the same values."""
    with device.create_stream() as stream:
        what = handoff.vulkan_submit()
        lists = {name: id(each) for name, each in what.items()}
        for frame in range(3):
            handoff.undo_submit()
            fresh = handoff.vulkan_submit()
            handoff.undo_submit()
            step = handoff.next_submit()
            handoff.undo_submit()
            assert handoff.vulkan_submit(into=what) is what
            assert what == fresh
            assert {name: id(each) for name, each in what.items()} == lists
            assert step.frame == frame
            assert ([] if step.wait_value is None else [step.wait_value]) == what["wait_values"]
            assert [step.signal_value] == what["signal_values"]
            assert what["signal_semaphores"] == [handoff._vk_to_compute.vk_semaphore]
            assert what["wait_semaphores"] == [handoff._vk_to_graphics.vk_semaphore] * bool(frame)
            assert what["wait_stages"] == [0x10000] * bool(frame)
            handoff.undo_submit()
            handoff.submit()
            handoff.acquire(stream)
            handoff.release(stream)
            stream.synchronize(timeout=LIMIT)
            handoff.vulkan_submit(into=what)
        handoff.undo_submit()


@pytest.mark.parametrize("wrong", [3, {}, [[], [], [], [], []]])
def test_what_no_earlier_frame_returned_takes_no_turn(handoff: Any, wrong: object) -> None:
    with pytest.raises(gi.ArgumentTypeError, match=r"^into: .* an earlier vulkan_submit has returned, got "):
        handoff.vulkan_submit(into=wrong)
    with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .* submit or vulkan_submit .* undo_submit;"):
        handoff.undo_submit()
