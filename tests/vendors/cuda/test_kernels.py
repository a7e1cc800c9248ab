"""The two kernels in PTX: that they assemble, which words they touch, and how they are launched.

Multicast is never run here, and the simulated driver runs no PTX. So the text is interpreted, as far as it goes; and on
a GPU it runs with its multimem instructions turned into ordinary ones, on ordinary memory.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

import gpuinterop as gi
from gpuinterop_cuda import multicast
from gpuinterop_cuda.backend import CudaBackend
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from ..parties import REAL, native

STORE, ADD = b"multimem.st.relaxed.sys.global.u32", b"multimem.ld_reduce.relaxed.sys.global.add.u32"
MASK = (1 << 32) - 1
ENTRIES = ("gpuinterop_multimem_store", "gpuinterop_multimem_add")


def interpret(entry: str, arguments: tuple[int, int, int], shape: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    """What one thread stores: address and word, in its order.

    `shape` is its block, its number in there, how many blocks there are and how many threads each has. The word that
    ``ld_reduce`` finds at an address is the address divided by 4.
    """
    found = re.search(rf"\.entry {entry}\((.*?)\)\n{{(.*?)\n}}", multicast._PTX.decode(), re.DOTALL)
    assert found is not None
    names = re.findall(r"\.param \.u\d+ (\w+)", found[1])
    values = dict(zip(("%ctaid.x", "%tid.x", "%nctaid.x", "%ntid.x"), shape, strict=True))
    values |= {f"[{name}]": value for name, value in zip(names, arguments, strict=True)}
    lines = [line.strip() for line in found[2].splitlines()]
    code = [re.split(r"[,;]? +", line.rstrip(";")) for line in lines if line and not line.startswith(".reg")]
    stored: list[tuple[int, int]] = []
    at = 0
    for _ in range(100_000):
        name, *places = code[at]
        at += 1
        given = [int(place) if place.isdigit() else values.get(place.strip("[]"), 0) for place in places]
        match name.split("."):
            case ["ld", "param", _]:
                values[places[0]] = values[places[1]]
            case ["mov", "u32"]:
                values[places[0]] = given[1]
            case ["mul", "lo", "u32"]:
                values[places[0]] = given[1] * given[2] & MASK
            case ["mad", "lo", "u32"]:
                values[places[0]] = given[1] * given[2] + given[3] & MASK
            case ["mad", "wide", "u32"]:
                values[places[0]] = given[1] * given[2] + given[3]
            case ["add", "u32"]:
                values[places[0]] = given[1] + given[2] & MASK
            case ["setp", "ge", "u32"]:
                values[places[0]] = given[1] >= given[2]
            case ["multimem", "ld_reduce", *_]:
                values[places[0]] = given[1] // 4
            case ["multimem", "st", *_] | ["st", "global", "u32"]:
                stored.append((given[0], given[1]))
            case ["bra"]:
                at = code.index([f"{places[0]}:"])
            case ["@%past"]:
                assert places == ["ret"]
                if values["%past"]:
                    return stored
            case _:
                assert name == "more:", f"the interpreter does not know {code[at - 1]}"
    raise AssertionError("the thread does not end")


def test_only_multimem_touches_the_multicast_address() -> None:
    """And one ordinary store, of the sums."""
    touching = [line.split()[0] for line in multicast._PTX.split(b"\n") if b"global" in line]
    assert touching == [STORE, ADD, b"st.global.u32"]
    assert multicast._PTX.endswith(b"\0")


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 4), (3, 4)])
def test_every_word_is_stored_once(blocks: int, threads: int) -> None:
    """Also where there are more words than threads, or fewer."""
    for count in (0, 1, 3, 4, 5, 12, 13, 40):
        stored: dict[str, list[tuple[int, int]]] = {entry: [] for entry in ENTRIES}
        for block in range(blocks):
            for thread in range(threads):
                shape = (block, thread, blocks, threads)
                stored[ENTRIES[0]] += interpret(ENTRIES[0], (1 << 40, 77, count), shape)
                stored[ENTRIES[1]] += interpret(ENTRIES[1], (1 << 41, 4096, count), shape)
        assert sorted(stored[ENTRIES[0]]) == [((1 << 40) + 4 * word, 77) for word in range(count)]
        assert sorted(stored[ENTRIES[1]]) == [((1 << 41) + 4 * word, 1024 + word) for word in range(count)]


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_last_thread_ends_after_the_most_words_of_a_launch(entry: str) -> None:
    """The words are counted in 32 bits, and a step beyond the last must not come out before it."""
    blocks, threads = multicast._BLOCKS, multicast._THREADS
    stored = interpret(entry, (0, 0, multicast._MOST), (blocks - 1, threads - 1, blocks, threads))
    assert len(stored) == multicast._MOST // (blocks * threads)
    assert stored[-1][0] == 4 * (multicast._MOST - 1)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_it_assembles(target: str, tmp_path: Path) -> None:
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("needs ptxas, of CUDA's toolkit")
    text = tmp_path / "kernels.ptx"
    text.write_bytes(multicast._PTX.rstrip(b"\0"))
    done = subprocess.run(
        [assembler, f"-arch={target}", "-o", str(tmp_path / "kernels.cubin"), str(text)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """Its kernels are not loaded yet."""
    native = gi.get_backend("cuda").driver
    assert isinstance(native, CudaBackend)
    monkeypatch.setattr(native, "_kernels", {})
    return native


@pytest.fixture
def launches(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Blocks, threads and arguments of each launch, which the driver does not see."""
    made: list[tuple[int, int, tuple[int, ...]]] = []

    driver = gi.get_backend("cuda").driver._driver  # type: ignore[attr-defined]
    names: dict[int, bytes] = {}
    find = driver.function("ModuleGetFunction")

    def found(place: Any, module: Any, name: bytes) -> int:
        code = int(find(place, module, name))
        names[place._obj.value or 0] = name
        return code

    def launch(kernel: Any, *rest: Any) -> int:
        x, y, z, threads, second, third, shared, stream = (one.value or 0 for one in rest[:8])
        arguments, extra = rest[8:]
        assert (y, z, second, third, shared, extra) == (1, 1, 1, 1, 0, None)
        assert int(cuda.cuCtxGetCurrent()[1]) == native(gi.get_backend("cuda").device(1)).pointer
        assert stream != 0
        word, half = ctypes.c_uint64, ctypes.c_uint32
        kinds = (word, half, half) if names[kernel.value].endswith(b"store") else (word, word, half)
        values = tuple(kind.from_address(place).value for kind, place in zip(kinds, arguments, strict=True))
        made.append((x, threads, values))
        return 0

    monkeypatch.setitem(driver._functions, "ModuleGetFunction", found)
    monkeypatch.setitem(driver._functions, "LaunchKernel", launch)
    return made


