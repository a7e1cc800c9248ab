"""Arrays that exist, in Vulkan: in place, refused before anything is imported, and level.

The other oracle is Vulkan itself: a command buffer writes what NumPy reads, and copies what NumPy wrote into memory of
Vulkan's own. tests/vendors/test_vulkan_arrays.py has a GPU's memory.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.vulkan._query import PhysicalDevice
from tests.limits import LIMIT
from tests.validation import descriptors

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, Calls, match
else:
    from vulkan_application import Application, Calls, match

LIBC = ctypes.CDLL(None)
SIZE = 1 << 16
READ, READ_WRITE, STORAGE, VERTEX = 0x1, 0x3, 0x20, 0x80
DEDICATED_ONLY, IMPORTABLE = 0x1, 0x4


def fill(application: Application, shared: gi.vulkan.SharedBuffer, word: int) -> None:
    def work(commands: Any) -> None:
        shared.acquire(commands)
        application.api.vkCmdFillBuffer(commands, shared.vk_buffer, 0, shared.size, word)
        shared.release(commands)

    application.run(work)


def fetch(application: Application, shared: gi.vulkan.SharedBuffer) -> Any:
    """The bytes as Vulkan has them."""
    with gi.vulkan.share_buffer(application.vk, match(application.vk), shared.size) as copy:

        def work(commands: Any) -> None:
            shared.acquire(commands)
            region = application.api.VkBufferCopy(size=shared.size)
            application.api.vkCmdCopyBuffer(commands, shared.vk_buffer, copy.vk_buffer, 1, [region])
            shared.release(commands)
            copy.release(commands)

        application.run(work)
        return np.array(copy.view(shared.size))


@pytest.fixture(autouse=True)
def software(driver: str) -> None:
    if driver not in ("swiftshader", "lavapipe"):
        pytest.skip("the memory here is the host's, and so is the device; the kit has a GPU's arrays")


@pytest.fixture
def allocation(device: gi.Device) -> Iterator[gi.Allocation]:
    """64 KiB that both drivers take: SwiftShader as a memfd, lavapipe by its address."""
    with device.allocate(SIZE) as allocation:
        yield allocation


def pattern(allocation: gi.Allocation) -> Any:
    """An array of it, with bytes that tell where they are."""
    found = np.asarray(allocation.buffer.view(SIZE))
    found[:] = np.arange(SIZE) % 251
    return found


@pytest.fixture
def calls(application: Application, monkeypatch: pytest.MonkeyPatch) -> Calls:
    names = "vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory", "vkDestroyBuffer", "vkFreeMemory"
    return Calls(application.vk, monkeypatch, *names)


PARTS: dict[str, tuple[int, int, Callable[[Any], Any]]] = {
    "whole": (0, SIZE, lambda found: found),
    "offset": (4352, 4000, lambda found: found[4352:8352].view(np.float32)),
    "strided": (256, 8096, lambda found: found[256 : 256 + 64 * 128].reshape(64, 128)[:, :32]),
    "backwards": (512, 512, lambda found: found[512:1024].view(np.uint32)[::-1]),
}


@pytest.mark.parametrize("part", PARTS)
def test_in_place(application: Application, allocation: gi.Allocation, part: str) -> None:
    """The VkBuffer begins at the first byte of the array, and ends behind the last."""
    first, size, take = PARTS[part]
    memory = pattern(allocation)
    expected = memory.copy()
    with gi.vulkan.import_array(application.vk, take(memory)) as shared:
        assert (shared.ptr, shared.size) == (memory.ctypes.data + first, size)
        assert shared.exposes == f"{shared.allocation_size:,} bytes, of which the buffer is {size:,}"
        assert size <= shared.allocation_size <= SIZE
        assert (fetch(application, shared) == expected[first : first + size]).all()
        fill(application, shared, 0x04030201)
        expected[first : first + size] = np.resize(np.array([1, 2, 3, 4], np.uint8), size)
        assert (memory == expected).all()
        shared.fill(9)
        assert (memory[first : first + size] == 9).all()
        assert (fetch(application, shared) == 9).all()


def test_memory_of_numpys_own(application: Application, driver: str) -> None:
    """Where the driver imports addresses, it takes NumPy's heap, too: in whole pages, at an offset that it can bind."""
    heap = np.zeros(40_000, np.uint8)
    array = heap[-heap.ctypes.data % 256 :][:10_000]
    if driver == "swiftshader":
        with pytest.raises(gi.UnsupportedError, match=r"a memfd, .* host memory\. Instead: .*Device\.empty") as caught:
            gi.vulkan.import_array(application.vk, array)
        assert caught.value.capability.scope is gi.Scope.DRIVER
        assert f"unsupported on {application.vk.identity.name}: " in str(caught.value)
        assert "only its own process" not in str(caught.value)
        return
    with gi.vulkan.import_array(application.vk, array) as shared:
        assert shared.allocation_size % system.PAGE == 0
        assert shared.allocation_size - shared.size < 2 * system.PAGE
        fill(application, shared, 0x05050505)
    assert (array == 5).all()
    assert np.count_nonzero(heap) == array.size


