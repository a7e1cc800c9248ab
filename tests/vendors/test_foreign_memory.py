"""Memory of other libraries, as the driver has it: what it tells of each kind, and what it lets other processes open.

What is told of an address is asked of every driver; the rest only of the simulated ones, whose memory is the CPU's.
"""

from __future__ import annotations

import ctypes

import pytest

from .foreign_memory import STEP, Kind, attribute, call, current, made, make, memory, ok
from .parties import MODE, SEVERAL
from .table import VENDOR

CUDA = VENDOR.name == "cuda"
NOT_FOUND = 500
KINDS: tuple[Kind, ...] = ("legacy", "pool", "managed", "vmm")
SIZE = 2 * STEP
MEMORY_TYPE, BUFFER_ID, IS_MANAGED, DEVICE_ORDINAL, IS_LEGACY, START, BYTES = 2, 7, 8, 9, 10, 11, 12
HANDLE_TYPES, RDMA, MEMPOOL, MAPPING_BYTES, MAPPING_START, BLOCK_ID = 14, 15, 17, 18, 19, 20


def address_range(address: int) -> tuple[int, int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_uint64()
    return call("MemGetAddressRange", ctypes.byref(base), ctypes.byref(size), address), base.value, size.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", range(1 + SEVERAL))
def test_what_the_driver_tells_of_an_address(kind: Kind, device: int) -> None:
    if kind == "pool" and MODE == "amd":
        pytest.skip("AMD's pools keep memory mapped, from 7.1 on")
    with memory(kind, SIZE, device) as it:
        inside, vmm = it.ptr + STEP + 64, kind == "vmm"
        assert attribute(MEMORY_TYPE, inside) == (1 if kind == "managed" and not CUDA else 2)
        assert attribute(IS_MANAGED, inside) == (kind == "managed")
        assert attribute(DEVICE_ORDINAL, inside) == device
        assert attribute(IS_LEGACY, inside) == ((kind == "legacy") if CUDA else None)
        assert attribute(HANDLE_TYPES, inside) == (int(vmm) if CUDA else None)
        assert attribute(RDMA, inside) == ((kind == "legacy") if CUDA else None)
        assert bool(attribute(MEMPOOL, inside)) == (CUDA and kind == "pool")
        one = (it.ptr + STEP, STEP) if vmm else (it.ptr, SIZE)  # one mapping, or the allocation
        reserved = (it.ptr, SIZE + STEP) if vmm and CUDA else one
        assert (attribute(START, inside), attribute(BYTES, inside)) == reserved
        if CUDA and kind in ("legacy", "vmm"):
            assert (attribute(MAPPING_START, inside), attribute(MAPPING_BYTES, inside)) == one
        assert address_range(inside) == (0, *one)
        ids = [attribute(BUFFER_ID, address) for address in (it.ptr, inside, it.ptr + 1)]
        assert ids[0] == ids[2]
        assert (ids[0] != ids[1]) == vmm
        assert (attribute(BLOCK_ID, it.ptr) != attribute(BLOCK_ID, inside)) == (CUDA and vmm)
        again = make(kind, SIZE, device)
        assert attribute(BUFFER_ID, again.ptr) not in ids
        again.free()
    if kind != "pool":  # which may keep it
        assert attribute(MEMORY_TYPE, inside) is None
        with current():
            assert address_range(inside)[0] == NOT_FOUND


def test_pinned_memory_is_the_hosts() -> None:
    with current():
        address = made("MemHostAlloc" if CUDA else "HostMalloc", SIZE, 0)
        assert attribute(MEMORY_TYPE, address) == 1
        ok("MemFreeHost" if CUDA else "HostFree", address)
