"""Parts shared by backends whose driver is a library of functions that return a status.

Objects are made and released; a device is made current; descriptors take handles. A backend may use this module, and
need not: the contract is `gpuinterop.backend`.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, Self, TypeVar

from .backend import leave_to_core
from .errors import DriverError, GpuInteropError, warn_leak
from .handles import (
    AllocationHandle,
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

    __slots__ = ("device", "handle", "made", "more")

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


class Releases:
    """The calls that release, for a backend whose objects are `Made`: `Made.back` names the native function."""

    release: Any = staticmethod(Made.release)
    destroy_stream = destroy_event = unmap_buffer = destroy_memory = destroy_semaphore = release
    destroy_array = unmap_allocation = release_allocation = unpin = release
