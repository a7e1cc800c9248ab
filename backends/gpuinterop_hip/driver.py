"""HIP through hip-python: loading, calls, the current device, and errors.

Every function of the bindings returns a tuple that begins with a ``hipError_t``. Two signatures are in use: 7.2 and
older take the address for an imported object, 10 returns the object. The bindings look a function up on its first call,
and raise a ``RuntimeError`` if the library or the function is missing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from gpuinterop import native_driver, system
from gpuinterop.errors import BackendUnavailableError, DriverError, InvalidArgumentError, OutOfMemoryError
from gpuinterop.native_driver import OUT_OF_MEMORY, RELAXED, NativeDevice, NativeDriver

from .error_hints import MEANINGS, OTHERS
from .facts import Facts

_NO_DEVICE: Final = (100, 101)  # hipErrorNoDevice, hipErrorInvalidDevice: hipInit returns either
_ABI: Final = 60_000_000  # hipRuntimeGetVersion of 6.0, which changed the structs; 5.2.3 is 50221153
_KFD: Final = "/dev/kfd"  # the kernel driver's device, on every Linux with an AMD GPU for computing
_RUNTIME_FILE: Final = re.compile(r"/libamdhip64[^/]*\.so[^/]*$")


class Driver(NativeDriver):
    """The bindings' module, with the helpers that every caller needs."""

    def __init__(self) -> None:
        self.api, self.bindings_version, self.is_new = _load()
        try:
            self.version: int = self.call("hipRuntimeGetVersion")
        except DriverError as error:  # a runtime may look for devices in its first call
            raise self._no_init(error.call, error.code) from None
        except RuntimeError as error:
            raise _unusable(error) from None
        if self.version < _ABI:  # checked before a struct is passed, whose layout differs there
            raise BackendUnavailableError(
                f"the HIP runtime is {version_text(self.version)}, and the structs of runtimes before 6.0 are laid out "
                "otherwise than the bindings pass them.",
                fix="Install ROCm 6.0 or newer, or take the older libamdhip64.so out of the library path.",
            )
        self.facts = Facts(version_text(self.version))
        if code := self.status("hipInit", 0)[0]:
            raise self._no_init("hipInit", code)
        # The library that the bindings have loaded, by the same name, for calls that they get wrong: in both versions
        # hipThreadExchangeStreamCaptureMode passes an uninitialised mode, and the capture status of a failed call is
        # uninitialised. It also serves calls that make and release objects: the bindings 7.2 keep the GIL in them.
        self.library: Any = ctypes.CDLL(_library_name(self.is_new))
        self._address = ctypes.cast(self.library.hipInit, ctypes.c_void_p).value or 0
        self._exchange: Any = getattr(self.library, "hipThreadExchangeStreamCaptureMode", None)
        self._status: Any = self.library.hipStreamIsCapturing
        self._status.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self._seen_modules = -1
        self._other_runtimes: tuple[str, ...] = ()

    # -- results -------------------------------------------------------------------------------------------------

    def error(self, call: str, code: Any) -> DriverError:
        self.forget_error()
        number = int(code)
        symbol, text = self._describe(number)
        meaning = MEANINGS.get((call, number)) or OTHERS.get(number) or text
        out_of_memory = number == OUT_OF_MEMORY and call != "hipImportExternalMemory"  # the import lacks no memory
        kind = OutOfMemoryError if out_of_memory else DriverError
        return kind(call, number, symbol, meaning)

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        code, *found = super().status(name, *arguments)
        if code:
            self.forget_error()
        return (int(code), *found)

    @staticmethod
    def unnamed(error: Exception) -> tuple[int]:
        found = re.match(r"(\d+) is not a valid hipError_t$", str(error))
        if found is None:
            raise error
        return (int(found[1]),)

    def direct(self, name: str, first: Any, *more: Any) -> None:
        """Call the library's function, past the bindings; integers are passed as wide as pointers."""
        if code := getattr(self.library, name)(first, *map(_wide, more)):
            raise self.error(name, code)

    def free(self, name: str, handle: Any, *more: Any) -> None:
        self.direct(name, ctypes.c_void_p(handle), *more)

    def forget_error(self) -> None:
        """Clear this thread's last error, which was reported.

        torch and others query that error after their own launches, and would take ours for theirs.
        """
        super().status("hipGetLastError")

    def _no_init(self, call: str, code: int) -> BackendUnavailableError:
        """Make the error of a runtime that does not start."""
        if code in _NO_DEVICE:
            return BackendUnavailableError(
                "the HIP runtime is installed, but has no device that it may use.",
                fix="Check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, which may hide it; the user must be in the "
                "groups render and video, and a container needs --device /dev/kfd --device /dev/dri.",
            )
        symbol, text = self._describe(code)
        return BackendUnavailableError(
            f"{call} failed with {symbol} ({code}): {text}.", fix="Run rocminfo to see whether runtime and kernel fit."
        )

    def _describe(self, number: int) -> tuple[str, str]:
        try:
            code = self.api.hipError_t(number)
        except ValueError:  # newer than the bindings
            return f"hipError_t {number}", "unknown to these bindings"
        _, *text = super().status("hipGetErrorString", code)
        return code.name, (text_of(text[0]) if text else "") or code.name

    # -- functions of the runtime ----------------------------------------------------------------------------------

    def has(self, symbol: str) -> bool:
        """Whether the bindings know a function, and the library has it."""
        return hasattr(self.api, symbol) and hasattr(self.library, symbol)

    def library_file(self) -> str:
        """The file of the library that is called; empty if the system does not say."""
        here = self._address
        return next((path for path, ranges in _runtimes().items() if any(here in one for one in ranges)), "")

    def check_runtime(self) -> None:
        """Refuse other libraries' streams if the process has a second HIP runtime, to which they may belong.

        To one runtime a handle of the other is invalid, or another object, and 0 is the default stream of either; no
        call would report that. Importing a module may load a runtime (torch's ROCm wheel brings its own), so this
        checks again when the number of modules changes.
        """
        modules = len(sys.modules)
        if modules != self._seen_modules:
            mine = self.library_file()
            self._other_runtimes = tuple(path for path in _runtimes() if mine and path != mine)
            self._seen_modules = modules
        if self._other_runtimes:
            mine = self.library_file()
            raise InvalidArgumentError(
                "stream",
                f"expected one HIP runtime in this process, got two, {mine}, which gpuinterop calls, and "
                f"{' and '.join(self._other_runtimes)}. They do not know each other's streams, and 0 is the default "
                "stream of both. Make all libraries load one file before any import: "
                + (
                    f"ROCM_PATH={Path(self._other_runtimes[0]).parent.parent} makes hip-python load the other's."
                    if self.is_new
                    else "import torch or CuPy before you get gpuinterop's first device, or let LD_LIBRARY_PATH "
                    f"name {Path(self._other_runtimes[0]).parent}."
                ),
            )

    def run(self, current: int | None, work: Callable[..., Any], *arguments: Any, aside: bool = True) -> Any:
        before = current if current is None else self.call("hipGetDevice")
        mode = ctypes.c_int(RELAXED)  # after the exchange it holds the thread's own mode, to be restored
        place, put = ctypes.byref(mode), self.library.hipSetDevice
        try:
            if before != current and (code := put(current)):
                raise self.error("hipSetDevice", code)
            try:
                if aside and self._exchange is not None and (code := self._exchange(place)):
                    raise self.error("hipThreadExchangeStreamCaptureMode", code)
                return work(*arguments)
            finally:
                if mode.value != RELAXED and (code := self._exchange(place)):
                    self.warn("hipThreadExchangeStreamCaptureMode", code)
        finally:
            if before != current and (code := put(before)):
                self.warn("hipSetDevice", code)

    def capture_status(self, stream: int) -> tuple[int, int]:
        """``hipStreamIsCapturing``: its status as a number, and a ``hipStreamCaptureStatus``."""
        found = ctypes.c_int()
        code = int(self._status(stream, ctypes.byref(found)))
        if code:
            self.forget_error()
        return code, found.value


