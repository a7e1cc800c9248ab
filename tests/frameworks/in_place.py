"""The check that an array is on the exporter's bytes, and keeps them mapped."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.limits import LIMIT

from .parties import BEHIND, COUNT, Party


def check_in_place(
    party: Party,
    make: Callable[[Any], Any],
    *,
    read: Callable[[Any], Any],
    add_one: Callable[[Any], object] | None = None,
    dtype: str = "int32",
    keeps: bool = True,
) -> None:
    """Reads what the other side writes afterwards, writes what the other side reads, and keeps the bytes mapped.

    Its end destroys no exception.

    Parameters
    ----------
    make : callable
        Makes the framework's array of a view.
    read : callable
        Return the array's elements as NumPy's, or what `numpy.asarray` takes.
    add_one : callable, optional
        Adds one to each element, in place, and waits for that.
    keeps : bool
        Whether the array keeps the memory mapped by itself.
    """
    size = COUNT * np.dtype(dtype).itemsize
    first, second = (np.arange(start, start + COUNT).astype(dtype) for start in (1, 1001))
    party.write(first.tobytes() + BEHIND)
    view = party.buffer.view((16, COUNT // 16), dtype)
    array = make(view)
    assert np.asarray(read(array)).astype(dtype).tobytes() == first.tobytes()
    party.write(second.tobytes())
    assert np.asarray(read(array)).astype(dtype).tobytes() == second.tobytes(), "it is a copy"
    if add_one is not None:
        add_one(array)
        assert party.read(size) == (second + np.dtype(dtype).type(1)).tobytes()
        assert party.read(len(BEHIND), size) == BEHIND
    with pytest.raises(ZeroDivisionError):
        _ = [make(view), 1 / 0]  # an array that ends while an exception is on its way leaves that alone
    del view
    if keeps:
        with pytest.raises(gi.ResourceBusyError, match="exported array"):
            party.memory.close(timeout=0.01)
        party.write(first.tobytes())
        assert np.asarray(read(array)).astype(dtype).tobytes() == first.tobytes()
    del array
    gc.collect()
    party.memory.close(timeout=LIMIT)


def check_copies(
    party: Party, make: Callable[[Any], Any], *, read: Callable[[Any], Any] = np.array, dtype: str = "int32"
) -> None:
    """It has the values, and does not see what the other side writes afterwards.

    Parameters
    ----------
    make, read : callable
        As those of `check_in_place`.
    """
    first = np.arange(1, COUNT + 1).astype(dtype).reshape(16, COUNT // 16)
    party.write(first.tobytes())
    copy = make(party.buffer.view(first.shape, dtype))
    party.write(bytes(first.nbytes))
    assert np.array_equal(np.squeeze(read(copy)), first)
