"""Each image is in the layout, and in the possession, that the barriers say: by a model of Vulkan's rules.

Software drivers ignore layouts, and the validation layer does not see a wrong one in an acquisition from another API.
The numbers are the Vulkan specification's (vulkan_core.h), not the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.exporters.base import ImageParameters
from gpuinterop.exporters.vulkan import VulkanExporter
from gpuinterop.vulkan import _context, _image
from gpuinterop.vulkan._export import Bound

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

FAMILY, EXTERNAL, IGNORED = 0, 0xFFFFFFFE, 0xFFFFFFFF
UNDEFINED, GENERAL, TRANSFER_SRC, TRANSFER_DST = 0, 1, 6, 7
TRANSFER, TRANSFER_WRITE = 0x1000, 0x1000
MEMORY_READ_WRITE = 0x8000 | 0x10000


class Model:
    """Layout and owner of each image, by what was submitted; `wrong` has what Vulkan does not allow."""

    def __init__(self, vk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.vk, self.address = vk, vk.api.address
        self.recorded: dict[int, list[Any]] = {}
        """Barriers of images, by command buffer."""
        self.state: dict[int, tuple[int, int | None]] = {}
        """Layout and owner, by image."""
        self.wrong: list[str] = []
        for name in ("vkBeginCommandBuffer", "vkCmdPipelineBarrier", "vkQueueSubmit"):
            seen, real = getattr(self, name), getattr(vk.functions, name)
            monkeypatch.setitem(vk.functions.__dict__, name, lambda *a, seen=seen, real=real: (seen(*a), real(*a))[1])

    def vkBeginCommandBuffer(self, commands: Any, _: Any) -> None:
        self.recorded[self.address(commands)] = []

    def vkCmdPipelineBarrier(self, commands: Any, source: int, target: int, *more: Any) -> None:
        *_, count, barriers = more
        for one in barriers[0:count] if count else ():
            layouts, families = (one.oldLayout, one.newLayout), (one.srcQueueFamilyIndex, one.dstQueueFamilyIndex)
            if layouts[0] == UNDEFINED and families == (IGNORED, IGNORED) and one.srcAccessMask:
                self.wrong.append("the first barrier makes accesses available, and there were none")
            said = self.address(one.image), layouts, families
            self.recorded[self.address(commands)].append(said)

    def vkQueueSubmit(self, queue: Any, count: int, infos: Any, fence: Any) -> None:
        for info in infos[0:count]:
            for commands in info.pCommandBuffers[0 : info.commandBufferCount]:
                for said in self.recorded[self.address(commands)]:
                    self.take(*said)

    def record(self, application: Application, record: Callable[[Any], None]) -> Any:
        """Have the application, whose functions are others, record a command buffer."""

        def afresh(commands: Any) -> None:
            self.vkBeginCommandBuffer(commands, None)
            record(commands)

        return application.record(afresh)

    def run(self, application: Application, record: Callable[[Any], None]) -> None:
        self.submit(application, self.record(application, record))

    def submit(self, application: Application, commands: Any) -> None:
        """Submit by the functions that the model watches."""
        new, call = self.vk.api.new, self.vk._call
        handles = self.vk.api.array("VkCommandBuffer", [self.vk.api.handle("VkCommandBuffer", commands)])
        info = new("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=handles)
        call("vkQueueSubmit", self.vk.queue, 1, info, self.vk.api.ffi.NULL)
        application.idle()

    def take(self, image: int, layouts: tuple[int, int], families: tuple[int, int]) -> None:
        (layout, owner), (old, new), (source, target) = self.state.get(image, (UNDEFINED, None)), layouts, families
        if old not in (UNDEFINED, layout):
            self.wrong.append(f"from layout {old}, and the image is in {layout}")
        if old == UNDEFINED != layout:
            self.wrong.append(f"from UNDEFINED, which discards what is in the image, in layout {layout}")
        if new == UNDEFINED:
            self.wrong.append("to UNDEFINED")
        if source == target:
            source = target = FAMILY
        if owner is None and old == UNDEFINED:  # it belongs to the first that uses it
            owner = FAMILY
        if source != owner or FAMILY not in (source, target):
            self.wrong.append(f"from family {source:#x} to {target:#x}, and the owner is {owner}")
        self.state[image] = new, target

    def compute_writes(self, shared: Any) -> None:
        """The other side may do so where it has the image, in a layout."""
        layout, owner = self.state.get(self.address(shared.vk_image), (UNDEFINED, None))
        if layout == UNDEFINED or owner != EXTERNAL:
            self.wrong.append(f"compute writes an image in layout {layout} that {owner} owns")


@pytest.fixture
def model(application: Application, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    model = Model(application.vk, monkeypatch)
    yield model
    assert model.wrong == []


@pytest.fixture(params=["linear", "optimal"])
def share(
    request: pytest.FixtureRequest, application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Share an image. Optimal ones have levels, and a made-up compute side: the host maps no such images."""
    vk, tiling = application.vk, request.param
    if tiling == "linear":
        return lambda **more: gi.vulkan.share_image(vk, device, (16, 8), "R8G8B8A8_UNORM", tiling=tiling, **more)
    array = SimpleNamespace(lifetime=SimpleNamespace(written=False))
    memory: Any = SimpleNamespace(closed=False, map_mipmapped_array=lambda *_, **__: array, close=lambda _: None)
    monkeypatch.setattr(_image, "agree_on_memory", lambda *_: gi.OpaqueFd)
    monkeypatch.setattr(_image, "share_memory", lambda _, native, make, label: make(memory))
    monkeypatch.setattr(Bound, "pair", lambda *_: None)
    return lambda **more: gi.vulkan.share_image(vk, device, (16, 8), "R8G8B8A8_UNORM", levels=3, layers=2, **more)