class Gpu(NativeDevice):
    """A device. HIP creates objects on the device that is current in the calling thread."""

    driver: Driver


class Made(native_driver.Made):
    """An object of the runtime."""

    device: Gpu
    handle: int

    def make(self, name: str, *arguments: Any) -> None:
        """Make the object on the device with a call that writes the handle to its first argument's address."""
        place = ctypes.c_void_p()
        self.device.driver.direct(name, ctypes.byref(place), *arguments)
        self.handle = place.value or 0
        self.made = True

    def add(self, name: str, handle: int, *arguments: Any) -> None:
        """Make the object as `make` does, with a call that takes the handle."""
        self.device.driver.direct(name, ctypes.c_void_p(handle), *arguments)
        self.handle = handle
        self.made = True


class Room(native_driver.Room):
    """Base of the classes that each implement a part of the contract. They share the driver."""

    _driver: Driver

    def __init__(self) -> None:
        self._driver = Driver()


def _wide(argument: Any) -> ctypes.c_void_p:
    """An argument of any integer type, or the address of one of the bindings' structs."""
    return ctypes.c_void_p(int(argument))


def version_text(number: int) -> str:
    """Format a version number: 70253211 is 7.2.53211."""
    major, rest = divmod(number, 10_000_000)
    minor, patch = divmod(rest, 100_000)
    return f"{major}.{minor}.{patch}"


