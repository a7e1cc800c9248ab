from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .claims import claim, load
from .in_place import check_copies, check_in_place
from .parties import COUNT, Party


@pytest.fixture
def ti() -> Any:
    ti = load("taichi")
    ti.init(arch=ti.cpu, offline_cache=False, log_level=ti.WARN)
    return ti


@claim("Taichi", "kernel(numpy.asarray(view))", memory=("host",), access="reads and writes",
       note="contiguous arrays only. kernel(view) raises a misleading AttributeError: 'NdarrayType' object has no "
            "attribute 'to_string'")  # fmt: skip
def test_kernel(party: Party, ti: Any) -> None:
    def add_to_each(array: Any):  # type: ignore[no-untyped-def]
        for i, j in array:
            array[i, j] += 1

    add_to_each.__annotations__["array"] = ti.types.ndarray()
    kernel = ti.kernel(add_to_each)

    def add_one(array: Any) -> None:
        kernel(array)
        ti.sync()

    with pytest.raises(AttributeError, match="'NdarrayType' object has no attribute 'to_string'"):
        kernel(party.buffer.view((16, COUNT // 16), "int32"))
    with pytest.raises(ValueError, match="Non contiguous"):
        kernel(np.asarray(party.buffer.view((16, 4), "int32", strides=(64, 8))))
    check_in_place(party, np.asarray, read=np.copy, add_one=add_one)


@claim("Taichi", "field.from_numpy(numpy.asarray(view))", memory=("host",), access="copies",
       note="so does Ndarray.from_numpy")  # fmt: skip
@pytest.mark.parametrize("kind", ["field", "ndarray"])
def test_from_numpy(party: Party, ti: Any, kind: str) -> None:
    def make(view: Any) -> Any:
        made = getattr(ti, kind)(ti.i32, view.shape)
        made.from_numpy(np.asarray(view))
        return made

    check_copies(party, make, read=lambda made: made.to_numpy())
