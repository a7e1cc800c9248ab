"""The driver. cuda-python loads it and finds its functions.

The bindings look up a function by name and version. ctypes calls it, because a call through the bindings is slower:
they turn the status into an enum.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any, ClassVar, Final

from gpuinterop.errors import BackendUnavailableError
from gpuinterop.installing import pip_install
from gpuinterop.native_driver.driver import NativeDevice, NativeDriver
from gpuinterop.native_driver.table import Table

from .table import CUDA

_NO_DEVICE: Final = 100
_ENTRIES: Final = 12010  # the CUDA version whose signatures are called
_RENAMED: Final = {"cuGraphInstantiate": "cuGraphInstantiateWithFlags"}
"""Functions that cuda.h renames. Under the first name the driver has CUDA 11.0's function, with other parameters."""
SECOND_BINDS: Final = 13010  # the first version with the second version of cuMulticastBind*, which expects the device
_FIRST: Final = 6000  # a version with cuDriverGetVersion and cuGetErrorName


class Driver(NativeDriver):
    """The driver's functions and the bindings' module."""

    table: ClassVar[Table] = CUDA

    def load(self) -> None:
        self.api, self.bindings_version = _load()
        _check_library()
        self.version = _FIRST
        self.version = self.ask("DriverGetVersion")
        code = self.status("Init", 0)
        if code == _NO_DEVICE:
            raise BackendUnavailableError(
                "the NVIDIA driver is installed, but finds no device that this process may use.",
                fix="Check CUDA_VISIBLE_DEVICES, which may hide it; in a container the device nodes may be missing.",
            )
        if code:
            symbol, text = self.describe(code)
            raise BackendUnavailableError(
                f"cuInit failed with {symbol} ({code}): {text}.",
                fix="Run nvidia-smi, which shows whether the driver matches the kernel module.",
            )
        self.has_stream_id = self.has("cuStreamGetId", 12000)

    def restore(self, before: Any) -> int:
        return self._leave(before)  # expects an address, for the context that is popped

    def find(self, name: str) -> Callable[..., int]:
        version = SECOND_BINDS if name.endswith("_v2") else min(_ENTRIES, self.version)
        address = self.address(_RENAMED.get(name) or name.removesuffix("_v2"), version)
        if not address:
            raise BackendUnavailableError(f"the NVIDIA driver has no {name}.", fix="Install a newer NVIDIA driver.")
        return ctypes.CFUNCTYPE(c_int)(address)

    def describe(self, code: int) -> tuple[str, str]:
        texts = []
        for function in ("GetErrorName", "GetErrorString"):
            text = c_char_p()
            self.function(function)(code, byref(text))
            texts.append((text.value or b"").decode())
        return (texts[0], texts[1]) if texts[0] else (f"CUresult {code}", "unknown to this driver")

    def has(self, symbol: str, version: int | None = None) -> bool:
        """Whether the bindings and the driver have a function, optionally in a `version` of CUDA.

        The driver finds a function by name and version. Only the bindings use the suffix ``_v2``.
        """
        name = symbol.removesuffix("_v2")
        return hasattr(self.api, symbol) and (version or 0) <= self.version and self.address(name, version) != 0

    def address(self, symbol: str, version: int | None = None) -> int:
        """A function's address in a version of CUDA; 0 if the driver lacks it."""
        flags = self.api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        try:
            code, *results = self.api.cuGetProcAddress(symbol.encode(), version or self.version, flags)
        except RuntimeError as error:  # the bindings find no cuGetProcAddress
            text = f"the NVIDIA driver cannot be used: {str(error).rstrip('.')}."
            raise BackendUnavailableError(text, fix="Install a newer NVIDIA driver.") from None
        return 0 if code or not results[0] else int(results[0])


class Context(NativeDevice):
    """A device's primary context, which torch, CuPy, JAX and numba also use. It is retained and never released."""

    driver: Driver

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.number = driver.ask("DeviceGet", ordinal)
        self.pointer = driver.ask("DevicePrimaryCtxRetain", self.number, kind=c_void_p)
        super().__init__(driver, ordinal, self.pointer)


def _check_library() -> None:
    """Refuse a driver that is missing or cannot be loaded."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        # The message begins with the missing file: libcuda itself, or a library that it needs.
        if not isinstance(error, FileNotFoundError) and not str(error).startswith("libcuda.so.1:"):
            raise BackendUnavailableError(
                f"the NVIDIA driver cannot be loaded: {error}.",
                fix="Install the NVIDIA driver again; nvidia-smi shows whether it works.",
            ) from None
        raise BackendUnavailableError(
            "the NVIDIA driver is not installed: libcuda.so.1 (nvcuda.dll on Windows) was not found.",
            fix="Install the NVIDIA driver; start a container with --gpus all. To test without a GPU: "
            "python -m gpuinterop.testing.simulated cuda -- COMMAND.",
            absent=True,
        ) from None


def _load() -> tuple[Any, str]:
    try:
        import cuda.bindings
        from cuda.bindings import driver
    except ImportError as error:
        # Having a package `cuda` proves nothing: hip-python-interop has one too.
        failure = BackendUnavailableError(
            f"cuda-bindings cannot be imported ({error}).",
            fix=pip_install("cuda"),
            absent=isinstance(error, ModuleNotFoundError),
        )
        raise failure from None
    version = cuda.bindings.__version__
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < (12, 9, 1):  # 12.9.0 keeps the GIL in every call
        raise BackendUnavailableError(
            f"expected cuda-bindings 12.9.1 or newer, got {version}.", fix=pip_install("cuda")
        )
    return driver, version
