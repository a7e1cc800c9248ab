"""A GPU's arrays in Vulkan: what is behind a pointer decides, before anything is imported.

SwiftShader says that it is the simulated GPU: that has its memory in memfds, which SwiftShader imports.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Final

import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters.vulkan import VulkanExporter
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from .foreign_memory import STEP, Kind, memory
from .parties import SEVERAL, open_party
from .table import VENDOR
from .test_foreign_memory import CUDA

SIZE: Final = 4096
EXPORTS: Final = VENDOR.call("MemExportToShareableHandle")


@pytest.fixture
def vulkan(simulator: Simulator) -> Iterator[VulkanExporter]:
    with open_party("swiftshader", gi.device()) as party:
        assert isinstance(party, VulkanExporter)
        yield party


def ours_still_works(vulkan: VulkanExporter) -> None:
    """The VkDevice still takes good arrays."""
    with gi.device().allocate(SIZE) as allocation:
        with vulkan.import_array(allocation.buffer.view(SIZE)) as theirs:
            theirs.write(0, b"good")
        assert ctypes.string_at(allocation.buffer.ptr, 4) == b"good"
    allocation.close(timeout=LIMIT)


@pytest.mark.skipif(not CUDA, reason="HIP asks no handle of memory that others mapped")
def test_memory_of_another_library(vulkan: VulkanExporter) -> None:
    """A VMM handle that another library has mapped, as torch's expandable segments are."""
    with memory("vmm", STEP) as it:
        ctypes.memset(it.ptr, 7, STEP)
        with vulkan.import_array(it.part(SIZE, 512)) as theirs:
            assert theirs.size == 512
            assert theirs.read(0, 512) == b"\x07" * 512
            theirs.write(508, b"last")
        assert ctypes.string_at(it.ptr + SIZE + 507, 6) == b"\x07last\x07"


@pytest.mark.parametrize("kind", ["legacy", "pool", "managed"])
def test_memory_that_vulkan_cannot_have(simulator: Simulator, vulkan: VulkanExporter, kind: Kind) -> None:
    before = simulator.calls(EXPORTS)
    with memory(kind, SIZE) as it:
        with pytest.raises(
            gi.UnsupportedError, match=r"export_array:ipc_mem_handle .*expandable_segments:True"
        ) as found:
            gi.vulkan.import_array(vulkan.vk, it)
        assert found.value.capability.handle_type is gi.IpcMemHandle
    assert simulator.calls(EXPORTS) == before
    ours_still_works(vulkan)


@pytest.mark.skipif(not CUDA, reason="HIP asks no handle of memory that others mapped")
def test_an_array_across_handles(simulator: Simulator, vulkan: VulkanExporter) -> None:
    before = simulator.calls(EXPORTS)
    with memory("vmm", 3 * STEP) as it:
        for part, handles in ((it, 3), (it.part(STEP - 1, 2), 2)):
            with pytest.raises(gi.InvalidArgumentError, match=rf"\b{handles}; put it into Device.empty"):
                gi.vulkan.import_array(vulkan.vk, part)
        assert simulator.calls(EXPORTS) == before
        ours_still_works(vulkan)


@pytest.mark.skipif(not SEVERAL, reason="there is one device")
def test_memory_of_another_gpu(simulator: Simulator, vulkan: VulkanExporter) -> None:
    before = simulator.calls(EXPORTS)
    with gi.device(1).allocate(SIZE) as allocation:
        there = "expected memory of Vulkan's .*; create the VkDevice on that GPU"
        with pytest.raises(gi.InvalidArgumentError, match=there):
            gi.vulkan.import_array(vulkan.vk, allocation.buffer.view(SIZE))
        assert simulator.calls(EXPORTS) == before
    ours_still_works(vulkan)
