"""Arrays that libraries make of views: what a capsule says, what keeps the bytes, and for how long."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device

from .capsules import read_capsule
from .fake import FakeBackend, FakeEverything, fake_device, memory_of

SIZE = 4096
GPU = (2, 3)

HOSTS: list[Any] = [
    np.from_dlpack,
    np.asarray,
    lambda view: np.array(view, copy=False),
    lambda view: view.__buffer__(0),
]
if sys.version_info >= (3, 12):
    HOSTS.append(memoryview)


# -- how long --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("take", [np.from_dlpack, np.asarray])
@pytest.mark.parametrize(
    ("error", "use"),
    [
        (IndexError, lambda make: make()[99]),
        (ValueError, lambda make: make().reshape(7)),
        (AttributeError, lambda make: make().missing),
        (KeyError, lambda make: {make().size: 1}["missing"]),
        (KeyError, lambda make: max(make(), {0: 1}[1])),
        (ZeroDivisionError, lambda make: max(make(), 1 / 0)),
    ],
)
def test_an_exception_outlives_the_array(
    device: Device, backend: FakeBackend, take: Any, error: type[Exception], use: Callable[[Any], object]
) -> None:
    """The last reference to the array goes while the exception is on its way."""
    memory = memory_of(device)
    view = memory.map_buffer().view(16)
    with pytest.raises(error):
        use(lambda: take(view))
    memory.close(timeout=0)
    assert not backend.count("mapping")


@pytest.mark.parametrize("take", HOSTS)
def test_the_array_keeps_the_bytes_and_the_view_does_not(device: Device, backend: FakeBackend, take: Any) -> None:
    memory = memory_of(device)
    view = memory.map_buffer().view(16)
    array = take(view)
    memory.close()
    with pytest.raises(gi.ResourceBusyError, match=r"1 exported array\(s\)"):
        memory.close(timeout=0)
    backend.memory[3] = b"M"
    assert array[3] == ord("M")
    del array
    memory.close(timeout=0)
    assert view.shape == (16,), "the view is still there"
    with pytest.raises(gi.ResourceClosedError):
        take(view)


def test_a_consumer_of_the_cuda_array_interface_keeps_the_bytes_by_the_view() -> None:
    device, _ = fake_device(dlpack=GPU)
    memory = memory_of(device)
    view = memory.map_buffer().view(16)
    assert view.__cuda_array_interface__["data"] == (view.ptr, False)
    memory.close()
    with pytest.raises(gi.ResourceBusyError, match=r"1 exported array\(s\)"):
        memory.close(timeout=0)
    del view
    memory.close(timeout=0)


# -- what a capsule says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [(1, 0), (1, 1), GPU, (10, 0)])
@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_says_what_the_view_is(place: tuple[int, int], versioned: bool) -> None:
    """Read by ctypes, as a consumer in C does."""
    device, _ = fake_device(dlpack=place)
    memory = memory_of(device)
    buffer = memory.map_buffer()

    def check(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None, expected: tuple[int, int]) -> None:
        code, itemsize = expected
        view = buffer.view(shape, dtype, 1024, strides)
        found = read_capsule(view.__dlpack__(max_version=(1, 0) if versioned else None))
        assert (found.data, found.byte_offset, found.device) == (buffer.ptr + 1024, 0, place)
        assert (found.dtype, found.shape) == ((code, 8 * itemsize, 1), shape)
        if found.strides is None:
            contiguous = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
            used = [(step, one) for size, step, one in zip(shape, view.strides, contiguous, strict=True) if size > 1]
            assert 0 in shape or all(step == one for step, one in used), "None is C order"
        else:
            assert found.strides == tuple(step // itemsize for step in view.strides)
        assert found.flags in (0, None), "it is neither read-only nor a copy"
        if not versioned:
            assert found.flags is None

    for kind, (code, sizes) in {"int": (0, (1, 2, 4, 8)), "uint": (1, (1, 2, 4, 8)), "float": (2, (2, 4, 8))}.items():
        for itemsize in sizes:
            check((2, 3), f"{kind}{8 * itemsize}", None, (code, itemsize))
    check((4,), "bfloat16", None, (4, 2))
    for code, kind in {7: "e3m4", 8: "e4m3", 9: "e4m3b11fnuz", 10: "e4m3fn", 11: "e4m3fnuz", 12: "e5m2",
                       13: "e5m2fnuz", 14: "e8m0fnu"}.items():  # fmt: skip
        check((2, 3), f"float8_{kind}", None, (code, 1))
    check((4,), "complex32", None, (5, 4))
    check((4,), "bool", None, (6, 1))
    check((4,), "complex64", None, (5, 8))
    check((4,), "complex128", (32,), (5, 16))
    check((), "float32", None, (2, 4))
    check((0, 3), "float32", None, (2, 4))
    check((5, 4), "int16", (-64, 2), (0, 2))
    check((5, 4), "bfloat16", (0, -2), (4, 2))
    check((1,) * 31 + (2,), "uint8", None, (1, 1))
    if int(np.__version__.split(".")[0]) >= 2:
        check((1,) * 63 + (2,), "uint8", None, (1, 1))
    memory.close(timeout=0)


@pytest.mark.parametrize("place", [(1, 0), GPU])
@pytest.mark.parametrize(("shape", "strides"), [((1,) * 65, None), ((2**40, 2**40), (0, 0))])
def test_a_shape_that_numpy_does_not_know_is_refused(
    place: tuple[int, int], shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    """In words, and the error keeps nothing."""
    device, _ = fake_device(dlpack=place)
    memory = memory_of(device)
    view = memory.map_buffer().view(shape, strides=strides)
    ways: list[Callable[[], object]] = [view.__dlpack__]
    if place == (1, 0):
        ways.append(lambda: np.asarray(view))
    errors = []
    for way in ways:
        with pytest.raises(BufferError, match="a shape that NumPy can describe, got <View uint8") as caught:
            way()
        errors.append(caught.value)
    memory.close(timeout=0)
    assert all(error.__traceback__ for error in errors)


# -- NumPy's own way -------------------------------------------------------------------------------------------------


def test_numpys_array_is_a_copy_where_it_must_be(device: Device) -> None:
    with memory_of(device) as memory:
        view = memory.map_buffer().view(4, "int32")
        own = np.asarray(view)
        for same in (
            np.asarray(view, dtype="int32"),
            view.__array__(),
            view.__array__("int32"),
            np.array(view, copy=False),
        ):
            assert np.shares_memory(own, same)
        for other in (
            np.array(view),
            np.asarray(view, dtype="float64"),
            view.__array__(copy=True),
            view.__array__("int8"),
        ):
            assert not np.shares_memory(own, other)
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            with pytest.raises(ValueError, match="copy"):
                np.asarray(view, dtype="float64", copy=False)
            assert np.shares_memory(own, np.asarray(view, copy=False))
            assert not np.shares_memory(own, np.asarray(view, copy=True))


@pytest.mark.parametrize("place", [(1, 0), GPU])
def test_what_is_no_array_is_no_array_of_one_object(place: tuple[int, int]) -> None:
    """NumPy would wrap it without a word; the error says what to write."""
    device, _ = fake_device(backend=FakeEverything(), dlpack=place)
    with memory_of(device) as memory, device.allocate(SIZE) as allocation:
        image = memory.map_mipmapped_array("R8_UNORM", (4, 4))
        things = {
            memory: "numpy.asarray(memory.map_buffer().view(shape, dtype))",
            memory.map_buffer(): "numpy.asarray(buffer.view(shape, dtype))",
            allocation: "numpy.asarray(allocation.view(shape, dtype))",
            image: "image.level(0).copy_to_host(",
            image.level(0): "level.copy_to_host(",
        }
        for thing, instead in things.items():
            ways: list[Any] = [np.asarray, np.array, np.sum, lambda one: np.add(one, 1), lambda one: np.array([one])]
            for way in ways:
                with pytest.raises(gi.ArgumentTypeError, match=f"got {type(thing).__name__}") as caught:
                    way(thing)
                assert instead in str(caught.value)
