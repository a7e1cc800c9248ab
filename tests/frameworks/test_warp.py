from __future__ import annotations

from typing import Any

import pytest

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, Party


@pytest.fixture
def wp() -> Any:
    wp: Any = load("warp", "warp-lang")
    wp.config.quiet = True
    wp.init()
    return wp


@claim("Warp", "warp.from_dlpack(view)", access="reads and writes", not_run=("CUDA",),
       note="on a GPU, Warp's current stream is ordered behind the streams that used the bytes")  # fmt: skip
def test_from_dlpack(party: Party, wp: Any) -> None:
    def add_one(array: Any) -> None:
        wp.copy(array, wp.array(array.numpy() + 1, dtype=wp.int32, device=array.device))
        wp.synchronize()

    check_in_place(party, wp.from_dlpack, read=lambda array: array.numpy().copy(), add_one=add_one)


@claim("Warp", "device.wrap_stream(warp.Stream(...))", memory=("CUDA",), access="stream", not_run=("CUDA",),
       note="on the host Warp works in the calling thread: wrap_stream(0)")  # fmt: skip
def test_stream(party: Party, wp: Any) -> None:
    stream = wp.Stream("cuda:0")
    array = wp.from_dlpack(party.buffer.view(COUNT, "int32"))
    values = iter(wp.full(COUNT, value, dtype=wp.int32, device="cuda:0") for value in (1, 2))
    ready = list(values)
    wp.synchronize()
    party.check_stream(stream, lambda: wp.copy(array, ready.pop(0), stream=stream))
    wp.synchronize_stream(stream)
