"""Arrays whose bytes NumPy would misread: each call that takes an array has their values, or refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.testing.exporters.vulkan import VulkanExporter

from .claims import load
from .parties import vulkan_exporter

Check = Callable[[Any], Any]


@pytest.fixture
def buffer() -> Iterator[gi.Buffer]:
    with gi.get_backend("host").device().allocate(4096) as allocation:
        yield allocation.buffer


@pytest.fixture(scope="module")
def exporter() -> Iterator[VulkanExporter]:
    with vulkan_exporter("swiftshader") as found:
        yield found


@pytest.mark.parametrize("name", ["bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
@pytest.mark.parametrize("library", ["ml_dtypes", "torch"])
def test_types_that_numpy_has_not(buffer: gi.Buffer, exporter: VulkanExporter, library: str, name: str) -> None:
    kind, values = getattr(load(library), name), [1, 2, 0.5, 4]
    given: Any = np.array(values, kind) if library == "ml_dtypes" else load("torch").tensor(values).to(kind)
    take: Check = np.asarray if library == "ml_dtypes" else load("torch").from_dlpack
    array, back = take(buffer.view(4, name)), take(buffer.view(4, given.dtype, 1024))
    buffer.copy_from_host(given)
    buffer.copy_to_host(back)
    assert (array.dtype, array.tolist(), back.tolist()) == (kind, values, values)
    with gi.share(array) as shared, gi.attach(bytes(shared)) as attached:
        assert (take(attached.view).dtype, take(attached.view).tolist()) == (kind, values)
    with exporter.import_array(array) as theirs:
        buffer.copy_from_host(theirs.read(0, array.nbytes), offset=2048)
    assert take(buffer.view(4, kind, 2048)).tolist() == values


def test_a_gradient_does_not_miss_a_write(buffer: gi.Buffer) -> None:
    buffer.copy_from_host(leaf := load("torch").ones(3).requires_grad_())
    assert np.asarray(buffer.view(3, "float32")).tolist() == [1, 1, 1]
    with pytest.raises(gi.ArgumentTypeError, match=r"target: .*detach"):
        buffer.copy_to_host(leaf)


LAZY: dict[str, tuple[Check, Check]] = {
    "conj": (lambda x: x.conj(), np.conj),
    "conj().imag": (lambda x: x.conj().imag, lambda x: -x.imag),
    "adjoint of a part": (lambda x: x[:, ::2].mH, lambda x: x[:, ::2].T.conj()),
}
"""What torch makes by bits, without touching the bytes; NumPy computes the same."""


@pytest.mark.parametrize("name", LAZY)
def test_bits_of_a_conjugate(buffer: gi.Buffer, exporter: VulkanExporter, name: str) -> None:
    torch, (make, compute) = load("torch"), LAZY[name]
    plain = np.arange(8).reshape(2, 4) * (1 + 2j)
    tensor = torch.from_dlpack(buffer.view((2, 4), "complex128")).copy_(torch.from_numpy(plain))
    lazy, expected = make(tensor), compute(plain)
    for call in (gi.share, exporter.import_array, buffer.copy_to_host):
        with pytest.raises(gi.InvalidArgumentError, match=r"(array|target): .*x\.resolve_conj\(\)\.resolve_neg\(\)"):
            call(lazy)
    buffer.copy_from_host(lazy, offset=2048)
    assert np.array_equal(np.asarray(buffer.view(expected.shape, expected.dtype, 2048)), expected)
    with gi.share(lazy, copy=True) as shared:
        assert np.array_equal(np.asarray(shared.view), expected)
    assert np.array_equal(tensor.numpy(), plain)


COMPUTED: dict[str, Any] = {"__torch_dispatch__": classmethod(repr)}
WITHOUT: dict[str, Callable[[Any, Check], Any]] = {
    "zero": lambda torch, check: check(torch._efficientzerotensor((3,))),
    "meta": lambda torch, check: check(torch.ones(3, device="meta")),
    "sparse": lambda torch, check: check(torch.eye(3).to_sparse()),
    "quantized": lambda torch, check: check(torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)),
    "masked": lambda torch, check: check(torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))),
    "nested": lambda torch, check: check(torch.nested.nested_tensor([torch.ones(2)])),
    "vmap": lambda torch, check: torch.vmap(check)(torch.ones(2, 3)),
    "grad": lambda torch, check: torch.func.grad(lambda x: check(x).sum())(torch.ones(3)),
    "functionalize": lambda torch, check: torch.func.functionalize(check)(torch.ones(3)),
    "fake": lambda torch, check: check(torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3))),
    "subclass": lambda torch, check: check(torch.ones(3).as_subclass(type("Computed", (torch.Tensor,), COMPUTED))),
}
"""Tensors whose memory does not have their values, each given to a check."""


@pytest.fixture
def refused(buffer: gi.Buffer, exporter: VulkanExporter) -> Check:
    calls: list[Check] = [gi.share, lambda array: gi.share(array, copy=True), exporter.import_array]

    def check(array: Any) -> Any:
        for call in (*calls, buffer.copy_from_host, buffer.copy_to_host):
            with pytest.raises(gi.InvalidArgumentError, match=r"(array|source|target): .*has its values.*; pass "):
                call(array)
        return array

    return check


@pytest.mark.parametrize("name", WITHOUT)
def test_a_tensor_without_its_values_is_refused(refused: Check, name: str) -> None:
    checked = []

    def check(tensor: Any) -> Any:
        checked.append(tensor)
        return refused(tensor)

    WITHOUT[name](load("torch"), check)
    assert checked


def donated() -> Any:
    jax = load("jax")
    array = jax.numpy.arange(3.0)
    jax.jit(lambda given: given + 1, donate_argnums=0)(array)
    return array


@pytest.mark.parametrize("make", [donated, lambda: load("pyarrow").array([1, None, 3])], ids=["JAX", "PyArrow"])
def test_an_array_without_its_values_is_refused(refused: Check, make: Callable[[], Any]) -> None:
    refused(make())