def clear(application: Application, shared: Any, layout: int, red: float) -> Callable[[Any], None]:
    vulkan = application.api
    whole = vulkan.VkImageSubresourceRange(1, 0, vulkan.VK_REMAINING_MIP_LEVELS, 0, vulkan.VK_REMAINING_ARRAY_LAYERS)
    colour = vulkan.VkClearColorValue(float32=[red, 0.0, 0.0, 1.0])
    return lambda commands: vulkan.vkCmdClearColorImage(commands, shared.vk_image, layout, colour, 1, [whole])


def there_and_back(shared: Any) -> Callable[[Any], None]:
    def record(commands: Any) -> None:
        shared.acquire(commands)
        shared.release(commands)

    return record


def reds(shared: Any) -> set[int]:
    """Those of the texels, as compute sees them; none of an optimal image."""
    if shared.buffer is None:
        return set()
    shared.buffer.copy_to_host(rows := np.empty(shared.buffer.size, np.uint8))
    width, height = shared.extent
    return set(rows[: shared.row_pitch * height].reshape(height, -1)[:, : 4 * width : 4].flat)


def test_vulkan_draws_first(application: Application, model: Model, share: Callable[..., Any]) -> None:
    """Also where an array was exported before, and in layouts of the caller's."""
    with share() as shared:
        if shared.buffer is not None:
            assert shared.view().__dlpack__()
        model.record(application, shared.acquire)  # and given up
        for layout, red in ((GENERAL, 1.0), (TRANSFER_DST, 0.2)):

            def frame(commands: Any, layout: int = layout, red: float = red) -> None:
                shared.acquire(commands, layout=layout)
                clear(application, shared, layout, red)(commands)
                shared.release(commands, layout=layout, shared_layout=TRANSFER_SRC)

            model.run(application, frame)
            model.compute_writes(shared)
            assert reds(shared) <= {red * 255}
        model.run(application, there_and_back(shared))

        def left_in(commands: Any) -> None:  # as it was acquired, unless another layout is passed
            shared.acquire(commands, layout=TRANSFER_DST)
            shared.release(commands)

        model.run(application, left_in)
        assert reds(shared) <= {51}
        assert list(model.state.values()) == [(GENERAL, EXTERNAL)]


