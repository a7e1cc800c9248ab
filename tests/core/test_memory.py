"""Mapping rules, views, copies, arrays."""

import contextlib
import copy
import ctypes
import gc
import pickle
import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import gpuinterop as gi
from gpuinterop._core import lifetime
from tests.beside import elsewhere
from tests.limits import LIMIT

from .fake import FakeBackend, FakeDriver, FakeEverything, Pinned, fake_device, memory_of, semaphore_of

SIZE = 4096
Call = Callable[[], object]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 64)), max_size=12))
def test_whatever_the_ranges_the_driver_maps_once(ranges: list[tuple[int, int]]) -> None:
    device, backend = fake_device()
    with memory_of(device, 64) as memory:
        open_ones = []
        for offset, size in ranges:
            if offset + size > 64:
                with pytest.raises(gi.InvalidArgumentError, match=rf"^size: expected {64 - offset} bytes\b"):
                    memory.map_buffer(offset, size)
            else:
                open_ones.append(memory.map_buffer(offset, size))
                assert open_ones[-1].ptr == ctypes.addressof(backend.memory) + offset
        made = [call for call in backend.calls if call[0] == "map_buffer"]
        assert made == [("map_buffer", 64)] * bool(open_ones)


@pytest.mark.parametrize("by", ["a stream", "a launch"])
@pytest.mark.parametrize(
    ("filled", "copied", "offset", "found"),
    [
        ((16, 16), (0, 4096), 8, [9] * 8 + [1] * 8),
        ((1024, 1024), (0, 4096), 1024, [1] * 16),
        ((0, 4096), (1024, 1024), 0, [1] * 16),
        ((1024, 1024), (1536, 1024), 0, [1] * 16),
        ((16, 16), (0, 16), 0, [9] * 16),
        ((0, 1024), (1024, 1024), 0, [9] * 16),
        ((1024, 16), (0, 4096), 0, [9] * 16),
    ],
)
def test_a_copy_comes_after_all_earlier_work_on_its_bytes(
    by: str, filled: tuple[int, int], copied: tuple[int, int], offset: int, found: list[int]
) -> None:
    """Also after that with another buffer of the memory; and not after work on other bytes, which is held up here."""
    backend = Pinned()
    device, _ = fake_device(backend=backend, dlpack=(2, 0))
    with memory_of(device) as memory, semaphore_of(device) as semaphore, device.create_stream() as held:
        one, other, out = memory.map_buffer(*filled), memory.map_buffer(*copied), np.zeros(16, np.uint8)
        ctypes.memset(backend.memory, 9, 4096)
        semaphore.wait(held, 1)
        if by == "a stream":
            one.fill(1, stream=held)
        else:
            with held.capture() as graph:
                for part in range(0, filled[1], 16):
                    one.fill(1, offset=part, size=16, stream=held)
            with graph:
                graph.launch(held)
        done = list[bool]()

        def go_on() -> None:
            done.append(bool(out.any()))
            backend.arrive(semaphore._handle, 1)

        backend.on_synchronize = go_on  # the copy waits for the stream of ours that it is on
        other.copy_to_host(out, offset=offset)
        assert (out.tolist(), done[0]) == (found, 1 not in found)
        held.synchronize(LIMIT)
    assert set(backend.memory.raw[filled[0] : sum(filled)]) == {1}


def test_an_interface_has_one_stream_which_is_behind_all(device: gi.Device, backend: FakeBackend) -> None:
    device.info = replace(device.info, array_interface="__cuda_array_interface__", dlpack=(2, 0))
    with memory_of(device) as memory, device.create_stream() as first, device.create_stream() as second:
        buffer = memory.map_buffer()
        buffer.fill(1, size=16, stream=first)
        assert buffer.view(16).__cuda_array_interface__["stream"] == first.ptr
        buffer.fill(2, size=16, stream=second)
        view = buffer.view(16)
        found = view.__cuda_array_interface__["stream"]
        waits = [call for call in backend.calls if call[0] == "wait_event" and call[1][1] == found]
        assert {call[2] for call in waits} == {first._handle, second._handle}
        buffer.fill(3, size=16, stream=second)  # each look tells of the work up to there
        backend.calls.clear()
        assert view.__cuda_array_interface__["stream"] == found
        waits = [call for call in backend.calls if call[0] == "wait_event" and call[1][1] == found]
        assert {call[2] for call in waits} == {first._handle, second._handle}
        with memory_of(device) as other, other.map_buffer() as unrelated:
            unrelated.copy_to_host(np.zeros(16, np.uint8))
            (copied,) = [call for call in backend.calls if call[0] == "copy"]
            assert copied[1][1] != found, "it would stand behind the others' work"


