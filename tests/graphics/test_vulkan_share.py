from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.capabilities import Capabilities, disable
from gpuinterop.handles import Binary, DeviceIdentity, OriginKind, Timeline
from gpuinterop.vulkan._image import SharedImage, _ImagePlan
from gpuinterop.vulkan._query import PhysicalDevice
from tests.cli.invoke import invoke
from tests.limits import LIMIT
from tests.missing_vulkan import give_up
from tests.validation import descriptors

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import (
        DECLARED_GAPS,
        Application,
        match,
    )
else:
    from vulkan_application import DECLARED_GAPS, Application, match


def fill(application: Application, shared: Any, word: int) -> None:
    def record(commands: Any) -> None:
        application.api.vkCmdFillBuffer(commands, shared.vk_buffer, 0, shared.size, word)
        shared.release(commands)

    application.run(record)


# Newer layers say that the extension of the handle types was forgotten, too.
@pytest.mark.unjustified("VUID-VkExternalMemoryBufferCreateInfo-handleTypes-parameter")
def test_a_forgotten_extension_is_named(driver: str) -> None:
    application = Application(driver, extensions=False)
    device, vk, before = match(application.vk), application.vk, descriptors()
    with pytest.raises(gi.InvalidArgumentError, match="VK_KHR_external_memory_fd"):
        gi.vulkan.share_buffer(vk, device, 4096)
    with pytest.raises((gi.InvalidArgumentError, gi.UnsupportedError), match="VK_KHR_external_semaphore_fd"):
        gi.vulkan.share_semaphore(vk, device, Binary)
    assert descriptors() == before
    if device.capabilities.supports((gi.Operation.EXPORT_ALLOCATION, gi.VmmFd)):
        with (
            device.allocate(4096) as allocation,
            pytest.raises(gi.InvalidArgumentError, match="was created without VK_"),
        ):
            gi.vulkan.import_array(vk, allocation.buffer.view(4096))
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


