"""Parts of the sharing room by themselves: bounds of what a peer sends, and what is read of an array."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext, suppress
from types import FrameType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop._core.dlpack import CAPSULES, DLTensor, pointer_of
from gpuinterop._core.layout import layout_of
from gpuinterop._core.streams import KnownStream
from gpuinterop.backend import SharingBackend
from gpuinterop.sharing.find_memory import describe
from gpuinterop.sharing.messages import Contents, Placed, Region
from gpuinterop.sharing.order import DEPARTED, POISON, SLOTS, ControlPage, Reader
from tests.limits import LIMIT

ADD_SEALS = 1033


def test_bounds_of_a_control_page(host: Device) -> None:
    with (
        closing(ControlPage()) as page,
        host.create_semaphore(gi.TimelineFd) as word,
        gi.OpaqueFd.adopt(os.memfd_create("control", os.MFD_ALLOW_SEALING)) as short,
        page.handle.duplicate() as handle,
    ):
        Reader(page, word, word, SLOTS - 1, "")
        page.slots[SLOTS - 1] = DEPARTED
        assert os.pread(handle.fd, system.PAGE, 0)[-9:] == b"\0" + DEPARTED.to_bytes(8)
        with pytest.raises(gi.PeerError, match="number of a slot"):
            Reader(page, word, word, SLOTS, "")
        os.pwrite(short.fd, os.pread(handle.fd, 2048, 0), 0)
        fcntl.fcntl(short.fd, ADD_SEALS, system.FIXED)
        with pytest.raises(gi.HandleError, match=r"expected gpuinterop\.control of"):
            ControlPage(short)
        ControlPage(handle.duplicate()).words[1] = 2
        with pytest.raises(gi.HandleError, match="control page"):
            ControlPage(handle)


def test_a_page_that_nobody_uses_any_more_closes_itself() -> None:
    page = ControlPage()
    page.lock.run(int)
    words, link = page.words, f"/proc/self/fd/{page.handle.fd}"
    file = os.readlink(link)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del page
        gc.collect()
    assert not (os.path.lexists(link) and os.readlink(link) == file)
    assert words[1] == 1  # mapped


def test_a_closed_pages_lock_takes_no_other_file() -> None:
    with closing(ControlPage()) as page:
        page.lock.run(int)
        number = page.handle.fd
    others = [os.memfd_create("another")]
    while number not in others:
        others.append(os.dup(others[0]))
    with pytest.raises(gi.DriverError, match="open"):
        page.lock.run(int)
    for one in others:
        os.close(one)


def test_contents_that_cannot_be_meant(host: Device) -> None:
    """Cut at any byte, and with any byte changed: they are read, or are an error of ours."""
    region = Region(gi.OpaqueFd, (1, 2), (4096, 8192))
    one = Placed(0, 64, layout_of((3, 2), "float32", None), False)
    whole = bytes(Contents(7, False, host.identity, (region,), {"a": one, "b": one}))
    for at in range(len(whole)):
        with pytest.raises(gi.PeerError, match="invalid"):
            Contents.parse(whole[:at])
        for byte in (0, 1, 127, 255):
            with suppress(gi.PeerError):
                Contents.parse(whole[:at] + bytes([byte]) + whole[at + 1 :])


def test_the_last_version_comes_before_the_end(host: Device) -> None:
    """The writer publishes it and closes after the reader has looked for a version, and before it looks for the end."""
    with host.allocate(4096) as memory, gi.share(memory.buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        page = attached._side().page
        newest = page.newest

        def looks() -> tuple[int, int]:
            found = newest()
            if not shared.closed:
                shared.acquire(timeout=LIMIT)
                shared.release()
                shared.close()
            return found

        page.newest = looks  # type: ignore[method-assign]
        assert attached.wait(newer_than=0, timeout=LIMIT) == 1


def test_an_acquire_with_a_time_out_gives_the_stream_no_wait(host: Device) -> None:
    """The calling thread waits for the reader, and raises; with the reader's release the writer goes on."""
    with (
        host.allocate(4096) as memory,
        gi.share(memory.buffer.view(4)) as shared,
        gi.attach(bytes(shared)) as attached,
        host.create_stream() as stream,
    ):
        attached.acquire(timeout=LIMIT)
        with pytest.raises(gi.SemaphoreTimeoutError, match="was not free in time"):
            shared.acquire(stream, timeout=0.01)
        stream.synchronize(timeout=0)
        attached.release()
        shared.acquire(stream, timeout=LIMIT)
        shared.release(stream)