def test_an_immutable_array_is_read(application: Application, allocation: gi.Allocation) -> None:
    memory = pattern(allocation)
    memory.flags.writeable = False
    for usage in (READ_WRITE, STORAGE, 0x2, 0x8, 0x800, 0x20000):  # texels, transform feedback, addresses
        with pytest.raises(gi.InvalidArgumentError, match=r"^usage: .*immutable"):
            gi.vulkan.import_array(application.vk, memory, usage=usage)
    with gi.vulkan.import_array(application.vk, memory, usage=READ | VERTEX) as shared:
        assert (fetch(application, shared) == memory).all()
        assert shared.size == SIZE
        for write in (shared.fill, lambda: shared.copy_from_host(bytes(4)), lambda: shared.view(4), lambda: shared.ptr):
            with pytest.raises(gi.InvalidArgumentError, match="immutable"):
                write()


# -- what is refused, and what fails ---------------------------------------------------------------------------------


def mapped(size: int, *protections: int, of: int = -1, flags: int = mmap.MAP_PRIVATE) -> Any:
    """New pages, or those of a descriptor, each with a protection of its own."""
    flags |= mmap.MAP_ANONYMOUS if of < 0 else 0
    pages = mmap.mmap(of, size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    array = np.frombuffer(pages, np.uint8)
    for number, protection in enumerate(protections):
        address = array.ctypes.data + number * system.PAGE
        assert LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(system.PAGE), protection) == 0
    return array


def unaligned(allocation: gi.Allocation, _: Path) -> Any:
    return pattern(allocation)[1:5]


def overlapping(allocation: gi.Allocation, _: Path) -> Any:
    return np.broadcast_to(pattern(allocation)[:4], (4, 4))


def one_read_only_page(_: gi.Allocation, __: Path) -> Any:
    both = mmap.PROT_READ | mmap.PROT_WRITE
    return mapped(3 * system.PAGE, both, mmap.PROT_READ, both)


def a_hole(_: gi.Allocation, __: Path) -> Any:
    array = mapped(3 * system.PAGE)
    assert LIBC.munmap(ctypes.c_void_p(array.ctypes.data + system.PAGE), ctypes.c_size_t(system.PAGE)) == 0
    return array


def a_files_pages(_: gi.Allocation, folder: Path) -> Any:
    return np.memmap(folder / "file", np.uint8, "w+", shape=8192)


HOST = "host memory"  # SwiftShader takes memfds alone


@pytest.mark.parametrize(
    ("make", "swiftshader", "lavapipe"),
    [
        (
            unaligned,
            r"a multiple of \d+ bytes, .* got an address 1 bytes past one",
            r"a multiple of \d+ bytes, .* got an address 1 bytes past one",
        ),
        (overlapping, "each have their own bytes", "each have their own bytes"),
        (one_read_only_page, HOST, "read-only"),
        (a_hole, HOST, f"expected {3 * system.PAGE} bytes mapped from .*, got {2 * system.PAGE}"),
        (a_files_pages, HOST, "pages of .*file"),
    ],
)
def test_refused(
    request: pytest.FixtureRequest, application: Application, allocation: gi.Allocation, calls: Calls, tmp_path: Path,
    make: Callable[..., Any], swiftshader: str, lavapipe: str,
) -> None:  # fmt: skip
    """Nothing is imported, and the same VkDevice takes good ones afterwards."""
    array, before = make(allocation, tmp_path), descriptors()
    message = swiftshader if request.node.callspec.params["driver"] == "swiftshader" else lavapipe
    with pytest.raises((gi.InvalidArgumentError, gi.UnsupportedError), match=message):
        gi.vulkan.import_array(application.vk, array, usage=READ)
    assert "vkAllocateMemory" not in calls.made
    assert calls.level()
    assert descriptors() == before
    memory = pattern(allocation)
    with gi.vulkan.import_array(application.vk, memory) as shared:
        fill(application, shared, 0)
    assert not memory.any()