@pytest.mark.parametrize("way", ["initial", "release"])
def test_compute_writes_first(application: Application, model: Model, share: Callable[..., Any], way: str) -> None:
    """One command buffer, submitted each frame, discards nothing."""
    with share(initial=GENERAL) if way == "initial" else share() as shared:
        if way == "release":
            model.run(application, lambda commands: shared.release(commands, layout=UNDEFINED))

        commands = model.record(application, there_and_back(shared))
        for red in (3, 4, 5):
            model.compute_writes(shared)
            if shared.buffer is not None:
                shared.buffer.fill(red)
            model.submit(application, commands)
            assert reds(shared) <= {red}
        assert [one.label for one in application.vk.lifetime.standing if one.label.startswith("submission")] == []


def test_barriers_of_the_applications_own(application: Application, model: Model, share: Callable[..., Any]) -> None:
    vk = application.vk
    with share() as shared:
        whole = vk.api.new(
            "VkImageSubresourceRange", aspectMask=1, levelCount=0xFFFFFFFF, layerCount=0xFFFFFFFF
        )  # what remains
        one = vk.api.new(
            "VkImageMemoryBarrier", dstAccessMask=TRANSFER_WRITE, oldLayout=UNDEFINED, newLayout=TRANSFER_DST,
            srcQueueFamilyIndex=IGNORED, dstQueueFamilyIndex=IGNORED, image=shared.vulkan_object.handle,
            subresourceRange=whole[0],
        )  # fmt: skip
        null = vk.api.ffi.NULL

        def draw(commands: Any) -> None:
            handle = vk.api.handle("VkCommandBuffer", commands)
            vk.functions.vkCmdPipelineBarrier(handle, TRANSFER, TRANSFER, 0, 0, null, 0, null, 1, one)
            clear(application, shared, TRANSFER_DST, 1.0)(commands)
            shared.release(commands, layout=TRANSFER_DST)

        model.run(application, draw)
        model.run(application, shared.acquire)
        assert reds(shared) <= {255}


def test_a_first_acquisition_is_good_for_one_submission(
    application: Application, model: Model, share: Callable[..., Any]
) -> None:
    with share() as shared:
        commands = model.record(application, there_and_back(shared))
        model.submit(application, commands)
        assert model.wrong == []
        model.take(*model.recorded[model.address(commands)][0])
        assert model.wrong.pop(0).startswith("from UNDEFINED, which discards")
        model.wrong.clear()