def test_an_interface_names_no_stream_that_ends_before_its_reader_asks_it() -> None:
    """A closed stream ends with its work, and the driver may refuse its number, or have another of that number."""
    backend = FakeDriver()
    device, _ = fake_device(backend=backend, dlpack=(2, 0))
    with memory_of(device) as memory, semaphore_of(device) as semaphore, memory.map_buffer() as buffer:
        with device.create_stream() as stream:
            semaphore.wait(stream, 1)
            buffer.fill(1, stream=stream)
        view = buffer.view(16)
        told = view.__cuda_array_interface__["stream"]
        assert not backend.is_idle(backend.adopt_stream(device._handle, told)), "it does not stand behind the fill"
        backend.arrive(semaphore._handle, 1)
        device.drain()
        assert ("stream", told) in backend.live


def test_an_interface_names_no_other_threads_own_stream() -> None:
    """Its number, 2, would be that of the reader's own."""
    backend = FakeDriver()
    device, _ = fake_device(backend=backend, dlpack=(2, 0))
    with memory_of(device) as memory, semaphore_of(device) as semaphore, memory.map_buffer() as buffer:

        def write() -> None:
            own = device.wrap_stream(2)
            semaphore.wait(own, 1)
            buffer.fill(1, stream=own)

        elsewhere(write)
        view = buffer.view(16)
        told = backend.adopt_stream(device._handle, view.__cuda_array_interface__["stream"])
        assert not backend.is_idle(told), "it does not stand behind the fill"
        backend.arrive(semaphore._handle, 1)
        assert backend.is_idle(told)


def test_a_stream_that_was_dropped_is_waited_for_once(device: gi.Device, backend: FakeBackend) -> None:
    """Whatever is left of it: its work may still be to come."""
    out = np.zeros(16, np.uint8)
    with memory_of(device) as memory, memory.map_buffer() as buffer:
        stream = device.wrap_stream(40)
        buffer.fill(1, stream=stream)
        backend.blocked.add(40)
        del stream
        gc.collect()
        device.drain()

        def waited_for() -> list[object]:
            start = len(backend.calls)
            buffer.copy_to_host(out)
            return [call[2] for call in backend.calls[start:] if call[0] == "wait_event"]

        assert waited_for() == [("adopted", 40)]
        backend.blocked.clear()
        device.drain()
        assert waited_for() == []


@pytest.mark.parametrize(
    ("shape", "options", "argument", "message"),
    [
        ((8, 8), {}, "offset", "4 to 260: [8, 8] of float32, strides [32, 4]; pass an offset of 0 to 0."),
        ((4,), {"strides": (-16,)}, "offset", "-44 to 8: [4] of float32, strides [-16]; pass an offset of 48 to 252."),
        ((8, 9), {}, "shape", "4 to 292: [8, 9] of float32, strides [36, 4]; pass fewer or closer elements."),
        ((2,), {"strides": (256,)}, "shape", "4 to 264: [2] of float32, strides [256]; pass fewer or closer elements."),
    ],
)
def test_a_view_beyond_the_buffer_is_told_what_would_fit(
    device: gi.Device, shape: tuple[int, ...], options: Any, argument: str, message: str
) -> None:
    with memory_of(device, SIZE) as memory:
        buffer = memory.map_buffer(16, 256)
        with pytest.raises(gi.InvalidArgumentError) as caught:
            buffer.view(shape, "float32", 4, **options)
        assert caught.value.argument == argument
        assert str(caught.value) == f"{argument}: expected elements within the buffer's 256 bytes, got bytes {message}"
        with pytest.raises(gi.InvalidArgumentError, match=r"^strides: expected 2 entries"):
            buffer.view((2, 2), strides=(2,))