@pytest.mark.parametrize(("path", "is_memory"), [("/dev/zero (deleted)", True), ("/dev/nvidia-uvm", False)])
def test_whose_pages_are_imported(
    application: Application, allocation: gi.Allocation, driver: str, calls: Calls, monkeypatch: pytest.MonkeyPatch,
    path: str, is_memory: bool,
) -> None:  # fmt: skip
    """Pinned memory is; a device's is not."""
    if driver == "swiftshader":
        pytest.skip("SwiftShader imports no addresses")
    array = pattern(allocation)
    start = array.ctypes.data
    monkeypatch.setattr(
        system, "mappings", lambda within: iter([system.Mapped(range(start, start + SIZE), "rw-s", 0, (0, 7), path)])
    )
    if is_memory:
        gi.vulkan.import_array(application.vk, array).close()
        return
    with pytest.raises(gi.InvalidArgumentError, match=path):
        gi.vulkan.import_array(application.vk, array)
    assert calls.made == []


def test_a_private_mapping_of_a_memfd_is_not_the_memfd(
    application: Application, device: gi.Device, driver: str
) -> None:
    """Its bytes are the process's own: SwiftShader would see the memfd's."""
    with device.allocate(SIZE) as allocation, allocation.export() as handle:
        allocation.buffer.fill(1)
        array = mapped(SIZE, of=cast(Any, handle).fd)
        array[:] = 2
        if driver == "swiftshader":
            with pytest.raises(gi.UnsupportedError, match=HOST):
                gi.vulkan.import_array(application.vk, array)
        else:
            with gi.vulkan.import_array(application.vk, array) as shared:
                assert (fetch(application, shared) == 2).all()
        with pytest.raises(gi.UnsupportedError, match=HOST):
            gi.share(array)


