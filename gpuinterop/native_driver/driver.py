"""The driver: its functions, its errors, the current device or context, and objects that are created and released."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_void_p
from functools import partial
from typing import Any, ClassVar, Final, Self, TypeVar

from ..backend import Backend, DeviceInfo, leave_to_core, pci_bus_id
from ..errors import DriverError, GpuInteropError, OutOfMemoryError, warn_leak
from ..handles import FdHandle, Handle
from .errors import MEANINGS, OTHER_MEANINGS, OUT_OF_MEMORY
from .table import Table

_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
_Place: Final = c_void_p * 1  # ctypes passes an array as its address, without a `byref`

_ObjectT = TypeVar("_ObjectT", bound="NativeObject")


class NativeDriver(ABC):
    """The functions of a driver by their names without the prefix. A call returns a status; 0 is success."""

    table: ClassVar[Table]
    version: int
    fds_by_address: bool = False  # whether an import of an allocation expects the descriptor's address

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        self._meanings = {**MEANINGS, **self.table.meanings}
        self._other_meanings = {**OTHER_MEANINGS, **self.table.other_meanings}
        self.load()
        self._exchange = self.function("ThreadExchangeStreamCaptureMode")
        self._current, self._enter = self.function("GetCurrent"), self.function("MakeCurrent")
        self._leave = self.function("RestoreCurrent")

    @abstractmethod
    def load(self) -> None:
        """Load and initialize the library and set `version`, or raise `BackendUnavailableError`."""

    @abstractmethod
    def find(self, name: str) -> Callable[..., int]:
        """The library's function with this full name, for ctypes."""

    @abstractmethod
    def describe(self, code: int) -> tuple[str, str]:
        """The name and the text of a status."""

    def forget_error(self) -> None:  # noqa: B027 - CUDA's driver stores none
        """Clear the error that the driver stores for the calling thread."""

    def restore(self, before: Any) -> int:
        """Make the content of an array current again; return the status."""
        return self._leave(c_void_p(before[0]))

    def native(self, name: str) -> str:
        """The full name of a function."""
        return self.table.names.get(name) or self.table.prefix + name

    def function(self, name: str) -> Callable[..., int]:
        """A function of the driver for ctypes. Integers must be as wide as its parameters."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self.find(self.native(name))
        return function

    def status(self, name: str, *arguments: Any) -> int:
        """Call a function that may fail without an error; return its status. Integers are widened to pointers."""
        wide = [c_void_p(argument) if isinstance(argument, int) else argument for argument in arguments]
        if code := self.function(name)(*wide):
            self.forget_error()
        return code

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; raise unless it succeeds."""
        if code := self.status(name, *arguments):
            raise self.error(name, code)

    def ask(self, name: str, *arguments: Any, kind: Any = c_int) -> Any:
        """Call a function that writes a value of `kind` to its first argument; return the value."""
        place = kind()
        self.call(name, byref(place), *arguments)
        return place.value

    def text(self, name: str, *arguments: Any) -> str:
        """Call a function that writes a text to its first argument, whose size is the second argument."""
        place = ctypes.create_string_buffer(256)
        self.call(name, place, len(place), *arguments)
        return place.value.decode(errors="replace")

    def attribute(self, device: int, number: int) -> int:
        """A device's attribute by its number; 0 if the driver does not have it."""
        value = c_int()
        return 0 if self.status("DeviceGetAttribute", byref(value), number, device) else value.value

    def error(self, name: str, code: int) -> DriverError:
        """Return the error of a call, with the status's name and its meaning for this call."""
        self.forget_error()
        symbol, text = self.describe(code)
        meaning = self._meanings.get((name, code)) or self._other_meanings.get(code) or text
        lacks_memory = code == OUT_OF_MEMORY and name not in self.table.not_out_of_memory
        return (OutOfMemoryError if lacks_memory else DriverError)(self.native(name), code, symbol, meaning)

    def warn(self, error: DriverError) -> None:
        """Warn that undoing something has failed. The caller has its result, or raises an earlier failure."""
        warn_leak(f"{error}; its object or setting stays as it is")

    def run(self, current: int | None, work: Callable[..., Any], *arguments: Any, relaxed: bool = True) -> Any:
        """Call `work` with a context or device current (None: do not change it), then restore the previous one.

        With `relaxed`, the calls do not invalidate another thread's capture in global mode, torch's default, as any
        event query or free would. Pass it for calls that do not belong to a capture.
        """
        mode = c_int(_RELAXED)  # after the exchange this is the thread's own mode, to be restored
        place = byref(mode)
        before = None  # set before the driver call: after an exception the driver is asked whether it succeeded
        try:
            if current is not None:
                present = _Place()
                if code := self._current(present):
                    raise self.error("GetCurrent", code)
                # Change nothing if it is already current, as in threads that use torch or CuPy.
                if (present[0] or 0) != current:
                    before = present
                    if code := self._enter(c_void_p(current)):
                        raise self.error("MakeCurrent", code)
            try:
                if relaxed and (code := self._exchange(place)):
                    raise self.error("ThreadExchangeStreamCaptureMode", code)
                return work(*arguments)
            finally:
                if mode.value != _RELAXED and (code := self._exchange(place)):
                    self.warn(self.error("ThreadExchangeStreamCaptureMode", code))
        finally:
            if before is not None:
                present = _Place()
                if not self._current(present) and (present[0] or 0) == current and (code := self.restore(before)):
                    self.warn(self.error("RestoreCurrent", code))


