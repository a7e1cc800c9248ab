"""Closed objects, null handles, wrong arguments and failing calls: errors that say so, and no crash of the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.handles import Binary, Timeline
from gpuinterop.vulkan._query import PhysicalDevice, Support
from tests.limits import LIMIT

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, semaphores_missing
else:
    from vulkan_application import Application, semaphores_missing


@pytest.fixture
def handoff(driver: str, application: Application, device: gi.Device) -> Any:
    if not gi.vulkan.capabilities(application.vk).supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        semaphores_missing(driver, Binary)
    with gi.vulkan.share_handoff(application.vk, device, allow=("binary",)) as handoff:
        yield handoff


def closed(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(gi.ResourceClosedError):
            call()


@pytest.mark.parametrize("by", ["itself", "the context"])
def test_what_is_closed_hands_nothing_out(application: Application, device: gi.Device, by: str) -> None:
    vk = application.vk
    buffer = gi.vulkan.share_buffer(vk, device, 4096)
    image = gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear")
    for thing in (buffer, image) if by == "itself" else (vk,):
        thing.close()
    commands = application.record(lambda _: None)
    closed(
        lambda: buffer.vk_buffer,
        lambda: buffer.vk_memory,
        lambda: buffer.release(commands),
        lambda: buffer.acquire(commands),
        lambda: image.vk_image,
        lambda: image.vk_memory,
        lambda: image.release(commands),
        lambda: image.acquire(commands),
    )
    if by == "the context":
        closed(
            lambda: gi.vulkan.share_buffer(vk, device, 4096),
            lambda: gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM"),
            lambda: gi.vulkan.share_semaphore(vk, device),
            lambda: gi.vulkan.share_handoff(vk, device),
            lambda: gi.vulkan.export_memory(vk, 1, size=1, dedicated=False),
            lambda: gi.vulkan.export_semaphore(vk, 1, Binary),
            lambda: vk.identity,  # the VkInstance may be gone as well
            lambda: vk.capabilities,
            lambda: vk.is_cpu,
            lambda: gi.vulkan.required_extensions(vk),
        )


@pytest.mark.parametrize("by", ["itself", "the context"])
def test_a_closed_handoff_submits_nothing(application: Application, handoff: Any, by: str) -> None:
    (handoff if by == "itself" else application.vk).close()
    closed(
        handoff.vulkan_submit,
        handoff.submit,
        lambda: handoff.wait_host(0),
        lambda: handoff._vk_to_compute.vk_semaphore,
        handoff.undo_submit,
    )


def test_a_closed_timeline_is_not_looked_at(application: Application, device: gi.Device) -> None:
    with gi.bridge.Bridge(device) as bridge:
        shared = gi.vulkan.share_semaphore(application.vk, device, Timeline, bridge=bridge)
        shared.close()
        closed(shared.counter, lambda: shared.vk_semaphore)


@pytest.mark.signals_beside
def test_a_bad_timeout_is_refused_at_once(application: Application, device: gi.Device) -> None:
    """Also where there is nothing to wait for yet, or nothing any more."""
    bad: list[Any] = ["soon", b"1", float("nan"), -1, True]
    allow = "timeline", "binary", "bridged"
    with gi.vulkan.share_handoff(application.vk, device, allow=allow) as handoff, device.create_stream() as stream:
        for _ in range(2):
            for timeout in bad:
                for call in (handoff.wait_host, handoff.close, lambda limit: handoff.acquire(stream, timeout=limit)):
                    with pytest.raises(gi.InvalidArgumentError, match="timeout"):
                        call(timeout)
            handoff.submit()
            with pytest.raises(gi.InvalidArgumentError, match="timeout"):
                handoff.acquire(stream, timeout=bad[0])
            handoff.acquire(stream)
            handoff.release(stream)
            handoff.wait_host(None)
        application.idle()


def test_a_bad_value_does_not_reach_the_driver(application: Application) -> None:
    vulkan = application.api
    kind = vulkan.VkSemaphoreTypeCreateInfo(semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
    semaphore = vulkan.vkCreateSemaphore(application.device, vulkan.VkSemaphoreCreateInfo(pNext=kind), None)
    endpoint = gi.vulkan.TimelineEndpoint(application.vk, semaphore)
    bad: list[Any] = ["1", None, 1.0, True, -1, 1 << 64]
    for value in bad:
        with pytest.raises(gi.InvalidArgumentError, match="value"):
            endpoint.signal(value)
    assert endpoint.counter() == 0
    vulkan.vkDestroySemaphore(application.device, semaphore, None)


def test_null_handles_in_a_submission_are_refused(handoff: Any) -> None:
    with pytest.raises(gi.InvalidArgumentError, match="queue: the VkQueue is null"):
        handoff.submit(queue=0)
    with pytest.raises(gi.InvalidArgumentError, match="command_buffers: the VkCommandBuffer is null"):
        handoff.submit(command_buffers=[None])
    assert handoff.vulkan_submit()["signal_semaphores"]  # neither took the turn


def test_a_failed_submission_can_be_repeated(
    application: Application, device: gi.Device, handoff: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(application.vk.functions.__dict__, "vkQueueSubmit", lambda *_: -1)
    for _ in range(2):
        with pytest.raises(gi.DriverError, match="VK_ERROR_OUT_OF_HOST_MEMORY"):
            handoff.submit()
    with device.create_stream() as stream:
        with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .* acquire;"):
            handoff.acquire(stream)  # nothing will signal
        monkeypatch.undo()
        handoff.vulkan_submit()
        handoff.undo_submit()  # as somebody does whose own vkQueueSubmit failed
        handoff.submit()
        handoff.acquire(stream)
        stream.synchronize(LIMIT)
        with pytest.raises(gi.InvalidArgumentError, match=r"^handoff: .* undo_submit;"):
            handoff.undo_submit()
    application.idle()


def test_an_image_over_the_limits_is_refused(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    vk = application.vk

    def refused(argument: str, *extent: int, **options: Any) -> None:
        with pytest.raises(gi.InvalidArgumentError) as caught:
            gi.vulkan.share_image(vk, device, extent, "R8G8B8A8_UNORM", **options)
        assert caught.value.argument == argument

    refused("extent", 100_000, 4, tiling="linear")
    refused("extent", 4, 100_000, tiling="linear")
    limits = Support(features=6, extent=(16, 8, 1), levels=4, layers=3, size=16)
    monkeypatch.setattr(PhysicalDevice, "image_support", lambda *_: limits)
    refused("extent", 16, 8, tiling="linear")  # for its bytes
    # Whether the device maps mipmapped arrays does not matter here.
    monkeypatch.setattr("gpuinterop.vulkan._memory.agree", lambda *_: gi.OpaqueFd)
    refused("extent", 17, 8)
    refused("extent", 16, 9)
    refused("levels", 16, 8, levels=5)
    refused("levels", 4, 4, levels=4)  # it has 4, 2 and 1 texels
    refused("layers", 16, 8, layers=4)


def test_bad_arguments_are_named(application: Application, device: gi.Device) -> None:
    vk: Any = application.vk
    g: Any = gi.vulkan
    dev: Any = device
    linear = {"tiling": "linear"}
    families = len(application.api.vkGetPhysicalDeviceQueueFamilyProperties(application.physical_device))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("vk", lambda: g.share_buffer(application.device, dev, 4096)),
        ("vk", lambda: g.export_memory(None, 1, size=1, dedicated=False)),
        ("device", lambda: g.share_buffer(vk, 0, 4096)),
        ("size", lambda: g.share_buffer(vk, dev, 1 << 63)),
        ("usage", lambda: g.share_buffer(vk, dev, 4096, usage=0)),
        ("usage", lambda: g.share_image(vk, dev, (8, 8), "R8_UNORM", usage=-1, **linear)),
        ("handle_types", lambda: g.share_buffer(vk, dev, 4096, handle_types=[gi.TimelineFd])),
        ("handle_types", lambda: g.share_buffer(vk, dev, 4096, handle_types=[])),
        ("extent", lambda: g.share_image(vk, dev, 8, "R8_UNORM", **linear)),
        ("format", lambda: g.share_image(vk, dev, (8, 8), "R8G8B8_UNORM", **linear)),  # no driver has linear ones
        ("extent", lambda: g.share_image(vk, dev, (8,), "R8_UNORM", **linear)),
        ("extent", lambda: g.share_image(vk, dev, (8, 0), "R8_UNORM", **linear)),
        ("levels", lambda: g.share_image(vk, dev, (8, 8), "R8_UNORM", levels="2")),
        ("levels", lambda: g.share_image(vk, dev, (8, 8), "R8_UNORM", levels=2, **linear)),
        ("layers", lambda: g.share_image(vk, dev, (8, 8), "R8_UNORM", layers=0)),
        ("tiling", lambda: g.share_image(vk, dev, (8, 8), "R8_UNORM", tiling="swizzled")),
        ("format", lambda: g.share_image(vk, dev, (8, 8), "R5G6B5_UNORM_PACK16", **linear)),
        ("kind", lambda: g.share_semaphore(vk, dev, "binary")),
        ("allow", lambda: g.share_handoff(vk, dev, allow=())),
        ("allow", lambda: g.share_handoff(vk, dev, allow="timeline")),
        ("allow", lambda: g.share_handoff(vk, dev, allow=("telepathy",))),
        ("array", lambda: g.import_array(vk, 3)),
        ("array", lambda: g.import_array(vk, np.zeros((0, 3)))),
        ("array", lambda: g.import_array(vk, np.ma.zeros(4))),
        ("usage", lambda: g.import_array(vk, np.zeros(4), usage=0)),
        ("handle_type", lambda: g.export_memory(vk, 1, size=1, dedicated=False, handle_type=gi.D3D12Heap)),
        *(
            ("queue_family_index", lambda it=it: g.VulkanContext(vk.instance, vk.physical_device, vk.device, None, it))
            for it in (families, "0", -1)
        ),
        *(
            ("format", lambda it=it: g.share_image(vk, dev, (8, 8), it))
            for it in (None, 0, "UNDEFINED", "R9_UNORM", "_MAX_ENUM", 987654, 8.0)
        ),
        ("timeout", lambda: vk.close("soon")),
        ("instance", lambda: g.VulkanContext("x", vk.physical_device, vk.device)),
        *(
            null
            for it in (None, 0, application.api.ffi.NULL)
            for null in (
                ("vk_memory", lambda it=it: g.export_memory(vk, it, size=4096, dedicated=False)),
                ("vk_semaphore", lambda it=it: g.export_semaphore(vk, it, Binary)),
                ("physical_device", lambda it=it: g.identity(it)),
            )
        ),
    ]
    for argument, call in calls:
        with pytest.raises(gi.InvalidArgumentError) as caught:
            call()
        assert caught.value.argument == argument, caught.value
        assert argument != "vk" or "VulkanContext(instance, physical_device, device, queue, " in str(caught.value)


@pytest.mark.parametrize(("call", "beyond"), [("vkCreateBuffer", 1), ("vkCreateBuffer", 0), ("vkAllocateMemory", None)])
def test_what_the_driver_cannot_allocate_is_told_in_bytes(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch, call: str, beyond: int | None
) -> None:
    """And the driver's limit only where the size is `beyond` it."""
    api = application.api
    limits = api.VkPhysicalDeviceMaintenance3Properties()
    asked = api.VkPhysicalDeviceProperties2(pNext=limits)
    api.vkGetPhysicalDeviceProperties2(application.physical_device, pProperties=asked)
    most = limits.maxMemoryAllocationSize
    size = 1 << 20 if beyond is None else most + beyond
    limit = rf"{most:,}\D*" if beyond else ""
    said = rf"{call} failed .* {size:,} bytes\D*{limit}$"
    monkeypatch.setitem(application.vk.functions.__dict__, call, lambda *_: -2)
    with pytest.raises(gi.OutOfMemoryError, match=said):
        gi.vulkan.share_buffer(application.vk, device, size)