def test_what_is_misaligned_is_the_address(device: gi.Device) -> None:
    """That of a buffer at an odd place too: there an offset of 0 is wrong. The message has one that fits."""
    with memory_of(device, SIZE) as memory, contextlib.ExitStack() as scope:
        for mapped, offset in ((3, 0), (4, 8), (0, 12), (1, 16)):
            buffer = scope.enter_context(memory.map_buffer(mapped))
            with pytest.raises(gi.InvalidArgumentError, match=r"^offset: ") as caught:
                buffer.view(1, "float64", offset)
            assert f"a multiple of 8, for float64; got {buffer.ptr + offset:#x}" in str(caught.value)
            found = re.search(r"; pass (\d+), or view bytes", str(caught.value))
            assert found
            assert buffer.view(1, "float64", int(found[1])).ptr % 8 == 0
            assert offset < int(found[1]) < offset + 8
        assert scope.enter_context(memory.map_buffer()).view(1, "complex64", 4).nbytes == 8  # aligned to its parts


@settings(deadline=None, max_examples=300)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    strides=st.lists(st.integers(-96, 96), min_size=3, max_size=3),
    offset=st.integers(0, 300),
)
def test_a_view_reaches_exactly_what_numpy_says(shape: list[int], strides: list[int], offset: int) -> None:
    device, _backend = fake_device()
    steps = strides[: len(shape)]
    with memory_of(device, 256) as memory:
        buffer = memory.map_buffer()
        touched = [
            offset + sum(index * step for index, step in zip(indices, steps, strict=True))
            for indices in np.ndindex(*shape)
        ]
        fits = all(start >= 0 and start + 1 <= 256 for start in touched) and offset <= 256
        with contextlib.nullcontext() if fits else pytest.raises(gi.InvalidArgumentError):
            view = buffer.view(shape, "uint8", offset, steps)
            array = np.asarray(view)
            for indices, start in zip(np.ndindex(*shape), touched, strict=True):
                element = array[tuple(slice(i, i + 1) for i in indices)] if shape else array
                assert element.__array_interface__["data"][0] == buffer.ptr + start


def test_views_carry_every_type_and_both_protocols(device: gi.Device) -> None:
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        for name in ("bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64"):
            view = buffer.view((2, 3), name)
            for array in (np.from_dlpack(view), np.asarray(view)):
                assert array.dtype == np.dtype(name)
                assert array.shape == (2, 3)
                assert array.__array_interface__["data"][0] == buffer.ptr
            assert view.nbytes == 6 * np.dtype(name).itemsize
        assert buffer.view(4, np.float32).dtype == "float32"
        assert buffer.view(4, np.dtype("int16")).dtype == "int16"
        for bad in ("nonsense", object, ">f4", "U4", None, "int4", "float4_e2m1fn"):
            with pytest.raises(gi.ArgumentTypeError, match=r"dtype: expected one of bool, .*float8_e5m2, .*; take "):
                buffer.view(4, bad)


def test_a_view_is_a_buffer(device: gi.Device, backend: FakeBackend) -> None:
    """Writable, in its shape and strides, on the same bytes; the memory stays as long as the memoryview does."""
    memory = memory_of(device)
    buffer = memory.map_buffer()
    theirs = memoryview(backend.memory).cast("B")
    ways: list[Any] = [lambda view: view.__buffer__(0)]
    if sys.version_info >= (3, 12):
        ways.append(memoryview)
    for take in ways:
        theirs[64:68] = np.array(7, np.int32).tobytes()
        with take(buffer.view((4, 2), "int32", offset=64, strides=(16, 4))) as seen:
            assert (seen.format, seen.shape, seen.strides, seen.readonly) == ("i", (4, 2), (16, 4), False)
            assert seen[0, 0] == 7
            seen[3, 1] = -2
        assert bytes(theirs[64 + 3 * 16 + 4 :][:4]) == b"\xfe\xff\xff\xff"
        assert take(buffer.view((), "bool")).shape == ()
        assert take(buffer.view(0)).nbytes == 0
    last = buffer.view(16).__buffer__(0)
    with pytest.raises(gi.ResourceBusyError, match=r"1 exported array\(s\) are still alive"):
        memory.close(timeout=0.01)
    assert last[0] == theirs[0]
    del last
    memory.close(timeout=LIMIT)
    with pytest.raises(gi.ResourceClosedError):
        buffer.view(16).__buffer__(0)


