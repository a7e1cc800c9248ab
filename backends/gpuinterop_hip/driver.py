"""HIP's runtime: loading, devices and errors.

ctypes calls the library that hip-python finds. Both versions of hip-python get some calls wrong (they leave the mode of
hipThreadExchangeStreamCaptureMode and a failed call's capture status uninitialized), and 7.2 keeps the GIL.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Final

from gpuinterop import system
from gpuinterop.errors import BackendUnavailableError, InvalidArgumentError
from gpuinterop.installing import pip_install
from gpuinterop.native_driver.driver import NativeDevice, NativeDriver
from gpuinterop.native_driver.table import Table

from .facts import Facts
from .table import HIP

_NO_DEVICE: Final = (100, 101)  # hipErrorNoDevice, hipErrorInvalidDevice: hipInit returns either
_ABI: Final = 60_000_000  # hipRuntimeGetVersion of 6.0, which changed the structs; 5.2.3 is 50221153
_BY_VALUE: Final = 70_100_000
"""From this HIP version on, a descriptor is passed by value instead of by pointer (torch checks the same version)."""
_UNKNOWN: Final = 999
_KFD: Final = "/dev/kfd"  # the kernel driver's device, on every Linux with an AMD compute GPU
_RUNTIME_FILE: Final = re.compile(r"/libamdhip64[^/]*\.so[^/]*$")


class Driver(NativeDriver):
    """The runtime's functions and the bindings' module."""

    table: ClassVar[Table] = HIP

    def load(self) -> None:
        self.api, self.bindings_version, self.is_new = _load()
        version = ctypes.c_int()
        try:
            self.library: Any = ctypes.CDLL(_library_name(self.is_new))
            for name in ("hipGetErrorName", "hipGetErrorString"):
                getattr(self.library, name).restype = ctypes.c_char_p
            self._check(self.status("RuntimeGetVersion", ctypes.byref(version)), "hipRuntimeGetVersion")
        except (OSError, RuntimeError, AttributeError) as error:
            raise _unusable(error) from None
        self.version = version.value
        if self.version < _ABI:  # before any struct is passed, because the layouts differ
            raise BackendUnavailableError(
                f"the HIP runtime is {version_text(self.version)}, and the bindings' structs do not fit "
                "runtimes before 6.0.",
                fix="Install ROCm 6.0 or newer, or remove the older libamdhip64.so from the library path.",
            )
        self.facts = Facts(version_text(self.version))
        self._check(self.status("Init", 0), "hipInit")
        self.fds_by_address = self.version < _BY_VALUE
        # Closed streams that can be reused, by device and priority, each with its number.
        self.idle_streams: defaultdict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
        self.free_ranges: defaultdict[int, list[int]] = defaultdict(list)  # reserved, without mappings, by size
        self._address = ctypes.cast(self.library.hipInit, ctypes.c_void_p).value or 0
        self._module_count = -1
        self._other_runtimes: tuple[str, ...] = ()

    def find(self, name: str) -> Callable[..., int]:
        try:
            return getattr(self.library, name)  # type: ignore[no-any-return]
        except AttributeError:
            raise BackendUnavailableError(f"the HIP runtime has no {name}.", fix="Install a newer ROCm.") from None

    def describe(self, code: int) -> tuple[str, str]:
        symbol, text = (getattr(self.library, f"hipGetError{what}")(code).decode() for what in ("Name", "String"))
        if symbol == "hipErrorUnknown" and code != _UNKNOWN:
            return f"hipError_t {code}", "unknown to this runtime"
        return symbol, text

    def forget_error(self) -> None:
        """Clear this thread's last error, which was reported. Others, like torch, would take it for their own."""
        self.library.hipGetLastError()

    def _check(self, code: int, call: str) -> None:
        """Raise for a runtime that does not start. Any first call may look for devices."""
        if code in _NO_DEVICE:
            raise BackendUnavailableError(
                "the HIP runtime is installed, but finds no device that this process may use.",
                fix="Check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, which may hide it; the user must be in the "
                "groups render and video, and a container needs --device /dev/kfd --device /dev/dri.",
            )
        if code:
            symbol, text = self.describe(code)
            raise BackendUnavailableError(
                f"{call} failed with {symbol} ({code}): {text}.",
                fix="Run rocminfo to see whether the runtime matches the kernel.",
            )

    # -- the library -----------------------------------------------------------------------------------------------

    def has(self, symbol: str) -> bool:
        """Whether the bindings and the library have a function."""
        return hasattr(self.api, symbol) and hasattr(self.library, symbol)

    def library_file(self) -> str:
        """The file of the library that is called; empty if the system does not show it."""
        here = self._address
        return next((path for path, ranges in _runtimes().items() if any(here in span for span in ranges)), "")

    def check_runtime(self) -> None:
        """Refuse other libraries' streams if the process has a second HIP runtime, because they may belong to it.

        For one runtime, the other's handle is invalid or a different object, and 0 is the default stream of each; no
        call would report the mistake. Importing a module may load a runtime (torch's ROCm wheel contains one), so this
        checks again when the number of modules changes.
        """
        modules = len(sys.modules)
        if modules != self._module_count:
            own_file = self.library_file()
            self._other_runtimes = tuple(path for path in _runtimes() if own_file and path != own_file)
            self._module_count = modules
        if self._other_runtimes:
            own_file = self.library_file()
            raise InvalidArgumentError(
                "stream",
                f"expected one HIP runtime in this process, got two: {own_file}, which gpuinterop calls, and "
                f"{' and '.join(self._other_runtimes)}. A stream of one is invalid in the other, and 0 is the default "
                "stream of both. Make all libraries load one file before any import: "
                + (
                    f"ROCM_PATH={Path(self._other_runtimes[0]).parent.parent} makes hip-python load the other runtime."
                    if self.is_new
                    else "import torch or CuPy before you use gpuinterop's first device, or let LD_LIBRARY_PATH "
                    f"contain {Path(self._other_runtimes[0]).parent}."
                ),
            )


