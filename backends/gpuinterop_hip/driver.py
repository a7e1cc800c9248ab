"""HIP through hip-python: loading it, calling it, the current device, and what its errors mean.

Every function of the bindings returns a tuple that begins with a ``hipError_t``. Two call shapes are in use: 7.2 and
older want the place that an imported object is written to, 10 returns the object. The bindings look a function up when
it is first called, and raise a ``RuntimeError`` when the library, or the function in it, is not there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import starmap
from typing import Any, ClassVar, Final, Self, TypeVar

from gpuinterop import system
from gpuinterop.backend import Backend
from gpuinterop.errors import BackendUnavailableError, DriverError, InvalidArgumentError, OutOfMemoryError, warn_leak

from .error_hints import GENERAL, MEANINGS, OUT_OF_MEMORY

NOT_READY: Final = 600
_NO_DEVICE: Final = (100, 101)  # hipErrorNoDevice, hipErrorInvalidDevice: what hipInit says is the one or the other
_ABI: Final = 60_000_000  # hipRuntimeGetVersion of 6.0, which changed the structs; 5.2.3 is 50221153
_RELAXED: Final = 2  # hipStreamCaptureModeRelaxed
_SUCCESS: Final = [0]
_KFD: Final = "/dev/kfd"  # the kernel driver's device: it is there on every Linux with an AMD GPU for computing
_RUNTIME_FILE: Final = re.compile(r"/libamdhip64[^/]*\.so[^/]*$")

_T = TypeVar("_T")
_MadeT = TypeVar("_MadeT", bound="Made")


class Driver:
    """The bindings' module, with what every caller needs beside it."""

    def __init__(self) -> None:
        if problem := system.not_main_interpreter():
            raise BackendUnavailableError(problem)
        self.api, self.bindings_version, self.is_new = _load()
        try:
            self.version: int = self.call("hipRuntimeGetVersion")
        except DriverError as error:  # a runtime may look for devices in whatever is called first
            raise self._no_init(error.call, error.code) from error
        except RuntimeError as error:
            raise _unusable(error) from error
        if self.version < _ABI:  # asked before anything is passed that has another layout there
            raise BackendUnavailableError(
                f"the HIP runtime is {version_text(self.version)}, and the structs of those before 6.0 are laid out "
                "otherwise than the bindings pass them.",
                fix="Install ROCm 6.0 or newer, or take the older libamdhip64.so out of the library path.",
            )
        if code := self.status("hipInit", 0)[0]:
            raise self._no_init("hipInit", code)
        # The library that the bindings have loaded, by the name under which they did. For what they get wrong: in both
        # versions hipThreadExchangeStreamCaptureMode passes a mode that nobody has set, and the capture status of a
        # call that failed is a number that nobody has written. And for what makes something: they run Python's code
        # behind every call, where an interrupt would lose what was made.
        self.library: Any = ctypes.CDLL(_library_name(self.is_new))
        self._address = ctypes.cast(self.library.hipInit, ctypes.c_void_p).value or 0
        self._exchange: Any = getattr(self.library, "hipThreadExchangeStreamCaptureMode", None)
        self._status: Any = self.library.hipStreamIsCapturing
        self._status.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self._seen_modules = -1
        self._other_runtimes: tuple[str, ...] = ()

    # -- results -------------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; what it returned beside its status. Raises where that is no success."""
        try:
            result = getattr(self.api, name)(*arguments)
        except ValueError as error:
            result = unnamed(error)
        if result[0]:
            raise self.error(name, result[0])
        return result[1] if len(result) > 1 else None

    def error(self, call: str, code: Any) -> DriverError:
        """The error of a call, with its name and what it means there."""
        self.forget_error()
        number = int(code)
        symbol, text = self._describe(number)
        meaning = MEANINGS.get((call, number)) or GENERAL.get(number) or text
        out_of_memory = number == OUT_OF_MEMORY and call != "hipImportExternalMemory"  # there it says nothing of memory
        kind = OutOfMemoryError if out_of_memory else DriverError
        return kind(call, number, symbol, meaning)

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function whose failure may be an answer; its status as an int, and what it returned beside it."""
        code, *found = self._returned(name, *arguments)
        if code:
            self.forget_error()
        return (int(code), *found)

    def _returned(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """What a function has returned, whatever its status."""
        try:
            result: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except ValueError as error:
            return unnamed(error)
        return result

    def forget_error(self) -> None:
        """Take back this thread's last error, which is told by now.

        torch and others ask for it behind launches of their own, and would take it for theirs.
        """
        self._returned("hipGetLastError")

    def _no_init(self, call: str, code: int) -> BackendUnavailableError:
        """What a runtime that does not start has said."""
        if code in _NO_DEVICE:
            return BackendUnavailableError(
                "the HIP runtime is here, and no device that it may use.",
                fix="HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES may hide it; the user must be in the groups render "
                "and video, and a container needs --device /dev/kfd --device /dev/dri.",
            )
        symbol, text = self._describe(code)
        return BackendUnavailableError(
            f"{call} failed with {symbol} ({code}): {text}.", fix="rocminfo shows whether runtime and kernel fit."
        )

    def _describe(self, number: int) -> tuple[str, str]:
        try:
            code = self.api.hipError_t(number)
        except ValueError:  # newer than the bindings
            return f"hipError_t {number}", "unknown to these bindings"
        _, *text = self._returned("hipGetErrorString", code)
        return code.name, (text_of(text[0]) if text else "") or code.name

    # -- what there is -------------------------------------------------------------------------------------------

    def has(self, symbol: str) -> bool:
        """Whether the bindings know a function, and the library has it."""
        return hasattr(self.api, symbol) and hasattr(self.library, symbol)

    def library_file(self) -> str:
        """The file of the library that is called; empty where the system does not say."""
        for path, ranges in _runtimes().items():
            if any(self._address in mapped for mapped in ranges):
                return path
        return ""

    def check_runtime(self) -> None:
        """Refuse others' streams where a second HIP runtime is in the process: theirs may be of that one.

        A handle of one means nothing to the other, or another object, and 0 is the default stream of either; nothing
        that is called would say so. Who loads a runtime is a module that is imported (torch's ROCm wheel brings one of
        its own), so this looks again when there are more modules or fewer.
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
                f"this process has two HIP runtimes, {mine}, which gpuinterop calls, and "
                f"{' and '.join(self._other_runtimes)}; a stream of the one is none of the other, and 0 is the default "
                "stream of both. Let both be one file, before anything is imported: "
                + (
                    f"ROCM_PATH={_root(self._other_runtimes[0])} makes hip-python load the other's."
                    if self.is_new
                    else "import torch or CuPy before gpuinterop's first device is asked for, or let LD_LIBRARY_PATH "
                    f"name {os.path.dirname(self._other_runtimes[0])}."
                ),
            )

    # -- interrupts ----------------------------------------------------------------------------------------------
    #
    # CPython looks at signals after a call of C's, at the entry of a function, and where a loop turns back; a handler
    # may raise anything there. So what must not be lost is stored by C, in the step that makes the call, and what must
    # be called in any case stands in a `finally` by itself, with no other call before it.

    def run(self, work: Callable[..., _T], *arguments: Any, ordinal: int | None = None, aside: bool = True) -> _T:
        """Call `work` with a device current (``hipSetDevice``), or with whichever is; what was is put back.

        With `aside` it may do what a capture elsewhere forbids: one in global mode, which is torch's default, refuses
        an event query or a free of any thread, and ours say nothing about what is being captured
        (``hipThreadExchangeStreamCaptureMode``).

        An interrupt may lose what `work` returns: what it makes stands in a `Made`.
        """
        before = ordinal if ordinal is None else self.call("hipGetDevice")
        mode = ctypes.c_int(_RELAXED)  # and once it is exchanged the thread's own, until that is put back
        place, put = ctypes.byref(mode), self.library.hipSetDevice
        try:
            if before != ordinal and (code := put(ordinal)):
                raise self.error("hipSetDevice", code)
            try:
                if aside and self._exchange is not None and (code := self._exchange(place)):
                    raise self.error("hipThreadExchangeStreamCaptureMode", code)
                return work(*arguments)
            finally:
                if mode.value != _RELAXED and (code := self._exchange(place)):
                    self.warn("hipThreadExchangeStreamCaptureMode", code)
        finally:
            if before != ordinal and (code := put(before)):
                self.warn("hipSetDevice", code)

    def warn(self, call: str, code: Any) -> None:
        """A call that was to take something back has failed.

        It is no more than a warning: what was made in between is the caller's, and what has failed before is what is
        raised.
        """
        warn_leak(f"{self.error(call, code)}; what it takes back stays as it is")

    def capture_status(self, stream: int) -> tuple[int, int]:
        """``hipStreamIsCapturing``: its status as a number, and a ``hipStreamCaptureStatus``."""
        found = ctypes.c_int()
        code = int(self._status(stream, ctypes.byref(found)))
        if code:
            self.forget_error()
        return code, found.value