@pytest.mark.parametrize("module", [None, types.ModuleType("ml_dtypes")])
@pytest.mark.parametrize(("name", "uint"), [("bfloat16", "uint16"), ("float8_e5m2", "uint8")])
def test_types_of_ml_dtypes_without_it(name: str, uint: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy has no such type: the view says what to install, or to renew, and is never an array of voids."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", module)
    device, _ = fake_device()
    with memory_of(device) as memory:
        view = memory.map_buffer().view(4, name)
        assert view.dtype == name
        calls: list[Call] = [lambda: np.asarray(view), lambda: np.array(view), lambda: np.add(view, 1)]
        for call in calls:
            with pytest.raises(gi.ArgumentTypeError, match="pip install ml_dtypes"):
                call()
        with pytest.raises(gi.ArgumentTypeError, match=uint):
            view.__buffer__(0)
        assert not hasattr(view, "__array_interface__")
        assert view.__dlpack_device__() == (1, 0)
    device, _ = fake_device(dlpack=(2, 0))
    with memory_of(device) as memory:
        view = memory.map_buffer().view(4, name)
        with pytest.raises(AttributeError, match="from_dlpack"):
            _ = view.__cuda_array_interface__


def test_views_of_one_layout_are_windows_of_their_own(device: gi.Device) -> None:
    """What they have in common is made once: it must not be the address, nor let another shape in that is equal."""
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        ctypes.memmove(buffer.ptr, bytes(range(256)), 256)
        arrays = [np.from_dlpack(buffer.view((2, 3), "uint8", offset, (8, 1))) for offset in (0, 16, 32, 0)]
        assert [array.tolist() for array in arrays] == [
            [[first + row * 8 + column for column in range(3)] for row in range(2)] for first in (0, 16, 32, 0)
        ]
        sizes: Any = [np.int64(2), 3]
        assert buffer.view(sizes, np.dtype("uint8")).shape == (2, 3)
        wrong: list[Any] = [(2.0, 3), (2, True), "23", (2, -3)]
        buffer.view((2, 1))
        for shape in wrong:
            with pytest.raises((gi.ArgumentTypeError, gi.InvalidArgumentError), match="shape"):
                buffer.view(shape)
        with pytest.raises(gi.ArgumentTypeError, match="strides"):
            buffer.view((2, 3), "uint8", 0, (8, True))


@pytest.mark.parametrize("kind", [1, 2])
def test_arrays_that_come_and_go_do_not_pile_up(kind: int) -> None:
    """In a loop that makes no other call of this library, also where no consumer takes the capsule."""
    device, _backend = fake_device(dlpack=(kind, 0))
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        device.drain()
        before, most = len(lifetime.alive()), 0
        for _ in range(1000):
            buffer.view((4, 4), "float32").__dlpack__(stream=None, max_version=(1, 0))
            most = max(most, len(lifetime.alive()) - before)
        assert most <= 2, "one consumer's stream, and what stands for it"
        device.drain()
        assert len(lifetime.alive()) == before


def test_dlpack_by_the_array_api(device: gi.Device) -> None:
    with memory_of(device) as memory:
        view = memory.map_buffer().view((2, 2), "float32")
        assert view.__dlpack_device__() == (1, 0)
        assert "dltensor_versioned" in repr(view.__dlpack__(max_version=(1, 0)))
        assert '"dltensor"' in repr(view.__dlpack__())
        for refused in ({"copy": True}, {"dl_device": (2, 0)}):
            with pytest.raises(BufferError):
                view.__dlpack__(**refused)
        with pytest.raises(gi.InvalidArgumentError, match="stream"):
            view.__dlpack__(stream=3)
        odd = memory.map_buffer().view((2, 2), "float32", strides=(10, 4))
        with pytest.raises(BufferError, match="multiple of 4"):
            odd.__dlpack__()
        assert np.asarray(odd).strides == (10, 4)


