from __future__ import annotations

from typing import Any

import pytest

from .claims import claim, load
from .in_place import check_copies, check_in_place
from .parties import Party
from .test_drjit import dr  # noqa: F401 - a fixture


@pytest.fixture
def mi(dr: Any) -> Any:  # noqa: F811 - it is that one
    mi = load("mitsuba")
    mi.set_variant("llvm_ad_rgb")
    return mi


@claim("Mitsuba", "mitsuba.TensorXf(view)", memory=("host",), access="reads",
       note="in llvm_* variants; needs libLLVM.so, like Dr.Jit")  # fmt: skip
def test_tensor(party: Party, mi: Any) -> None:
    check_in_place(party, mi.TensorXf, read=lambda tensor: tensor.numpy().copy(), dtype="float32")


@claim("Mitsuba", "mitsuba.TensorXf(view)", memory=("host",), access="copies", note="in scalar_* variants")
def test_scalar(party: Party, mi: Any) -> None:
    mi.set_variant("scalar_rgb")
    check_copies(party, mi.TensorXf, dtype="float32")


@claim("Mitsuba", "mitsuba.Bitmap(view)", memory=("host",), access="copies", note="in every variant")
@pytest.mark.parametrize("variant", ["llvm_ad_rgb", "scalar_rgb"])
def test_bitmap(party: Party, mi: Any, variant: str) -> None:
    mi.set_variant(variant)
    check_copies(party, mi.Bitmap, dtype="float32")