class Gpu:
    """A device. What HIP makes belongs to the one that is current in the calling thread."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal

    def run(self, work: Callable[..., _T], *arguments: Any, aside: bool = True) -> _T:
        """`Driver.run` calls `work` on this device. `aside` is for what belongs to no stream."""
        return self.driver.run(work, *arguments, ordinal=self.ordinal, aside=aside)

    def call(self, name: str, *arguments: Any, aside: bool = True) -> Any:
        """`Driver.call` calls a function that makes nothing, on this device."""
        return self.driver.run(self.driver.call, name, *arguments, ordinal=self.ordinal, aside=aside)

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        return self.driver.run(self.driver.status, name, *arguments, ordinal=self.ordinal)

    def create(self, made: _MadeT, work: Callable[[], object], *, aside: bool = True) -> _MadeT:
        """`work` makes it on this device; it is taken back where anything raises."""
        try:
            self.driver.run(work, ordinal=self.ordinal, aside=aside)
            return made
        except BaseException:
            made.undo()
            raise


class Made:
    """What one call of the runtime makes and another takes back, each of them once, whatever interrupts."""

    __slots__ = ("_found", "_left", "_place", "_told", "gpu", "handle", "more")

    back: ClassVar[str]
    """The function that takes it back. It is given the handle and `more`."""

    def __init__(self, gpu: Gpu, *more: int) -> None:
        self.gpu = gpu
        self.more = more
        self.handle = 0
        self._place = ctypes.c_void_p()
        self._found: list[int] = []
        """What the call has returned that makes it."""
        self._left: Iterator[tuple[ctypes.c_void_p, ...]] | None = None
        """What `back` is still to be given: C takes it out in the step that makes the call."""
        self._told: list[int] = []
        """What `back` has returned."""

    @property
    def made(self) -> bool:
        return self._found == _SUCCESS

    def create(self, name: str, *arguments: Any) -> Self:
        """Make it, with this call alone."""
        return self.gpu.create(self, partial(self.make, name, *arguments))

    def make(self, name: str, *arguments: Any) -> None:
        """Make it, on the device, by a call that writes the handle to where its first argument points."""
        self._call(name, ctypes.byref(self._place), *map(_wide, arguments))

    def add(self, name: str, handle: int, *arguments: Any) -> None:
        """As `make`, by a call that is given the handle."""
        self.handle = self._place.value = handle
        self._call(name, self._place, *map(_wide, arguments))

    def _call(self, name: str, *arguments: Any) -> None:
        self._found.extend(starmap(getattr(self.gpu.driver.library, name), (arguments,)))
        if self._found != _SUCCESS:
            raise self.gpu.driver.error(name, self._found[0])
        self.handle = self._place.value or 0

    def free(self) -> None:
        """Take it back, on the device. Called again it does nothing; but what has failed, and was told, is tried."""
        if not self.made:
            return
        if self._left is None:
            self._left = iter(((self._place, *map(_wide, self.more)),))
        self._told.extend(starmap(getattr(self.gpu.driver.library, self.back), self._left))
        if self._told and self._told != _SUCCESS:
            failed = self.gpu.driver.error(self.back, self._told[0])
            self._left, self._told = None, []
            raise failed

    def release(self) -> None:
        """`free` it, whichever device is current."""
        self.gpu.run(self.free)

    def undo(self) -> None:
        """`release` it behind a failure; if that fails as well, it is a warning: see `Driver.warn`."""
        try:
            self.release()
        except DriverError as error:
            self.gpu.driver.warn(error.call, error.code)


class Room(Backend):
    """A part of the contract, which a room implements. The rooms share the driver."""

    def __init__(self) -> None:
        self._driver = Driver()


def _wide(argument: Any) -> ctypes.c_void_p:
    """An argument of any integer type, or the address of one of the bindings' structs."""
    return ctypes.c_void_p(int(argument))


