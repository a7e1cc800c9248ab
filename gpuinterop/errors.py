"""Errors and warnings of gpuinterop. Messages say what went wrong and what to do about it."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


class GpuInteropError(Exception):
    """Base of every error that gpuinterop raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (multiprocessing, pytest-xdist): rebuild without calling __init__, whose
        # signatures differ, so that the attributes survive.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[GpuInteropError], args: tuple[Any, ...], attributes: dict[str, Any]) -> GpuInteropError:
    # Not cls.__new__: OutOfMemoryError inherits MemoryError's, which does not fit the layout of its instances.
    error: GpuInteropError = cls.__base__.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class BackendNotFoundError(GpuInteropError, LookupError):
    """A backend of that name is not installed; the message lists the installed ones."""


class DeviceNotFoundError(GpuInteropError, LookupError):
    """No device has that ordinal or identity; the message lists the available devices."""


class BackendUnavailableError(GpuInteropError, RuntimeError):
    """A backend is installed but does not work on this machine.

    Parameters
    ----------
    reason : str
        Why, in one line.
    fix : str, optional
        What to install or set.
    absent : bool
        Whether the vendor's software is not installed, so that choosing another backend needs no warning.

    Attributes
    ----------
    reason, fix, absent
        The arguments.
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
    """

    def __init__(self, capability: Capability, *, context: str = "") -> None:
        where = f" on {context}" if context else ""
        instead = f" Instead: {capability.workaround}" if capability.workaround else ""
        super().__init__(f"{capability.cell} is {capability.support.value}{where}: {capability.reason}{instead}")
        self.capability = capability


class InvalidArgumentError(GpuInteropError, ValueError):
    """An argument has a value that cannot work.

    Attributes
    ----------
    argument : str
        The name of the argument.
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument has the wrong type, most often a bare int instead of a typed handle."""


class HandleError(GpuInteropError, ValueError):
    """A handle cannot be used: closed, consumed, not of the stated kind, or of another device."""


class ResourceClosedError(GpuInteropError):
    """The object was closed."""


class ResourceBusyError(GpuInteropError):
    """The object is still in use by pending work or by exported arrays."""


class SemaphoreTimeoutError(GpuInteropError, TimeoutError):
    """A wait expired; the message names the semaphores and values."""


class PeerError(GpuInteropError, ConnectionError):
    """Another process died, or did not send a valid gpuinterop message."""


class DriverError(GpuInteropError):
    """A native call failed.

    Attributes
    ----------
    call : str
        The native function, e.g. ``cuImportExternalMemory``.
    code : int
        Its status.
    symbol : str
        The status by name, e.g. ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, call: str, code: int, symbol: str, meaning: str = "") -> None:
        super().__init__(f"{call} failed with {symbol} ({code})" + (f": {meaning}" if meaning else ""))
        self.call = call
        self.code = code
        self.symbol = symbol


class OutOfMemoryError(DriverError, MemoryError):
    """A native call failed for lack of memory."""


class LeakedResourceWarning(ResourceWarning):
    """An object that owns a handle, a mapping or a semaphore was dropped without ``close()``."""


def again(failure: BaseException) -> BaseException:
    """Return a copy of a remembered failure to raise, with the original as its cause.

    Raising the same object twice would pile up tracebacks, and two threads would write to it at once.
    """
    try:
        fresh = copy.copy(failure)
    except Exception:
        return failure  # not ours, and it cannot be copied
    if not isinstance(fresh, type(failure)):
        return failure
    fresh.__cause__ = failure
    return fresh


class _Unraisable:
    """Hands an exception to `sys.unraisablehook`, which receives the exceptions of finalizers."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def report(error: BaseException) -> None:
    """Report an exception that no caller can catch."""
    _Unraisable(error)


def warn_leak(message: str, source: object = None) -> None:
    """Warn of a leak; if warnings are errors, report the error instead of raising it."""
    try:
        warnings.warn(message, LeakedResourceWarning, stacklevel=3, source=source)
    except LeakedResourceWarning as error:
        report(error)
