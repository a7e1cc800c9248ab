"""The driver through cuda-python: loading it, calling it, the current context, and what its errors mean.

Every function of ``cuda.bindings.driver`` returns a tuple that begins with a ``CUresult``; the bindings look functions
up by name and version when they are first called, and raise a ``RuntimeError`` for one that the driver lacks.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import starmap
from typing import Any, ClassVar, Final, Self, TypeVar

from gpuinterop import system
from gpuinterop.backend import Backend
from gpuinterop.errors import BackendUnavailableError, DriverError, OutOfMemoryError, warn_leak

from .error_hints import GENERAL, MEANINGS, NEWER_NAMES

UNNAMED: Final = (ValueError, KeyError)
"""What the bindings raise for a number that they have no name for: 13.x, and 12.9 for a status. See `unnamed`."""
OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600
_NO_DEVICE: Final = 100
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ENTRIES: Final = 12010  # the version of CUDA whose signatures `Driver.entry` gives

_T = TypeVar("_T")
_MadeT = TypeVar("_MadeT", bound="Made")


class Driver:
    """The bindings' module, with what every caller needs beside it."""

    def __init__(self) -> None:
        if problem := system.not_main_interpreter():
            raise BackendUnavailableError(problem)
        self.api, self.bindings_version = _load()
        self._entries: dict[str, Callable[..., int]] = {}
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
        self._exchange = self.entry("cuThreadExchangeStreamCaptureMode")
        self._push = self.entry("cuCtxPushCurrent")
        self._pop = partial(self.entry("cuCtxPopCurrent"), ctypes.byref(ctypes.c_void_p()))
        self.has_stream_id = self.has("cuStreamGetId", 12000)

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

    # -- interrupts ----------------------------------------------------------------------------------------------
    #
    # CPython looks at signals after a call of C's, at the entry of a function, and where a loop turns back; a handler
    # may raise anything there. So what must not be lost is stored by C, in the step that makes the call, and what must
    # be called in any case stands in a `finally` by itself, with no other call before it.

    def entry(self, name: str, version: int = _ENTRIES) -> Callable[..., int]:
        """A function past the bindings, for calls whose status must not be lost: the bindings run Python's code to name
        it, behind the driver's. It takes what ctypes takes."""
        found = self._entries.get(name)
        if found is None:
            address = self.address(name.removesuffix("_v2"), min(version, self.version))
            found = self._entries[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        return found

    def run(
        self, work: Callable[..., _T], *arguments: Any, contexts: Iterable[ctypes.c_void_p] = (), aside: bool = True
    ) -> _T:
        """Call `work` with a context current (``cuCtxPushCurrent``), or with whichever is; what was is put back.

        With `aside` it may do what a capture elsewhere forbids: one in global mode, which is torch's default, is made
        invalid by an event query of any thread, and ours say nothing about what is being captured
        (``cuThreadExchangeStreamCaptureMode``).

        An interrupt may lose what `work` returns: what it makes stands in a `Made`.
        """
        pushed: list[int] = []
        mode = ctypes.c_int(_RELAXED)  # and once it is exchanged the thread's own, until that is put back
        place = ctypes.byref(mode)
        try:
            pushed.extend(map(self._push, contexts))
            if any(pushed):
                raise self.error("cuCtxPushCurrent", pushed[0])
            try:
                if aside and (code := self._exchange(place)):
                    raise self.error("cuThreadExchangeStreamCaptureMode", code)
                return work(*arguments)
            finally:
                if mode.value != _RELAXED and (code := self._exchange(place)):
                    self.warn("cuThreadExchangeStreamCaptureMode", code)
        finally:
            if pushed == [0] and (code := self._pop()):
                self.warn("cuCtxPopCurrent", code)

    def warn(self, call: str, code: Any) -> None:
        """A call that was to take something back has failed.

        It is no more than a warning: what was made in between is the caller's, and what has failed before is what is
        raised.
        """
        warn_leak(f"{self.error(call, code)}; what it takes back stays as it is")


class Context:
    """A device's primary context, which torch, CuPy, JAX and numba use as well. Retained, and never given back."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.device = driver.call("cuDeviceGet", ordinal)
        self.handle = driver.call("cuDevicePrimaryCtxRetain", self.device)
        self.pointer = int(self.handle)
        self._pushed = (ctypes.c_void_p(self.pointer),)

    def run(self, work: Callable[..., _T], *arguments: Any, aside: bool = True) -> _T:
        """`Driver.run` calls `work` in this context. `aside` is for what belongs to no stream."""
        return self.driver.run(work, *arguments, contexts=self._pushed, aside=aside)

    def call(self, name: str, *arguments: Any, aside: bool = True) -> Any:
        """`Driver.call` calls a function that makes nothing, in this context."""
        return self.driver.run(self.driver.call, name, *arguments, contexts=self._pushed, aside=aside)

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        return self.driver.run(self.driver.status, name, *arguments, contexts=self._pushed)

    def create(self, made: _MadeT, work: Callable[[], object], *, aside: bool = True) -> _MadeT:
        """`work` makes it in this context; it is taken back where anything raises."""
        try:
            self.driver.run(work, contexts=self._pushed, aside=aside)
            return made
        except BaseException:
            made.undo()
            raise


class Made:
    """What one call of the driver makes and another takes back, each of them once, whatever interrupts."""

    __slots__ = ("_found", "_left", "_told", "context", "handle", "more")

    back: ClassVar[str]
    """The function that takes it back. It is given the handle and `more`."""

    def __init__(self, context: Context, *more: Any) -> None:
        self.context = context
        self.handle: Any = None
        self.more = more
        self._found: list[tuple[Any, ...]] = []
        """What the call has returned that makes it."""
        self._left: Iterator[tuple[Any, ...]] | None = None
        """What `back` is still to be given: C takes it out in the step that makes the call."""
        self._told: list[tuple[Any, ...]] = []
        """What `back` has returned."""

    @property
    def made(self) -> Any:
        """The handle, as soon as there is one; None where the call was not made, or has failed."""
        if not self._found or self._found[0][0]:
            return None
        return (*self._found[0], self.handle)[1]

    def create(self, name: str, *arguments: Any) -> Self:
        """Make it, with this call alone."""
        # C calls a method that is given `*arguments`, and an interrupt behind that would lose what `create` returns.
        return self.context.create(self, partial(self.make, name, *arguments))

    def make(self, name: str, *arguments: Any) -> None:
        """Make it, in the context; the handle is what the call returns."""
        driver = self.context.driver
        try:
            self._found.extend(starmap(getattr(driver.api, name), (arguments,)))
        except UNNAMED as error:
            self._found.append(unnamed(error))
        self.handle = driver.check(name, self._found[0])

    def add(self, name: str, *arguments: Any, version: int = _ENTRIES) -> None:
        """Make it by a call that returns its status alone; the handle is the call's first argument."""
        driver = self.context.driver
        self.handle = arguments[0]
        given = tuple(ctypes.c_void_p(int(argument)) for argument in arguments)  # wide enough for each
        self._found.extend(zip(starmap(driver.entry(name, version), (given,)), strict=False))
        driver.check(name, self._found[0])

    def free(self) -> Any:
        """Take it back, in the context. Called again it does nothing; but what has failed, and was told, is tried."""
        if self.made is None:
            return None
        driver = self.context.driver
        if self._left is None:
            self._left = iter(((self.made, *self.more),))
        try:
            self._told.extend(starmap(getattr(driver.api, self.back), self._left))
        except UNNAMED as error:
            self._told.append(unnamed(error))
        if self._told and self._told[0][0]:
            failed = driver.error(self.back, self._told[0][0])
            self._left, self._told = None, []
            raise failed
        return driver.check(self.back, self._told[0]) if self._told else None

    def release(self) -> None:
        """`free` it, whichever context is current."""
        self.context.run(self.free)

    def undo(self) -> None:
        """`release` it behind a failure; if that fails as well, it is a warning: see `Driver.warn`."""
        try:
            self.release()
        except DriverError as error:
            self.context.driver.warn(error.call, error.code)


class Room(Backend):
    """A part of the contract, which a room implements. The rooms share the driver."""

    def __init__(self) -> None:
        self._driver = Driver()


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
