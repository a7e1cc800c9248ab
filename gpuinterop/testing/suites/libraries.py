"""Array libraries that address the memory of the device under test."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest

from ..._core import discovery
from ..._core.device import Device
from ..requirements import skip_declared
from ..stand_ins import stand_in

__all__ = ["Library", "legacy_array", "libraries"]

_ROCM = 10  # of DLDeviceType


class Library(ABC):
    """An array library that addresses device memory."""

    interface_is_ordered = True
    """Whether the library waits for the stream that the array interface names."""

    @abstractmethod
    def from_dlpack(self, view: Any) -> Any:
        """Make an array of the view's bytes through DLPack."""

    @abstractmethod
    def from_interface(self, view: Any) -> Any:
        """Make an array through the view's array interface."""

    @abstractmethod
    def bytes_of(self, array: Any) -> bytes:
        """The elements in C order, after the library's own work."""

    def set(self, array: Any, index: Any, value: int) -> None:
        array[index] = value

    def finish(self) -> None:  # noqa: B027 - nothing to wait for on a CPU
        """Wait for work that the library has enqueued."""


class _NumPy(Library):
    def from_dlpack(self, view: Any) -> Any:
        return np.from_dlpack(view)

    def from_interface(self, view: Any) -> Any:
        return np.asarray(view)

    def bytes_of(self, array: Any) -> bytes:
        return bytes(array.tobytes())


class _Torch(Library):
    interface_is_ordered = False

    def __init__(self, torch: Any, ordinal: int) -> None:
        self._torch = torch
        self._device = torch.device("cuda", ordinal)  # a ROCm build uses this name too

    def from_dlpack(self, view: Any) -> Any:
        return self._torch.from_dlpack(view)

    def from_interface(self, view: Any) -> Any:
        return self._torch.as_tensor(view, device=self._device)

    def bytes_of(self, array: Any) -> bytes:
        return bytes(array.contiguous().cpu().numpy().tobytes())

    def finish(self) -> None:
        self._torch.cuda.synchronize(self._device)


class _CuPy(Library):
    def __init__(self, cupy: Any, ordinal: int) -> None:
        self._cupy = cupy
        self._ordinal = ordinal

    def from_dlpack(self, view: Any) -> Any:
        with self._cupy.cuda.Device(self._ordinal):
            return self._cupy.from_dlpack(view)

    def from_interface(self, view: Any) -> Any:
        with self._cupy.cuda.Device(self._ordinal):
            return self._cupy.asarray(view)

    def bytes_of(self, array: Any) -> bytes:
        with self._cupy.cuda.Device(self._ordinal):
            return bytes(self._cupy.asnumpy(array).tobytes())

    def set(self, array: Any, index: Any, value: int) -> None:
        with self._cupy.cuda.Device(self._ordinal):  # CuPy's kernels run on the current device
            array[index] = value

    def finish(self) -> None:
        self._cupy.cuda.Device(self._ordinal).synchronize()


def libraries(device: Device, *, simulated: bool) -> list[Library]:
    """Installed libraries that can address the device's memory; skips if there are none."""
    if device.info.array_interface == "__array_interface__":
        return [_NumPy()]
    if simulated:
        skip_declared("no array library for this device: it is simulated, and theirs is a real GPU")
    if library := stand_in(discovery.get_backend(device.backend).libraries):
        skip_declared(f"no array library for this device: {library} replaces its driver, and theirs is another")
    kind, ordinal = device.info.dlpack
    found: list[Library] = []
    torch, cupy = _load("torch"), _load("cupy")
    if torch is not None and bool(torch.version.hip) is (kind == _ROCM) and ordinal < torch.cuda.device_count():
        found.append(_Torch(torch, ordinal))
    if cupy is not None and bool(cupy.cuda.runtime.is_hip) is (kind == _ROCM) and ordinal < _count(cupy):
        found.append(_CuPy(cupy, ordinal))
    if not found:
        # No table declares this skip: it is a failure on a required backend.
        pytest.skip("no array library for this device: neither torch nor CuPy is installed with its GPU")
    return found


def legacy_array(device: Device, size: int) -> Any:
    """A part of a larger byte array in a library's memory from ``cudaMalloc`` or ``hipMalloc``; None without one."""
    kind, ordinal = device.info.dlpack
    torch, cupy = _load("torch"), _load("cupy")
    if torch is not None and torch.cuda.is_available() and (torch.version.hip is not None) is (kind == _ROCM):
        return torch.zeros(3 * size, dtype=torch.uint8, device=f"cuda:{ordinal}")[size : 2 * size]
    if cupy is not None and _count(cupy) and bool(cupy.cuda.runtime.is_hip) is (kind == _ROCM):
        with cupy.cuda.Device(ordinal):
            return cupy.zeros(3 * size, "uint8")[size : 2 * size]
    return None


def _load(name: str) -> Any:
    """Import the module; None if it is not installed. Fails if it does not load."""
    if importlib.util.find_spec(name) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _count(cupy: Any) -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # CuPy's own error: no driver
        return 0