@pytest.mark.parametrize(("kind", "refused"), [(1, 3), (2, 0), (10, 1), (2, -5), (10, 2**64)])
def test_a_refused_dlpack_holds_nothing(kind: int, refused: int) -> None:
    """The caller may keep the error, and with its traceback all that the call had made."""
    device, _backend = fake_device(dlpack=(kind, 0))
    memory = memory_of(device)
    with pytest.raises(gi.InvalidArgumentError) as caught:
        memory.map_buffer().view(4).__dlpack__(stream=refused)
    memory.close(timeout=0)
    assert caught.value.argument == "stream"


@pytest.mark.parametrize(("kind", "default", "refused"), [(2, 1, (0,)), (10, 0, (1, 2))])
def test_dlpack_orders_the_consumers_stream_behind_the_last_write(
    kind: int, default: int, refused: tuple[int, ...]
) -> None:
    device, backend = fake_device(dlpack=(kind, 0))
    with memory_of(device) as memory, device.create_stream() as stream:
        buffer = memory.map_buffer()
        view = buffer.view(4)
        view.__dlpack__(stream=default)
        assert not [call for call in backend.calls if call[0] == "wait_event"]  # nothing was written yet
        buffer.fill(7, stream=stream)
        view.__dlpack__(stream=40)
        assert not [call for call in backend.calls if call[0] == "wait_event"]  # that write is done
        backend.blocked.add(backend.number(stream._handle))
        taken = []
        for given_, pointer in ((None, default), (40, 40)):
            taken.append(view.__dlpack__(stream=given_))
            assert backend.calls[-1] == ("wait_event", ("adopted", pointer), stream._handle)
        before = len(backend.calls)
        view.__dlpack__(stream=-1)
        assert len(backend.calls) == before
        for pointer in refused:
            with pytest.raises(gi.InvalidArgumentError, match=rf"^stream: .*got {pointer}\b"):
                view.__dlpack__(stream=pointer)
        assert not hasattr(view, "__array_interface__")
        # The consumers' streams have had the bytes, too.
        found = view.__cuda_array_interface__["stream"]
        behind = {call[2] for call in backend.calls if call[0] == "wait_event" and call[1][1] == found}
        assert behind == {stream._handle, ("adopted", default), ("adopted", 40)}
        backend.blocked.clear()


def test_each_array_of_one_consumer_keeps_its_stream() -> None:
    """They share what stands for the stream, which is waited for when all are gone, and not ended by the first."""
    device, backend = fake_device(dlpack=(2, 0))
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        first, second = (buffer.view(4).__dlpack__(stream=40) for _ in range(2))
        del first
        gc.collect()
        device.drain()
        third = buffer.view(4).__dlpack__(stream=40)
        device.drain()
        assert not [call for call in backend.calls if call[0] == "wait_event"]
        backend.blocked.add(40)
        buffer.close()
        del second, third
        gc.collect()
        device.drain()
        assert backend.count("mapping") == 1
        backend.blocked.clear()
        device.drain()
        assert backend.count("mapping") == 0


def test_a_consumers_failure_that_was_told_is_over_with_its_next_array() -> None:
    """Also while an earlier array of it is alive."""
    device, _ = fake_device(dlpack=(2, 0))
    with memory_of(device) as memory, device.wrap_stream(40) as consumer:
        buffer = memory.map_buffer()
        _earlier = buffer.view(4).__dlpack__(stream=40)
        consumer._known_as().fail(gi.PeerError("gone"))
        with pytest.raises(gi.PeerError, match="gone"):
            buffer.fill()
        _next = buffer.view(4).__dlpack__(stream=40)
        buffer.fill()


@pytest.mark.parametrize("start", [0, 2048])
def test_a_consumer_that_had_a_part_of_the_bytes_takes_the_rest(start: int) -> None:
    """Also of a buffer that does not begin where the memory does."""
    device, backend = fake_device(dlpack=(2, 0))
    with memory_of(device) as memory:
        ranges = (start, 512), (start, 2048), (start + 1024, 1024)
        part, whole, rest = (memory.map_buffer(offset, size) for offset, size in ranges)
        _kept = [buffer.view(4).__dlpack__(stream=40) for buffer in (part, whole)]
        backend.blocked.add(40)
        rest.view(4).__dlpack__(stream=41)
        assert backend.calls[-1] == ("wait_event", ("adopted", 41), ("adopted", 40))
        backend.blocked.clear()


