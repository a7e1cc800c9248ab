"""Parts shared by backends whose driver is a library of functions that return a status.

Objects are made and released; a device is made current; descriptors take handles. What CUDA and HIP share beside that
stands at the end. A backend may use this module, and need not: the contract is `gpuinterop.backend`.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Final, Self, TypeVar, cast

from .backend import Address, Backend, leave_to_core
from .errors import ArgumentTypeError, DriverError, GpuInteropError, warn_leak
from .handles import (
    AllocationHandle,
    ArrayLayout,
    ArrayUsage,
    FabricHandle,
    FdHandle,
    Handle,
    OpaqueWin32,
    OpaqueWin32Kmt,
    PointerHandle,
    VmmFd,
    Win32Handle,
)

UNNAMED: Final = (ValueError, KeyError)
"""Errors that bindings raise for a number without a name: the latter cuda-python 12.9, for a status."""

_MadeT = TypeVar("_MadeT", bound="Made")


class NativeDriver(ABC):
    """The functions of a driver. A call's results are a tuple that begins with its status, 0 for success."""

    api: Any
    """The bindings' module."""

    @staticmethod
    @abstractmethod
    def unnamed(error: Exception) -> tuple[int, ...]:
        """Results of a call for which the bindings raise, because a number has no name; raises what is another error.

        The driver is then newer than the bindings.
        """

    @abstractmethod
    def error(self, call: str, code: Any) -> DriverError:
        """Make the error of a call, with the status's name and its meaning for this call."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function and return its results without the status; raise unless that is success."""
        try:  # as `status`, without a frame more
            result = getattr(self.api, name)(*arguments)
        except UNNAMED as error:
            result = self.unnamed(error)
        if result[0]:
            raise self.error(name, result[0])
        return result[1] if len(result) == 2 else result[1:]

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function whose failure may be an answer; return all its results."""
        try:
            result: tuple[Any, ...] = getattr(self.api, name)(*arguments)
        except UNNAMED as error:
            return self.unnamed(error)
        return result

    free = call
    """Call a function that releases an object."""

    @abstractmethod
    def run(self, current: Any, work: Callable[..., Any], *arguments: Any, aside: bool = True) -> Any:
        """Call `work` with what `current` names current, or, for None, with the present one; then restore that.

        With `aside`, calls do not invalidate another thread's capture in global mode, which is torch's default: any
        thread's event query or free would. Pass it for calls unrelated to a capture.
        """

    def attribute(self, call: str, kind: Callable[[int], Any], device: Any, number: int) -> int:
        """A device's attribute by its number; 0 if the bindings or the driver do not know it."""
        try:
            wanted = kind(number)
        except ValueError:  # newer than the bindings
            return 0
        code, *found = self.status(call, wanted, device)
        return 0 if code else int(found[0])

    def warn(self, call: str, code: Any) -> None:
        """Warn that a call that undoes something has failed.

        It does not raise: the caller has what was made meanwhile, or already raises an earlier failure.
        """
        warn_leak(f"{self.error(call, code)}; its object or setting stays as it is")