class NativeDevice:
    """A device with its driver's calls. `current` is the context or the ordinal that makes it current."""

    driver: Any

    def __init__(self, driver: NativeDriver, ordinal: int, current: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.run = partial(driver.run, current)  # with the device current

    def call(self, name: str, *arguments: Any, relaxed: bool = True) -> None:
        """`NativeDriver.call` on this device, for functions that do not create objects."""
        self.run(self.driver.call, name, *arguments, relaxed=relaxed)

    def create(self, made: _ObjectT, work: Callable[..., object], *arguments: Any, relaxed: bool = True) -> _ObjectT:
        """Let `work` create the object on this device. If the driver refuses, undo it."""
        try:
            self.run(work, *arguments, relaxed=relaxed)
            return made
        except GpuInteropError as error:
            made.fail(error)
            raise


class NativeObject:
    """An object that one driver call creates and another releases."""

    release_call: ClassVar[str]
    blocks: ClassVar[bool] = False  # whether the release waits for the device's work

    def __init__(self, device: NativeDevice, *extra: Any) -> None:
        self.device = device
        self.handle = 0
        self.extra = extra  # arguments of `release_call` after the handle
        self.made = False

    def create(self, name: str, *arguments: Any, closes: Handle | None = None) -> Self:
        """Create the object with a single call. If the call leaves a handle's descriptor open, close it afterwards."""

        def work() -> None:
            self.make(name, *arguments)
            if isinstance(closes, FdHandle):
                os.close(closes.fd)

        return self.device.create(self, work)

    def make(self, name: str, *arguments: Any) -> None:
        """Create the object with a call that writes its handle to the address in the first argument."""
        place = c_void_p()
        self.device.driver.call(name, byref(place), *arguments)
        self.handle = place.value or 0
        self.made = True

    def add(self, name: str, handle: int, *arguments: Any) -> None:
        """Create the object like `make`, with a call that accepts the handle."""
        self.device.driver.call(name, handle, *arguments)
        self.handle = handle
        self.made = True

    def free(self) -> None:
        """Release the object on the device. If it fails, you can repeat it."""
        if self.made:
            self.device.driver.call(self.release_call, self.handle, *self.extra)
            self.made = False

    def release(self) -> None:
        """Call `free` with any device current."""
        self.device.run(self.free)

    def fail(self, error: BaseException) -> None:
        """Undo what existed before `error`: at once, or, if that blocks, when the core finds that it does not."""
        if self.blocks and self.made:
            leave_to_core(error, self.undo_parts)
        else:
            self.undo()

    def undo_parts(self) -> None:
        """Call `release`. Also works for an object that was only partly created."""
        self.release()

    def undo(self) -> None:
        """Call `undo_parts` after a failed call; if that fails too, warn (`NativeDriver.warn`)."""
        try:
            self.undo_parts()
        except DriverError as error:
            self.device.driver.warn(error)


class NativeBackend(Backend):
    """Base of the classes that implement parts of the contract. They share the driver."""

    driver_type: ClassVar[type[Any]]
    _driver: Any
    _infos: tuple[DeviceInfo, ...] | None = None
    pageable_copies_block: ClassVar[bool] = True
    releases_block: ClassVar[bool] = True

    release: Any = staticmethod(NativeObject.release)
    """`NativeObject.release_call` names the native function."""
    destroy_stream = destroy_event = unmap_buffer = destroy_memory = destroy_semaphore = release
    destroy_array = unmap_allocation = release_allocation = unpin = detach_blocks = release

    def __init__(self) -> None:
        self._driver = self.driver_type()

    def devices(self) -> Sequence[DeviceInfo]:
        if self._infos is None:  # a cached_property would slow down every access to an attribute
            self._infos = tuple(map(self._info, range(self._driver.ask("DeviceGetCount"))))
        return self._infos

    @abstractmethod
    def identity(self, device: int) -> tuple[bytes | None, bytes | None, str]:
        """UUID, LUID and note of a device for its `DeviceInfo`. `device` is the driver's number."""

    def number(self, ordinal: int) -> int:
        """The driver's number of a device."""
        return ordinal

    def _info(self, ordinal: int) -> DeviceInfo:
        driver, device = self._driver, self.number(ordinal)
        uuid, luid, note = self.identity(device)
        return DeviceInfo(
            ordinal=ordinal,
            name=driver.text("DeviceGetName", device),
            uuid=uuid,
            pci_bus_id=pci_bus_id(driver.text("DeviceGetPCIBusId", device)),
            luid=luid,
            dlpack=(driver.table.dlpack, ordinal),
            array_interface="__cuda_array_interface__",  # torch and CuPy use it on ROCm too
            note=note,
        )


def as_pointer(address: int) -> Any:
    """A pointer or handle in the form that ctypes passes fastest: it converts a ``c_void_p`` in each call."""
    return byref(ctypes.c_char.from_address(address))