@pytest.mark.parametrize("kind", [2, 10])
def test_numpy_takes_no_memory_of_a_gpu(kind: int) -> None:
    """It would make an array of one Python object; what does take it is named."""
    device, _ = fake_device(dlpack=(kind, 0))
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        view = buffer.view((2, 2), "float32")
        calls: list[Call] = [
            lambda: np.asarray(view),
            lambda: np.array([view, view]),
            lambda: np.sum(view),
            lambda: buffer.copy_from_host(view),
        ]
        for call in calls:
            with pytest.raises(TypeError) as caught:
                call()
            assert isinstance(caught.value, gi.GpuInteropError)
            for name in ("torch.from_dlpack(view)", "cupy.asarray(view)", "view.to_numpy()"):
                assert name in str(caught.value)
        any_: Any = view
        others: list[Call] = [lambda: memoryview(view), lambda: float(any_), lambda: bytes(view), lambda: list(any_)]
        for call in others:
            with pytest.raises(TypeError):
                call()
        # CuPy, torch and JAX look for this one first, and find what they find without NumPy's.
        assert view.__cuda_array_interface__["data"] == (view.ptr, False)


def test_host_consumers_wait_for_the_last_write(device: gi.Device, backend: FakeBackend) -> None:
    with memory_of(device) as memory, device.create_stream() as stream:
        buffer = memory.map_buffer()
        buffer.fill(7, size=4, stream=stream)
        assert np.from_dlpack(buffer.view(4)).tolist() == [7] * 4
        assert backend.calls[-1] == ("synchronize", stream._handle)
        assert not hasattr(buffer.view(4), "__cuda_array_interface__")


def test_copies_both_ways_and_their_bounds(device: gi.Device, backend: FakeBackend) -> None:
    with memory_of(device) as memory, device.create_stream() as stream:
        buffer = memory.map_buffer()
        data = np.arange(16, dtype="float32")
        buffer.copy_from_host(data, offset=64)
        back = np.zeros_like(data)
        buffer.copy_to_host(back, offset=64, stream=stream)
        assert (back == data).all()
        buffer.copy_from_host(bytes(8), offset=64, stream=stream)
        target = bytearray(8)
        buffer.copy_to_host(target, offset=64)
        assert bytes(target) == bytes(8)
        count = len(backend.calls)
        calls: list[Call] = [
            lambda: buffer.copy_from_host(data, offset=SIZE - 60),
            lambda: buffer.copy_from_host([1, 2]),
            lambda: buffer.copy_to_host(b"read-only"),
            lambda: buffer.copy_to_host(np.zeros((4, 4))[:, 1]),
            lambda: buffer.fill(256),
            lambda: buffer.fill(offset=SIZE),
            lambda: buffer.fill(stream="one"),
        ]
        for call in calls:
            with pytest.raises(gi.InvalidArgumentError):
                call()
        assert len(backend.calls) == count


def test_every_call_on_a_closed_buffer_is_refused(device: gi.Device, backend: FakeBackend) -> None:
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        view = buffer.view(16)
        level = memory.map_mipmapped_array("R8_UNORM", (4, 4)).level(0)
        buffer.close()
        buffer.close()
        memory.close()
        count = len(backend.calls)
        calls: list[Call] = [
            lambda: buffer.ptr,
            lambda: buffer.view(16),
            buffer.fill,
            lambda: buffer.copy_from_host(bytes(16)),
            lambda: buffer.copy_to_host(bytearray(16)),
            lambda: view.ptr,
            view.__dlpack__,
            lambda: np.asarray(view),
            memory.map_buffer,
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4)),
            lambda: level._image.level(0),
            lambda: level.copy_to_host(bytearray(16), stream=0),
        ]
        for call in calls:
            with pytest.raises(gi.ResourceClosedError):
                call()
        assert len(backend.calls) == count