class Gpu(NativeDevice):
    """A device. HIP creates objects on the calling thread's current device."""

    driver: Driver


def version_text(number: int) -> str:
    """Format a version number: 70253211 is 7.2.53211."""
    major, remainder = divmod(number, 10_000_000)
    minor, patch = divmod(remainder, 100_000)
    return f"{major}.{minor}.{patch}"


def _unusable(error: Exception) -> BackendUnavailableError:
    """Return the error for a runtime that is missing or unusable."""
    # Not for a runtime that itself lacks a library; on Windows the two look alike.
    if re.search(r"libamdhip64[^:]*: cannot open shared object|amdhip64\S*\.dll", str(error)):
        return BackendUnavailableError(
            "the HIP runtime is not installed: libamdhip64.so (amdhip64.dll on Windows) was not found.",
            fix="Install ROCm, or add its lib folder (/opt/rocm/lib) to LD_LIBRARY_PATH. If the folder has only "
            "libamdhip64.so.7, install ROCm's development package, or make a link. To test without a GPU: "
            "python -m gpuinterop.testing.simulated hip -- COMMAND.",
            absent=not os.path.exists(_KFD),  # otherwise there is a GPU, and the installation is broken
        )
    text = str(error).rstrip(".")
    return BackendUnavailableError(f"the HIP runtime cannot be used: {text}.", fix="Install ROCm 6.0 or newer.")


def _runtimes() -> dict[str, list[range]]:
    """The address ranges of this process's HIP runtimes, by file; empty if the system does not show them."""
    runtimes: dict[str, list[range]] = {}
    for mapping in system.mappings():
        if _RUNTIME_FILE.search(mapping.path):
            runtimes.setdefault(mapping.path, []).append(mapping.addresses)
    return runtimes


def advised(command: str) -> str:
    """The command that installs hip-python if PyPI has it for this system; otherwise other advice."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return command
    return "PyPI has hip-python only for Linux on x86-64: install AMD's package for this system"


def _library_name(is_new: bool) -> str:
    """The name with which the bindings load the runtime, so that both load the same library."""
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
        # Having a package `hip` proves nothing, because other packages have that name.
        if hasattr(api, "hipRuntimeGetVersion"):
            return api, str(version), name.startswith("rocm")
        errors.append(ImportError(f"the package at {getattr(api, '__file__', None)} is not hip-python"))
    raise BackendUnavailableError(
        f"hip-python cannot be imported ({'; '.join(map(str, errors))}).",
        fix=advised(pip_install("hip")),
        absent=all(isinstance(error, ModuleNotFoundError) for error in errors),
    )