def test_another_reader_has_noticed_the_death_first(host: Device) -> None:
    with host.allocate(4096) as memory, gi.share(memory.buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        attached.acquire(timeout=LIMIT)
        attached.release()
        shared._side().own.host_signal(POISON)
        with pytest.raises(gi.PeerError, match="has ended"):
            attached.acquire(timeout=LIMIT)


@pytest.mark.parametrize("look", [KnownStream.is_idle, KnownStream.poll])
def test_a_stream_that_fails_by_itself_does_not_blame_a_writer_that_lives(
    host: Device, monkeypatch: pytest.MonkeyPatch, look: Callable[[KnownStream], object]
) -> None:
    """Its waits will never pass."""

    def fails(_: object) -> bool:
        raise gi.DriverError("a query", 700, "ILLEGAL_ADDRESS", "the test says so")

    with host.allocate(4096) as memory, gi.share(memory.buffer.view(4)) as shared, host.create_stream() as stream:
        word, known = shared._side().own, stream._known_as()
        word.wait(stream, 2)
        assert known.fence() is not None
        broken = SimpleNamespace(is_capturing=known.backend.is_capturing, is_idle=fails, is_done=fails)
        with monkeypatch.context() as patch:
            patch.setattr(known, "backend", broken)
            look(known)
        assert (known.failure, known.pending()) == (None, [])
        shared.acquire(timeout=LIMIT)
        shared.release()
        stream.synchronize(LIMIT)


def test_a_stream_that_fails_skips_its_releases_and_the_end_makes_up_for_them(host: Device) -> None:
    with (
        host.allocate(4096) as memory,
        gi.share(memory.buffer.view(4)) as shared,
        gi.attach(bytes(shared)) as attached,
        host.create_stream() as stream,
        host.create_semaphore(gi.TimelineFd) as gate,
    ):
        gate.wait(stream, 1)
        for _ in range(2):
            attached.acquire(stream)
            attached.release(stream)
        with pytest.raises(gi.ResourceBusyError):
            gate.close(timeout=0)
        with pytest.raises(gi.ResourceClosedError):
            stream.synchronize(timeout=LIMIT)
        attached.close()
        shared.acquire(timeout=LIMIT)
        shared.release()


class Struck(BaseException):
    """An interrupt."""


def strikes(call: Callable[..., object], stream: gi.Stream, at: int, event: str) -> bool:
    """Make a call that an interrupt strikes where this library calls or returns for the `at`-th time; or is it over?"""
    left = itertools.count(at - 1, -1)

    def seen(frame: FrameType, what: str, _: object) -> None:
        if what == event and "/gpuinterop/" in frame.f_code.co_filename and next(left) == 0:
            sys.setprofile(None)
            raise Struck

    gc.disable()  # finalizers are not struck
    sys.setprofile(seen)
    try:
        call(stream)
    except Struck:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return False


@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize("struck", ["acquire", "release"])
@pytest.mark.parametrize("of", ["writer", "reader"])
def test_an_interrupt_leaves_a_turn_that_goes_on(host: Device, of: str, struck: str, event: str) -> None:
    for at in itertools.count(1):
        with (
            host.allocate(4096) as memory, gi.share(memory.buffer.view(4)) as shared,
            gi.attach(bytes(shared)) as attached, host.create_stream() as stream,
        ):  # fmt: skip
            one, other = (shared, attached) if of == "writer" else (attached, shared)
            for arrays in (one, other):
                arrays.acquire(stream)
                arrays.release(stream)
            if struck == "release":
                one.acquire(stream)
            found = strikes(getattr(one, struck), stream, at, event)
            with suppress(gi.InvalidArgumentError):  # it is in
                one.acquire(stream)
            one.release(stream)
            stream.synchronize(timeout=LIMIT)
            other.acquire(timeout=LIMIT)
            other.release()
        if not found:
            break
    assert at > 10


def test_a_slot_is_withdrawn_only_by_its_offer(host: Device) -> None:
    with host.allocate(4096) as memory:
        with gi.share(memory.buffer.view(4)) as one:
            offer = one.lifetime.handle
        with gi.share(memory.buffer.view(4)) as other:
            assert other.lifetime.handle.slot == offer.slot
            offer.close()
            gi.attach(bytes(other)).close()


def test_an_offset_in_a_capsule() -> None:
    given = np.arange(8, dtype=np.uint8)
    capsule: Any = given.__dlpack__()
    name, offset = next((one[0], one[1]) for one in CAPSULES if f'"{one[0].decode()}"' in repr(capsule))
    tensor = DLTensor.from_address(pointer_of(capsule, name) + offset)
    tensor.data -= 16
    tensor.byte_offset += 16
    array = SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda **_: capsule)
    assert describe(array, "array").pointer == given.ctypes.data