def test_memory_larger_than_the_driver_imports(
    application: Application, driver: str, allocation: gi.Allocation, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SwiftShader imports all of the memfd, whatever part the array is."""
    array = pattern(allocation)[: 4096 if driver == "swiftshader" else SIZE]
    real = application.vk.physical.extended
    limits = {"VkPhysicalDeviceMaintenance3Properties": SimpleNamespace(maxMemoryAllocationSize=SIZE - 1)}
    monkeypatch.setattr(application.vk.physical, "extended", lambda kind: limits.get(kind) or real(kind))
    with pytest.raises(gi.InvalidArgumentError, match=f"an allocation of .*\\b{SIZE - 1:,} bytes"):
        gi.vulkan.import_array(application.vk, array)
    assert calls.made == []


@pytest.mark.parametrize(
    ("features", "message"),
    [(0, "usage 0x81|host memory"), (DEDICATED_ONLY | IMPORTABLE, "memory of share_buffer")],
)
def test_a_driver_that_does_not_import_such_buffers(
    application: Application,
    allocation: gi.Allocation,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    features: int,
    message: str,
) -> None:
    assert application.vk.capabilities.supports((gi.Operation.EXPORT_ARRAY, gi.OpaqueFd))
    real, usage = PhysicalDevice.buffer_features, READ | VERTEX

    def answer(physical: PhysicalDevice, bit: int, asked: int) -> int:
        found = real(physical, bit, asked)
        return features if found and asked == usage else found

    monkeypatch.setattr(PhysicalDevice, "buffer_features", answer)
    with pytest.raises(gi.InvalidArgumentError, match=message):
        gi.vulkan.import_array(application.vk, pattern(allocation), usage=usage)
    assert calls.made == []


def test_a_driver_that_wants_more_bytes_than_are_there(
    application: Application, allocation: gi.Allocation, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = application.vk.functions.vkGetBufferMemoryRequirements2

    def more(device: Any, asked: Any, found: Any) -> None:
        real(device, asked, found)
        found.memoryRequirements.size = SIZE - 4096 + 1

    monkeypatch.setitem(application.vk.functions.__dict__, "vkGetBufferMemoryRequirements2", more)
    with pytest.raises(gi.InvalidArgumentError, match=f"expected {SIZE - 4095} bytes .* got {SIZE - 4096} to the end"):
        gi.vulkan.import_array(application.vk, pattern(allocation)[4096:])
    assert calls.made == ["vkCreateBuffer", "vkDestroyBuffer"]


def test_a_driver_that_has_no_memory_type_for_these_pages(
    application: Application, driver: str, allocation: gi.Allocation, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if driver == "swiftshader":
        pytest.skip("SwiftShader imports no addresses")
    name = "vkGetMemoryHostPointerPropertiesEXT"  # which leaves the types at 0
    monkeypatch.setitem(application.vk.functions.__dict__, name, lambda *_: 0)
    with pytest.raises(gi.InvalidArgumentError, match="memory type"):
        gi.vulkan.import_array(application.vk, pattern(allocation))
    assert calls.level()


@pytest.mark.parametrize("call", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory"])
def test_a_call_that_fails(application: Application, device: gi.Device, calls: Calls, call: str) -> None:
    """Each native call, once: what was made before is destroyed, and the array is let go."""
    allocation = device.allocate(SIZE)
    before = descriptors()
    calls.failing[call] = 0
    with pytest.raises(gi.OutOfMemoryError, match=call):
        gi.vulkan.import_array(application.vk, allocation.buffer.view(SIZE))
    assert calls.level()
    assert descriptors() == before
    allocation.close(timeout=LIMIT)


@pytest.mark.parametrize("way", ["imported", "shared"])
def test_memory_for_addresses(
    application: Application, allocation: gi.Allocation, device: gi.Device, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A buffer that shaders address is bound to memory that was allocated for it, which Vulkan demands."""
    flags: list[int] = []
    ffi = application.vk.api.ffi

    def allocate(_: Any, info: Any, *__: Any) -> int:
        chain = ffi.cast("VkMemoryAllocateFlagsInfo *", info.pNext)
        flags.append(chain.flags if chain.sType == 1000060000 else 0)
        return -1  # the application has not enabled the feature

    monkeypatch.setitem(application.vk.functions.__dict__, "vkAllocateMemory", allocate)
    for usage in (STORAGE, STORAGE | 0x20000):
        with pytest.raises(gi.OutOfMemoryError):
            if way == "shared":
                gi.vulkan.share_buffer(application.vk, device, SIZE, usage=usage)
            else:
                gi.vulkan.import_array(application.vk, pattern(allocation), usage=usage)
    assert flags == [0, 2]


# -- how long things live --------------------------------------------------------------------------------------------


class Held(np.ndarray[Any, Any]):
    """An array that a weak reference can be of."""


def test_the_array_is_kept_until_both_sides_let_go(application: Application, allocation: gi.Allocation) -> None:
    array = pattern(allocation).view(Held)
    alive, shared = weakref.ref(array), gi.vulkan.import_array(application.vk, array)
    seen = np.asarray(shared.view(SIZE))
    del array
    gc.collect()
    assert alive() is not None
    shared.close()
    gc.collect()
    assert alive() is not None, "an array of it is left"
    del seen, shared
    gc.collect()
    application.vk.close()
    assert alive() is None


def test_the_array_is_kept_as_long_as_the_queue_may_use_it(application: Application, allocation: gi.Allocation) -> None:
    """An exception ends the block: Vulkan's half waits for the context's close, and needs the bytes until then."""
    array = pattern(allocation).view(Held)
    alive = weakref.ref(array)
    with pytest.raises(KeyError), gi.vulkan.import_array(application.vk, array):
        raise KeyError
    del array
    gc.collect()
    assert alive() is not None
    application.vk.close()
    gc.collect()
    assert alive() is None
