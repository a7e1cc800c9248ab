from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .claims import claim, load
from .in_place import check_copies, check_in_place
from .parties import COUNT, Party


@pytest.fixture
def wp() -> Any:
    wp: Any = load("warp", "warp-lang")
    wp.config.quiet = True
    wp.init()
    return wp


@claim("Warp", "warp.from_dlpack(view)", access="reads and writes", not_run=("CUDA",),
       note="on a GPU, Warp's current stream waits for the streams that used the bytes")  # fmt: skip
def test_from_dlpack(party: Party, wp: Any) -> None:
    def add_one(array: Any) -> None:
        wp.copy(array, wp.array(array.numpy() + 1, dtype=wp.int32, device=array.device))
        wp.synchronize()

    check_in_place(party, wp.from_dlpack, read=lambda array: array.numpy().copy(), add_one=add_one)


@claim("Warp", "warp.array(numpy.asarray(view), copy=False)", memory=("host",), access="reads and writes")
def test_array(party: Party, wp: Any) -> None:
    def make(view: Any) -> Any:
        return wp.array(np.asarray(view), dtype=wp.int32, copy=False, device="cpu")

    def add_one(array: Any) -> None:
        made = array.numpy()
        made += 1

    check_in_place(party, make, read=lambda array: array.numpy().copy(), add_one=add_one)


@claim("Warp", "warp.from_numpy(numpy.asarray(view))", memory=("host",), access="copies",
       note="so does warp.array(numpy.asarray(view))")  # fmt: skip
@pytest.mark.parametrize("call", ["array", "from_numpy"])
def test_copies(party: Party, wp: Any, call: str) -> None:
    make = getattr(wp, call)
    check_copies(
        party, lambda view: make(np.asarray(view), dtype=wp.int32, device="cpu"), read=lambda made: made.numpy()
    )


@claim("Warp", "device.wrap_stream(warp.Stream(...))", memory=("CUDA",), access="stream", not_run=("CUDA",),
       note="on the host, Warp runs in the calling thread: use wrap_stream(0)")  # fmt: skip
def test_stream(party: Party, wp: Any) -> None:
    stream = wp.Stream("cuda:0")
    array = wp.from_dlpack(party.buffer.view(COUNT, "int32"))
    values = iter(wp.full(COUNT, value, dtype=wp.int32, device="cuda:0") for value in (1, 2))
    ready = list(values)
    wp.synchronize()
    party.check_stream(stream, lambda: wp.copy(array, ready.pop(0), stream=stream))
    wp.synchronize_stream(stream)
