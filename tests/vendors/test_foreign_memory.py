"""Memory of other libraries, as the driver has it: what it tells of each kind, and what it lets other processes open.

What is told of an address is asked of every driver; the rest only of the simulated ones, whose memory is the CPU's.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.programs import python
from tests.simulated.driver import Simulator

from .foreign_memory import STEP, Foreign, Kind, attribute, call, current, export, made, make, memory, ok, open_exported
from .hip.runtime import Access, Location
from .parties import MODE, SEVERAL
from .table import VENDOR

CUDA = VENDOR.name == "cuda"
INVALID_VALUE, INVALID_DEVICE_POINTER, INVALID_CONTEXT, NOT_FOUND = 1, 17, 201, 500
GONE = INVALID_VALUE if CUDA else INVALID_DEVICE_POINTER
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


def test_a_reserved_address_has_no_memory(simulator: Simulator) -> None:
    with memory("vmm", SIZE) as it:
        assert attribute(MEMORY_TYPE, it.ptr + SIZE) is None
        access = Access(where=Location(1, 0), flags=3)
        for part in (STEP // 2, STEP + STEP // 2, SIZE + STEP):
            assert call("MemSetAccess", it.ptr, part, ctypes.byref(access), 1) == INVALID_VALUE
        ok("MemUnmap", it.ptr, SIZE)  # of whole mappings one call gives back all
        assert simulator.live()["vmm_mapping"] == 0
        for index, handle in enumerate(it.handles):
            ok("MemMap", it.ptr + index * STEP, STEP, 0, handle, 0)
        assert address_range(it.ptr)[0] == (NOT_FOUND if CUDA else 0), "there is no access yet"


# -- other processes ---------------------------------------------------------------------------------------------------

THERE = """
import ctypes, json, sys
from tests.simulated.driver import Simulator
from tests.vendors.foreign_memory import *
data = bytes.fromhex(sys.argv[1])
with current():
    opened = [open_exported(data, 0), open_exported(data), open_exported(data)]
    print(json.dumps(opened), flush=True)
    if not (ptr := opened[1][1]):
        sys.exit()
    first = ctypes.string_at(ptr, 3).hex()
    ctypes.memset(ptr + 1, 9, 1)
    told = attribute(10, ptr), attribute(12, ptr), export(ptr)[0]
    print(json.dumps([first, *told]), flush=True)
    sys.stdin.readline()  # it is freed
    still = ctypes.string_at(ptr, 3).hex(), open_exported(data)[1] == ptr
    closed = [call("IpcCloseMemHandle", ptr + 64)] + [call("IpcCloseMemHandle", ptr) for _ in range(4)]
    again = open_exported(data)
    noted = Simulator.attach(VENDOR.name).violations()
    print(json.dumps([*still, closed, again, len(noted)]), flush=True)
"""

NAMESPACES = ("unshare", "--pid", "--fork", "--net", "--ipc", "--mount-proc")


def in_namespaces() -> tuple[str, ...]:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACES, "true"], check=False).returncode:
        pytest.skip("needs the right to make namespaces")
    return NAMESPACES


@pytest.mark.parametrize("elsewhere", [False, True])
def test_another_process_opens_it(simulator: Simulator, elsewhere: bool) -> None:
    """Twice at one address, and keeps it when it is freed; by an inner address, the whole."""
    namespaces = in_namespaces() if elsewhere else ()  # which may skip: before anything is made
    with current():
        it = make("legacy", SIZE)
        ctypes.memset(it.ptr, 7, 3)
        code, data = export(it.ptr + STEP)
        assert (code, export(it.ptr)[1] == data) == (0, CUDA)
        assert open_exported(data) == (INVALID_CONTEXT, 0)
        command = [*namespaces, sys.executable, "-c", THERE, data.hex()]
        with subprocess.Popen(
            command, env=simulator.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin
            assert process.stdout

            def answer() -> Any:
                return json.loads(process.stdout.readline())  # type: ignore[union-attr]

            refused, first, second = answer()
            assert (refused, first[0], first) == ([INVALID_VALUE, 0], 0, second)
            assert answer() == ["070707", 0 if CUDA else None, SIZE, INVALID_VALUE]
            assert ctypes.string_at(it.ptr, 3) == b"\7\x09\7"
            it.free()
            print(file=process.stdin, flush=True)
            # Three were open; the inner address and the fourth are noted.
            assert answer() == ["070907", True, [INVALID_VALUE, 0, 0, 0, INVALID_VALUE], [GONE, 0], 2]
    assert simulator.live()["allocation"] == 0


SAME_NUMBER = """
import os, subprocess, sys
from tests.vendors.foreign_memory import *
with memory("legacy", 4096) as it:
    print(os.getpid(), flush=True)
    sys.stdout.flush()
    subprocess.run([*sys.argv[2:], sys.executable, "-c", sys.argv[1], export(it.ptr)[1].hex()], check=True)