@pytest.fixture
def stream() -> Iterator[Any]:
    """Of the second device, which is not the current one."""
    with gi.get_backend("cuda").device(1).create_stream() as made:
        yield made._handle


@pytest.mark.parametrize("count", [0, 1, 256, 257, 262_144, 10**7, (1 << 31) + 1, (1 << 32) - 1, (1 << 32) + 5])
def test_all_words_are_launched_for_and_no_more_blocks_than_they_need(
    backend: CudaBackend, launches: list[tuple[int, int, tuple[int, ...]]], stream: Any, count: int
) -> None:
    """In the device's context; so many at a time that the kernels can count them."""
    backend.multimem_store(stream, 1 << 40, 77, count)
    stores = launches.copy()
    launches.clear()
    backend.multimem_add(stream, 1 << 41, 1 << 40, count)
    assert [shape for *shape, _ in stores] == [shape for *shape, _ in launches]
    done = 0
    for (blocks, threads, stored), (_, _, added) in zip(stores, launches, strict=True):
        words = stored[2]
        assert stored == ((1 << 40) + 4 * done, 77, words)
        assert added == ((1 << 41) + 4 * done, (1 << 40) + 4 * done, words)
        assert threads * (blocks - 1) < words <= multicast._MOST
        assert threads * blocks >= words or blocks == 1024
        done += words
    assert done == count


@pytest.mark.skipif(not REAL, reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 255, 256, 257, 262_144, 262_145, 1_000_003])
def test_every_word_is_touched_and_no_other(backend: CudaBackend, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gi.get_backend("cuda").device(0)
    major = cuda.cuDeviceGetAttribute(
        cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device.ordinal
    )[1]
    if major < 9:
        pytest.skip("needs a GPU from Hopper on")
    ordinary = multicast._PTX.replace(STORE, b"st.global.u32").replace(ADD, b"ld.global.u32")
    assert b"multimem." not in ordinary
    monkeypatch.setattr(multicast, "_PTX", ordinary)
    with device.allocate(8 << 20) as memory, device.allocate(8 << 20) as target, device.create_stream() as stream:
        memory.buffer.fill(0xEE)
        target.buffer.fill(0xDD)
        backend.multimem_store(stream._handle, memory.buffer.ptr, 0x01020304, count)
        backend.multimem_add(stream._handle, target.buffer.ptr, memory.buffer.ptr, count + 1)
        stream.synchronize(LIMIT)
        for buffer, words in (
            (memory.buffer, (0x01020304, 0xEEEEEEEE, 0xEEEEEEEE)),
            (target.buffer, (0x01020304, 0xEEEEEEEE, 0xDDDDDDDD)),
        ):
            data = (ctypes.c_ubyte * (4 * (count + 2)))()
            buffer.copy_to_host(data)
            assert bytes(data) == struct.pack("I", words[0]) * count + struct.pack("2I", *words[1:])
