from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .claims import REQUIRED, claim, load
from .in_place import check_copies, check_in_place
from .parties import COUNT, Party


@pytest.fixture
def dr() -> Any:
    """Dr.Jit with LLVM's library: its import looks where systems have that, and not where lavapipe's was fetched."""
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        for library in Path(folder).glob("libLLVM*.so*"):
            os.environ.setdefault("DRJIT_LIBLLVM_PATH", str(library))
    dr = load("drjit")
    if not dr.has_backend(dr.JitBackend.LLVM):
        (pytest.fail if "drjit" in REQUIRED else pytest.skip)("Dr.Jit finds no libLLVM.so of LLVM 15 or newer")
    return dr


@claim("Dr.Jit", "drjit.llvm.TensorXi(view)", memory=("host",), access="reads and writes",
       note="needs libLLVM.so of LLVM 15 or newer. Write with drjit.scatter(tensor.array, value, ...), where value has "
            "been evaluated; then call drjit.eval(tensor) and drjit.sync_thread() before you hand the memory "
            "over")  # fmt: skip
def test_tensor(party: Party, dr: Any) -> None:
    def add_one(tensor: Any) -> None:
        dr.eval(more := tensor.array + 1)
        dr.scatter(tensor.array, more, dr.arange(dr.llvm.UInt32, COUNT))
        dr.eval(tensor)
        dr.sync_thread()

    check_in_place(party, dr.llvm.TensorXi, read=lambda tensor: tensor.numpy().copy(), add_one=add_one)


@claim("Dr.Jit", "drjit.scalar.TensorXi(view)", memory=("host",), access="copies")
def test_scalar(party: Party, dr: Any) -> None:
    check_copies(party, dr.scalar.TensorXi)


@claim("Dr.Jit", "tensor += 1", memory=("host",), access="copies",
       note="the operator writes to a new array; so does drjit.scatter_add")  # fmt: skip
@pytest.mark.parametrize("write", ["+=", "scatter_add"])
def test_writes_that_are_elsewhere(party: Party, dr: Any, write: str) -> None:
    party.write(bytes(4 * COUNT))
    tensor = dr.llvm.TensorXi(party.buffer.view(COUNT, "int32"))
    if write == "+=":
        tensor += 1
    else:
        dr.scatter_add(tensor.array, dr.llvm.Int(1), dr.arange(dr.llvm.UInt32, COUNT))
    assert (tensor.numpy() == 1).all()
    assert party.read(4 * COUNT) == bytes(4 * COUNT)