"""


def test_equal_numbers_of_processes_are_one_process(simulator: Simulator) -> None:
    """As in two containers, whose main process is number 1."""
    command = [*in_namespaces(), sys.executable, "-c", SAME_NUMBER, THERE, *NAMESPACES]
    done = subprocess.run(command, env=simulator.environment(), capture_output=True, text=True, check=True)
    number, opened = done.stdout.splitlines()
    assert (number, json.loads(opened)[1]) == ("1", [INVALID_CONTEXT, 0])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_only_legacy_memory_is_opened_by_others(simulator: Simulator, kind: Kind) -> None:
    with memory(kind, SIZE) as it:
        assert export(it.ptr)[0] == INVALID_VALUE


def test_nothing_is_left_of_what_was_exported(simulator: Simulator, tmp_path: Any) -> None:
    """Neither by a free nor by a process that ends."""
    program = f"""
import os
from tests.vendors.foreign_memory import *
with current():
    kept, freed = make("legacy", 64), make("legacy", 64)
    assert export(kept.ptr)[0] == export(freed.ptr)[0] == 0
    print(len(os.listdir({str(tmp_path)!r})))
    freed.free()
    print(len(os.listdir({str(tmp_path)!r})))
"""
    assert simulator.run(program, GPUINTEROP_SIM_IPC=str(tmp_path)) == "2\n1\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(CUDA, reason="AMD's alone")
def test_the_legacy_mode_exports_nothing(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSA_ENABLE_IPC_MODE_LEGACY", "1")
    with memory("legacy", SIZE) as it:
        assert export(it.ptr)[0] == INVALID_VALUE


# -- handles of what is mapped -----------------------------------------------------------------------------------------


def retained(it: Foreign) -> int:
    return made("MemRetainAllocationHandle", it.ptr + STEP + 64)


@pytest.mark.skipif(not CUDA, reason="AMD's runtime does not count before 7.3")
def test_a_retained_handle_counts(simulator: Simulator) -> None:
    """It is the one that was mapped, also where that was released before; and it may be exported."""
    with memory("vmm", SIZE) as it:
        ok("MemRelease", it.handles[1])
        assert [retained(it), retained(it)] == [it.handles[1]] * 2
        assert simulator.live()["retained"] == 1
        fd = made("MemExportToShareableHandle", it.handles[1], 1, 0)
        os.close(fd)
        ok("MemRelease", it.handles[1])
        assert simulator.live()["retained"] == 0
        assert call("MemRetainAllocationHandle", ctypes.byref(ctypes.c_uint64()), it.ptr + SIZE) == INVALID_VALUE
    with memory("legacy", SIZE) as it:
        assert call("MemRetainAllocationHandle", ctypes.byref(ctypes.c_uint64()), it.ptr) == INVALID_VALUE


COUNTS = """
from tests.simulated.driver import Simulator
from tests.vendors.foreign_memory import *
with current():
    it = make("vmm", STEP)
    ok("MemRelease", made("MemRetainAllocationHandle", it.ptr))
    print(Simulator.attach("hip").count("vmm_handle"), flush=True)
    made("MemRetainAllocationHandle", make("legacy", STEP).ptr)
"""


@pytest.mark.skipif(CUDA, reason="AMD's alone")
@pytest.mark.parametrize(("version", "left"), [("70151831", "0\n"), ("70300000", "1\n")])
def test_a_retained_handle_counts_from_some_version_on(simulator: Simulator, version: str, left: str) -> None:
    """And of memory that is no mapping the process ends."""
    done = python("-c", COUNTS, env=simulator.environment(GPUINTEROP_SIM_HIP_VERSION=version))
    assert (done.stdout, done.returncode) == (left, -signal.SIGABRT), done.stderr
