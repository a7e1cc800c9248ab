"""Arrays whose memory does not contain their values, or whose element type only NumPy has: each entry refuses them.

tests/frameworks/test_foreign_arrays.py has torch's, JAX's and PyArrow's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

import gpuinterop as gi

UNDER_THE_MASK: Final = 999
MASK: Final = np.array([False, True, False])


class Interface:
    """An array that any library can have: it is what its attributes say."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Masked(Interface):
    """As astropy's `Masked`."""

    mask = property(lambda _: MASK)


class Deleted:
    """As a JAX array that a jitted function took: none of its protocols works any more."""

    def is_deleted(self) -> bool:
        return True

    def __dlpack_device__(self) -> Any:
        raise TypeError("object of type 'NoneType' has no len()")

    def __dlpack__(self, **_: object) -> Any:
        raise TypeError("object of type 'NoneType' has no len()")


class Both(Interface):
    """It has DLPack, which has no masks, and an interface, which has one."""

    array: Any

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Nulls(Interface):
    """As PyArrow's and polars's: NumPy gets a copy, of another element type."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array([1, np.nan, 3])


ARRAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "masked": lambda array: np.ma.array(array, mask=MASK),
    "masked by a condition": lambda array: np.ma.masked_greater(array, 100),
    "to be masked later": np.ma.array,
    "a mask in the interface": lambda array: Interface(__array_interface__=array.__array_interface__ | {"mask": MASK}),
    "a mask in CUDA's interface": lambda array: Interface(
        __cuda_array_interface__=array.__array_interface__ | {"mask": MASK}
    ),
    "a mask beside DLPack": lambda array: Both(
        array=array, __array_interface__=array.__array_interface__ | {"mask": MASK}
    ),
    "a class with masks": lambda array: Masked(__array_interface__=array.__array_interface__),
    "nulls": lambda _: Nulls(null_count=1),
    "nulls by a method": lambda _: Nulls(null_count=lambda: 1),
    "deleted": lambda _: Deleted(),
}


@pytest.fixture
def buffer() -> Iterator[gi.Buffer]:
    with gi.get_backend("host").device().allocate(4096) as allocation:
        yield allocation.buffer


def in_place(buffer: gi.Buffer) -> Any:
    """An array in memory that can be shared."""
    array = np.asarray(buffer.view(3, "float32"))
    array[:] = [1, UNDER_THE_MASK, 3]
    return array


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_without_its_values_is_refused(buffer: gi.Buffer, name: str) -> None:
    array = in_place(buffer)
    given = ARRAYS[name](array)
    entries: list[tuple[str, Callable[[Any], object]]] = [
        ("array", gi.share),
        ("array", lambda given: gi.share(given, copy=True)),
        ("part", lambda given: gi.share({"whole": array, "part": given})),
        ("source", buffer.copy_from_host),
        ("source", buffer.view(3, "float32", 1024).copy_from),
        ("target", buffer.copy_to_host),
    ]
    buffer.fill(7, offset=1024)
    for argument, call in entries:
        with pytest.raises(gi.InvalidArgumentError, match=rf"has its values, .*\b{type(given).__name__}\b") as caught:
            call(given)
        assert caught.value.argument == argument
    assert (np.asarray(buffer.view(3072, offset=1024)) == 7).all()
    assert array.tolist() == [1, UNDER_THE_MASK, 3]


def test_what_is_passed_instead_has_the_values(buffer: gi.Buffer) -> None:
    array = in_place(buffer)
    masked = np.ma.array(array, mask=MASK)
    with gi.share(masked.filled(masked.mean()), copy=True) as shared, gi.attach(bytes(shared)) as attached:
        assert np.asarray(attached.view).mean() == masked.mean() == 2
    buffer.copy_from_host(Interface(__array_interface__=array.__array_interface__ | {"mask": None}), offset=1024)
    buffer.copy_from_host(np.ones(2, [("mask", "f4")]).view(np.recarray), offset=1036)  # a field of that name
    buffer.copy_from_host(np.ones(2, [("null_count", "f4")]).view(np.recarray), offset=1036)
    unmasked = type("Unmasked", (Interface,), {"mask": None})  # as classes have it that can have a mask
    buffer.copy_from_host(unmasked(__array_interface__=array.__array_interface__), offset=1044)
    assert np.asarray(buffer.view(8, "float32", 1024)).tolist() == [1, UNDER_THE_MASK, 3, 1, 1, 1, UNDER_THE_MASK, 3]


def test_a_target_that_numpy_copies_is_refused(buffer: gi.Buffer) -> None:
    """As one of pandas with missing values: the bytes would be in nobody's memory."""
    buffer.copy_from_host(Nulls(), offset=1024)  # a copy has what is read
    assert np.asarray(buffer.view(3, "float64", 1024))[2] == 3
    with pytest.raises(gi.ArgumentTypeError, match=r"Nulls .*copy"):
        buffer.copy_to_host(Nulls())


DTYPES: Final = (
    [("a", "<f4"), ("b", "<i4")], "V4", "<U2", "S3", "longdouble", "datetime64[s]", "timedelta64[ns]", ">f4", "object",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_type_of_numpy_is_named(buffer: gi.Buffer, dtype: Any) -> None:
    given = np.zeros(4, dtype)
    words, passed = ("numbers", given.astype(int)) if dtype == "object" else ("uint8", given.view("uint8"))
    for argument, call in (
        ("array", gi.share), ("array", lambda given: gi.share(given, copy=True)),
        ("source", buffer.view(4).copy_from),
    ):  # fmt: skip
        with pytest.raises(gi.InvalidArgumentError) as caught:
            call(given)
        assert caught.value.argument == argument
        assert f" {given.dtype}; take " in str(caught.value)
        assert words in str(caught.value)
    with gi.share(passed, copy=True) as shared:
        assert np.asarray(shared.view).tobytes() == passed.tobytes()


def test_an_image_of_pil(buffer: gi.Buffer) -> None:
    image = Image.new("RGB", (4, 3), (1, 2, 3))
    with pytest.raises(gi.InvalidArgumentError, match=r"PIL\.Image\.Image: .*address.*; pass numpy\.asarray"):
        gi.share(image)
    with gi.share(np.asarray(image), copy=True) as shared:
        assert np.asarray(shared.view)[2, 3].tolist() == [1, 2, 3]
