from __future__ import annotations

from typing import Any

import pytest

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, Party


@pytest.fixture
def cupy() -> Any:
    return load("cupy", "cupy-cuda13x" if _is_of("cupy-cuda13x") else "cupy-cuda12x" if _is_of("cupy-cuda12x") else "")


def _is_of(distribution: str) -> bool:
    from importlib import metadata

    try:
        return bool(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return False


def add_one(array: Any) -> None:
    array += 1
    array.sum().item()


@claim("CuPy", "cupy.from_dlpack(view)", memory=("CUDA",), access="reads and writes",
       note="CuPy's current stream waits for the streams that used the bytes")  # fmt: skip
def test_from_dlpack(party: Party, cupy: Any) -> None:
    check_in_place(party, cupy.from_dlpack, read=cupy.asnumpy, add_one=add_one)


@claim("CuPy", "cupy.asarray(view)", memory=("CUDA",), access="reads and writes",
       note="like from_dlpack; accepts any strides")  # fmt: skip
def test_asarray(party: Party, cupy: Any) -> None:
    check_in_place(party, cupy.asarray, read=cupy.asnumpy, add_one=add_one)


@claim("CuPy", "device.wrap_stream(cupy.cuda.get_current_stream())", memory=("CUDA",), access="stream")
def test_stream(party: Party, cupy: Any) -> None:
    array = cupy.from_dlpack(party.buffer.view(COUNT, "int32"))

    def step() -> None:
        cupy.add(array, 1, out=array)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        party.check_stream(cupy.cuda.get_current_stream(), step)
    stream.synchronize()