def test_the_exporters_images(exporter: VulkanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = ImageParameters(format="R8G8B8A8_UNORM", width=16, height=8, levels=3)
    if gap := exporter.image_gap(parameters):
        pytest.skip(gap)
    model = Model(exporter.vk, monkeypatch)
    with exporter.create_image(parameters) as image:
        for value in (1, 2):
            texels = bytes([value]) * parameters.level_bytes(1)
            image.write(1, texels)
            assert image.read(1) == texels
        assert list(model.state.values()) == [(GENERAL, EXTERNAL)]
    assert model.wrong == []


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_a_new_image_cannot_say(application: Application, share: Callable[..., Any]) -> None:
    with share() as shared:

        def record(commands: Any) -> None:
            with pytest.raises(
                gi.InvalidArgumentError, match=r"VK_IMAGE_LAYOUT_UNDEFINED if nothing .* barriers of your own"
            ):
                shared.release(commands)
            with pytest.raises(gi.InvalidArgumentError, match="layout"):
                shared.acquire(commands, layout=UNDEFINED)
            if shared.buffer is None:
                shared.array.lifetime.written = True
            else:
                shared.buffer.fill(1)
            for call in (shared.acquire, lambda commands: shared.release(commands, layout=UNDEFINED)):
                with pytest.raises(gi.InvalidArgumentError, match="pass initial= to share_image, or submit release"):
                    call(commands)
            shared.release(commands, layout=GENERAL)
            shared.acquire(commands, shared_layout=UNDEFINED)  # the caller's word that it may be discarded

        application.record(record)


@pytest.mark.parametrize("copy", ["fill", "from", "stream"])
def test_what_compute_writes_is_noticed(application: Application, device: gi.Device, copy: str) -> None:
    """And neither what it reads, nor a call that is refused."""
    commands = application.record(lambda _: None)
    with (
        gi.vulkan.share_image(application.vk, device, (16, 8), "R8_UNORM", tiling="linear") as shared,
        device.create_stream() as stream,
    ):
        assert shared.buffer is not None
        shared.buffer.copy_to_host(bytearray(16))
        with pytest.raises(gi.ArgumentTypeError):
            shared.buffer.fill(7, stream=object())  # type: ignore[arg-type]
        application.record(shared.acquire)
        if copy == "from":
            shared.buffer.copy_from_host(bytes(16))
        else:
            shared.buffer.fill(7, stream=stream if copy == "stream" else None)
        with pytest.raises(gi.InvalidArgumentError, match="initial="):
            shared.acquire(commands)


def test_an_initial_layout_needs_a_queue(application: Application, device: gi.Device) -> None:
    handles = application.instance, application.physical_device, application.device
    for queue, family, said in ((None, 0, "UNDEFINED"), (application.queue, None, "queue_family_index")):
        with (
            gi.vulkan.VulkanContext(*handles, queue, family) as vk,
            pytest.raises(gi.InvalidArgumentError, match=said),
        ):
            gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear", initial=GENERAL)
    for wrong in (UNDEFINED, -1, "GENERAL"):
        with pytest.raises(gi.InvalidArgumentError, match="initial"):
            gi.vulkan.share_image(application.vk, device, (8, 8), "R8_UNORM", tiling="linear", initial=wrong)  # type: ignore[arg-type]


def test_a_submission_that_fails(application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made under the queue's lock, and leaves nothing."""
    vk, locked = application.vk, []

    def refuse(*_: object) -> int:
        locked.append(system.holds(vk._submitting))
        return -4

    monkeypatch.setitem(vk.functions.__dict__, "vkQueueSubmit", refuse)
    with pytest.raises(gi.DriverError, match="VK_ERROR_DEVICE_LOST"):
        gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear", initial=GENERAL)
    assert locked == [True]
    assert not vk.lifetime.standing


def test_a_queue_that_is_held(application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call gives up; the context's close destroys what the queue used, and the layer says nothing of leaks."""
    vulkan, vk = application.api, application.vk
    kind = vulkan.VkSemaphoreTypeCreateInfo(semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE)
    gate = vulkan.vkCreateSemaphore(application.device, vulkan.VkSemaphoreCreateInfo(pNext=kind), None)
    values = vulkan.VkTimelineSemaphoreSubmitInfo(pWaitSemaphoreValues=[1])
    info = vulkan.VkSubmitInfo(pNext=values, pWaitSemaphores=[gate], pWaitDstStageMask=[TRANSFER])
    vulkan.vkQueueSubmit(application.queue, 1, [info], None)
    monkeypatch.setattr(_context, "_SUBMISSION_S", 0.05)
    with pytest.raises(gi.ResourceBusyError, match=r"finish a submission in 0.05 s"):
        gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear", initial=GENERAL)
    opened = vk.api.new("VkSemaphoreSignalInfo", semaphore=vk.api.cast("VkSemaphore", gate), value=1)
    vk._call("vkSignalSemaphore", vk.device, opened)
    vk.close()
    vulkan.vkDestroySemaphore(application.device, gate, None)