def unnamed(error: ValueError) -> tuple[int]:
    """What a call has returned whose status the bindings have no name for: the runtime is newer than they are."""
    found = re.match(r"(\d+) is not a valid hipError_t$", str(error))
    if found is None:
        raise error
    return (int(found[1]),)


def version_text(number: int) -> str:
    """70253211 is 7.2.53211."""
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
    """No runtime at all, or one that the bindings cannot use."""
    # Not one that is there and lacks a library of its own; Windows does not tell the two apart.
    if re.search(r"libamdhip64[^:]*: cannot open shared object|amdhip64\S*\.dll", str(error)):
        return BackendUnavailableError(
            "there is no HIP runtime here: libamdhip64.so (amdhip64.dll on Windows) was not found.",
            fix="Install ROCm; where it is installed, let LD_LIBRARY_PATH name its lib folder (/opt/rocm/lib). The "
            "name without a version is needed: where there is a libamdhip64.so.7 only, install ROCm's development "
            "package, or make a link.",
            absent=not os.path.exists(_KFD),  # with such a GPU it is a broken installation, and no machine without HIP
        )
    text = str(error).rstrip(".")
    return BackendUnavailableError(f"the HIP runtime cannot be used: {text}.", fix="Install ROCm 6.0 or newer.")


def _runtimes() -> dict[str, list[range]]:
    """The HIP runtimes of this process, by file, and where each is mapped; empty where the system does not say."""
    found: dict[str, list[range]] = {}
    for addresses, path in system.mapped_files():
        if _RUNTIME_FILE.search(path):
            found.setdefault(path, []).append(addresses)
    return found


