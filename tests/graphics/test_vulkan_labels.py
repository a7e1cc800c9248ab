"""The user's name of an object stands in what Vulkan's side says of it, and of what is made of it."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi

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


@pytest.mark.parametrize(
    ("make", "noun"), [(array, "imported array"), (buffer, "Vulkan memory"), (image, "Vulkan memory")]
)
@pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning")
def test_memory_and_what_is_made_of_it(
    application: Application, device: gi.Device, make: Callable[..., Any], noun: str
) -> None:
    with make(application, device, label="mesh") as shared:
        kind = type(shared).__name__
        assert re.fullmatch(rf'<{kind} of {noun} #\d+ "mesh">', repr(shared))
        assert re.fullmatch(r'<Buffer #\d+ "mesh">', repr(shared.buffer))
    with pytest.raises(gi.ResourceClosedError, match=rf'the {kind} of {noun} #\d+ "mesh" was closed'):
        shared.check_open()
    with pytest.raises(gi.ArgumentTypeError, match=r"^label: expected a str, got int"):
        make(application, device, label=3)
    with pytest.warns(gi.LeakedResourceWarning, match=rf'{noun} #\d+ "left" was dropped'):
        make(application, device, label="left")
        gc.collect()


def test_semaphores_and_handoffs(application: Application, device: gi.Device) -> None:
    modes = {"bridged": r'bridged Vulkan timeline 0x[0-9a-f]+ #\d+ "frames"'}
    if application.vk.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        sides = (rf'opaque_fd semaphore #\d+ "frames to {side}"' for side in ("compute", "graphics"))
        modes["binary"] = " and ".join(sides)
    for mode, names in modes.items():
        with gi.vulkan.share_handoff(application.vk, device, allow=(mode,), label="frames") as handoff:
            assert re.fullmatch(f"<SharedHandoff of {names}: frame 0 is due for submit>", repr(handoff))
        assert re.fullmatch(f"<SharedHandoff of {names} closed>", repr(handoff))
        with pytest.raises(gi.ArgumentTypeError, match=r"^label: expected a str, got int"):
            gi.vulkan.share_handoff(application.vk, device, allow=(mode,), label=3)  # type: ignore[arg-type]


def test_the_context(application: Application, device: gi.Device) -> None:
    handles = application.instance, application.physical_device, application.device
    with gi.vulkan.VulkanContext(*handles, label="renderer") as vk:
        assert re.fullmatch(rf'<VulkanContext #\d+ "renderer" of {re.escape(vk.identity.name)}>', repr(vk))
        shared = gi.vulkan.share_buffer(vk, device, 4096)
    assert repr(vk).endswith(" closed>")
    with pytest.raises(gi.ResourceClosedError, match=r'VulkanContext #\d+ "renderer" is closed'):
        _ = shared.vk_buffer
