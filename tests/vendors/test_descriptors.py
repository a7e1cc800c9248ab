"""What the driver is told of imports, field by field: every handle type that both vendors have, by handle and by name.

Windows is only here: the simulator's Windows personality takes the types, and keeps what it was given.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN
from gpuinterop.handles import ArrayLayout
from tests.simulated.driver import Simulator

from .parties import open_party
from .table import MEMORY, VENDOR

NT = 0x1234_5678
NAME = "Local\\gpuinterop \u00fc\U0001f600"


def only(found: list[Any]) -> Any:
    assert len(found) == 1
    return found[0]


def named(types: Any) -> list[Any]:
    return [pytest.param(kind, number, id=kind.type_name) for kind, number in types.items()]


@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize(("kind", "number"), named(MEMORY))
def test_memory_by_handle(backend: Any, windows: Simulator, kind: type[Any], number: int, dedicated: bool) -> None:
    windows.forget_descriptors()
    must = kind in (gi.D3D12Resource, gi.D3D11Resource, gi.D3D11ResourceKmt)
    native = backend.import_memory(
        backend.open_device(0), kind(handle=NT), size=0x1_0000_1000, dedicated=dedicated or must
    )
    desc = only(windows.descriptors(VENDOR.call("ImportExternalMemory")))
    assert (desc.type, desc.handle, desc.name) == (number, NT, None)
    assert (desc.size, desc.flags) == (0x1_0000_1000, int(dedicated or must))
    assert not any(desc.reserved)
    backend.destroy_memory(native)


@pytest.mark.parametrize(("kind", "number"), named({kind: n for kind, n in MEMORY.items() if kind.nameable}))
def test_memory_by_name(backend: Any, windows: Simulator, kind: type[Any], number: int) -> None:
    windows.forget_descriptors()
    native = backend.import_memory(backend.open_device(0), kind(name=NAME), size=4096, dedicated=True)
    desc = only(windows.descriptors(VENDOR.call("ImportExternalMemory")))
    assert (desc.type, desc.handle, desc.name, desc.flags) == (number, 0, NAME, 1)
    backend.destroy_memory(native)


@pytest.mark.parametrize(("kind", "number"), named(VENDOR.semaphores))
def test_semaphores_by_handle(backend: Any, windows: Simulator, kind: type[Any], number: int) -> None:
    windows.forget_descriptors()
    native = backend.import_semaphore(backend.open_device(0), kind(handle=NT))
    desc = only(windows.descriptors(VENDOR.call("ImportExternalSemaphore")))
    assert (desc.type, desc.handle, desc.name, desc.flags) == (number, NT, None, 0)
    assert not any(desc.reserved)
    backend.destroy_semaphore(native)


@pytest.mark.parametrize(("kind", "number"), named({kind: n for kind, n in VENDOR.semaphores.items() if kind.nameable}))
def test_semaphores_by_name(backend: Any, windows: Simulator, kind: type[Any], number: int) -> None:
    """HIP ignores the name: refused before the call, also for the type that memory has, too."""
    windows.forget_descriptors()
    call, device = VENDOR.call("ImportExternalSemaphore"), backend.open_device(0)
    if VENDOR.name == "hip":
        with pytest.raises(gi.UnsupportedError, match="HIP ignores the name") as caught:
            backend.import_semaphore(device, kind(name=NAME))
        assert caught.value.capability.workaround
        assert windows.descriptors(call) == []
        return
    native = backend.import_semaphore(device, kind(name=NAME))
    desc = only(windows.descriptors(call))
    assert (desc.type, desc.handle, desc.name, desc.flags) == (number, 0, NAME, 0)
    backend.destroy_semaphore(native)


@pytest.mark.skipif(sys.platform != "linux", reason="file descriptors")
def test_the_descriptor_of_a_linux_import(simulator: Simulator, device: gi.Device) -> None:
    """Through the whole library: the driver sees a duplicate, the size and the flag that the exporter said."""
    with open_party("memfd", device) as exporter, exporter.create_memory(8192) as theirs:
        simulator.forget_descriptors()
        handle = theirs.export()
        number = handle.fd  # type: ignore[attr-defined]
        with device.import_memory(handle, size=theirs.size) as memory:
            desc = only(simulator.descriptors(VENDOR.call("ImportExternalMemory")))
            assert (desc.type, desc.size, desc.flags) == (1, theirs.size, int(theirs.dedicated))
            assert desc.fd != number
            memory.map_buffer(4096, 1024).close()
            mapped = only(simulator.descriptors(VENDOR.call("ExternalMemoryGetMappedBuffer")))
            assert (mapped.offset, mapped.size, mapped.flags) == (0, theirs.size, 0)


def test_what_the_table_takes_has_a_number(backend: Any) -> None:
    """And what the driver refuses has none, so that no call can be made with it."""
    table = backend._driver.table
    for operation, types in (
        (gi.Operation.IMPORT_MEMORY, table.memory_types),
        (gi.Operation.IMPORT_SEMAPHORE, table.semaphore_types),
    ):
        kinds = {cell.handle_type for cell in DOMAIN if cell.operation is operation}
        assert kinds - set(types) == VENDOR.refuses[operation]
    with pytest.raises(gi.ArgumentTypeError, match=r"expected one of OpaqueFd, .* got TimelineFd"):
        backend.import_memory(backend.open_device(0), gi.TimelineFd(0), size=1, dedicated=False)


SURFACE, COLOUR, CUBE = gi.ArrayUsage.SURFACE, gi.ArrayUsage.COLOR_ATTACHMENT, gi.ArrayUsage.CUBEMAP
COLOURED = ArrayLayout(format="VK_FORMAT_R32G32B32A32_SFLOAT", extent=(16, 16, 0), usage=SURFACE | COLOUR)
LAYOUTS: list[tuple[ArrayLayout, tuple[int, ...], dict[str, tuple[int, ...]]]] = [
    (ArrayLayout(format="R8_UNORM", extent=(37, 21, 0), levels=3, offset=65536), (37, 21, 0, 0x02, 3),
     {"cuda": (0x01, 1), "hip": (8, 0, 0, 0, 1)}),
    (ArrayLayout(format="R16G16_SFLOAT", extent=(64, 0, 0)), (64, 0, 0, 0x02, 1),
     {"cuda": (0x10, 2), "hip": (16, 16, 0, 0, 2)}),
    (COLOURED, (16, 16, 0, 0x22, 1), {"cuda": (0x20, 4)}),
    (COLOURED, (16, 16, 0, 0x02, 1), {"hip": (32, 32, 32, 32, 2)}),  # which has no flag for it
    (ArrayLayout(format="R8G8B8A8_SINT", extent=(8, 6, 4), usage=gi.ArrayUsage.NONE), (8, 6, 4, 0, 1),
     {"cuda": (0x08, 4), "hip": (8, 8, 8, 8, 0)}),
    (ArrayLayout(format="R32_UINT", extent=(8, 8, 0), layers=3), (8, 8, 3, 0x03, 1),
     {"cuda": (0x03, 1), "hip": (32, 0, 0, 0, 1)}),
    # CUDA's layers lie as far apart as all possible levels need: the driver is told all of them.
    (ArrayLayout(format="R32_UINT", extent=(37, 21, 0), layers=3, levels=2), (37, 21, 3, 0x03, 6), {"cuda": (0x03, 1)}),
    (ArrayLayout(format="B8G8R8A8_UNORM", extent=(8, 8, 0), layers=6, usage=CUBE), (8, 8, 6, 0x04, 1),
     {"cuda": (0x01, 4), "hip": (8, 8, 8, 8, 1)}),
    (ArrayLayout(format="R16_SNORM", extent=(8, 8, 0), layers=12, usage=CUBE), (8, 8, 12, 0x05, 1),
     {"cuda": (0x09, 1), "hip": (16, 0, 0, 0, 0)}),
]  # fmt: skip
"""Width, height, depth, flags and levels; CUDA's format and channels, HIP's bits of four channels and their kind."""


def test_arrays(backend: Any, windows: Simulator) -> None:
    call = VENDOR.call("ExternalMemoryGetMappedMipmappedArray")
    if not backend._driver.has(call):
        pytest.skip("this runtime maps no arrays; hip/test_suite_again.py runs this on one that does")
    memory = backend.import_memory(backend.open_device(0), gi.OpaqueWin32(handle=NT), size=1 << 24, dedicated=True)
    for layout, shape, texels in LAYOUTS:
        if VENDOR.name in texels:
            windows.forget_descriptors()
            backend.destroy_array(backend.map_array(memory, layout))
            desc = only(windows.descriptors(call))
            if VENDOR.name == "cuda":
                names = ("offset", "format", "channels", "width", "height", "depth", "flags", "levels")
                found = tuple(getattr(desc, name) for name in names)
                assert not any(desc.reserved)
            else:
                found = struct.unpack("Q5i4x3QII", desc.raw)
            assert found == (layout.offset, *texels[VENDOR.name], *shape), layout
    with pytest.raises(gi.InvalidArgumentError, match=r"format.*R8G8B8A8_SRGB"):
        backend.map_array(memory, ArrayLayout(format="R8G8B8A8_SRGB", extent=(4, 4, 0)))
    backend.destroy_memory(memory)
