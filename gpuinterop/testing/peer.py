"""A second process with the backend under test: one process exports, the other imports."""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import discovery
from .._core.multicast import import_multicast
from ..errors import SemaphoreTimeoutError
from ..handles import Binary, FdHandle, handle_types
from ..sharing import attach, subscribe
from .child import Child, Remote
from .failed_releases import leaks_raised
from .multimem import multimem_store

if TYPE_CHECKING:
    from .._core.allocation import Allocation
    from .._core.device import Device
    from .._core.memory import Buffer
    from .._core.multicast import MulticastMapping, MulticastObject
    from .._core.stream import Stream
    from .._core.view import View
    from ..sharing import AttachedArrays, Subscription
    from ..sharing.arrays import Access

__all__ = ["BackendPeer"]

_LIMIT = float(os.environ.get("GPUINTEROP_KIT_LIMIT") or "20")  # as `suites.base` has it, and checks it


class BackendPeer(Child):
    """The other process: you call the methods of `_Commands`.

    It opens the backend and ordinal of `device`. An answer must arrive within `reply_limit` seconds; None waits for
    ever.
    """

    def __init__(self, device: Device, *, reply_limit: float | None = max(60.0, 2 * _LIMIT)) -> None:
        super().__init__("the second process of the test", __name__, limit=reply_limit)
        self._device = device.backend, device.ordinal
        self._commands: Remote | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(_Commands, name):
            raise AttributeError(name)
        return functools.partial(self._command, name)

    def _command(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Run a command in the other process, which takes over the handles among the arguments."""
        try:
            self._commands = self._commands or self.run(f"{__name__}:_Commands", *self._device)
            return self._commands.call(name, *arguments, **keywords)
        finally:
            for argument in arguments:
                if isinstance(argument, FdHandle):
                    argument.close()


class _Placed:
    """The memory of an attached array, on a stream."""

    def __init__(self, buffer: Buffer, start: int, stream: Stream) -> None:
        self._buffer, self._start, self._stream = buffer, start, stream

    def fill(self, byte: int, *, offset: int, size: int) -> None:
        self._buffer.fill(byte, offset=self._start + offset, size=size, stream=self._stream)

    def copy_to_host(self, target: Any, *, offset: int) -> None:
        self._stream.synchronize(_LIMIT)
        self._buffer.copy_to_host(target, offset=self._start + offset)


class _Commands:
    """Commands of the other process; their results are sent back, with handles."""

    remote_attributes = ()

    def __init__(self, backend: str, ordinal: int) -> None:
        self._device = device = discovery.get_backend(backend).device(ordinal)
        self._scope = ExitStack()
        self._stream = device.create_stream()
        self._buffer: Any = None
        self._semaphore: Any = None
        self._arrays: AttachedArrays
        self._camera: Subscription
        self._access: Access[View]
        self._object: MulticastObject
        self._bound: Allocation
        self._mapping: MulticastMapping

    def import_allocation(self, handle: Any, size: int) -> None:
        self._buffer = self._scope.enter_context(self._device.import_allocation(handle, size=size)).buffer

    def allocate(self, size: int, type_name: str) -> tuple[Any, int]:
        """Allocate; return a handle and the size."""
        kind: Any = handle_types()[type_name]
        allocation = self._scope.enter_context(self._device.allocate(size, kind))
        self._buffer = allocation.buffer
        return allocation.export(), allocation.size

    def fill(self, byte: int, offset: int, size: int) -> None:
        """Fill part of the allocation."""
        self._buffer.fill(byte, offset=offset, size=size)

    def read(self, offset: int, size: int) -> bytes:
        """Read part of the allocation."""
        target = np.zeros(size, np.uint8)
        self._buffer.copy_to_host(target, offset=offset)
        return target.tobytes()

    def attach(self, descriptor: bytes, name: str) -> None:
        """Attach to shared arrays; `read` and `fill` then use the memory of the array `name`, from its start."""
        self._arrays = attach(descriptor, timeout=_LIMIT, device=self._device)
        self._buffer = _Placed(*self._arrays._place(name), self._stream)

    def acquire(self) -> None:
        """Acquire the attached arrays on the stream, which `read` and `fill` then use."""
        self._arrays.acquire(self._stream)

    def release(self) -> None:
        self._arrays.release(self._stream)

    def subscribe(self, name: str) -> None:
        self._camera = self._scope.enter_context(subscribe(name, timeout=_LIMIT, device=self._device))

    def take(self, timeout: float) -> tuple[int, int, bool]:
        """Take the newest frame and start to read it on the stream, for `read`; return its number and reports."""
        frame = self._camera.next(timeout)
        self._access = frame.read(self._stream)
        view = self._access.__enter__()
        self._buffer = _Placed(view._buffer, view._start, self._stream)
        return frame.number, frame.dropped, frame.restarted

    def give_back(self) -> None:
        """Give the frame back after the stream's work."""
        self._access.__exit__(None, None, None)

    def detach(self) -> None:
        self._arrays.close(timeout=_LIMIT)

    def import_semaphore(self, handle: Any) -> None:
        self._semaphore = self._scope.enter_context(self._device.import_semaphore(handle))

    def create_semaphore(self, type_name: str) -> Any:
        """Create a semaphore in the child, and return a handle."""
        kind: Any = handle_types()[type_name]
        self._semaphore = self._scope.enter_context(self._device.create_semaphore(kind))
        return self._semaphore.export()

    def signal(self, value: int) -> None:
        """Signal on a stream, and wait until that is done."""
        self.enqueue(signal=value)
        self._stream.synchronize(_LIMIT)

    def host_signal(self, value: int) -> None:
        """Signal from the calling thread."""
        self._semaphore.host_signal(*self._value(value))

    def enqueue(
        self, *, wait: int | None = None, fill: tuple[int, int, int] | None = None, signal: int | None = None
    ) -> None:
        """Enqueue a wait, a fill of the allocation (byte, offset, size) and a signal; returns at once."""
        if wait is not None:
            self._semaphore.wait(self._stream, *self._value(wait))
        if fill is not None:
            byte, offset, size = fill
            self._buffer.fill(byte, offset=offset, size=size, stream=self._stream)
        if signal is not None:
            self._semaphore.signal(self._stream, *self._value(signal))

    def idle(self, timeout: float) -> bool:
        """Whether the child's stream is idle within `timeout` seconds."""
        try:
            self._stream.synchronize(timeout)
        except SemaphoreTimeoutError:
            return False
        return True

    def wait(self, value: int, *, timeout: float) -> bool:
        """Wait on the calling thread."""
        try:
            self._semaphore.host_wait(*self._value(value), timeout=timeout)
        except SemaphoreTimeoutError:
            return False
        return True

    def import_multicast(self, handle: Any, devices: int, size: int) -> None:
        """Import the multicast object of a team of this many devices."""
        self._object = import_multicast(handle, devices, size, device=self._device)

    def add_device(self) -> None:
        self._object.add_device(self._device)

    def bind_memory(self, size: int) -> None:
        """Allocate memory, for `fill` and `read` too, and bind it to the multicast object."""
        self._bound = self._device.allocate(size)
        self._buffer = self._bound.buffer
        self._object.bind_memory(self._bound, assume_all_added=True)

    def map_multicast(self) -> None:
        self._mapping = self._object.map(assume_all_added=True)

    def multimem_store(self, value: int, count: int, *, first: int = 0) -> None:
        """Store a word `count` times through the mapping, and wait until that is done."""
        multimem_store(self._stream, self._mapping, value, count, first=first, timeout=None)

    def close_multicast(self, timeout: float = _LIMIT) -> None:
        """Close the multicast object and its bound memory; raises if something was not released."""
        with leaks_raised():
            self._object.close(timeout=timeout)
            self._bound.close(timeout=timeout)

    def _value(self, value: int) -> tuple[int, ...]:
        return () if self._semaphore.kind is Binary else (value,)
