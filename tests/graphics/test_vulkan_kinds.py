"""Handles of the wrong kind are refused at every public entry: drivers take them, and crash or hand out rubbish."""

from __future__ import annotations

import json
import re
from ctypes import c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from tests.programs import python

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

PROGRAM = Path(__file__).with_name("wrong_kinds.py")
LIMIT = 60.0


def outcomes(driver: str, handles: str) -> tuple[dict[tuple[str, str, str], dict[str, Any]], list[dict[str, Any]]]:
    """What came of each case, by parameter, its kind and what was given; and what else was said."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    while True:
        before = len(found)
        child = python(str(PROGRAM), driver, handles, str(before), seconds=LIMIT)
        case = None
        for line in map(json.loads, child.stdout.splitlines()):
            if "parameter" in line:
                case = line["parameter"], line["kind"], line["given"]
                found[case] = {"error": f"crash or hang: exit status {child.returncode}"}
            elif "error" in line and case is not None:
                found[case] = line
            else:
                others.append(line)
        if not child.returncode and "ended" in (others or [{}])[-1]:
            return found, others
        assert len(found) > before, child.stderr


def named(kind: str, text: str) -> bool:
    """Whether a message speaks of this kind, and not only of one whose name begins so."""
    return re.search(rf"(?<!\w){re.escape(kind)}(?![\w*])", text) is not None


@pytest.mark.timeout(1800)  # on a library that refuses nothing each case is a process of its own
def test_every_entry_refuses_every_other_kind(driver: str, application: Application) -> None:
    found, others = outcomes(driver, "raw" if application.raw else "typed")
    assert others[0] == {"missing": []}, "an entry that takes a handle and is not tried, or the other way round"
    bad = {}
    for (parameter, kind, given), outcome in found.items():
        entry, _, argument = parameter.rpartition(".")
        wants = "InvalidArgumentError" if given in ("-1", "2**64", "int -1") else "ArgumentTypeError"
        good = outcome["error"] == wants and outcome["argument"] == argument
        if given.startswith(("Vk", "PFN")):
            good = good and named(kind, outcome["text"]) and (given in outcome["text"] or given.startswith("PFN"))
        if not good:
            bad[f"{entry}({argument}={given})"] = outcome
    assert not bad, "\n".join([f"{len(bad)} of {len(found)}:", *(f"{call}: {got}" for call, got in bad.items())])


def test_what_does_not_tell_its_kind_is_taken(application: Application) -> None:
    """Ints, ctypes values, and the handles of another cffi, whether or not its types have Vulkan's names."""
    import cffi

    vulkan, vk = application.api, application.vk
    plain, named = cffi.FFI(), cffi.FFI()
    plain.cdef("typedef void *VkInstance; typedef uint64_t VkSemaphore;")
    named.cdef("typedef struct VkPhysicalDevice_T *VkPhysicalDevice; typedef struct VkDevice_T *VkDevice;")
    wanted = gi.vulkan.identity(application.physical_device)
    number = vk.api.address(application.physical_device)
    theirs: Any = named.cast("VkPhysicalDevice", number)
    for handle in (number, c_void_p(number), theirs, plain.cast("void *", number), plain.cast("uint64_t", number)):
        assert gi.vulkan.identity(handle) == wanted
    gi.vulkan.VulkanContext(
        plain.cast("VkInstance", vk.api.address(application.instance)),
        theirs,
        named.cast("VkDevice", vk.api.address(application.device)),
        get_instance_proc_addr=vk.api.address(vulkan.lib.vkGetInstanceProcAddr),
    ).close()
    with pytest.raises(gi.ArgumentTypeError, match="VkInstance, got a VkPhysicalDevice"):
        gi.vulkan.VulkanContext(theirs, theirs, application.device)


def test_handles_come_back_in_the_form_of_those_given(application: Application, device: gi.Device) -> None:
    ffi, vk = application.api.ffi, application.vk
    with (
        gi.vulkan.share_buffer(vk, device, 4096) as buffer,
        gi.vulkan.share_image(vk, device, (8, 8), "R8_UNORM", tiling="linear") as image,
        gi.vulkan.share_handoff(vk, device, allow=("timeline", "binary", "bridged")) as handoff,
    ):
        handles = {
            "VkBuffer": buffer.vk_buffer,
            "VkDeviceMemory": image.vk_memory,
            "VkImage": image.vk_image,
            "VkSemaphore": handoff.vulkan_submit()["signal_semaphores"][0],
        }
    for kind, handle in handles.items():
        assert type(handle) is int if application.raw else ffi.typeof(handle) == ffi.typeof(kind)
