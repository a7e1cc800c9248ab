from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from .claims import REQUIRED, claim, load
from .in_place import check_in_place
from .parties import Party


@contextlib.contextmanager
def own_context(name: str) -> Iterator[None]:
    """What tinygrad does here: it makes a context of its own the thread's, where torch would make its streams."""
    if name != "CUDA":
        yield
        return
    from cuda.bindings import driver

    _, before = driver.cuCtxGetCurrent()
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(before)


@claim("tinygrad", "tinygrad.Tensor.from_blob(view.ptr, view.shape, dtype=..., device=...)", access="reads and writes",
       note="pass device CPU, which needs clang, or CUDA; keep a buffer.hold() as long as the tensor exists; "
            "synchronize the device before you hand the memory over. On CUDA, tinygrad makes its own context current "
            "in the thread: restore the previous one before another library creates a stream")  # fmt: skip
def test_from_blob(party: Party) -> None:
    if party.device.backend == "host" and shutil.which("clang") is None and "tinygrad" not in REQUIRED:
        pytest.skip("tinygrad compiles for the CPU with clang, which is not installed")
    tinygrad = load("tinygrad")
    name = "CPU" if party.device.backend == "host" else "CUDA"
    with own_context(name):
        device = tinygrad.Device[name]

    def make(view: Any) -> Any:
        return tinygrad.Tensor.from_blob(view.ptr, view.shape, dtype=tinygrad.dtypes.int32, device=name)

    def add_one(tensor: Any) -> None:
        tensor.assign(tensor + 1).realize()
        device.synchronize()

    with own_context(name):
        check_in_place(party, make, read=lambda tensor: (tensor + 0).numpy(), add_one=add_one, keeps=False)
