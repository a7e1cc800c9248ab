"""Errors and warnings of gpuinterop. A message reports what went wrong and what to do about it.

Examples
--------
>>> try:
...     device.import_memory(fd, size=65536)
... except gi.ArgumentTypeError as error:
...     print(error.argument, "is wrong")
handle is wrong
"""

from __future__ import annotations

import copy
import errno
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    from .capabilities import Capability

__all__ = [
    "ArgumentTypeError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "DeviceNotFoundError",
    "DriverError",
    "GpuInteropError",
    "HandleError",
    "InvalidArgumentError",
    "LeakedResourceWarning",
    "OutOfMemoryError",
    "PeerError",
    "ResourceBusyError",
    "ResourceClosedError",
    "SemaphoreTimeoutError",
    "UnsupportedError",
    "again",
    "report",
    "warn_leak",
]


DEV_MODE = sys.flags.dev_mode
passed_over = {f"{__package__}.", "contextlib."}
"""Prefixes of packages whose frames are not the user's, each ending in a dot. `discovery` adds the backends'."""


class GpuInteropError(Exception):
    """Base of every error that gpuinterop raises.

    Examples
    --------
    >>> try:
    ...     stream = gi.get_backend("metal").device().create_stream()
    ... except gi.GpuInteropError as error:
    ...     print(f"no sharing: {error}")
    no sharing: there is no backend 'metal'; installed: ...
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (multiprocessing, pytest-xdist). The signatures of __init__ differ, so this
        # does not call it, and the attributes survive.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[GpuInteropError], args: tuple[Any, ...], attributes: dict[str, Any]) -> GpuInteropError:
    # Not cls.__new__: OutOfMemoryError inherits MemoryError's, which does not fit its instances' layout.
    error: GpuInteropError = cls.__base__.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class BackendNotFoundError(GpuInteropError, LookupError):
    """No installed backend has that name. The message lists the installed backends.

    Examples
    --------
    >>> gi.get_backend("metal")
    Traceback (most recent call last):
        ...
    gpuinterop.errors.BackendNotFoundError: there is no backend 'metal'; installed: ...
    """


class DeviceNotFoundError(GpuInteropError, LookupError):
    """No device has that ordinal or identity. The message lists the available devices.

    Examples
    --------
    >>> gi.get_backend("host").device(7)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.DeviceNotFoundError: ordinal: host has no device 7; devices: 0: ...
    """


class BackendUnavailableError(GpuInteropError, RuntimeError):
    """A backend is installed but does not work on this machine.

    Parameters
    ----------
    reason : str
        Why, in one line.
    fix : str, optional
        What to install or set.
    absent : bool
        Whether the vendor's software is not installed. If so, choosing another backend needs no warning.

    Attributes
    ----------
    reason, fix, absent
        The arguments.

    Examples
    --------
    >>> for name, installed in gi.backends().items():
    ...     if installed.error is not None and not installed.error.absent:
    ...         problem = f"{name} does not work here: {installed.error.reason} {installed.error.fix}"
    """

    def __init__(self, reason: str, *, fix: str = "", absent: bool = False) -> None:
        super().__init__(f"{reason} {fix}".strip() if fix else reason)
        self.reason = reason
        self.fix = fix
        self.absent = absent


class UnsupportedError(GpuInteropError, NotImplementedError):
    """The device cannot do this. Raised before the driver is called or a handle is consumed.

    Attributes
    ----------
    capability : Capability
        The gap in the capability table, with scope, reason, reference and workaround.

    Examples
    --------
    >>> try:
    ...     memory = device.import_memory(gi.DmaBufFd(fd), size=65536)
    ... except gi.UnsupportedError as error:
    ...     print(error.capability.workaround)
    export the memory as OpaqueFd; lavapipe and SwiftShader both do.
    """

    def __init__(self, capability: Capability, *, context: str = "", message: str = "") -> None:
        where = f" on {context}" if context else ""
        instead = f" Instead: {capability.workaround}" if capability.workaround else ""
        super().__init__(
            message or f"{capability.cell} is {capability.support.value}{where}: {capability.reason}{instead}"
        )
        self.capability = capability


class InvalidArgumentError(GpuInteropError, ValueError):
    """An argument has a value that cannot work.

    Attributes
    ----------
    argument : str
        The name of the argument.

    Examples
    --------
    >>> try:
    ...     buffer.fill(256)
    ... except gi.InvalidArgumentError as error:
    ...     error.argument
    'byte'
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument has the wrong type, most often a plain int instead of a typed handle.

    Examples
    --------
    >>> device.import_memory(fd, size=65536)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ArgumentTypeError: handle: import_memory expects one of OpaqueFd, ...
    """


class HandleError(GpuInteropError, ValueError):
    """A handle cannot be used: it is closed or consumed, of a different kind, or from another device.

    Examples
    --------
    >>> handle = gi.OpaqueFd(fd)
    >>> with device.import_memory(handle, size=65536) as memory:
    ...     device.import_memory(handle, size=65536)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.HandleError: handle: this OpaqueFd was consumed by host import_memory; use handle.duplicate() ...
    """


class ResourceClosedError(GpuInteropError):
    """The object was closed.

    Examples
    --------
    >>> stream.close()
    >>> buffer.fill(7, stream=stream)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ResourceClosedError: ...
    """


class ResourceBusyError(GpuInteropError):
    """Pending work or exported arrays still use the object.

    Examples
    --------
    >>> memory = device.import_memory(gi.OpaqueFd(fd), size=65536)
    >>> array = np.asarray(memory.map_buffer().view(16))
    >>> memory.close(timeout=0)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ResourceBusyError: ...
    """


class SemaphoreTimeoutError(GpuInteropError, TimeoutError):
    """A wait expired. The message names the semaphores and values.

    Examples
    --------
    >>> with device.create_semaphore(gi.TimelineFd) as semaphore:
    ...     semaphore.host_wait(1, timeout=0.01)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.SemaphoreTimeoutError: ... was not signalled to 1 in 0.01 s; is the other side alive?
    """


class PeerError(GpuInteropError, ConnectionError):
    """Another process exited, or did not send a valid gpuinterop message.

    Examples
    --------
    >>> import socket
    >>> here, there = socket.socketpair()
    >>> there.close()
    >>> with here:
    ...     gi.ipc.receive_handle(here, gi.OpaqueFd)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.PeerError: the peer closed the connection after 0 of 16 bytes.
    """


class DriverError(GpuInteropError):
    """A native call failed. If the process has run out of file descriptors, the message reports it; drivers do not.

    Attributes
    ----------
    call : str
        The native function, for example ``cuImportExternalMemory``.
    code : int
        Its status.
    symbol : str
        The name of the status, for example ``CUDA_ERROR_INVALID_VALUE``.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> import os
    >>> with open(os.devnull) as file, gi.OpaqueFd(file.fileno()) as handle:
    ...     try:
    ...         device.import_memory(handle, size=65536)
    ...     except gi.DriverError as error:
    ...         print(error.call, error.symbol)
    cuImportExternalMemory CUDA_ERROR_...
    """

    def __init__(self, call: str, code: int, symbol: str, meaning: str = "") -> None:
        text = f"{call} failed with {symbol} ({code})" + (f": {meaning}" if meaning else "")
        short = _short_of_descriptors(symbol)
        super().__init__(f"{text.rstrip('.')}: {short}" if short else text)
        self.call = call
        self.code = code
        self.symbol = symbol


def _short_of_descriptors(symbol: str) -> str:
    if symbol not in ("EMFILE", "ENFILE"):
        try:
            os.close(os.open(os.sep, os.O_RDONLY))
            return ""
        except OSError as error:
            symbol = errno.errorcode.get(error.errno or 0, "")
    if symbol == "EMFILE":
        limit = os.sysconf("SC_OPEN_MAX")
        return f"out of file descriptors (limit {limit}); close some, or raise the limit: ulimit -n, resource.setrlimit"
    return "the system is out of file descriptors; raise the limit: sysctl fs.file-max." if symbol == "ENFILE" else ""


class OutOfMemoryError(DriverError, MemoryError):
    """A native call failed because memory ran out.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> device.allocate(1 << 50)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.OutOfMemoryError: cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2)...
    """


class LeakedResourceWarning(ResourceWarning):
    """An object that owns a handle, a mapping or a semaphore was dropped without ``close()``.

    Examples
    --------
    >>> import warnings
    >>> allocation = device.allocate(4096)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", gi.LeakedResourceWarning)
    ...     del allocation
    >>> print(caught[0].message)
    Allocation ... was dropped without close()
    """


def again(failure: BaseException) -> BaseException:
    """Return a copy of a stored failure, to raise it with the original as its cause.

    If the same object were raised twice, its tracebacks would pile up, and two threads could write to it at once.

    Examples
    --------
    >>> first = gi.DriverError("cuStreamQuery", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    >>> second = gi.errors.again(first)
    >>> second is first, second.symbol, second.__cause__ is first
    (False, 'CUDA_ERROR_ILLEGAL_ADDRESS', True)
    """
    try:
        duplicate = copy.copy(failure)
    except Exception:
        return failure  # another library's, and it cannot be copied
    if not isinstance(duplicate, type(failure)):
        return failure
    duplicate.__cause__ = failure
    return duplicate


class _Unraisable:
    """Passes an exception to `sys.unraisablehook`, which receives the exceptions of finalizers."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def report(error: BaseException) -> None:
    """Report an exception that no caller can catch.

    Examples
    --------
    >>> import sys
    >>> hook, reported = sys.unraisablehook, []
    >>> sys.unraisablehook = lambda args: reported.append(str(args.exc_value))
    >>> gi.errors.report(ValueError("a callback failed"))
    >>> sys.unraisablehook = hook
    >>> reported
    ['a callback failed']
    """
    _Unraisable(error)


def users_frame() -> tuple[FrameType, int]:
    """The nearest frame of the user's code, and the `stacklevel` with which the caller can warn about it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(tuple(passed_over)):
        frame, level = frame.f_back, level + 1
    return frame, level


def place() -> str:
    """File and line of the user's code that creates an object, for warnings in Python's development mode."""
    frame, _ = users_frame()
    return f" [made at {frame.f_code.co_filename}:{frame.f_lineno}]"


def warn_leak(message: str) -> None:
    """Warn of a leak. If warnings are errors, report the error instead of raising it.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", gi.LeakedResourceWarning)
    ...     gi.errors.warn_leak("releasing Buffer #7 failed")
    >>> print(caught[0].message)
    releasing Buffer #7 failed
    """
    try:
        warnings.warn(message, LeakedResourceWarning, stacklevel=3)
    except LeakedResourceWarning as error:
        report(error)
