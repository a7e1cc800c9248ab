"""The driver through cuda-python: loading, calls, the current context, and errors.

Every function of ``cuda.bindings.driver`` returns a tuple that begins with a ``CUresult``. The bindings look a function
up by name and version on its first call, and raise a ``RuntimeError`` if the driver lacks it.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from functools import partial
from typing import Any, Final

from gpuinterop import native_driver, system
from gpuinterop.errors import BackendUnavailableError, DriverError, OutOfMemoryError
from gpuinterop.native_driver import OUT_OF_MEMORY, RELAXED, NativeDevice, NativeDriver

from .error_hints import MEANINGS, NEWER_NAMES, OTHERS

_NO_DEVICE: Final = 100
_ENTRIES: Final = 12010  # the version of CUDA whose signatures `Driver.entry` returns

_Place: Final = c_void_p * 1  # ctypes passes an array as its address, without a `byref`


class Driver(NativeDriver):
    """The bindings' module, with the helpers that every caller needs."""

    def __init__(self) -> None:
        self.api, self.bindings_version = _load()
        self._entries: dict[str, Callable[..., int]] = {}
        try:
            code = int(self.status("cuInit", 0)[0])
        except RuntimeError as error:
            raise _unusable(error) from None
        if code == _NO_DEVICE:
            raise BackendUnavailableError(
                "the NVIDIA driver is installed, but has no device that it may use.",
                fix="Check CUDA_VISIBLE_DEVICES, which may hide it; in a container the device nodes may be missing.",
            )
        if code:
            symbol, text = self._describe(code)
            raise BackendUnavailableError(
                f"cuInit failed with {symbol} ({code}): {text}.",
                fix="Run nvidia-smi, which shows whether driver and kernel module fit together.",
            )
        self.version: int = self.call("cuDriverGetVersion")
        self._exchange = self.entry("cuThreadExchangeStreamCaptureMode")
        self._current = self.entry("cuCtxGetCurrent")
        self._push = self.entry("cuCtxPushCurrent")
        self._pop = partial(self.entry("cuCtxPopCurrent"), byref(c_void_p()))
        self.has_stream_id = self.has("cuStreamGetId", 12000)

    # -- results -------------------------------------------------------------------------------------------------

    def error(self, call: str, code: Any) -> DriverError:
        number = int(code)
        symbol, text = self._describe(number)
        meaning = MEANINGS.get((call, number)) or OTHERS.get(number) or text
        kind = OutOfMemoryError if number == OUT_OF_MEMORY else DriverError
        return kind(call, number, symbol, meaning)

    @staticmethod
    def unnamed(error: Exception) -> tuple[int, ...]:
        found = re.match(r"(\d+)(?: is not a valid (\w+))?$", str(error))
        if found is None:
            raise error
        number = int(found[1])
        return (number,) if found[2] in (None, "CUresult") else (0, number)

    def _describe(self, number: int) -> tuple[str, str]:
        try:
            code = self.api.CUresult(number)
        except ValueError:  # newer than the bindings
            return NEWER_NAMES.get(number, f"CUresult {number}"), "unknown to these bindings"
        found = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            status, *text = self.status(function, code)
            found.append(text[0].decode() if not status and text[0] else code.name)
        return found[0], found[1]

    # -- functions of the driver -----------------------------------------------------------------------------------

    def has(self, symbol: str, version: int | None = None) -> bool:
        """Whether the bindings know a function and the driver has it, optionally as of a `version` of CUDA.

        The driver looks functions up by name and version: ``_v2`` is the bindings' own.
        """
        name = symbol.removesuffix("_v2")
        return hasattr(self.api, symbol) and (version or 0) <= self.version and self.address(name, version) != 0

    def address(self, symbol: str, version: int | None = None) -> int:
        """A function's address, as of a version of CUDA; 0 if the driver lacks it."""
        flags = self.api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        code, *found = self.status("cuGetProcAddress", symbol.encode(), version or self.version, flags)
        return 0 if code or not found[0] else int(found[0])

    def entry(self, name: str) -> Callable[..., int]:
        """The driver's function for ctypes: the bindings make an enum of each status, which costs as much again."""
        found = self._entries.get(name)
        if found is None:
            address = self.address(name, min(_ENTRIES, self.version))
            found = self._entries[name] = ctypes.CFUNCTYPE(c_int)(address)
        return found

    def run(self, current: int | None, work: Callable[..., Any], *arguments: Any, aside: bool = True) -> Any:
        # A context that is current already, as where torch or CuPy runs, is neither pushed nor popped.
        pushed: list[int] = []  # C code stores the status: no exception comes between the call and the store
        mode = c_int(RELAXED)  # after the exchange it holds the thread's own mode, to be restored
        place = byref(mode)
        try:
            if current is not None:
                here = _Place()
                if code := self._current(here):
                    raise self.error("cuCtxGetCurrent", code)
                if here[0] != current:
                    pushed.extend(map(self._push, (c_void_p(current),)))
                    if pushed[0]:
                        raise self.error("cuCtxPushCurrent", pushed[0])
            try:
                if aside and (code := self._exchange(place)):
                    raise self.error("cuThreadExchangeStreamCaptureMode", code)
                return work(*arguments)
            finally:
                if mode.value != RELAXED and (code := self._exchange(place)):
                    self.warn("cuThreadExchangeStreamCaptureMode", code)
        finally:
            if pushed and not pushed[0] and (code := self._pop()):
                self.warn("cuCtxPopCurrent", code)


