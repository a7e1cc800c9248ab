"""The driver through cuda-python: loading it, calling it, the current context, and what its errors mean.

Every function of ``cuda.bindings.driver`` returns a tuple that begins with a ``CUresult``; the bindings look functions
up by name and version when they are first called, and raise a ``RuntimeError`` for one that the driver lacks.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from gpuinterop.errors import BackendUnavailableError, DriverError, OutOfMemoryError, warn_leak

from .meanings import GENERAL, MEANINGS, NEWER_NAMES

UNNAMED: Final = (ValueError, KeyError)
"""What the bindings raise for a number that they have no name for: 13.x, and 12.9 for a status. See `unnamed`."""
OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600
_NO_DEVICE: Final = 100


class Driver:
    """The bindings' module, with what every caller needs beside it."""

    def __init__(self) -> None:
        self.api, self._version = _load()
        try:
            code = int(self.status("cuInit", 0)[0])
        except RuntimeError as error:
            raise _unusable(error) from error
        if code == _NO_DEVICE:
            raise BackendUnavailableError(
                "the NVIDIA driver is here, and no device that it may use.",
                fix="CUDA_VISIBLE_DEVICES may hide it; in a container the device nodes may be missing.",
            )
        if code:
            symbol, text = self._describe(code)
            raise BackendUnavailableError(
                f"cuInit failed with {symbol} ({code}): {text}.",
                fix="nvidia-smi shows whether driver and kernel module fit together.",
            )
        self.version: int = self.call("cuDriverGetVersion")

    # -- results -------------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; what it returned beside its status. Raises where that is no success."""
        try:
            result = getattr(self.api, name)(*arguments)
        except UNNAMED as error:
            result = unnamed(error)
        return self.check(name, result)

    def check(self, call: str, result: Any) -> Any:
        """What the call returned beside its status, several as a tuple; raises where that is no success."""
        if result[0]:
            raise self.error(call, result[0])
        return result[1] if len(result) == 2 else result[1:]

    def error(self, call: str, code: Any) -> DriverError:
        """The error of a call, with its name and what it means there."""
        number = int(code)
        symbol, text = self._describe(number)
        meaning = MEANINGS.get((call, number)) or GENERAL.get(number) or text
        kind = OutOfMemoryError if number == OUT_OF_MEMORY else DriverError
        return kind(call, number, symbol, meaning)

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function whose failure may be an answer; its status, an int, and what it returned beside it."""
        try:
            result: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except UNNAMED as error:
            return unnamed(error)
        return result

    def undo(self, name: str, *arguments: Any) -> None:
        """Call a function that takes back what another has done.

        A failure is a warning: what was made in between is the caller's, and what has failed before is what is raised.
        """
        if code := self.status(name, *arguments)[0]:
            warn_leak(f"{self.error(name, code)}; what it takes back stays as it is")

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

    # -- what there is -------------------------------------------------------------------------------------------

    def has(self, symbol: str, version: int | None = None) -> bool:
        """Whether the bindings know a function, and the driver has it; with `version`, as of that version of CUDA.

        The driver looks functions up by name and version: ``_v2`` is the bindings' own.
        """
        name = symbol.removesuffix("_v2")
        return hasattr(self.api, symbol) and (version or 0) <= self.version and self.address(name, version) != 0

    def address(self, symbol: str, version: int | None = None) -> int:
        """A function's address, as of a version of CUDA; 0 where there is none."""
        flags = self.api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        code, *found = self.status("cuGetProcAddress", symbol.encode(), version or self.version, flags)
        return 0 if code or not found[0] else int(found[0])

    @property
    def bindings_version(self) -> str:
        return str(self._version)

    # -- calls that are not stream-ordered -----------------------------------------------------------------------

    @contextmanager
    def relaxed(self) -> Generator[None]:
        """Let this thread make calls that a capture elsewhere forbids.

        A capture in global mode, which is torch's default, is made invalid by an event query of any thread; ours say
        nothing about what is being captured. (``cuThreadExchangeStreamCaptureMode``)
        """
        modes = self.api.CUstreamCaptureMode
        before = self.call("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            yield
        finally:
            self.undo("cuThreadExchangeStreamCaptureMode", before)


class Context:
    """A device's primary context, which torch, CuPy, JAX and numba use as well. Retained, and never given back."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self.ordinal = ordinal
        self.device = driver.call("cuDeviceGet", ordinal)
        self.handle = driver.call("cuDevicePrimaryCtxRetain", self.device)
        self.pointer = int(self.handle)

    @contextmanager
    def current(self) -> Generator[None]:
        """Make it this thread's current one, and put back what was (``cuCtxPushCurrent``, ``cuCtxPopCurrent``)."""
        self._driver.call("cuCtxPushCurrent", self.handle)
        try:
            yield
        finally:
            self._driver.undo("cuCtxPopCurrent")

    @contextmanager
    def aside(self) -> Generator[None]:
        """As `current`, for calls that belong to no stream: also during a capture."""
        with self.current(), self._driver.relaxed():
            yield

    @property
    def is_current(self) -> bool:
        return int(self._driver.call("cuCtxGetCurrent")) == self.pointer


def unnamed(error: Exception) -> tuple[int, ...]:
    """What a call has returned where the bindings have no name for its status, or for the answer of one that succeeded.

    The driver is newer than they are.
    """
    found = re.match(r"(\d+)(?: is not a valid (\w+))?$", str(error))
    if found is None:
        raise error
    number = int(found[1])
    return (number,) if found[2] in (None, "CUresult") else (0, number)


def _unusable(error: RuntimeError) -> BackendUnavailableError:
    """No driver at all, or one that the bindings cannot use."""
    # DynamicLibNotFoundError of 13.x; 12.9 has a plain RuntimeError.
    if type(error).__name__ == "DynamicLibNotFoundError" or "dlopen" in str(error):
        return BackendUnavailableError(
            "there is no NVIDIA driver here: libcuda.so.1 (nvcuda.dll on Windows) was not found.",
            fix="Install the NVIDIA driver; in a container, start it with the NVIDIA runtime (--gpus all).",
            absent=True,
        )
    text = str(error).rstrip(".")
    return BackendUnavailableError(f"the NVIDIA driver cannot be used: {text}.", fix="Install a newer NVIDIA driver.")


def _load() -> tuple[Any, str]:
    try:
        import cuda.bindings
        from cuda.bindings import driver
    except ImportError as error:
        # `cuda` alone proves nothing: hip-python-interop has a package of that name.
        failure = BackendUnavailableError(
            f"cuda-bindings cannot be imported ({error}).",
            fix="pip install 'gpuinterop[cuda]'",
            absent=isinstance(error, ModuleNotFoundError),
        )
        raise failure from error
    return driver, cuda.bindings.__version__
