from __future__ import annotations

import re
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.capabilities import Capabilities, Cell, disable
from gpuinterop.handles import Binary, DeviceIdentity, OriginKind, Timeline
from gpuinterop.testing.missing_vulkan import give_up
from gpuinterop.vulkan._image import SharedImage, _ImagePlan
from tests.cli.invoke import invoke
from tests.validation import descriptors

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import (
        DECLARED_GAPS,
        Application,
        match,
        require_allocations,
    )
else:
    from vulkan_application import DECLARED_GAPS, Application, match, require_allocations


def fill(application: Application, shared: Any, word: int) -> None:
    def record(commands: Any) -> None:
        application.api.vkCmdFillBuffer(commands, shared.vk_buffer, 0, shared.size, word)
        shared.release(commands)

    application.run(record)


def test_one_buffer_on_both_sides(application: Application, device: gi.Device) -> None:
    vulkan = application.api
    with gi.vulkan.share_buffer(application.vk, device, 12288) as shared:
        assert shared.size == 12288 <= shared.allocation_size
        assert shared.handle_type is gi.OpaqueFd
        fill(application, shared, 0xCAFEBABE)
        host = np.zeros(3072, np.uint32)
        shared.copy_to_host(host)
        assert (host == 0xCAFEBABE).all()
        host[:] = np.arange(3072)
        shared.copy_from_host(host)
        # Back through Vulkan: a copy of the first half over the second.
        region = vulkan.VkBufferCopy(srcOffset=0, dstOffset=6144, size=6144)

        def record(commands: Any) -> None:
            shared.acquire(commands, stage=vulkan.VK_PIPELINE_STAGE_TRANSFER_BIT)
            vulkan.vkCmdCopyBuffer(commands, shared.vk_buffer, shared.vk_buffer, 1, [region])
            shared.release(commands)

        application.run(record)
        shared.copy_to_host(host)
        assert (host[1536:] == np.arange(1536)).all()
        if application.vk.is_cpu:
            view = np.asarray(shared.view((3072,), "uint32"))
            assert view.ctypes.data == shared.ptr
            assert (view == host).all()
            del view
        with pytest.raises(
            gi.ArgumentTypeError, match=r"SharedBuffer; use numpy.asarray\(shared.view\(shape, dtype\)\)"
        ):
            np.asarray(shared)
    application.vk.close()
    assert shared.vulkan_object.closed
    with pytest.raises(gi.ResourceClosedError):
        gi.vulkan.share_buffer(application.vk, device, 4096)


def test_a_forgotten_extension_is_named(driver: str) -> None:
    application = Application(driver, extensions=False)
    try:
        device = match(application.vk)
        before = descriptors()
        with pytest.raises(gi.InvalidArgumentError, match="VkDevice was created without VK_KHR_external_memory_fd"):
            gi.vulkan.share_buffer(application.vk, device, 4096)
        with pytest.raises((gi.InvalidArgumentError, gi.UnsupportedError), match="VK_KHR_external_semaphore_fd"):
            gi.vulkan.share_semaphore(application.vk, device, Binary)
        assert descriptors() == before
    finally:
        application.close()


