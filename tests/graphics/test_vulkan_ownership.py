"""The ownership transfers that reach vkCmdPipelineBarrier: software drivers ignore them, and show no missing one.

The numbers are the Vulkan specification's (vulkan_core.h), not the library's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.cli.demo.producer import Producer
from gpuinterop.cli.demo.simulation import WaveParameters
from gpuinterop.exporters.base import Fill
from gpuinterop.exporters.vulkan import VulkanExporter
from gpuinterop.handles import DmaBufFd, MemoryHandle, OpaqueFd
from gpuinterop.vulkan._buffer import SharedBuffer
from gpuinterop.vulkan._image import SharedImage, _ImagePlan

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, open_exporter, require_allocations
else:
    from vulkan_application import Application, open_exporter, require_allocations

FAMILY = 7  # no device has so many: a family that was left out is 0
EXTERNAL, FOREIGN, IGNORED = 0xFFFFFFFE, 0xFFFFFFFD, 0xFFFFFFFF
COMPUTE, TRANSFER, BOTTOM, HOST, ALL = 0x800, 0x1000, 0x2000, 0x4000, 0x10000  # VkPipelineStageFlagBits
SHADER_READ_WRITE, TRANSFER_READ_WRITE, TRANSFER_WRITE = 0x20 | 0x40, 0x800 | 0x1000, 0x1000  # VkAccessFlagBits
HOST_READ, MEMORY_READ_WRITE = 0x2000, 0x8000 | 0x10000
UNDEFINED, GENERAL, SHADER_READ_ONLY, TRANSFER_DST = 0, 1, 5, 7  # VkImageLayout
WHOLE_BUFFER = 0, 0xFFFFFFFFFFFFFFFF
COLOUR = 1  # VK_IMAGE_ASPECT_COLOR_BIT
COMMANDS = 0xC0FFEE0  # a VkCommandBuffer that no driver gets to see


@dataclass(frozen=True)
class Transfer:
    """A barrier of one buffer or image; pairs are (source, destination)."""

    handle: int
    families: tuple[int, int]
    stages: tuple[int, int]
    access: tuple[int, int]
    layouts: tuple[int, int] | None = None  # of an image
    range: tuple[int, ...] = WHOLE_BUFFER  # of an image: aspect, first level, levels, first layer, layers


def released(
    handle: int, stage: int, access: int, *, to: int = EXTERNAL, layouts: tuple[int, int] | None = None,
    range: tuple[int, ...] = WHOLE_BUFFER,
) -> Transfer:  # fmt: skip
    return Transfer(handle, (FAMILY, to), (stage, BOTTOM), (access, 0), layouts, range)


def acquired(
    handle: int, stage: int, access: int, *, source: int = EXTERNAL, layouts: tuple[int, int] | None = None,
    range: tuple[int, ...] = WHOLE_BUFFER,
) -> Transfer:  # fmt: skip
    return Transfer(handle, (source, FAMILY), (stage, stage), (0, access), layouts, range)


class Recorder:
    """What is recorded and submitted, as (command buffer, what). Barriers are not passed on: FAMILY is made up."""

    def __init__(self, vk: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.seen: list[tuple[int, Any]] = []
        self.vk = vk
        table = vk.functions.__dict__
        for name in names:
            real = getattr(vk.functions, name)
            monkeypatch.setitem(table, name, self._watched(name, real))
        monkeypatch.setitem(table, "vkCmdPipelineBarrier", self._barrier)

    def _watched(self, name: str, real: Any) -> Any:
        def watched(*arguments: Any) -> Any:
            if name == "vkQueueSubmit":
                assert arguments[2].commandBufferCount == 1
                self.seen.append((self.vk.api.address(arguments[2].pCommandBuffers[0]), name))
            else:
                self.seen.append((self.vk.api.address(arguments[0]), name))
            return real(*arguments)

        return watched

    def _barrier(self, commands: Any, source: int, target: int, flags: int, *counted: Any) -> None:
        null = self.vk.api.ffi.NULL
        memory, memories, buffer, buffers, image, images = counted
        assert flags == 0
        assert memory + buffer + image == 1  # all that is expected here
        assert [pointer == null for pointer in (memories, buffers, images)] == [not n for n in (memory, buffer, image)]
        barrier = (memories if memory else buffers if buffer else images)[0]
        assert barrier.sType == (46 if memory else 44 if buffer else 45)
        assert barrier.pNext == null
        stages, access = (source, target), (barrier.srcAccessMask, barrier.dstAccessMask)
        what: Any
        if memory:
            what = stages, access
        else:
            families = barrier.srcQueueFamilyIndex, barrier.dstQueueFamilyIndex
            handle = self.vk.api.address(barrier.buffer if buffer else barrier.image)
            what = Transfer(handle, families, stages, access, range=(barrier.offset, barrier.size) if buffer else ())
            if image:
                part, layouts = barrier.subresourceRange, (barrier.oldLayout, barrier.newLayout)
                whole = part.aspectMask, part.baseMipLevel, part.levelCount, part.baseArrayLayer, part.layerCount
                what = replace(what, layouts=layouts, range=whole)
        self.seen.append((self.vk.api.address(commands), what))

    def take(self) -> list[tuple[int, Any]]:
        """What came since the last call."""
        seen, self.seen = self.seen, []
        return seen

    def one(self) -> Transfer:
        """The only barrier since the last call, recorded into COMMANDS."""
        ((commands, barrier),) = self.take()
        assert commands == COMMANDS
        assert isinstance(barrier, Transfer)
        return barrier


@pytest.fixture
def context(application: Application) -> Iterator[gi.vulkan.VulkanContext]:
    with gi.vulkan.VulkanContext(
        application.instance, application.physical_device, application.device, application.queue, 0
    ) as vk:
        vk.queue_family_index = FAMILY  # which the constructor refuses: there is none
        yield vk


@pytest.fixture
def recorder(context: gi.vulkan.VulkanContext, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(context, monkeypatch)


# -- what is shared ----------------------------------------------------------------------------------------------------


def check_buffer(shared: Any, recorder: Recorder, other: int) -> None:
    """Both transfers of a buffer, by default and as asked for."""
    handle = recorder.vk.api.address(shared.vk_buffer)
    assert handle
    shared.release(COMMANDS)
    assert recorder.one() == released(handle, ALL, MEMORY_READ_WRITE, to=other)
    shared.acquire(COMMANDS)
    assert recorder.one() == acquired(handle, ALL, MEMORY_READ_WRITE, source=other)
    shared.release(COMMANDS, stage=TRANSFER, access=TRANSFER_WRITE)
    assert recorder.one() == released(handle, TRANSFER, TRANSFER_WRITE, to=other)
    shared.acquire(COMMANDS, stage=COMPUTE, access=SHADER_READ_WRITE)
    assert recorder.one() == acquired(handle, COMPUTE, SHADER_READ_WRITE, source=other)


def check_image(shared: Any, recorder: Recorder, other: int, levels: int = 1, layers: int = 1) -> None:
    """Both transfers of an image, by default and as asked for."""
    handle = recorder.vk.api.address(shared.vk_image)
    assert handle
    whole = COLOUR, 0, levels, 0, layers
    shared.acquire(COMMANDS, stage=TRANSFER, access=TRANSFER_WRITE, layout=TRANSFER_DST)  # of a new image
    stages, access, layouts = (TRANSFER, TRANSFER), (0, TRANSFER_WRITE), (UNDEFINED, TRANSFER_DST)
    assert recorder.one() == Transfer(handle, (IGNORED, IGNORED), stages, access, layouts, whole)
    layouts = TRANSFER_DST, GENERAL  # as it was acquired
    shared.release(COMMANDS)
    assert recorder.one() == released(handle, ALL, MEMORY_READ_WRITE, to=other, layouts=layouts, range=whole)
    layouts = GENERAL, GENERAL
    shared.acquire(COMMANDS)
    assert recorder.one() == acquired(handle, ALL, MEMORY_READ_WRITE, source=other, layouts=layouts, range=whole)
    shared.release(COMMANDS, stage=TRANSFER, access=TRANSFER_WRITE, layout=TRANSFER_DST)
    layouts = TRANSFER_DST, GENERAL
    assert recorder.one() == released(handle, TRANSFER, TRANSFER_WRITE, to=other, layouts=layouts, range=whole)
    shared.acquire(COMMANDS, stage=COMPUTE, access=SHADER_READ_WRITE, layout=SHADER_READ_ONLY)
    layouts = GENERAL, SHADER_READ_ONLY
    assert recorder.one() == acquired(handle, COMPUTE, SHADER_READ_WRITE, source=other, layouts=layouts, range=whole)
    # The other side's layout is the new one of a release, and the old one of an acquire.
    shared.release(COMMANDS, layout=TRANSFER_DST, shared_layout=SHADER_READ_ONLY)
    assert recorder.one().layouts == (TRANSFER_DST, SHADER_READ_ONLY)
    shared.acquire(COMMANDS, layout=TRANSFER_DST)
    assert recorder.one().layouts == (SHADER_READ_ONLY, TRANSFER_DST)
    shared.acquire(COMMANDS, shared_layout=TRANSFER_DST)
    assert recorder.one().layouts == (TRANSFER_DST, GENERAL)


def test_a_shared_buffer(context: gi.vulkan.VulkanContext, device: gi.Device, recorder: Recorder) -> None:
    with gi.vulkan.share_buffer(context, device, 4096, handle_types=[OpaqueFd]) as shared:
        check_buffer(shared, recorder, EXTERNAL)


def test_a_shared_image(context: gi.vulkan.VulkanContext, device: gi.Device, recorder: Recorder) -> None:
    with gi.vulkan.share_image(
        context, device, (16, 16), "R8G8B8A8_UNORM", tiling="linear", handle_types=[OpaqueFd]
    ) as shared:
        check_image(shared, recorder, EXTERNAL)


def test_an_imported_buffer(
    application: Application, context: gi.vulkan.VulkanContext, device: gi.Device, recorder: Recorder
) -> None:
    require_allocations(application, device)
    with (
        device.allocate(8192) as allocation,
        gi.vulkan.import_array(context, allocation.buffer.view(8192)) as imported,
    ):
        with pytest.raises(gi.ArgumentTypeError, match=r"SharedBuffer; use numpy.asarray\(shared.view\("):
            np.asarray(imported)
        check_buffer(imported, recorder, EXTERNAL)


# Software drivers share no dma-bufs, and the host no optimal images. So the objects here are made up: their transfers
# are recorded, and no driver sees them.


def memory() -> Any:
    array = SimpleNamespace(lifetime=SimpleNamespace(written=False))
    return SimpleNamespace(closed=False, map_buffer=lambda **_: None, map_mipmapped_array=lambda *_, **__: array)


HANDLE_TYPES = pytest.mark.parametrize(("handle_type", "other"), [(OpaqueFd, EXTERNAL), (DmaBufFd, FOREIGN)])


@HANDLE_TYPES
def test_a_buffers_handle_type_decides_the_other_family(
    context: gi.vulkan.VulkanContext, recorder: Recorder, handle_type: type[MemoryHandle], other: int
) -> None:
    buffer = context.api.ffi.cast("VkBuffer", 0xB0F0)
    native: Any = SimpleNamespace(
        handle_type=handle_type, size=64, dedicated=False, handle=buffer, pair=lambda _: None, _call=context._call
    )
    check_buffer(SharedBuffer(context, native, memory(), cast(Any, None)), recorder, other)


@HANDLE_TYPES
def test_an_images_handle_type_decides_the_other_family(
    context: gi.vulkan.VulkanContext, recorder: Recorder, handle_type: type[MemoryHandle], other: int
) -> None:
    plan = _ImagePlan(context, (64, 64), "R8G8B8A8_UNORM", "optimal", 3, 2, None)
    image = context.api.ffi.cast("VkImage", 0x1330)
    native: Any = SimpleNamespace(
        handle_type=handle_type, size=64, dedicated=False, handle=image, pair=lambda _: None, _call=context._call
    )
    check_image(SharedImage(context, native, memory(), plan), recorder, other, levels=3, layers=2)


# -- the exporter ------------------------------------------------------------------------------------------------------


@pytest.fixture
def staged(driver: str) -> Iterator[VulkanExporter]:
    """Every access of it takes the queue, as on a GPU."""
    with open_exporter(driver, staged=True) as exporter:
        exporter.vk.queue_family_index = FAMILY  # its command pool exists, and keeps its own
        yield exporter


@pytest.fixture
def watched(staged: VulkanExporter, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    names = "vkCmdFillBuffer", "vkCmdCopyBuffer", "vkCmdDispatch", "vkQueueSubmit"
    return Recorder(staged.vk, monkeypatch, *names)


def in_one(entries: list[tuple[int, Any]]) -> list[Any]:
    """What was recorded into and done with one command buffer."""
    assert len({commands for commands, _ in entries}) == 1
    return [what for _, what in entries]


def copied(handle: int) -> list[Any]:
    """A copy from or to the shared buffer `handle`, and a staging buffer that the host reads."""
    return [
        acquired(handle, TRANSFER, TRANSFER_READ_WRITE),
        "vkCmdCopyBuffer",
        ((TRANSFER, HOST), (TRANSFER_WRITE, HOST_READ)),
        released(handle, TRANSFER, TRANSFER_READ_WRITE),
        "vkQueueSubmit",
    ]


def test_the_exporters_memory(staged: VulkanExporter, watched: Recorder) -> None:
    with staged.create_memory(4096) as memory:
        handle = staged.vk.api.address(memory.vk_buffer)
        assert watched.take() == []
        memory.write(8, b"abcd")
        assert in_one(watched.take()) == copied(handle)
        memory.read(0, 16)
        assert in_one(watched.take()) == copied(handle)


def test_the_exporters_fills(staged: VulkanExporter, watched: Recorder) -> None:
    with staged.create_memory(4096) as first, staged.create_memory(4096) as second:
        fills = [Fill(memory=memory, offset=16, size=32, word=1) for memory in (first, second)]
        assert staged.submit(fill=fills).done(30)
        expected: list[Any] = []
        for memory in (first, second):
            handle = staged.vk.api.address(memory.vk_buffer)
            expected += [
                acquired(handle, TRANSFER, TRANSFER_WRITE),
                "vkCmdFillBuffer",
                released(handle, TRANSFER, TRANSFER_WRITE),
            ]
        assert in_one(watched.take()) == [*expected, "vkQueueSubmit"]


def test_the_exporters_kernels(staged: VulkanExporter, watched: Recorder) -> None:
    with Producer(staged, WaveParameters(width=8, height=8), None) as producer:
        memory: Any = producer.memory
        handle = staged.vk.api.address(memory.vk_buffer)
        cleared, stepped = (
            watched.take()[:5],
            [
                acquired(handle, COMPUTE, SHADER_READ_WRITE),
                "vkCmdDispatch",
                released(handle, COMPUTE, SHADER_READ_WRITE),
                "vkQueueSubmit",
            ],
        )
        assert in_one(cleared) == copied(handle)
        for number in range(3):
            assert producer.submit(number).done(30)
            assert in_one(watched.take()) == stepped
