"""Parts of the sharing room by themselves: bounds of what a peer sends, and one order for several shares."""

from __future__ import annotations

import fcntl
import inspect
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop._core.interchange import CAPSULES, DLTensor, layout_of, pointer_of
from gpuinterop.backend import SharingBackend
from gpuinterop.sharing import arrays
from gpuinterop.sharing.descriptor import Contents, Placed, Region
from gpuinterop.sharing.order import LEFT, POISON, SLOTS, ControlPage, Reader
from gpuinterop.sharing.origin import describe

ADD_SEALS = 1033


def test_a_control_page_has_so_many_slots(host: Device) -> None:
    with closing(ControlPage()) as page, host.create_semaphore(gi.TimelineFd) as word:
        Reader(page, word, word, SLOTS - 1, "")
        page.slots[SLOTS - 1] = LEFT
        assert os.pread(page.handle.fd, system.PAGE, 0)[-9:] == b"\0" + LEFT.to_bytes(8)
        with pytest.raises(gi.PeerError, match="number of a slot"):
            Reader(page, word, word, SLOTS, "")


@pytest.mark.parametrize("size", [2048, 8192])
def test_a_control_page_of_another_size_is_refused(size: int) -> None:
    with closing(ControlPage()) as page:
        content = os.pread(page.handle.fd, 16, 0)
    fd = os.memfd_create("control", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, ADD_SEALS, system.FIXED)
    with gi.OpaqueFd.adopt(fd) as handle, pytest.raises(gi.HandleError, match=r"expected gpuinterop\.control of"):
        ControlPage(handle)


def test_a_control_page_of_another_version_is_refused() -> None:
    with closing(ControlPage()) as page, page.handle.duplicate() as handle:
        ControlPage(handle)
        page.words[1] = 2
        with pytest.raises(gi.HandleError, match="the control page of a share of this version"):
            ControlPage(handle)


def test_another_reader_has_noticed_the_death_first(host: Device) -> None:
    with host.allocate(4096) as memory, gi.share(memory.buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        attached.acquire(timeout=5)
        attached.release()
        shared._turns().own.host_signal(POISON)
        with pytest.raises(gi.PeerError, match="has ended"):
            attached.acquire(timeout=5)


def test_several_are_acquired_in_one_order(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []
    monkeypatch.setattr(arrays, "acquire_all", lambda turns, *_: seen.append([one for one, _ in turns]))
    with host.allocate(4096) as memory, gi.share(view := memory.buffer.view(4)) as one, gi.share(view) as other:
        gi.sharing.acquire([one, other])
        gi.sharing.acquire([other, one, other])
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]


def test_many_are_acquired_at_once(host: Device) -> None:
    """The stack does not grow with them."""
    with host.allocate(4096) as memory, ExitStack() as stack:
        view = memory.buffer.view(4)
        many = [stack.enter_context(gi.share(view)) for _ in range(100)]
        gi.sharing.acquire(many[:1], timeout=5)
        many[0].release()
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(len(inspect.stack(0)) + 100)
        try:
            gi.sharing.acquire(many, timeout=5)
        finally:
            sys.setrecursionlimit(before)
        for one in many:
            one.release()


def test_a_closed_pages_lock_takes_no_other_file(host: Device) -> None:
    with closing(ControlPage()) as page:
        page.lock.run(int)
        number = page.handle.fd
    descriptor = os.memfd_create("another")
    try:
        if descriptor != number:
            os.dup2(descriptor, number)
        with pytest.raises(gi.DriverError, match="open"):
            page.lock.run(int)
    finally:
        os.close(descriptor)
        if descriptor != number:
            os.close(number)


def test_a_share_that_is_over_lets_nothing_in(host: Device) -> None:
    with host.allocate(4096) as memory:
        shared = gi.share(memory.buffer.view(4))
        descriptor = bytes(shared)
        shared.close(timeout=10)
        with pytest.raises(gi.ResourceClosedError, match="share was closed"):
            gi.attach(descriptor)


def test_contents_that_cannot_be_meant(host: Device) -> None:
    """Cut at any byte, and with any byte changed: they are read, or are an error of ours."""
    region = Region(gi.OpaqueFd, (1, 2), (4096, 8192))
    one = Placed(0, 64, layout_of((3, 2), "float32", None), False)
    whole = bytes(Contents(7, False, host.identity, (region,), {"a": one, "b": one}))
    assert Contents.parse(whole).arrays["b"].offset == 64
    for at in range(len(whole)):
        with pytest.raises(gi.PeerError, match="cannot be meant"):
            Contents.parse(whole[:at])
        for byte in (0, 1, 127, 255):
            with suppress(gi.PeerError):
                Contents.parse(whole[:at] + bytes([byte]) + whole[at + 1 :])


def test_an_offset_in_a_capsule() -> None:
    given = np.arange(8, dtype=np.uint8)
    capsule: Any = given.__dlpack__()
    name, offset = next((one[0], one[1]) for one in CAPSULES if f'"{one[0].decode()}"' in repr(capsule))
    tensor = DLTensor.from_address(pointer_of(capsule, name) + offset)
    tensor.data -= 16
    tensor.byte_offset += 16

    class Array:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: object) -> object:
            return capsule

    assert describe(Array(), "array").pointer == given.ctypes.data