def test_a_pageable_copy_behind_a_pending_wait_is_refused(device: gi.Device, backend: FakeBackend) -> None:
    with (
        memory_of(device) as memory,
        device.create_stream() as stream,
        device.import_semaphore(gi.TimelineWin32(handle=8)) as semaphore,
    ):
        buffer, level = memory.map_buffer(), memory.map_mipmapped_array("R8_UNORM", (2, 2)).level(0)
        semaphore.wait(stream, 4)
        backend.blocked.add(stream.ptr)
        for copied in (buffer, level):
            with pytest.raises(gi.ResourceBusyError, match=r"deadlock") as caught:
                copied.copy_to_host(bytearray(4), stream=stream)
            assert "to reach 4" in str(caught.value)
        assert not [call for call in backend.calls if call[0] in ("copy", "copy_level")]
        backend.blocked.clear()
        buffer.copy_to_host(bytearray(4), stream=stream)


def test_a_copy_behind_a_wait_that_passes_is_not_refused() -> None:
    """The signal is there, and the stream has not got to it yet."""
    device, backend = fake_device(backend=FakeEverything())
    with memory_of(device) as memory, device.create_stream() as stream, device.create_semaphore(gi.TimelineFd) as own:
        own.wait(stream, 4)
        own.host_signal(4)
        backend.blocked.add(stream.ptr)
        with memory.map_buffer() as buffer:
            buffer.copy_to_host(bytearray(4), stream=stream)
        assert backend.calls[-1][0] == "copy"
        backend.blocked.clear()


@pytest.mark.parametrize("given", [False, True])
def test_a_views_copy_uses_the_bytes_of_both(device: gi.Device, backend: FakeBackend, given: bool) -> None:
    """It is ordered behind earlier work with either, if it has no stream; and later work with either behind it."""

    def behind(stream: gi.Stream, call: Call) -> bool:
        backend.calls.clear()
        call()
        return any(one[0] == "wait_event" and one[2] == stream._handle for one in backend.calls)

    with (
        memory_of(device) as one, memory_of(device) as other,
        device.create_stream() as first, device.create_stream() as second,
    ):  # fmt: skip
        mine, theirs = one.map_buffer(), other.map_buffer()
        target, source = mine.view(256, offset=512), theirs.view(256, offset=512)
        if given:
            target.copy_from(source, stream=first)
            for buffer in (mine, theirs):
                fills = {at: partial(buffer.fill, 1, offset=at, size=16) for at in (0, 496, 512, 752, 768)}
                assert [at for at, fill in fills.items() if behind(first, fill)] == [512, 752]
        else:
            mine.fill(1, stream=first)
            theirs.fill(1, stream=second)
            assert behind(first, lambda: target.copy_from(source))
            assert behind(second, lambda: target.copy_from(source))
            assert [len(buffer.mapping.uses) for buffer in (mine, theirs)] == [1, 1]
            backend.on_synchronize = Mock(side_effect=KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                target.copy_from(source)
            backend.on_synchronize = Mock()
            assert [len(buffer.mapping.uses) for buffer in (mine, theirs)] == [2, 2], "the copy may be under way"
            theirs.close()
            with pytest.raises(gi.ResourceClosedError):
                target.copy_from(source)


@pytest.mark.parametrize("strides", [(2, 1), (-2, 1), (2, -1), (-2, -1), (-1, -4)])
def test_a_views_copy_refuses_a_source_that_shares_bytes(device: gi.Device, strides: tuple[int, int]) -> None:
    """And no other, whichever element is the first in memory. NumPy says what shares bytes."""
    shape = 4, 2
    with memory_of(device) as memory:
        buffer = memory.map_buffer()
        target = buffer.view(shape, offset=32, strides=strides)
        for offset in range(16, 49):
            content = np.asarray(buffer.view(64))
            content[:] = range(64)
            source = buffer.view(shape, offset=offset, strides=strides)
            expected = np.asarray(source).tolist()
            if np.shares_memory(np.asarray(target), np.asarray(source)):
                with pytest.raises(gi.InvalidArgumentError, match="overlap") as caught:
                    target.copy_from(source)
                assert caught.value.argument == "source"
                assert content.tolist() == [*range(64)]
            else:
                target.copy_from(source)
                assert np.asarray(target).tolist() == expected
                assert np.count_nonzero(content != range(64)) == 8


def test_arrays_are_laid_out_checked_and_copied(device: gi.Device, backend: FakeBackend) -> None:
    with memory_of(device, 1 << 16) as memory, device.create_stream() as stream:
        array = memory.map_mipmapped_array("R32G32B32A32_SFLOAT", (32, 16), levels=3)
        assert [array.level(n).nbytes for n in range(3)] == [8192, 2048, 512]
        assert array.level(2).extent == (8, 4, 0)
        written = [array.lifetime.written]
        array.level(1).copy_from_host(np.zeros(2048, "uint8"), stream=stream)
        written.append(array.lifetime.written)
        buffer = device.import_memory(gi.OpaqueWin32(handle=9), size=8192).map_buffer()
        written.append(buffer.mapping.written)
        array.level(0).copy_to_buffer(buffer, stream=stream)
        assert [*written, buffer.mapping.written] == [False, True, False, True]
        assert backend.calls[-1] == ("copy_level", 0, 8192, False)
        array.level(1).copy_from_buffer(buffer, offset=64, stream=stream)
        assert backend.calls[-1] == ("copy_level", 1, 2048, True)
        bad: list[Call] = [
            lambda: array.level(3),
            lambda: array.level(0).copy_from_host(bytes(4), stream=stream),
            lambda: array.level(1).copy_to_buffer(buffer, offset=8192 - 2047, stream=stream),
            lambda: array.level(0).copy_from_host(np.ma.zeros(8192, "uint8"), stream=stream),
            lambda: array.level(0).copy_to_host(np.ma.zeros(8192, "uint8"), stream=stream),
            lambda: array.level("0"),  # type: ignore[arg-type]
            lambda: array.level(0.0),  # type: ignore[arg-type]
            lambda: memory.map_mipmapped_array("R64_SFLOAT", (4, 4)),
            lambda: memory.map_mipmapped_array(None, (4, 4)),  # type: ignore[arg-type]
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4), levels="1"),  # type: ignore[arg-type]
            lambda: memory.map_mipmapped_array("R8_UNORM", (0, 4)),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4), levels=9),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4), layers=-1),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4), offset=1 << 16),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4), layers=5, usage=gi.ArrayUsage.CUBEMAP),
            lambda: memory.map_mipmapped_array("R32G32B32A32_SFLOAT", (512, 512)),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4, 4, 4)),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, True)),
            lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4), usage=True),  # type: ignore[arg-type]
        ]
        before = len(backend.calls)
        for call in bad:
            with pytest.raises(gi.InvalidArgumentError):
                call()
        assert len(backend.calls) == before
        buffer._parents[0].close()
    assert not [native for native in backend.live if native[0] == "array"]


