"""A buffer, an image and an imported array change hands: the barriers that reach the driver, and the bytes.

Software drivers ignore families and layouts, so each barrier is compared with the specification's. The numbers are the
Vulkan specification's (vulkan_core.h), not the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.handles import DmaBufFd, MemoryHandle, OpaqueFd
from gpuinterop.testing.exporters.base import Fill, ImageParameters
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from gpuinterop.vulkan import _image
from gpuinterop.vulkan._memory import BoundObject
from tests.limits import LIMIT

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, HeldQueue, open_exporter, require_allocations
else:
    from vulkan_application import Application, HeldQueue, open_exporter, require_allocations

FAMILY = 7  # no device has so many: a family that was left out is 0
EXTERNAL, FOREIGN, IGNORED = 0xFFFFFFFE, 0xFFFFFFFD, 0xFFFFFFFF
COMPUTE, TRANSFER, BOTTOM, HOST, ALL = 0x800, 0x1000, 0x2000, 0x4000, 0x10000  # VkPipelineStageFlagBits
SHADER_READ_WRITE, TRANSFER_READ_WRITE, TRANSFER_WRITE = 0x20 | 0x40, 0x800 | 0x1000, 0x1000  # VkAccessFlagBits
HOST_READ, MEMORY_READ_WRITE = 0x2000, 0x8000 | 0x10000
UNDEFINED, GENERAL, SHADER_READ_ONLY, TRANSFER_SRC, TRANSFER_DST = 0, 1, 5, 6, 7  # VkImageLayout
WHOLE_BUFFER = 0, 0xFFFFFFFFFFFFFFFF
COLOUR = 1  # VK_IMAGE_ASPECT_COLOR_BIT
COMMANDS = 0xC0FFEE0  # a VkCommandBuffer that no driver gets to see
SIZE = 1 << 13
EXTENT = 25, 16  # lavapipe pads the rows


@dataclass(frozen=True)
class Barrier:
    """A barrier of one buffer or image; pairs are (source, destination)."""

    families: tuple[int, int]
    stages: tuple[int, int]
    access: tuple[int, int]
    handle: int = 0
    layouts: tuple[int, int] | None = None  # of an image
    part: tuple[int, ...] = WHOLE_BUFFER  # of an image: aspect, first level, levels, first layer, layers

    def of(self, handle: int, **image: Any) -> Barrier:
        return replace(self, handle=handle, **image)


def released(stage: int, access: int, to: int = EXTERNAL) -> Barrier:
    return Barrier((FAMILY, to), (stage, BOTTOM), (access, 0))


def acquired(stage: int, access: int, source: int = EXTERNAL) -> Barrier:
    return Barrier((source, FAMILY), (stage, stage), (0, access))


class Recorder:
    """What is recorded and submitted, as (command buffer, what). Barriers are not passed on: FAMILY is made up."""

    def __init__(self, vk: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.seen: list[tuple[int, Any]] = []
        self.vk = vk
        table = vk.functions.__dict__
        for name in names:
            monkeypatch.setitem(table, name, self._watched(name, getattr(vk.functions, name)))
        monkeypatch.setitem(table, "vkCmdPipelineBarrier", self._barrier)

    def _watched(self, name: str, real: Any) -> Any:
        def watched(*arguments: Any) -> Any:
            commands = arguments[2].pCommandBuffers[0] if name == "vkQueueSubmit" else arguments[0]
            self.seen.append((self.vk.api.address(commands), name))
            # Without its barriers, the layer would complain of an image's copy.
            return None if "Image" in name else real(*arguments)

        return watched

    def _barrier(self, commands: Any, source: int, target: int, flags: int, *counted: Any) -> None:
        memory, memories, buffer, buffers, image, images = counted
        assert (flags, memory + buffer + image) == (0, 1)
        one = (memories if memory else buffers if buffer else images)[0]
        assert one.sType == (46 if memory else 44 if buffer else 45)
        stages, access = (source, target), (one.srcAccessMask, one.dstAccessMask)
        what: Any = stages, access
        if not memory:
            what = Barrier((one.srcQueueFamilyIndex, one.dstQueueFamilyIndex), stages, access)
        if buffer:
            what = what.of(self.vk.api.address(one.buffer), part=(one.offset, one.size))
        if image:
            r = one.subresourceRange
            part = r.aspectMask, r.baseMipLevel, r.levelCount, r.baseArrayLayer, r.layerCount
            what = what.of(self.vk.api.address(one.image), part=part, layouts=(one.oldLayout, one.newLayout))
        self.seen.append((self.vk.api.address(commands), what))

    def take(self) -> list[Any]:
        """What was recorded into and done with one command buffer since the last call."""
        seen, self.seen = self.seen, []
        assert len({commands for commands, _ in seen}) <= 1
        return [what for _, what in seen]


@pytest.fixture
def context(application: Application) -> Iterator[gi.vulkan.VulkanContext]:
    with gi.vulkan.VulkanContext(
        application.instance, application.physical_device, application.device, application.queue, 0
    ) as vk:
        vk.queue_family_index = FAMILY  # which the constructor refuses: there is none
        yield vk


def buffer(application: Application, vk: Any, device: gi.Device, scope: ExitStack) -> Any:
    return scope.enter_context(gi.vulkan.share_buffer(vk, device, SIZE, handle_types=[OpaqueFd]))


def image(application: Application, vk: Any, device: gi.Device, scope: ExitStack, **more: Any) -> Any:
    more = {"tiling": "linear", "handle_types": [OpaqueFd], **more}
    return scope.enter_context(gi.vulkan.share_image(vk, device, EXTENT, "R8G8B8A8_UNORM", **more))


def array(application: Application, vk: Any, device: gi.Device, scope: ExitStack) -> Any:
    require_allocations(application, device)
    allocation = scope.enter_context(device.allocate(2 * SIZE))
    return scope.enter_context(gi.vulkan.import_array(vk, allocation.buffer.view(SIZE, offset=4096)))


@pytest.fixture(params=[buffer, image, array])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]


# -- the barriers ------------------------------------------------------------------------------------------------------

LAYOUTS = "layout", "shared_layout"  # what only an image takes
STEPS: list[tuple[str, dict[str, int], Barrier, tuple[int, int]]] = [
    ("release", {"layout": UNDEFINED}, released(ALL, MEMORY_READ_WRITE), (UNDEFINED, GENERAL)),
    ("acquire", {}, acquired(ALL, MEMORY_READ_WRITE), (GENERAL, GENERAL)),
    (
        "release", {"stage": TRANSFER, "access": TRANSFER_WRITE, "layout": TRANSFER_DST, "shared_layout": TRANSFER_SRC},
        released(TRANSFER, TRANSFER_WRITE), (TRANSFER_DST, TRANSFER_SRC),
    ),
    (
        "acquire", {"stage": COMPUTE, "access": SHADER_READ_WRITE, "layout": SHADER_READ_ONLY},
        acquired(COMPUTE, SHADER_READ_WRITE), (TRANSFER_SRC, SHADER_READ_ONLY),
    ),
    ("release", {}, released(ALL, MEMORY_READ_WRITE), (SHADER_READ_ONLY, GENERAL)),
    ("acquire", {"shared_layout": TRANSFER_DST}, acquired(ALL, MEMORY_READ_WRITE), (TRANSFER_DST, GENERAL)),
    ("acquire", {"shared_layout": UNDEFINED}, replace(acquired(ALL, MEMORY_READ_WRITE), families=(IGNORED, IGNORED)),
     (UNDEFINED, GENERAL)),
]  # fmt: skip
"""Call, options, barrier, and the layouts of an image: where none is passed, those that earlier barriers said."""


def test_each_barrier(
    application: Application, context: Any, device: gi.Device, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(context, monkeypatch)
    with ExitStack() as scope:
        shared = make(application, context, device, scope)
        with pytest.raises(gi.ArgumentTypeError, match=rf"{type(shared).__name__}; use numpy.asarray\("):
            np.asarray(shared)
        handle = context.api.address(shared.vk_image if make is image else shared.vk_buffer)
        for call, options, barrier, layouts in STEPS if make is image else STEPS[:-1]:
            given = {name: value for name, value in options.items() if make is image or name not in LAYOUTS}
            getattr(shared, call)(COMMANDS, **given)
            of_image = {"layouts": layouts, "part": (COLOUR, 0, 1, 0, 1)} if make is image else {}
            assert recorder.take() == [barrier.of(handle, **of_image)]
        for wrong in ({"stage": "all"}, {"stage": 0}, {"access": -1}):
            with pytest.raises(gi.InvalidArgumentError) as caught:
                shared.release(COMMANDS, **wrong)
            assert [caught.value.argument] == list(wrong)
        with pytest.raises(gi.InvalidArgumentError, match="cmd: the VkCommandBuffer is null"):
            shared.acquire(None)
        assert recorder.take() == []


@pytest.mark.parametrize("kind", ["Buffer", "Image"])
@pytest.mark.parametrize(("handle_type", "other"), [(OpaqueFd, EXTERNAL), (DmaBufFd, FOREIGN)])
def test_a_handle_type_decides_the_other_family(
    context: Any, monkeypatch: pytest.MonkeyPatch, kind: str, handle_type: type[MemoryHandle], other: int
) -> None:
    """Software drivers share no dma-bufs. So the object here is made up, and no driver sees it."""
    recorder, native = Recorder(context, monkeypatch), BoundObject(context, kind, handle_type, 1, 1)
    native.create(lambda: context.api.ffi.cast(f"Vk{kind}", 0xB0F0))
    layout = GENERAL if kind == "Image" else None
    native.transfer(COMMANDS, native.vulkan_side(COMPUTE, 1, layout), native.other_side(BOTTOM, layout))
    native.transfer(COMMANDS, native.other_side(COMPUTE, layout), native.vulkan_side(COMPUTE, 1, layout))
    assert [one.families for one in recorder.take()] == [(FAMILY, other), (other, FAMILY)]


# -- the bytes ---------------------------------------------------------------------------------------------------------


def texels(shared: Any) -> Any:
    """The compute side's bytes, without the padding of an image's rows."""
    shared.buffer.copy_to_host(found := np.empty(shared.buffer.size, np.uint8))
    if not hasattr(shared, "row_pitch"):
        return found
    height, width = EXTENT[1], 4 * EXTENT[0]
    return np.lib.stride_tricks.as_strided(found, (height, width), (shared.row_pitch, 1)).flatten()


@pytest.mark.parametrize("first", ["Vulkan", "compute"])
def test_bytes_both_ways(application: Application, device: gi.Device, make: Callable[..., Any], first: str) -> None:
    """Vulkan copies what compute has written, and writes anew: one command buffer, submitted each frame."""
    vulkan, vk, random = application.api, application.vk, np.random.default_rng(1)
    with ExitStack() as scope:
        initial = {"initial": GENERAL} if make is image and first == "compute" else {}
        shared: Any = make(application, vk, device, scope, **initial)
        copy = scope.enter_context(gi.vulkan.share_buffer(vk, device, texels(shared).size))
        layer = vulkan.VkImageSubresourceLayers(aspectMask=COLOUR, layerCount=1)
        whole = vulkan.VkImageSubresourceRange(aspectMask=COLOUR, levelCount=1, layerCount=1)
        texel = vulkan.VkBufferImageCopy(imageSubresource=layer, imageExtent=vulkan.VkExtent3D(*EXTENT, 1))
        colour = vulkan.VkClearColorValue(float32=[1.0, 0.0, 0.2, 0.4])

        def write(commands: Any) -> None:
            if make is image:
                vulkan.vkCmdClearColorImage(commands, shared.vk_image, GENERAL, colour, 1, [whole])
            else:
                vulkan.vkCmdFillBuffer(commands, shared.vk_buffer, 0, shared.size, 0x663300FF)
            shared.release(commands)

        def draw(commands: Any) -> None:
            if make is image:  # a buffer that is new has nothing to acquire
                shared.acquire(commands)
            write(commands)

        def frame(commands: Any) -> None:
            shared.acquire(commands)
            if make is image:
                vulkan.vkCmdCopyImageToBuffer(commands, shared.vk_image, GENERAL, copy.vk_buffer, 1, [texel])
            else:
                region = vulkan.VkBufferCopy(size=shared.size)
                vulkan.vkCmdCopyBuffer(commands, shared.vk_buffer, copy.vk_buffer, 1, [region])
            behind = vulkan.VkMemoryBarrier(srcAccessMask=0x800, dstAccessMask=TRANSFER_WRITE)
            vulkan.vkCmdPipelineBarrier(commands, TRANSFER, TRANSFER, 0, 1, [behind], 0, None, 0, None)
            write(commands)
            copy.release(commands)

        if first == "Vulkan":
            application.run(draw)
            assert (texels(shared).reshape(-1, 4) == [255, 0, 51, 102]).all()
        commands = application.record(frame)
        for _ in range(3):
            shared.buffer.copy_from_host(random.bytes(shared.buffer.size))
            wanted = texels(shared)
            application.submit(commands)
            assert (texels(copy) == wanted).all()
            assert (texels(shared).reshape(-1, 4) == [255, 0, 51, 102]).all()


# -- the exporter's ----------------------------------------------------------------------------------------------------


@pytest.fixture
def staged(driver: str) -> Iterator[VulkanExporter]:
    """Every access of it takes the queue, as on a GPU."""
    with open_exporter(driver, staged=True) as exporter:
        exporter.vk.queue_family_index = FAMILY  # its command pool exists, and keeps its own
        yield exporter


@pytest.fixture
def watched(staged: VulkanExporter, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    copies = "vkCmdCopyBuffer", "vkCmdCopyBufferToImage", "vkCmdCopyImageToBuffer"
    return Recorder(staged.vk, monkeypatch, *copies, "vkCmdFillBuffer", "vkQueueSubmit")


TO_HOST = (TRANSFER, HOST), (TRANSFER_WRITE, HOST_READ)


def there_and_back(handle: int, stage: int, access: int, *work: Any) -> list[Any]:
    return [acquired(stage, access).of(handle), *work, released(stage, access).of(handle)]


def test_the_exporters_memory(staged: VulkanExporter, watched: Recorder) -> None:
    with staged.create_memory(4096) as first, staged.create_memory(4096) as second:
        handles = [staged.vk.api.address(memory.vk_buffer) for memory in (first, second)]
        for copy in (lambda: first.write(8, b"abcd"), lambda: first.read(0, 16)):
            assert watched.take() == []
            copy()
            copied = there_and_back(handles[0], TRANSFER, TRANSFER_READ_WRITE, "vkCmdCopyBuffer", TO_HOST)
            assert watched.take() == [*copied, "vkQueueSubmit"]
        fills = [Fill(memory=memory, offset=16, size=32, word=1) for memory in (first, second)]
        assert staged.submit(fill=fills).done(LIMIT)
        filled = [there_and_back(handle, TRANSFER, TRANSFER_WRITE, "vkCmdFillBuffer") for handle in handles]
        assert watched.take() == [*filled[0], *filled[1], "vkQueueSubmit"]


def test_the_exporters_images(staged: VulkanExporter, watched: Recorder) -> None:
    parameters = ImageParameters(format="R8G8B8A8_UNORM", width=16, height=8, levels=3, layers=2)
    if gap := staged.image_gap(parameters):
        pytest.skip(gap)
    with staged.create_image(parameters) as made:
        one: dict[str, Any] = {"handle": staged.vk.api.address(made.vulkan_object.handle), "part": (COLOUR, 0, 3, 0, 2)}
        use = TRANSFER, TRANSFER_READ_WRITE
        assert watched.take() == [released(*use).of(**one, layouts=(UNDEFINED, GENERAL)), "vkQueueSubmit"]
        made.write(1, bytes(parameters.level_bytes(1)))
        back, forth = (acquired(*use).of(**one), released(*use).of(**one))
        layouts = (GENERAL, TRANSFER_DST), (TRANSFER_DST, GENERAL)
        first, last = replace(back, layouts=layouts[0]), replace(forth, layouts=layouts[1])
        assert watched.take() == [first, "vkCmdCopyBufferToImage", last, "vkQueueSubmit"]
        made.read(1)
        layouts = (GENERAL, TRANSFER_SRC), (TRANSFER_SRC, GENERAL)
        first, last = replace(back, layouts=layouts[0]), replace(forth, layouts=layouts[1])
        assert watched.take() == [first, "vkCmdCopyImageToBuffer", TO_HOST, last, "vkQueueSubmit"]


# -- new images --------------------------------------------------------------------------------------------------------


def test_what_a_new_image_refuses(application: Application, device: gi.Device) -> None:
    with ExitStack() as scope:
        shared = image(application, application.vk, device, scope)

        def record(commands: Any) -> None:
            with pytest.raises(gi.InvalidArgumentError, match=r"^layout: .*VK_IMAGE_LAYOUT_UNDEFINED"):
                shared.release(commands)
            with pytest.raises(gi.InvalidArgumentError, match="layout"):
                shared.acquire(commands, layout=UNDEFINED)
            shared.buffer.copy_to_host(bytearray(16))
            with pytest.raises(gi.ArgumentTypeError):
                shared.buffer.fill(7, stream=object())
            shared.acquire(commands)  # neither what compute reads nor a refused call counts

        application.record(record)


@pytest.mark.parametrize("copy", ["fill", "from", "stream"])
def test_what_compute_has_written_is_not_discarded(application: Application, device: gi.Device, copy: str) -> None:
    with device.create_stream() as stream, ExitStack() as scope:
        shared = image(application, application.vk, device, scope)
        if copy == "from":
            shared.buffer.copy_from_host(bytes(16))
        else:
            shared.buffer.fill(7, stream=stream if copy == "stream" else None)

        def record(commands: Any) -> None:
            for call in (shared.acquire, lambda commands: shared.release(commands, layout=UNDEFINED)):
                with pytest.raises(gi.InvalidArgumentError, match="pass initial= to share_image, or submit release"):
                    call(commands)
            shared.release(commands, layout=GENERAL)
            shared.acquire(commands, shared_layout=UNDEFINED)  # the caller's word that it may be discarded

        application.record(record)


def test_an_initial_layout_needs_a_queue(application: Application, device: gi.Device) -> None:
    handles = application.instance, application.physical_device, application.device
    for queue, family, said in ((None, 0, "UNDEFINED"), (application.queue, None, "queue_family_index")):
        with (
            gi.vulkan.VulkanContext(*handles, queue, family) as vk,
            ExitStack() as scope,
            pytest.raises(gi.InvalidArgumentError, match=said),
        ):
            image(application, vk, device, scope, initial=GENERAL)
    for wrong in (UNDEFINED, -1, "GENERAL"):
        with pytest.raises(gi.InvalidArgumentError, match="initial"), ExitStack() as scope:
            image(application, application.vk, device, scope, initial=wrong)


def test_an_initial_layouts_submission_fails(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made under the queue's lock, and leaves nothing."""
    vk, locked = application.vk, []

    def refuse(*_: object) -> int:
        locked.append(system.holds(vk._submitting))
        return -4

    monkeypatch.setitem(vk.functions.__dict__, "vkQueueSubmit", refuse)
    with pytest.raises(gi.DriverError, match="VK_ERROR_DEVICE_LOST"), ExitStack() as scope:
        image(application, vk, device, scope, initial=GENERAL)
    assert locked == [True]
    assert not vk.lifetime.dependents


def test_an_initial_layout_while_the_queue_is_held(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call gives up; the context's close destroys what the queue used, and the layer says nothing of leaks."""
    monkeypatch.setattr(_image, "_SUBMISSION_S", 0.05)
    with (
        ExitStack() as scope,
        HeldQueue(application),
        pytest.raises(gi.ResourceBusyError, match=r"finish a submission in 0.05 s"),
    ):
        image(application, application.vk, device, scope, initial=GENERAL)
    application.vk.close()