@pytest.mark.parametrize("array", [
    SimpleNamespace(__dlpack_device__=lambda: (2, 99), __dlpack__=lambda **_: np.zeros(4).__dlpack__()),
    SimpleNamespace(__cuda_array_interface__={"data": (64, False), "shape": (4,), "typestr": "<f8"}),
])  # fmt: skip
def test_memory_of_no_device_here_is_named_with_those_that_are(array: object) -> None:
    got = r"(that of CUDA, DLPack's device \(2, 99\)|0x40 by __cuda_array_interface__.*)"
    with pytest.raises(gi.DeviceNotFoundError, match=f"^field: expected memory of .*, got {got}; devices: .*host:0 "):
        gi.share({"field": array})


def test_the_one_array_of_a_share_is_called_array() -> None:
    with gi.OpaqueFd.adopt(os.memfd_create("no sealing")) as file:
        os.ftruncate(file.fd, 4096)
        with pytest.raises(gi.InvalidArgumentError, match=r"^array: expected memory that can be shared, got some "):
            gi.share(np.frombuffer(mmap.mmap(file.fd, 4096), np.uint8))


def test_arrays_with_bytes_in_common_span_them_once(host: Device) -> None:
    with host.allocate(4096) as one, host.allocate(4096) as other:
        arrays = {
            "whole": one.buffer.view(100), "part": one.buffer.view(10, offset=20), "same": one.buffer.view(100),
            "later": one.buffer.view(100, offset=50), "back": other.buffer.view(3, "int32", 8, (-4,)),
        }  # fmt: skip
        with gi.share(arrays) as shared:
            assert shared.exposes == "2 allocation(s) of 8,192 bytes in all, of which the arrays span 162"


def overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements have a byte in common, by a look at each byte."""
    steps = [np.arange(count) * step for count, step in zip(shape, strides, strict=True)]
    places: Any = sum(np.ix_(*steps, np.arange(itemsize)))
    return bool(len(np.unique(places)) < places.size)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    """An array that is not read: all addresses will do."""
    data = {"data": (1 << 40, False), "shape": shape, "strides": strides, "typestr": f"|u{itemsize}"}
    return SimpleNamespace(__array_interface__=data)


def shapes() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    yield from [
        ((3, 2), (8, 12), 4),
        ((30000, 3), (12, 4), 4),
        ((40000, 2), (16, 8), 4),
        ((9000, 2, 5), (-80, 40, 8), 8),
    ]
    random = np.random.default_rng(7)
    for _ in range(300):
        count = random.integers(1, 4)
        shape, strides = random.integers(1, 5, count), random.integers(-14, 15, count)
        yield tuple(shape.tolist()), tuple(strides.tolist()), int(2 ** random.integers(0, 3))


def test_elements_with_bytes_in_common_are_refused_and_no_others() -> None:
    told: dict[bool, int] = {True: 0, False: 0}
    for one in shapes():
        told[wanted := overlap(*one)] += 1
        with pytest.raises(gi.InvalidArgumentError, match="overlap") if wanted else nullcontext():
            describe(strided(*one), "array", in_place=False)
    assert min(told.values()) > 50


def test_an_object_with_an_address_and_an_interface_is_shared(host: Device) -> None:
    with host.allocate(4096) as memory:
        array = np.asarray(memory.buffer.view(8))
        facts: Any = array.__array_interface__
        given = SimpleNamespace(__array_interface__=facts, data_ptr=lambda: facts["data"][0])
        with gi.share(given) as shared, gi.attach(bytes(shared)) as attached:
            array[:] = 5
            assert np.asarray(attached.view).tolist() == [5] * 8
        del array, given


def test_arrays_without_bytes_are_shared(host: Device) -> None:
    with host.allocate(4096) as memory:
        none, some = np.empty((0, 3), "float32"), memory.buffer.view(4)
        for arrays in ({"none": none}, {"none": none, "some": some}, {"some": some, "none": none}):
            for copy in (False, True):
                with gi.share(arrays, copy=copy) as shared, gi.attach(bytes(shared)) as attached:
                    for one in (shared, attached):
                        view = one["none"]
                        assert (view.shape, view.dtype, np.asarray(view).shape) == ((0, 3), "float32", (0, 3))


def test_a_file_of_another_file_system_with_the_same_number(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each numbers its inodes by itself, as that of huge pages does."""
    real, backend = os.fstat, host.driver
    with ExitStack() as files:

        def file() -> tuple[int, mmap.mmap]:
            fd = files.enter_context(gi.OpaqueFd.adopt(os.memfd_create("file", os.MFD_ALLOW_SEALING))).fd
            os.ftruncate(fd, 4096)
            return real(fd).st_ino, files.enter_context(mmap.mmap(fd, 4096))

        before, (own, mapped), after = file()[0], file(), file()[0]

        def fstat(fd: int) -> os.stat_result:
            found = real(fd)
            if found.st_ino not in (before, after):
                return found
            return os.stat_result((found.st_mode, own, found.st_dev + 1, *found[3:10]))

        monkeypatch.setattr(os, "fstat", fstat)
        assert isinstance(backend, SharingBackend)
        block = backend.find_blocks()(np.frombuffer(mapped, np.uint8).ctypes.data)
        with cast(gi.OpaqueFd, backend.export_block(host._handle, block)) as handle:
            assert real(handle.fd).st_ino == own
