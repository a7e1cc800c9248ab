"""The traceback of a mistake with Vulkan ends at the user's line, or at most two calls further in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.tracebacks import MOST, ours

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

TYPE, VALUE, CLOSED = gi.ArgumentTypeError, gi.InvalidArgumentError, gi.ResourceClosedError


def submit_twice(w: Any) -> None:
    w.handoff.vulkan_submit()
    try:
        w.handoff.vulkan_submit()
    finally:
        w.handoff.undo_submit()


MISTAKES: dict[str, tuple[type[gi.GpuInteropError], Callable[[Any], object]]] = {
    "a buffer of no bytes": (VALUE, lambda w: gi.vulkan.share_buffer(w.vk, w.device, 0)),
    "a usage that is a str": (TYPE, lambda w: gi.vulkan.share_buffer(w.vk, w.device, 4096, usage="x")),  # type: ignore[arg-type]
    "a number as a device": (TYPE, lambda w: gi.vulkan.share_buffer(w.vk, 3, 4096)),  # type: ignore[arg-type]
    "a closed context": (CLOSED, lambda w: gi.vulkan.share_buffer(w.closed_vk, w.device, 4096)),
    "the VkBuffer of what is closed": (CLOSED, lambda w: w.closed.vk_buffer),
    "a view of what is closed": (CLOSED, lambda w: w.closed.view(4)),
    "a number as a command buffer": (TYPE, lambda w: w.buffer.release(3.5)),
    "another format": (VALUE, lambda w: gi.vulkan.share_image(w.vk, w.device, (64, 32), "R3G3")),
    "an unsupported image": (
        gi.UnsupportedError, lambda w: gi.vulkan.share_image(w.vk, w.device, (64, 32), "R8G8B8A8_UNORM")
    ),
    "another kind of semaphore": (TYPE, lambda w: gi.vulkan.share_semaphore(w.vk, w.device, int)),
    "a semaphore of a closed context": (CLOSED, lambda w: gi.vulkan.share_semaphore(w.closed_vk, w.device)),
    "a handoff of a closed context": (CLOSED, lambda w: gi.vulkan.share_handoff(w.closed_vk, w.device)),
    "the capabilities of a number": (TYPE, lambda _: gi.vulkan.capabilities(3.5)),
    "the extensions of a number": (TYPE, lambda _: gi.vulkan.required_extensions(3.5)),
    "another mode": (VALUE, lambda w: gi.vulkan.share_handoff(w.vk, w.device, allow=("any",))),
    "a release out of turn": (VALUE, lambda w: w.handoff.release(w.stream)),
    "a submit out of turn": (VALUE, submit_twice),
    "a number among command buffers": (TYPE, lambda w: w.handoff.submit(None, [3.5])),
    "a number as an instance": (
        TYPE, lambda w: gi.vulkan.VulkanContext(1.5, w.application.physical_device, w.application.device)
    ),
    "a number as a timeline": (TYPE, lambda w: gi.vulkan.TimelineEndpoint(w.vk, 3.5)),
    "a layout that is a str": (TYPE, lambda w: w.application.record(lambda cmd: w.image.acquire(cmd, layout="x"))),
    "a submit of a closed handoff": (CLOSED, lambda w: w.closed_handoff.submit(None, [])),
    "what a closed handoff waits for": (CLOSED, lambda w: w.closed_handoff.vulkan_submit()),
    "a number to identify": (TYPE, lambda _: gi.vulkan.identity(3.5)),
    "an array that is not aligned": (
        gi.GpuInteropError, lambda w: gi.vulkan.import_array(w.vk, np.zeros(100, "uint8")[1:])
    ),
}  # fmt: skip


def test_all_end_near_the_users_line(application: Application, device: gi.Device) -> None:
    vk = application.vk
    closed_vk = gi.vulkan.VulkanContext(application.instance, application.physical_device, application.device)
    closed_vk.close()
    with (
        gi.vulkan.share_buffer(vk, device, 4096) as buffer,
        gi.vulkan.share_buffer(vk, device, 4096) as closed,
        gi.vulkan.share_image(vk, device, (8, 8), "R8G8B8A8_UNORM", tiling="linear") as image,
        gi.vulkan.share_handoff(vk, device, allow=("bridged",)) as handoff,
        gi.vulkan.share_handoff(vk, device, allow=("bridged",)) as closed_handoff,
        device.create_stream() as stream,
    ):
        closed.close()
        closed_handoff.close()
        world = SimpleNamespace(
            application=application, vk=vk, device=device, closed_vk=closed_vk, buffer=buffer, image=image,
            closed=closed, handoff=handoff, closed_handoff=closed_handoff, stream=stream,
        )  # fmt: skip
        frames = {}
        for mistake, (kind, make) in MISTAKES.items():
            if kind is gi.UnsupportedError and not device.identity.is_cpu:
                continue  # a GPU has it
            with pytest.raises(kind) as caught:
                make(world)
            frames[mistake] = ours(caught.tb)
            assert caught.value.__cause__ is None, mistake
            assert caught.value.__context__ is None or caught.value.__suppress_context__, mistake
    assert {mistake: found for mistake, found in frames.items() if len(found) > MOST} == {}