def test_another_device_is_refused(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = DeviceIdentity(name="another", uuid=b"another device!!", is_cpu=not application.vk.is_cpu)
    monkeypatch.setattr(type(application.vk), "identity", other)
    for call in (
        lambda: gi.vulkan.share_buffer(application.vk, device, 4096),
        lambda: gi.vulkan.share_image(application.vk, device, (8, 8), "R8_UNORM", tiling="linear"),
        lambda: gi.vulkan.share_semaphore(application.vk, device, Binary),
        lambda: gi.vulkan.share_handoff(application.vk, device),
    ):
        with pytest.raises(gi.InvalidArgumentError, match="match_device"):
            call()


def test_what_a_side_cannot_is_refused(application: Application, device: gi.Device) -> None:
    vk = application.vk
    with pytest.raises(gi.UnsupportedError):
        gi.vulkan.share_buffer(vk, device, 4096, handle_types=[gi.D3D12Heap])
    if not device.capabilities.supports((gi.Operation.MAP_MIPMAPPED_ARRAY, gi.OpaqueFd)):
        with pytest.raises(gi.UnsupportedError, match="map_mipmapped_array"):
            gi.vulkan.share_image(vk, device, (64, 64), "R8G8B8A8_UNORM", tiling="optimal")
    if not gi.vulkan.capabilities(vk).supports((gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd)):
        with pytest.raises(gi.UnsupportedError, match="timeline"):
            gi.vulkan.share_semaphore(vk, device, Timeline)
    for size in (0, -4):
        with pytest.raises(gi.InvalidArgumentError, match="size"):
            gi.vulkan.share_buffer(vk, device, size)


@pytest.mark.parametrize("format", ["R8G8B8A8_UNORM", "VK_FORMAT_R8G8B8A8_UNORM", 37])
def test_a_linear_image_in_place(application: Application, device: gi.Device, driver: str, format: int | str) -> None:
    vulkan = application.api
    with gi.vulkan.share_image(application.vk, device, (100, 50), format, tiling="linear") as shared:
        assert shared.format == "R8G8B8A8_UNORM"
        if driver in ("swiftshader", "lavapipe"):
            assert shared.row_pitch == {"swiftshader": 400, "lavapipe": 448}[driver]
        everything = vulkan.VkImageSubresourceRange(aspectMask=1, levelCount=1, layerCount=1)

        def record(commands: Any) -> None:
            shared.acquire(commands)
            colour = vulkan.VkClearColorValue(float32=[1.0, 0.0, 0.2, 0.4])
            vulkan.vkCmdClearColorImage(commands, shared.vk_image, 1, colour, 1, [everything])
            shared.release(commands)

        application.run(record)
        if application.vk.is_cpu:
            view = np.asarray(shared.view())
            assert view.shape == (50, 100, 4)
            assert view.strides == (shared.row_pitch, 4, 1)
            assert (view == [255, 0, 51, 102]).all()
            view[10:20, 30:40] = 9
            del view
        with pytest.raises(gi.ArgumentTypeError, match=r"SharedImage; use numpy.asarray\(image.view\(\)\)"):
            np.asarray(shared)

        def back_and_forth(commands: Any) -> None:
            shared.acquire(commands)
            shared.release(commands)

        application.run(back_and_forth)


def test_an_optimal_images_usage_is_the_arrays(application: Application) -> None:
    """With a made-up image and memory: the host maps no optimal image."""
    given: dict[str, Any] = {}

    def map_mipmapped_array(*_: object, **options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(lifetime=None)

    memory: Any = SimpleNamespace(map_mipmapped_array=map_mipmapped_array)
    for usage, expected in (
        (None, gi.handles.ArrayUsage.SURFACE),  # storage is among the default
        (0x4, gi.handles.ArrayUsage.NONE),  # VK_IMAGE_USAGE_SAMPLED_BIT
        (0x10, gi.handles.ArrayUsage.COLOR_ATTACHMENT),
        (0x18, gi.handles.ArrayUsage.COLOR_ATTACHMENT | gi.handles.ArrayUsage.SURFACE),
    ):
        plan = _ImagePlan(application.vk, (64, 64), "R8G8B8A8_UNORM", "optimal", 3, 2, usage)
        native: Any = SimpleNamespace(pair=lambda _: None, handle_type=gi.OpaqueFd, size=64, dedicated=False)
        SharedImage(application.vk, native, memory, plan)
        assert given == {"levels": 3, "layers": 2, "usage": expected, "label": None}


def test_linear_images_of_other_formats(application: Application, device: gi.Device) -> None:
    for format, dtype, channels in (("R32_SFLOAT", "float32", 1), ("R32G32B32A32_SFLOAT", "float32", 4)):
        with gi.vulkan.share_image(application.vk, device, (33, 5), format, tiling="linear") as shared:
            view = shared.view()
            assert tuple(view.shape) == (5, 33, channels)
            assert view.dtype == dtype
            del view
    one: Any = np.int64(1)
    with gi.vulkan.share_image(
        application.vk, device, (33 * one, 5 * one), 9 * one, tiling="linear", levels=one, layers=one
    ) as shared:
        assert shared.extent == (33, 5)
    for arguments, complaint in (
        (((8,), "R8_UNORM"), "extent"),
        (((8, 0), "R8_UNORM"), "extent"),
        (((8, 8), "R9_UNORM"), "expected a VkFormat"),
        (((8, 8), 987654), "expected a VkFormat"),
        (((8, 8), 1.5), "format"),
        (((8, 8), "R5G6B5_UNORM_PACK16"), "channels that are alike"),
    ):
        with pytest.raises(gi.InvalidArgumentError, match=complaint):
            gi.vulkan.share_image(application.vk, device, *arguments, tiling="linear")
    with pytest.raises(gi.InvalidArgumentError, match="expected 1 for a linear image"):
        gi.vulkan.share_image(application.vk, device, (8, 8), "R8_UNORM", tiling="linear", levels=2)
    with pytest.raises(gi.InvalidArgumentError, match="tiling"):
        gi.vulkan.share_image(application.vk, device, (8, 8), "R8_UNORM", tiling="swizzled")


def test_exports_of_the_applications_own_objects(application: Application, device: gi.Device) -> None:
    with gi.vulkan.share_buffer(application.vk, device, 4096) as shared:
        handle = gi.vulkan.export_memory(
            application.vk, shared.vk_memory, size=shared.allocation_size, dedicated=shared.dedicated
        )
        assert handle.origin is not None
        assert handle.origin.size == shared.allocation_size
        with device.import_memory(handle, size=shared.allocation_size) as memory, memory.map_buffer() as buffer:
            buffer.fill(3)
        host = np.zeros(4096, np.uint8)
        shared.copy_to_host(host)
        assert (host == 3).all()
        with pytest.raises(gi.InvalidArgumentError, match="handle_type"):
            gi.vulkan.export_memory(application.vk, shared.vk_memory, size=1, dedicated=False, handle_type=gi.D3D12Heap)
    if not gi.vulkan.capabilities(application.vk).supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        with pytest.raises(gi.UnsupportedError):
            gi.vulkan.export_semaphore(application.vk, 1, Binary)
        return
    with gi.vulkan.share_semaphore(application.vk, device, Binary) as semaphore:
        with gi.vulkan.export_semaphore(application.vk, semaphore.vk_semaphore, Binary) as exported:
            assert exported.origin is not None
            assert exported.origin.kind is OriginKind.BINARY
        with pytest.raises(gi.InvalidArgumentError, match="no counter"):
            semaphore.counter()


def modes(application: Application, device: gi.Device) -> list[str]:
    table = gi.vulkan.capabilities(application.vk)
    return [
        mode
        for mode, kind in (("timeline", gi.TimelineFd), ("binary", gi.OpaqueFd))
        if table.supports((gi.Operation.IMPORT_SEMAPHORE, kind))
        and device.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, kind))
    ]