def text_of(found: Any) -> str:
    """The bindings' ``CStr``, or bytes."""
    if not found:
        return ""
    raw = found if isinstance(found, bytes) else ctypes.string_at(int(found))
    return raw.partition(b"\0")[0].decode(errors="replace")


def _unusable(error: RuntimeError) -> BackendUnavailableError:
    """Make the error for a missing runtime, or one that the bindings cannot use."""
    # Not for an installed one that lacks a library itself; Windows does not tell the two apart.
    if re.search(r"libamdhip64[^:]*: cannot open shared object|amdhip64\S*\.dll", str(error)):
        return BackendUnavailableError(
            "the HIP runtime is not installed: libamdhip64.so (amdhip64.dll on Windows) was not found.",
            fix="Install ROCm, or add its lib folder (/opt/rocm/lib) to LD_LIBRARY_PATH; where that has only "
            "libamdhip64.so.7, install ROCm's development package, or make a link. To test without a GPU: "
            "python -m gpuinterop.testing.simulated hip -- COMMAND.",
            absent=not os.path.exists(_KFD),  # on a machine with such a GPU, the installation is broken
        )
    text = str(error).rstrip(".")
    return BackendUnavailableError(f"the HIP runtime cannot be used: {text}.", fix="Install ROCm 6.0 or newer.")


def _runtimes() -> dict[str, list[range]]:
    """The addresses of the HIP runtimes of this process, by file; empty if the system does not say."""
    found: dict[str, list[range]] = {}
    for one in system.mappings():
        if _RUNTIME_FILE.search(one.path):
            found.setdefault(one.path, []).append(one.addresses)
    return found


def advised(command: str) -> str:
    """The command that installs hip-python, where PyPI has it for this system; else other advice."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return command
    return "PyPI has hip-python for Linux on x86-64 only: install AMD's own package of it for this system"


def _library_name(is_new: bool) -> str:
    """The name by which the bindings have loaded the runtime: the same name finds the same library."""
    if is_new:
        from rocm.bindings.util.paths import get_library_path

        return os.fsdecode(get_library_path("amdhip64"))
    return "libamdhip64.so"


def _load() -> tuple[Any, str, bool]:
    """The module, its version, and whether it is 10 or newer."""
    errors: list[ImportError] = []
    for name, versions in (("rocm.bindings.hip", "rocm.version"), ("hip.hip", "hip._version")):
        try:
            api, version = import_module(name), import_module(versions).__version__
        except ImportError as error:
            errors.append(error)
            continue
        # A package `hip` proves nothing, because other packages have that name.
        if hasattr(api, "hipRuntimeGetVersion"):
            return api, str(version), name.startswith("rocm")
        errors.append(ImportError(f"the package at {getattr(api, '__file__', None)} is not hip-python"))
    raise BackendUnavailableError(
        f"hip-python cannot be imported ({'; '.join(map(str, errors))}).",
        fix=advised(system.pip_install("hip")),
        absent=all(isinstance(error, ModuleNotFoundError) for error in errors),
    )
