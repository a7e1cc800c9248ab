"""Arrays of the libraries themselves, on the CPU, in Vulkan: in place, and to read alone where they are immutable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi

from .claims import load
from .parties import vulkan_exporter

COUNT = 4096
TRANSFER_SRC = 0x1


def of_numpy(view: Any) -> tuple[Any, Callable[[], Any]]:
    if view is None:
        heap = np.zeros(4 * COUNT + 64, np.uint8)  # malloc aligns to 16 bytes, and lavapipe wants 64
        array = heap[-heap.ctypes.data % 64 :][: 4 * COUNT].view(np.int32)
    else:
        array = np.asarray(view)
    array[:] = np.arange(COUNT)
    return array, lambda: array


def of_torch(view: Any) -> tuple[Any, Callable[[], Any]]:
    torch = load("torch")
    tensor = torch.zeros(COUNT, dtype=torch.int32) if view is None else torch.from_dlpack(view)
    tensor.copy_(torch.arange(COUNT))
    return tensor, tensor.numpy


def of_jax(view: Any) -> tuple[Any, Callable[[], Any]]:
    jax = load("jax")
    if view is None:
        array = jax.numpy.arange(COUNT, dtype="int32")
    else:
        np.asarray(view)[:] = np.arange(COUNT)
        array = jax.dlpack.from_dlpack(view)
    return array.block_until_ready(), lambda: np.asarray(array)


@pytest.mark.parametrize("driver", ["lavapipe", "swiftshader"])
@pytest.mark.parametrize("make", [of_numpy, of_torch, of_jax])
def test_in_place(driver: str, make: Callable[..., Any]) -> None:
    """lavapipe takes what the library has allocated; SwiftShader the library's array on a device's allocation."""
    expected = np.arange(COUNT, dtype=np.int32)
    with vulkan_exporter(driver) as exporter, gi.get_backend("host").device().allocate(4 * COUNT) as allocation:
        array, seen = make(allocation.buffer.view(COUNT, "int32") if driver == "swiftshader" else None)
        if make is of_jax:
            with pytest.raises(gi.InvalidArgumentError, match="immutable"):
                exporter.import_array(array)
        with exporter.import_array(array, TRANSFER_SRC if make is of_jax else 0x3) as theirs:
            assert theirs.read(0, 4 * COUNT) == expected.tobytes()
            if make is not of_jax:
                theirs.write(4 * (COUNT - 1), b"\x07\0\0\0")
                expected[-1] = 7
        assert (seen() == expected).all()
        del array, seen
