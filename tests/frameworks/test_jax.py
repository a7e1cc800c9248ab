from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, Party


def elements(array: Any) -> Any:
    return np.asarray(array + 0)  # not of the array itself, whose first copy on the host JAX keeps


@claim("JAX", "jax.dlpack.from_dlpack(view)", access="reads",
       note="JAX's arrays are immutable; call block_until_ready() before you hand the memory over")  # fmt: skip
def test_from_dlpack(party: Party) -> None:
    jax = load("jax")
    if party.device.backend == "cuda" and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    check_in_place(party, jax.dlpack.from_dlpack, read=elements)


@claim("JAX", "jax.dlpack.from_dlpack(view_of_bfloat16)", memory=("host",), access="reads")
def test_bfloat16(party: Party) -> None:
    jax = load("jax")
    party.write(b"\x80\x3f" * COUNT)  # 1.0: the upper half of a float32
    for dtype in ("bfloat16", jax.numpy.bfloat16):
        array = jax.dlpack.from_dlpack(party.buffer.view(COUNT, dtype))
        assert array.dtype == jax.numpy.bfloat16
        assert float(array.sum()) == COUNT
    party.buffer.copy_from_host(jax.numpy.asarray([2, 1], dtype))
    assert party.read(6) == b"\x00\x40\x80\x3f\x80\x3f"


@claim("JAX", "jax.numpy.asarray(view)", memory=("host",), access="copies",
       note="JAX reads the view through NumPy; use from_dlpack")  # fmt: skip
def test_asarray(party: Party) -> None:
    jax = load("jax")
    party.write(np.arange(COUNT, dtype=np.int32).tobytes())
    array = jax.numpy.asarray(party.buffer.view(COUNT, "int32")).block_until_ready()
    assert (np.asarray(array) == np.arange(COUNT)).all()
    party.write(bytes(4 * COUNT))
    assert (elements(array) == np.arange(COUNT)).all()
