from __future__ import annotations

from typing import Any

import numpy as np

from .claims import claim, load
from .in_place import check_in_place
from .parties import Party


@claim("PyArrow", "pyarrow.array(numpy.asarray(view))", memory=("host",), access="reads",
       note="one dimension only; Arrow's arrays are immutable")  # fmt: skip
def test_array(party: Party) -> None:
    pa = load("pyarrow")

    def make(view: Any) -> Any:
        return pa.array(np.asarray(view).reshape(-1))

    check_in_place(party, make, read=lambda array: np.array(array.to_pylist()))


@claim("PyArrow", "pyarrow.Tensor.from_numpy(numpy.asarray(view))", memory=("host",), access="reads and writes",
       note="any shape and strides; tensor.to_numpy() is a writable view")  # fmt: skip
def test_tensor(party: Party) -> None:
    pa = load("pyarrow")

    def add_one(tensor: Any) -> None:
        array = tensor.to_numpy()
        array += 1

    check_in_place(
        party,
        lambda view: pa.Tensor.from_numpy(np.asarray(view)),
        read=lambda tensor: tensor.to_numpy().copy(),
        add_one=add_one,
    )
