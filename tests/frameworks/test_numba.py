from __future__ import annotations

from typing import Any

import numpy as np

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, Party


def add_to_each(array: Any) -> None:
    for i in range(array.shape[0]):
        for j in range(array.shape[1]):
            array[i, j] += 1


@claim("numba", "jitted(numpy.asarray(view))", memory=("host",), access="reads and writes",
       note="a compiled function accepts NumPy's array, not the view")  # fmt: skip
def test_jit(party: Party) -> None:
    numba = load("numba")
    check_in_place(party, np.asarray, read=np.copy, add_one=numba.njit(add_to_each))


@claim("numba-cuda", "numba.cuda.as_cuda_array(view)", memory=("CUDA",), access="reads and writes",
       note="a kernel also accepts the view itself")  # fmt: skip
def test_cuda_array(party: Party) -> None:
    cuda = load("numba.cuda", "numba-cuda")
    kernel = cuda.jit(add_kernel(cuda))

    def add_one(array: Any) -> None:
        kernel[1, 256](array)
        cuda.synchronize()

    assert cuda.is_cuda_array(party.buffer.view(COUNT, "int32"))
    check_in_place(party, cuda.as_cuda_array, read=lambda array: array.copy_to_host(), add_one=add_one)


@claim("numba-cuda", "device.wrap_stream(numba.cuda.stream())", memory=("CUDA",), access="stream")
def test_stream(party: Party) -> None:
    cuda = load("numba.cuda", "numba-cuda")
    stream = cuda.stream()
    kernel = cuda.jit(add_kernel(cuda))
    array = cuda.as_cuda_array(party.buffer.view((16, COUNT // 16), "int32"), sync=False)
    party.check_stream(stream, lambda: kernel[1, 256, stream](array))
    stream.synchronize()


def add_kernel(cuda: Any) -> Any:
    def kernel(array: Any) -> None:
        i = cuda.grid(1)
        if i < array.size:
            array[i // array.shape[1], i % array.shape[1]] += 1

    return kernel