def test_the_choice_of_memory(application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dedicated where the driver wants that; the type that has all preferred flags, else the first."""
    monkeypatch.setattr(PhysicalDevice, "buffer_features", lambda *_: 0x1 | 0x2)  # DEDICATED_ONLY, EXPORTABLE
    with gi.vulkan.share_buffer(application.vk, device, 4096) as shared:
        assert shared.dedicated

    def three(_: Any, found: Any) -> None:
        found.memoryTypeCount = 3
        for index, flags in enumerate((0, 1, 7)):
            found.memoryTypes[index].propertyFlags = flags

    functions = application.vk.instance_functions.__dict__
    monkeypatch.setitem(functions, "vkGetPhysicalDeviceMemoryProperties", three)
    for bits, preferred, expected in ((7, (7, 6), (2, 7)), (3, (7, 1), (1, 1)), (6, (8,), (1, 1)), (4, (1,), (2, 7))):
        assert application.vk._memory_type(bits, *preferred) == expected


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


@pytest.mark.parametrize(
    ("format", "name", "dtype", "channels"),
    [
        ("R32_SFLOAT", "R32_SFLOAT", "float32", 1),
        ("VK_FORMAT_R32G32B32A32_SFLOAT", "R32G32B32A32_SFLOAT", "float32", 4),
        (np.int64(37), "R8G8B8A8_UNORM", "uint8", 4),
    ],
)
def test_linear_images_of_other_formats(
    application: Application, device: gi.Device, format: Any, name: str, dtype: str, channels: int
) -> None:
    extent: Any = np.int64(33), np.int64(5)
    with gi.vulkan.share_image(application.vk, device, extent, format, tiling="linear") as shared:
        view = shared.view()
        assert (shared.format, shared.extent, shared.dedicated) == (name, (33, 5), True)
        assert (tuple(view.shape), view.dtype) == ((5, 33, channels), dtype)
        if application.vk.is_cpu:
            strides = shared.row_pitch, channels * np.dtype(dtype).itemsize, np.dtype(dtype).itemsize
            assert np.asarray(view).strides == strides
        del view


def test_exports_of_the_applications_own_objects(application: Application, device: gi.Device) -> None:
    with gi.vulkan.share_buffer(application.vk, device, 4096) as shared:
        handle = gi.vulkan.export_memory(
            application.vk, shared.vk_memory, size=shared.allocation_size, dedicated=shared.dedicated
        )
        assert handle.origin is not None
        assert handle.origin.size == shared.allocation_size
        assert isinstance(handle, gi.OpaqueFd)
        assert not os.get_inheritable(handle.fd)
        with device.import_memory(handle, size=shared.allocation_size) as memory, memory.map_buffer() as buffer:
            buffer.fill(3)
        host = np.zeros(4096, np.uint8)
        shared.copy_to_host(host)
        assert (host == 3).all()
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
            with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .*\bacquire\b.* submit "):
                handoff.submit()
            handoff.acquire(stream)
            shared.fill(frame + 1, size=4, stream=stream)
            handoff.release(stream)
            handoff.wait_host(LIMIT)
            shared.copy_to_host(seen)
            assert seen[8] == frame * 0x01010101
        application.idle()


@pytest.mark.signals_beside
def test_wait_host_waits_for_the_release(application: Application, device: gi.Device) -> None:
    if not device.capabilities.supports((gi.Operation.CREATE_SEMAPHORE, gi.TimelineFd)):
        pytest.skip("the device cannot hold its own stream")
    allow = "timeline", "binary", "bridged"
    with (
        gi.vulkan.share_handoff(application.vk, device, allow=allow) as handoff,
        device.create_stream() as stream,
        device.create_semaphore(gi.TimelineFd) as hold,
    ):
        handoff.submit()
        handoff.acquire(stream)
        hold.wait(stream, 1)
        handoff.release(stream)
        with pytest.raises(TimeoutError):
            handoff.wait_host(0)
        hold.host_signal(1)
        handoff.wait_host(LIMIT)
        application.idle()


def test_a_handoff_names_the_reason_of_every_mode(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that `allow` leaves out; a bridge needs Vulkan's timelines, and streams that wait for words."""
    possible = modes(application, device)
    for mode in {"timeline", "binary"} - set(possible):
        with pytest.raises(gi.UnsupportedError) as caught:
            gi.vulkan.share_handoff(application.vk, device, allow=(mode,))
        for other in (*possible, "bridged"):
            assert f"\n  {other}: works here; pass allow={(mode, other)}." in str(caught.value)
        assert caught.value.capability.operation is gi.Operation.IMPORT_SEMAPHORE
    if not possible:
        _, both, _ = str(caught.value).split("\n")  # the reason that they share is told once
        assert both.startswith("  timeline, binary: import_semaphore:timeline_fd is unsupported on")
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
    """A bridge is taken where it is asked for first, and never where it is not named. ``gpuinterop info`` says so."""
    best = [*modes(application, device), "bridged"][0]
    for allow, mode in ((("bridged", "timeline", "binary"), "bridged"), (("timeline", "binary", "bridged"), best)):
        with gi.vulkan.share_handoff(application.vk, device, allow=allow) as handoff:
            assert handoff.mode == mode
    line = invoke("info").stdout.partition(application.vk.identity.name)[2].partition("; handoff ")[2]
    assert re.split(r"\W", line)[0] == best


@pytest.mark.signals_beside
def test_a_bridge_of_the_callers(application: Application, device: gi.Device) -> None:
    """It outlives the handoff, and serves several."""
    with gi.bridge.Bridge(device) as bridge, device.create_stream() as stream:
        for _ in range(2):
            with gi.vulkan.share_handoff(application.vk, device, allow=("bridged",), bridge=bridge) as handoff:
                handoff.submit()
                handoff.acquire(stream)
                handoff.release(stream)
                handoff.wait_host(LIMIT)
                application.idle()
            assert not bridge.closed
        with gi.vulkan.share_semaphore(application.vk, device, Timeline, bridge=bridge) as semaphore:
            semaphore.semaphore.signal(stream, 7)
            semaphore.semaphore.host_wait(7, timeout=LIMIT)
            assert semaphore.counter() == 7
            with pytest.raises(gi.InvalidArgumentError, match=r"\bat 7\b"):
                semaphore.semaphore.host_signal(7)
        with pytest.raises(gi.InvalidArgumentError, match="kind"):
            gi.vulkan.share_semaphore(application.vk, device, Binary, bridge=bridge)
    with pytest.raises(gi.ResourceClosedError):
        gi.vulkan.share_handoff(application.vk, device, allow=("bridged",), bridge=bridge)
    with pytest.raises(gi.ArgumentTypeError, match="bridge"):
        gi.vulkan.share_semaphore(application.vk, device, Timeline, bridge=device)  # type: ignore[call-overload]
