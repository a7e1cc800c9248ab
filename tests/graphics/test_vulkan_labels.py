"""The user's name of an object stands in all that Vulkan's side says of it, and of what is derived from it."""

from __future__ import annotations

import gc
import os
import re
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from gpuinterop.handles import Binary

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, require_allocations
else:
    from vulkan_application import Application, require_allocations


def array(application: Application, device: gi.Device, **label: Any) -> Any:
    require_allocations(application, device)
    with device.allocate(4096) as memory:
        return gi.vulkan.import_array(application.vk, memory.view(1024), **label)


def buffer(application: Application, device: gi.Device, **label: Any) -> Any:
    return gi.vulkan.share_buffer(application.vk, device, 4096, **label)


def image(application: Application, device: gi.Device, **label: Any) -> Any:
    return gi.vulkan.share_image(application.vk, device, (64, 32), "R8G8B8A8_UNORM", tiling="linear", **label)


def bridged(application: Application, device: gi.Device, **label: Any) -> Any:
    return gi.vulkan.share_handoff(application.vk, device, allow=("bridged",), **label)


@pytest.mark.parametrize(
    ("make", "halves"),
    [
        (array, ["imported array", "Buffer"]),
        (buffer, ["Vulkan memory", "Buffer"]),
        (image, ["Vulkan memory", "Buffer"]),
    ],
    ids=["array", "buffer", "image"],
)
@pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning")
def test_memory_and_what_is_made_of_it(application: Application, device: gi.Device, make: Any, halves: Any) -> None:
    with make(application, device, label="mesh") as shared:
        kind = type(shared).__name__
        assert re.fullmatch(rf'<{kind} of {halves[0]} #\d+ "mesh">', repr(shared))
        assert re.fullmatch(rf'<{halves[1]} #\d+ "mesh">', repr(shared.buffer))
    assert repr(shared).endswith('"mesh" closed>')
    with pytest.raises(gi.ResourceClosedError, match=rf'the {kind} of {halves[0]} #\d+ "mesh" was closed'):
        shared.check_open()
    with make(application, device) as shared:
        assert re.fullmatch(rf"<{kind} of {halves[0]} #\d+ \([\d,]+ bytes\)>", repr(shared))
        assert re.fullmatch(rf"<Buffer #\d+ \([\d,]+ bytes of {halves[0]} #\d+\)>", repr(shared.buffer))
    with pytest.raises(gi.ArgumentTypeError, match=r"^label: expected a str, got int"):
        make(application, device, label=3)
    with pytest.warns(gi.LeakedResourceWarning, match=rf'{halves[0]} #\d+ "left" was dropped'):
        make(application, device, label="left")
        gc.collect()


@pytest.mark.parametrize("make", [buffer, image])
def test_an_import_that_fails(
    application: Application, device: gi.Device, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    def broken(_device: Any, lent: gi.OpaqueFd, **_: Any) -> None:
        os.close(lent.fd)
        raise RuntimeError("of a backend")

    monkeypatch.setattr(device.driver, "import_memory", broken)
    with pytest.raises(RuntimeError, match="of a backend"):
        make(application, device, label="mesh")
    with pytest.warns(gi.LeakedResourceWarning, match=r'^Vulkan memory #\d+ "mesh": an exception struck there'):
        device.drain(timeout=10)


def test_semaphores_and_handoffs(application: Application, device: gi.Device) -> None:
    with device.create_stream(label="compute") as stream:
        handoff = bridged(application, device, label="frames")
        semaphore = r'bridged Vulkan timeline 0x[0-9a-f]+ #\d+ "frames"'
        due = "frame 0 is due for submit"
        assert re.fullmatch(f"<SharedHandoff of {semaphore}: {due}>", repr(handoff))
        handoff.vulkan_submit()
        handoff.acquire(stream)
        with pytest.raises(gi.SemaphoreTimeoutError, match=rf'Stream #\d+ "compute" .*{semaphore} to reach 1'):
            stream.synchronize(timeout=0.01)
        handoff._to_compute.host_signal(1)
        stream.synchronize(timeout=10)
        handoff.close()
        assert re.fullmatch(f"<SharedHandoff of {semaphore} closed>", repr(handoff))
        for call in (handoff.release, handoff.acquire):  # in turn, and out of turn
            with pytest.raises(gi.ResourceClosedError, match=f"^{semaphore} is closed"):
                call(stream)
    if application.vk.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        forth, back = (rf'opaque_fd semaphore #\d+ "frames to {side}"' for side in ("compute", "graphics"))
        with gi.vulkan.share_handoff(application.vk, device, allow=("binary",), label="frames") as handoff:
            assert re.fullmatch(f"<SharedHandoff of {forth} and {back}: {due}>", repr(handoff))
        with pytest.raises(gi.ArgumentTypeError, match=r"^label: expected a str, got int"):
            gi.vulkan.share_handoff(application.vk, device, allow=("binary",), label=3)  # type: ignore[arg-type]
        with gi.vulkan.share_semaphore(application.vk, device, Binary, label="ready") as shared:
            assert re.fullmatch(r'<SharedSemaphore of opaque_fd semaphore #\d+ "ready">', repr(shared))


def test_the_context(application: Application, device: gi.Device) -> None:
    handles = application.instance, application.physical_device, application.device
    with gi.vulkan.VulkanContext(*handles, label="renderer") as vk:
        assert re.fullmatch(rf'<VulkanContext #\d+ "renderer" of {re.escape(vk.identity.name)}>', repr(vk))
        shared = gi.vulkan.share_buffer(vk, device, 4096)
    assert repr(vk).endswith(" closed>")
    with pytest.raises(gi.ResourceClosedError, match=r'VulkanContext #\d+ "renderer" is closed'):
        _ = shared.vk_buffer
    with pytest.raises(gi.ArgumentTypeError, match=r"^label: expected a str, got int"):
        gi.vulkan.VulkanContext(*handles, label=3)  # type: ignore[arg-type]