class NativeDevice:
    """A device, with its driver's calls.

    Parameters
    ----------
    driver : NativeDriver
    ordinal : int
    current : object
        What makes the device current: a context, or the ordinal.
    """

    driver: Any

    def __init__(self, driver: NativeDriver, ordinal: int, current: object) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.run = partial(driver.run, current)
        """The driver's `run`, with the device current."""

    def call(self, name: str, *arguments: Any, aside: bool = True) -> Any:
        """`NativeDriver.call` calls a function that does not create objects, on this device."""
        return self.run(self.driver.call, name, *arguments, aside=aside)

    def status(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self.run(self.driver.status, name, *arguments)
        return found

    def create(self, made: _MadeT, work: Callable[[], object], *, aside: bool = True) -> _MadeT:
        """Have `work` make the object on this device; undo it if the driver refuses."""
        try:
            self.run(work, aside=aside)
            return made
        except GpuInteropError as error:
            made.fail(error)
            raise


class Made(ABC):
    """An object that one driver call makes and another releases."""

    back: ClassVar[str]
    """Name of the function that releases it."""
    blocks: ClassVar[bool] = False
    """Whether that function waits for work of the device."""
    device: Any
    handle: Any

    def __init__(self, device: NativeDevice, *more: Any) -> None:
        self.device = device
        self.handle = 0
        self.more = more
        """Arguments of `back` behind the handle."""
        self.made = False

    def create(self, name: str, *arguments: Any) -> Self:
        """Make the object, with this call alone: if it fails, there is nothing to undo."""
        self.device.run(self.make, name, *arguments)
        return self

    def load(self, handle: Handle, name: str, *arguments: Any) -> Self:
        """Make the object of a handle, with a call that leaves its descriptor open: then this closes it."""

        def work() -> None:
            self.make(name, *arguments)
            if isinstance(handle, FdHandle):
                os.close(handle.fd)

        return cast(Self, self.device.create(self, work))

    @abstractmethod
    def make(self, name: str, *arguments: Any) -> None:
        """Make the object on the device, with a call that returns its handle."""

    def free(self) -> Any:
        """Release the object on the device; return the call's result. A failed release may be repeated."""
        if not self.made:
            return None
        result = self.device.driver.free(self.back, self.handle, *self.more)
        self.made = False
        return result

    def release(self) -> None:
        """Call `free`, with any device current."""
        self.device.run(self.free)

    def fail(self, error: BaseException) -> None:
        """`undo` what was made before `error`: at once, or, if that blocks, when the core finds that it does not."""
        if self.blocks and self.made:
            leave_to_core(error, self.take_back)
        else:
            self.undo()

    def take_back(self) -> None:
        """Call `release`, also for an object made in part."""
        self.release()

    def undo(self) -> None:
        """`take_back` what a failed call has made; if that fails as well, warn (`NativeDriver.warn`)."""
        try:
            self.take_back()
        except DriverError as error:
            self.device.driver.warn(error.call, error.code)


def describe(union: Any, handle: Handle, pointer_arm: str = "") -> object:
    """Set a handle in the union of a driver's descriptor; return the object to keep alive until the call.

    Exactly one member is set: the members share their bytes.
    """
    if isinstance(handle, FdHandle):
        union.fd = handle.fd
        return None
    if isinstance(handle, PointerHandle):
        setattr(union, pointer_arm, handle.pointer)
        return None
    assert isinstance(handle, Win32Handle)
    if handle.handle is not None:
        union.win32.handle = handle.handle
        return None
    assert handle.name is not None
    name = ctypes.create_string_buffer(handle.name.encode("utf-16-le") + b"\0\0")
    union.win32.name = ctypes.addressof(name)
    return name


def exported(kind: type[AllocationHandle], found: Any) -> AllocationHandle:
    """The handle of what a driver has exported: a descriptor, which the handle owns from now on, a number, or bytes."""
    if kind is VmmFd:
        os.set_inheritable(found, False)
        return VmmFd.adopt(found)
    if kind is FabricHandle:
        return FabricHandle(found)
    return (OpaqueWin32 if kind is OpaqueWin32 else OpaqueWin32Kmt)(handle=found)


def number_of(types: Mapping[type[Handle], int], handle: Handle, vendor: str) -> int:
    """The driver's number of a handle's type."""
    try:
        return types[type(handle)]
    except KeyError:
        known, got = ", ".join(kind.__name__ for kind in types), type(handle).__name__
        raise ArgumentTypeError("handle", f"expected one of {known}, got {got}; {vendor} imports no other.") from None


# -- CUDA, and HIP, which has its functions under another prefix, and its numbers ---------------------------------

OUT_OF_MEMORY: Final = 2
NOT_READY: Final = 600
NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING, hipStreamNonBlocking
NORMAL, HIGHEST = 0, -100  # priorities: a number beyond the device's range means the end of the range
RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
CAPTURE_IMPLICIT: Final = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, hipErrorStreamCaptureImplicit
_LAYERED: Final = 0x01  # CUDA_ARRAY3D_LAYERED, hipArrayLayered
_DISABLE_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING, hipEventDisableTiming

_CAPTURE: Final = "this call is not allowed in the graph that is being captured; make it before or after the capture."
_LOST: Final = "earlier work on the device has failed, and its context is lost: the process must be started again."
GENERAL: Final[Mapping[int, str]] = {
    3: "the driver is not initialised in this process, and cannot be in a forked one: use the multiprocessing start "
    "method 'spawn'.",
    4: "the driver is being shut down: the process is ending.",
    700: _LOST,
    715: _LOST,
    719: _LOST,
    900: _CAPTURE,
    901: "an earlier call made the graph's capture invalid; end it and capture again.",
    905: "a captured stream cannot wait for work outside of its capture; use semaphores, or record the event in it.",
    CAPTURE_IMPLICIT: "an operation on the default stream would wait for a stream that is being captured.",
    907: "an event that was recorded in a capture cannot be queried.",
}
"""Meaning of a status from any call."""


def answer(result: tuple[Any, ...]) -> Any:
    """The results of a call by the bindings alone, which must not have failed."""
    if result[0]:
        raise DriverError("a call of the yardstick", int(result[0]), result[0].name)
    return result[1] if len(result) == 2 else result[1:]


def array_flags(layout: ArrayLayout, uses: Mapping[ArrayUsage, int]) -> int:
    """The flags of a mipmapped array; `uses` has the driver's for each use."""
    return (_LAYERED if layout.layered else 0) | sum(flag for usage, flag in uses.items() if layout.usage & usage)


class NativeArray(Made):
    """A mapped mipmapped array."""

    blocks = True

    def __init__(self, device: NativeDevice, layout: ArrayLayout) -> None:
        super().__init__(device)
        self.layout = layout


class NativeStream(Made):
    """A stream, created here or adopted."""

    pointer: int
    relative: bool
    """Whether the stream is a default one."""

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work` on the stream: with its device current, if it is a default stream."""
        return self.device.run(work, *arguments, aside=False) if self.relative else work(*arguments)


Calls = namedtuple("Calls", "StreamSynchronize StreamQuery EventQuery EventRecord StreamWaitEvent MemsetD8Async")
"""The native functions' names, with their prefix: made once, for a drain asks often."""


class Room(Backend):
    """The calls of CUDA and HIP that differ in the prefix of the native function, and those that release."""

    native: ClassVar[Calls]
    event_type: ClassVar[type[Made]]
    create_event: ClassVar[str]
    _driver: Any

    release: Any = staticmethod(Made.release)
    """`Made.back` names the native function."""
    destroy_stream = destroy_event = unmap_buffer = destroy_memory = destroy_semaphore = release
    destroy_array = unmap_allocation = release_allocation = unpin = release

    def stream_pointer(self, stream: NativeStream) -> int:
        return stream.pointer

    def synchronize(self, stream: Any) -> None:
        """``cuStreamSynchronize``, ``hipStreamSynchronize``."""
        stream.device.call(self.native.StreamSynchronize, stream.handle)

    def is_idle(self, stream: Any) -> bool:
        """``cuStreamQuery``, ``hipStreamQuery``."""
        return bool(stream.device.run(self._is_reached, self.native.StreamQuery, stream.handle))

    def is_done(self, event: Any) -> bool:
        """``cuEventQuery``, ``hipEventQuery``, with any device current."""
        return bool(self._driver.run(None, self._is_reached, self.native.EventQuery, event.handle))

    def _is_reached(self, call: str, handle: Any) -> bool:
        code = self._driver.status(call, handle)[0]
        if code and code != NOT_READY:
            raise self._driver.error(call, code)
        return not code

    def record(self, stream: Any) -> Made:
        """`create_event` makes an event; ``cuEventRecord`` or ``hipEventRecord`` enqueues it."""
        event = self.event_type(stream.device)

        def work() -> None:
            event.make(self.create_event, _DISABLE_TIMING)
            self._driver.call(self.native.EventRecord, event.handle, stream.handle)

        event.device.create(event, work, aside=False)
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        """``cuStreamWaitEvent``, ``hipStreamWaitEvent``."""
        stream.device.call(self.native.StreamWaitEvent, stream.handle, event.handle, 0, aside=False)

    def fill(self, stream: Any, target: Address, byte: int, size: int) -> None:
        """``cuMemsetD8Async``, ``hipMemsetD8Async``."""
        stream.device.call(self.native.MemsetD8Async, target, byte, size, stream.handle, aside=False)