@pytest.mark.signals_beside
@pytest.mark.parametrize("mode", ["timeline", "binary", "bridged"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["submit", "by hand"])
def test_a_handoff_keeps_both_sides_in_step(
    driver: str, application: Application, device: gi.Device, mode: str, by_hand: bool
) -> None:
    possible = [*modes(application, device), "bridged"]
    if mode not in possible:
        declared = DECLARED_GAPS.get(driver, set())
        if {"binary": Binary, "timeline": Timeline}[mode] not in declared:
            give_up(f"{driver} should hand over by {mode}")
        with pytest.raises(gi.UnsupportedError):
            gi.vulkan.share_handoff(application.vk, device, allow=(mode,))
        return
    vulkan = application.api
    with (
        gi.vulkan.share_buffer(application.vk, device, 64) as shared,
        gi.vulkan.share_handoff(application.vk, device, allow=(mode,)) as handoff,
        device.create_stream() as stream,
    ):
        assert handoff.mode == mode
        assert handoff.queue_family is not None
        assert handoff.queue_family.index == 0
        handoff.wait_host(0)  # nothing was released yet
        seen = np.zeros(16, np.uint32)
        # Vulkan adds by copying: word k + 1 = word k, and the compute side counts word 0 up.
        region = vulkan.VkBufferCopy(srcOffset=0, dstOffset=32, size=4)
        fill(application, shared, 0)

        def record(commands: Any) -> None:
            shared.acquire(commands)
            vulkan.vkCmdCopyBuffer(commands, shared.vk_buffer, shared.vk_buffer, 1, [region])
            shared.release(commands)

        commands = application.record(record)
        for frame in range(20):
            if by_hand:
                what = handoff.vulkan_submit()
                chain = vulkan.VkTimelineSemaphoreSubmitInfo(
                    pWaitSemaphoreValues=what["wait_values"], pSignalSemaphoreValues=what["signal_values"]
                )
                info = vulkan.VkSubmitInfo(
                    pNext=None if mode == "binary" else chain,
                    pWaitSemaphores=what["wait_semaphores"],
                    pWaitDstStageMask=what["wait_stages"],
                    pCommandBuffers=[commands],
                    pSignalSemaphores=what["signal_semaphores"],
                )
                vulkan.vkQueueSubmit(application.queue, 1, [info], vulkan.VK_NULL_HANDLE)
            else:
                handoff.submit(command_buffers=[commands])
            with pytest.raises(gi.InvalidArgumentError, match="out of turn"):
                handoff.submit()
            handoff.acquire(stream)
            shared.fill(frame + 1, size=4, stream=stream)
            handoff.release(stream)
            handoff.wait_host(30)
            shared.copy_to_host(seen)
            assert seen[8] == frame * 0x01010101
        application.idle()


def test_a_handoff_on_a_driver_without_semaphores_says_why(application: Application, device: gi.Device) -> None:
    if modes(application, device):
        pytest.skip("this driver exports semaphores")
    with pytest.raises(gi.UnsupportedError, match="VK_KHR_external_semaphore_fd") as caught:
        gi.vulkan.share_handoff(application.vk, device)
    assert caught.value.capability.cell == Cell(gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd)
    _, both, bridged = str(caught.value).split("\n")  # the reason that they share is told once
    assert both.startswith("  timeline, binary: import_semaphore:timeline_fd is unsupported on")
    assert bridged == "  bridged: works here; pass allow=('timeline', 'binary', 'bridged')."
    with gi.vulkan.share_handoff(application.vk, device, allow=("timeline", "binary", "bridged")) as handoff:
        assert handoff.mode == "bridged"
    with pytest.raises(gi.InvalidArgumentError, match="allow"):
        gi.vulkan.share_handoff(application.vk, device, allow=("telepathy",))


def test_info_names_the_mode_that_the_driver_gets(application: Application, device: gi.Device) -> None:
    def works(mode: str) -> bool:
        with suppress(gi.UnsupportedError), gi.vulkan.share_handoff(application.vk, device, allow=(mode,)):
            return True
        return False

    best = next(mode for mode in ("timeline", "binary", "bridged") if works(mode))
    line = invoke("info").stdout.partition(application.vk.identity.name)[2].partition("; handoff ")[2]
    assert re.split(r"\W", line)[0] == best


def test_a_handoff_names_the_reason_of_every_mode(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that `allow` leaves out; a bridge needs Vulkan's timelines, and streams that wait for words."""
    possible = modes(application, device)
    for mode in {"timeline", "binary"} - set(possible):
        with pytest.raises(gi.UnsupportedError) as caught:
            gi.vulkan.share_handoff(application.vk, device, allow=(mode,))
        for other in possible:
            assert f"\n  {other}: works here; pass allow={(mode, other)}." in str(caught.value)
        assert f"\n  bridged: works here; pass allow=('{mode}', 'bridged')." in str(caught.value)
    monkeypatch.setattr(application.vk.physical, "has_timelines", False)
    with pytest.raises(gi.UnsupportedError, match=r"\n  bridged: wait_semaphore:timeline_fd is unsupported") as caught:
        gi.vulkan.share_handoff(application.vk, device, allow=("bridged",))
    assert "has no timeline semaphores" in str(caught.value)
    monkeypatch.setattr(application.vk.physical, "has_timelines", True)
    off = Capabilities(disable(device.capabilities.values(), "stream_memory_ops", lambda _: ()), owner=device.name)
    monkeypatch.setattr(device, "capabilities", off)
    with pytest.raises(gi.UnsupportedError, match=r"\n  bridged: stream_memory_ops is disabled"):
        gi.vulkan.share_handoff(application.vk, device, allow=("bridged",))


def test_the_first_mode_that_is_allowed(application: Application, device: gi.Device) -> None:
    """A bridge is taken where it is asked for first, and never where it is not named."""
    with gi.vulkan.share_handoff(application.vk, device, allow=("bridged", "timeline", "binary")) as handoff:
        assert handoff.mode == "bridged"
    if possible := modes(application, device):
        with gi.vulkan.share_handoff(application.vk, device, allow=("timeline", "binary", "bridged")) as handoff:
            assert handoff.mode == possible[0]


@pytest.mark.signals_beside
def test_a_bridge_of_the_callers(application: Application, device: gi.Device) -> None:
    """It outlives the handoff, and serves several."""
    with gi.bridge.Bridge(device) as bridge, device.create_stream() as stream:
        for _ in range(2):
            with gi.vulkan.share_handoff(application.vk, device, allow=("bridged",), bridge=bridge) as handoff:
                handoff.submit()
                handoff.acquire(stream)
                handoff.release(stream)
                handoff.wait_host(30)
                application.idle()
            assert not bridge.closed
        with gi.vulkan.share_semaphore(application.vk, device, Timeline, bridge=bridge) as semaphore:
            semaphore.semaphore.signal(stream, 7)
            semaphore.semaphore.host_wait(7, timeout=30)
            assert semaphore.counter() == 7
            with pytest.raises(gi.InvalidArgumentError, match="stands at 7"):
                semaphore.semaphore.host_signal(7)
        with pytest.raises(gi.InvalidArgumentError, match="kind"):
            gi.vulkan.share_semaphore(application.vk, device, Binary, bridge=bridge)
    with pytest.raises(gi.ResourceClosedError):
        gi.vulkan.share_handoff(application.vk, device, allow=("bridged",), bridge=bridge)
    with pytest.raises(gi.ArgumentTypeError, match="bridge"):
        gi.vulkan.share_semaphore(application.vk, device, Timeline, bridge=device)  # type: ignore[call-overload]


def test_a_devices_allocation_in_vulkan(application: Application, device: gi.Device) -> None:
    require_allocations(application, device)
    with (
        device.allocate(8192) as allocation,
        gi.vulkan.import_array(application.vk, allocation.buffer.view(allocation.size)) as imported,
    ):
        fill(application, imported, 0x11223344)
        host = np.zeros(allocation.size // 4, np.uint32)
        allocation.buffer.copy_to_host(host)
        assert (host == 0x11223344).all()
        # And the other way: the device writes, Vulkan copies it on into a shared buffer.
        allocation.buffer.fill(0x5A)
        with gi.vulkan.share_buffer(application.vk, device, 8192) as shared:
            region = application.api.VkBufferCopy(size=8192)

            def record(commands: Any) -> None:
                imported.acquire(commands)
                application.api.vkCmdCopyBuffer(commands, imported.vk_buffer, shared.vk_buffer, 1, [region])
                imported.release(commands)
                shared.release(commands)

            application.run(record)
            seen = np.zeros(8192, np.uint8)
            shared.copy_to_host(seen)
            assert (seen == 0x5A).all()
    imported.close()
    with pytest.raises(gi.ResourceClosedError):
        _ = imported.vk_buffer