def test_an_image_is_released_after_the_copies_of_its_levels(device: gi.Device, backend: FakeBackend) -> None:
    with memory_of(device, 1 << 16) as memory, device.create_stream() as stream:
        image = memory.map_mipmapped_array("R8_UNORM", (4, 4))
        image.level(0).copy_to_host(bytearray(16), stream=stream)
        backend.blocked.add(stream.ptr)
        image.close()
        assert backend.count("array") == 1
        backend.blocked.clear()
        image.close(timeout=LIMIT)


@pytest.mark.parametrize("to_buffer", [False, True])
def test_a_levels_copy_uses_its_bytes_of_the_buffer(device: gi.Device, backend: FakeBackend, to_buffer: bool) -> None:
    """A copy of those, without a stream, is ordered behind it, and one of others is not."""
    with memory_of(device, 1 << 16) as memory, device.create_stream() as stream:
        level = memory.map_mipmapped_array("R8_UNORM", (16, 16)).level(0)
        with memory_of(device, 4096) as other, other.map_buffer(1024) as buffer:
            (level.copy_to_buffer if to_buffer else level.copy_from_buffer)(buffer, offset=512, stream=stream)
            behind = []
            for offset in (0, 496, 512, 752, 768):
                backend.calls.clear()
                buffer.copy_to_host(bytearray(16), offset=offset)
                behind += [offset for call in backend.calls if call[0] == "wait_event" and call[2] == stream._handle]
            assert behind == [512, 752]


def test_a_hold_is_not_copied(device: gi.Device) -> None:
    """A second one would take off the mark of an array."""
    with memory_of(device) as memory:
        token = memory.map_buffer().hold()
        for twin in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(gi.ArgumentTypeError, match="got a request for a copy"):
                twin(token)