def _root(library: str) -> str:
    """What ROCM_PATH is to be, for hip-python to load this one: the folder above lib."""
    return os.path.dirname(os.path.dirname(library))


def install(requirement: str) -> str:
    """How hip-python is installed on this system."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return f"pip install '{requirement}'"
    return "PyPI has hip-python for Linux on x86-64 only: install AMD's own package of it for this system"


def _library_name(is_new: bool) -> str:
    """The name that the bindings have loaded the runtime by: the same name gives the same library."""
    if is_new:
        from rocm.bindings.util.paths import get_library_path

        return os.fsdecode(get_library_path("amdhip64"))
    return "libamdhip64.so"


def _load() -> tuple[Any, str, bool]:
    """The module, its version, and whether it is 10 or newer."""
    errors: list[ImportError] = []
    for load in (_load_new, _load_old):
        try:
            api, version, is_new = load()
        except ImportError as error:
            errors.append(error)
            continue
        # A package of that name proves nothing: `hip` is also the name of others, and `cuda` of hip-python-interop.
        if hasattr(api, "hipRuntimeGetVersion"):
            return api, version, is_new
        errors.append(ImportError(f"the package at {getattr(api, '__file__', None)} is not hip-python"))
    raise BackendUnavailableError(
        f"hip-python cannot be imported ({'; '.join(map(str, errors))}).",
        fix=install("gpuinterop[hip]"),
        absent=_are_absent(errors),
    ) from errors[-1]


def _load_new() -> tuple[Any, str, bool]:
    from rocm import version
    from rocm.bindings import hip

    return hip, str(version.__version__), True


def _load_old() -> tuple[Any, str, bool]:
    from hip import _version, hip

    return hip, str(_version.__version__), False


def _are_absent(errors: Iterable[ImportError]) -> bool:
    return all(isinstance(error, ModuleNotFoundError) for error in errors)