def test_arrays_with_bytes_in_common_span_them_once(host: Device) -> None:
    with host.allocate(4096) as one, host.allocate(4096) as other:
        arrays = {
            "whole": one.buffer.view(100), "part": one.buffer.view(10, offset=20), "same": one.buffer.view(100),
            "later": one.buffer.view(100, offset=50), "back": other.buffer.view(3, "int32", 8, (-4,)),
        }  # fmt: skip
        with gi.share(arrays) as shared:
            assert shared.exposes == "2 allocation(s) of 8,192 bytes in all, of which the arrays span 162"


def test_elements_with_bytes_in_common_are_refused_and_no_others() -> None:
    random, told = np.random.default_rng(7), {True: 0, False: 0}
    shapes = [
        ((3, 2), (8, 12), 4), ((30000, 3), (12, 4), 4), ((40000, 2), (16, 8), 4), ((9000, 2, 5), (-80, 40, 8), 8),
    ]  # fmt: skip
    for count in random.integers(1, 4, 300):
        shape, strides = random.integers(1, 5, count), random.integers(-14, 15, count)
        shapes.append((tuple(shape.tolist()), tuple(strides.tolist()), int(2 ** random.integers(0, 3))))
    for shape, strides, size in shapes:
        steps = [np.arange(count) * step for count, step in zip(shape, strides, strict=True)]
        places: Any = sum(np.ix_(*steps, np.arange(size)))  # of each byte
        told[overlap := bool(len(np.unique(places)) < places.size)] += 1
        data = {"data": (1 << 40, False), "shape": shape, "strides": strides, "typestr": f"|u{size}"}
        with pytest.raises(gi.InvalidArgumentError, match="overlap") if overlap else nullcontext():
            describe(SimpleNamespace(__array_interface__=data), "array", in_place=False)
    assert min(told.values()) > 50


def test_arrays_without_bytes_and_one_with_an_address_and_an_interface(host: Device) -> None:
    with host.allocate(4096) as memory:
        some, none = np.asarray(memory.buffer.view((2, 4)))[::-1, ::-2], np.empty((0, 3), "float32")
        facts: Any = some.__array_interface__
        both = SimpleNamespace(__array_interface__=facts, data_ptr=lambda: facts["data"][0])
        some[:] = [[1, 2], [3, 4]]
        for arrays in ({"none": none}, {"none": none, "some": some}, {"some": both, "none": none}):
            for copy in (False, True):
                with gi.share(arrays, copy=copy) as shared, gi.attach(bytes(shared)) as attached:
                    for one in (shared, attached):
                        for name, array in arrays.items():
                            wanted = none if array is none else some
                            view = np.asarray(one[name])
                            assert (view.tolist(), view.shape, view.dtype) == (
                                wanted.tolist(),
                                wanted.shape,
                                wanted.dtype,
                            )
        del arrays, array, both, some, view, wanted


def test_a_file_of_another_file_system_with_the_same_number(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each numbers its inodes by itself, as that of huge pages does."""
    real, numbers = os.fstat, list[int]()
    with ExitStack() as files:
        for _ in range(3):
            fd = files.enter_context(gi.OpaqueFd.adopt(os.memfd_create("file", os.MFD_ALLOW_SEALING))).fd
            os.ftruncate(fd, 4096)
            numbers.append(real(fd).st_ino)
            if len(numbers) == 2:
                mapped = files.enter_context(mmap.mmap(fd, 4096))

        def fstat(fd: int) -> os.stat_result:
            found = real(fd)
            if found.st_ino in (numbers[0], numbers[2]):
                return os.stat_result((found.st_mode, numbers[1], found.st_dev + 1, *found[3:10]))
            return found

        monkeypatch.setattr(os, "fstat", fstat)
        block = cast(SharingBackend, host.driver).find_blocks()(np.frombuffer(mapped, np.uint8).ctypes.data)
        with cast(gi.OpaqueFd, cast(SharingBackend, host.driver).export_block(host._handle, block)) as handle:
            assert real(handle.fd).st_ino == numbers[1]