class Context(NativeDevice):
    """A device's primary context, which torch, CuPy, JAX and numba use as well. It is retained and never released."""

    driver: Driver

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.number = driver.call("cuDeviceGet", ordinal)
        self.handle = driver.call("cuDevicePrimaryCtxRetain", self.number)
        self.pointer = int(self.handle)
        super().__init__(driver, ordinal, self.pointer)


class Made(native_driver.Made):
    """An object of the driver."""

    device: Context

    def make(self, name: str, *arguments: Any) -> None:
        self.handle = self.device.driver.call(name, *arguments)
        self.made = True

    def add(self, name: str, *arguments: Any) -> None:
        """Make the object with a call that returns only a status; the call's first argument is the handle."""
        self.device.driver.call(name, *arguments)
        self.handle = arguments[0]
        self.made = True


class Room(native_driver.Room):
    """Base of the classes that each implement a part of the contract. They share the driver."""

    _driver: Driver

    def __init__(self) -> None:
        self._driver = Driver()


def at(address: int) -> Any:
    """A pointer or a handle as ctypes passes it fastest: a ``byref`` is converted already, a ``c_void_p`` anew."""
    return byref(ctypes.c_char.from_address(address))


def _unusable(error: RuntimeError) -> BackendUnavailableError:
    """Make the error for a missing driver, or one that the bindings cannot use."""
    # DynamicLibNotFoundError of 13.x; 12.9 has a plain RuntimeError.
    if type(error).__name__ == "DynamicLibNotFoundError" or "dlopen" in str(error):
        if problem := _load_error():
            return BackendUnavailableError(
                f"the NVIDIA driver cannot be loaded: {problem}.",
                fix="Install the NVIDIA driver again; nvidia-smi shows whether it works.",
            )
        return BackendUnavailableError(
            "the NVIDIA driver is not installed: libcuda.so.1 (nvcuda.dll on Windows) was not found.",
            fix="Install the NVIDIA driver; start a container with --gpus all. To test without a GPU: "
            "python -m gpuinterop.testing.simulated cuda -- COMMAND.",
            absent=True,
        )
    text = str(error).rstrip(".")
    return BackendUnavailableError(f"the NVIDIA driver cannot be used: {text}.", fix="Install a newer NVIDIA driver.")


def _load_error() -> str:
    """Why the system cannot load the library that it has found; empty if it finds none, or loads it."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except FileNotFoundError:
        return ""
    except OSError as error:
        # The loader names what is wrong first: this name if nothing has it, else the file, or another that it needs.
        return "" if str(error).startswith("libcuda.so.1:") else str(error)
    return ""


def _load() -> tuple[Any, str]:
    try:
        import cuda.bindings
        from cuda.bindings import driver
    except ImportError as error:
        # A package `cuda` proves nothing: hip-python-interop has one of that name.
        failure = BackendUnavailableError(
            f"cuda-bindings cannot be imported ({error}).",
            fix=system.pip_install("cuda"),
            absent=isinstance(error, ModuleNotFoundError),
        )
        raise failure from None
    version = cuda.bindings.__version__
    # Measured: 12.9.0 keeps the GIL in every call, so a call that blocks stops every thread; 12.9.1 releases it.
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < (12, 9, 1):
        raise BackendUnavailableError(
            f"expected cuda-bindings 12.9.1 or newer, got {version}.", fix=system.pip_install("cuda")
        )
    return driver, version
