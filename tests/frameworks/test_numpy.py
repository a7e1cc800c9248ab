from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, Party


def add_one(array: Any) -> None:
    array += 1


@claim("NumPy", "numpy.asarray(view)", memory=("host",), access="reads and writes",
       note="waits for the streams that used the bytes; accepts any strides")  # fmt: skip
def test_asarray(party: Party) -> None:
    load("numpy")
    check_in_place(party, np.asarray, read=np.copy, add_one=add_one)


@claim("NumPy", "numpy.from_dlpack(view)", memory=("host",), access="reads and writes",
       note="waits for the streams that used the bytes")  # fmt: skip
def test_from_dlpack(party: Party) -> None:
    load("numpy")
    check_in_place(party, np.from_dlpack, read=np.copy, add_one=add_one)


@claim("NumPy", "numpy.asarray(view_of_bfloat16)", memory=("host",), access="reads and writes",
       note="needs ml_dtypes; without it the call raises ArgumentTypeError")  # fmt: skip
def test_bfloat16(party: Party) -> None:
    ml_dtypes = load("ml_dtypes")
    view = party.buffer.view(COUNT, "bfloat16")
    assert view.dtype == np.dtype(ml_dtypes.bfloat16) == "bfloat16"
    expected = np.arange(COUNT).astype(ml_dtypes.bfloat16)
    party.write(expected.tobytes())
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        array = np.asarray(party.buffer.view(COUNT, dtype))
        assert array.dtype == ml_dtypes.bfloat16
        assert (array == expected).all()
    array += 1
    assert party.read(2 * COUNT) == (expected + ml_dtypes.bfloat16(1)).tobytes()
    assert (view.to_numpy() == array).all()
    view.copy_from(expected)
    assert party.read(2 * COUNT) == expected.tobytes()
    assert np.asarray(view, dtype="float32").dtype == np.float32
    assert not np.shares_memory(np.array(view), array)


@claim("Python", "memoryview(view)", memory=("host",), access="reads and writes",
       note="from Python 3.12 (PEP 688); every library that accepts a Python buffer accepts the view, too")  # fmt: skip
@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 688 came with Python 3.12")
def test_memoryview(party: Party) -> None:
    check_in_place(party, memoryview, read=np.array, add_one=lambda seen: add_one(np.asarray(seen)))


@claim("NumPy", "device.wrap_stream(0)", memory=("host",), access="stream",
       note="the calling thread: a wait blocks it, a signal is immediate")  # fmt: skip
def test_stream(party: Party) -> None:
    array = np.asarray(party.buffer.view(COUNT, "int32"))
    party.check_stream(0, lambda: add_one(array))
