"""The stand-in below AMD's runtime: it fails where it is asked to, and counts.

That it has every call which AMD's runtime makes, the linker has seen (``-z defs``), and would have named those missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gpuinterop as gi
from tests.simulated.stand_in import StandIn

from ..parties import MODE, open_party

pytestmark = pytest.mark.skipif(MODE != "amd", reason="needs AMD's runtime on the stand-in")

SIZE = 1 << 16


@pytest.fixture
def theirs(device: gi.Device) -> Iterator[Any]:
    with open_party("memfd", device) as exporter, exporter.create_memory(SIZE) as memory:
        yield memory


def test_an_allocation_that_fails(device: gi.Device, stand_in: StandIn) -> None:
    before = stand_in.live("handle")
    stand_in.fail("hsa_amd_vmem_handle_create")
    with pytest.raises(gi.OutOfMemoryError):
        device.allocate(SIZE)
    assert stand_in.clear_faults() == 0
    assert stand_in.live("handle") == before
    with device.allocate(SIZE) as allocation:
        allocation.buffer.fill(3)
        assert stand_in.live("handle") == before + 1


def test_an_import_that_fails_leaves_the_handle(device: gi.Device, theirs: Any, stand_in: StandIn) -> None:
    stand_in.fail("hsa_amd_interop_map_buffer")
    handle = theirs.export()
    with pytest.raises(gi.DriverError, match="hipImportExternalMemory"):
        device.import_memory(handle, size=SIZE)
    assert stand_in.clear_faults() == 0
    assert stand_in.live("interop_mapping") == 0
    with device.import_memory(handle, size=SIZE) as memory, memory.map_buffer() as buffer:
        buffer.fill(5)
        assert stand_in.live("interop_mapping") == 1
    assert theirs.read(0, SIZE) == b"\x05" * SIZE


def test_a_page_that_cannot_be_pinned(device: gi.Device, stand_in: StandIn) -> None:
    stand_in.fail("hsa_amd_memory_lock_to_pool")
    with pytest.raises(gi.GpuInteropError):
        device.create_semaphore(gi.TimelineFd)
    assert stand_in.clear_faults() == 0
    with device.create_semaphore(gi.TimelineFd), device.create_stream():
        assert stand_in.live("registration") == 1
