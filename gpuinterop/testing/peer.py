"""A second process that uses the backend under test: for what one process exports and another imports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from .. import errors
from .._core import registry
from .._core.multicast import import_multicast
from ..errors import GpuInteropError, PeerError, SemaphoreTimeoutError
from ..exporters.process import _Wire
from ..handles import Binary, FdHandle, handle_types
from ..sharing import attach
from .failed_releases import leaks_raised
from .multimem import multimem_store
from .parent_death import die_with

if TYPE_CHECKING:
    from .._core.allocation import Allocation
    from .._core.device import Device
    from .._core.memory import Buffer
    from .._core.multicast import MulticastMapping, MulticastObject
    from .._core.stream import Stream
    from ..sharing import AttachedArrays

__all__ = ["BackendPeer"]

_REPLY_LIMIT = 60.0


class BackendPeer:
    """The other process; one command at a time.

    Parameters
    ----------
    device : Device
        The child uses the device of the same backend and ordinal. It ends with the thread that has started it.
    reply_limit : float, optional
        Seconds to wait for an answer; None for ever.
    """

    def __init__(self, device: Device, *, reply_limit: float | None = _REPLY_LIMIT) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(reply_limit)
        self._reply_limit = reply_limit
        self._wire = _Wire(ours)
        with theirs:
            code = "from gpuinterop.testing.peer import _main; _main()"
            arguments = [str(os.getpid()), str(theirs.fileno()), device.backend, str(device.ordinal)]
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self, limit: float | None = 20.0) -> None:
        """End the child; it notices the end of the connection, and is killed after `limit` seconds."""
        self._wire.socket.close()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """End the child with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def import_allocation(self, handle: FdHandle, size: int) -> None:
        """Import and map an allocation; takes over `handle`."""
        self._send("import_allocation", handle, size=size)

    def allocate(self, size: int, type_name: str) -> tuple[Any, int]:
        """Allocate, and return a handle and the size."""
        message, _, handles = self._send("allocate", size=size, type_name=type_name)
        return handles[0], message["result"]

    def fill(self, byte: int, offset: int, size: int) -> None:
        """Fill a part of the allocation."""
        self._send("fill", byte=byte, offset=offset, size=size)

    def read(self, offset: int, size: int) -> bytes:
        """Read a part of the allocation."""
        return self._send("read", offset=offset, size=size)[1]

    def attach(self, descriptor: bytes, name: str) -> None:
        """Attach shared arrays; `read` and `fill` are of the memory that the named one lies in, from its start on."""
        self._send("attach", descriptor=descriptor.hex(), array=name)

    def acquire(self) -> None:
        """Acquire the attached arrays on the stream, on which `read` and `fill` then are."""
        self._send("acquire")

    def release(self) -> None:
        """Release the attached arrays."""
        self._send("release")

    def detach(self) -> None:
        """End the attachment."""
        self._send("detach")

    def import_semaphore(self, handle: Any) -> None:
        """Import a semaphore; takes over `handle`."""
        self._send("import_semaphore", handle)

    def create_semaphore(self, type_name: str) -> Any:
        """Create one there, and return a handle of it."""
        return self._send("create_semaphore", type_name=type_name)[2][0]

    def signal(self, value: int) -> None:
        """Signal on a stream, and wait until that is done."""
        self._send("signal", value=value)

    def host_signal(self, value: int) -> None:
        """Signal from the calling thread."""
        self._send("host_signal", value=value)

    def enqueue(
        self, *, wait: int | None = None, fill: tuple[int, int, int] | None = None, signal: int | None = None
    ) -> None:
        """Enqueue on the stream there, in this order, a wait, a fill of the allocation (byte, offset, size), a signal.

        Returns at once.
        """
        self._send("enqueue", wait=wait, fill=fill, signal=signal)

    def idle(self, timeout: float) -> bool:
        """Whether the stream there comes to its end in `timeout` seconds."""
        return bool(self._send("idle", timeout=timeout)[0]["result"])

    def wait(self, value: int, *, timeout: float) -> bool:
        """Wait on the calling thread."""
        return bool(self._send("wait", value=value, timeout=timeout)[0]["result"])

    def import_multicast(self, handle: FdHandle, devices: int, size: int) -> None:
        """Import a multicast object of a team of so many devices; takes over `handle`."""
        self._send("import_multicast", handle, devices=devices, size=size)

    def add_device(self) -> None:
        """Add the device there to the multicast object."""
        self._send("add_device")

    def bind_memory(self, size: int) -> None:
        """Allocate, and bind that to the multicast object; `fill` and `read` are of it from now on."""
        self._send("bind_memory", size=size)

    def map_multicast(self) -> None:
        """Map the multicast object."""
        self._send("map_multicast")

    def multimem_store(self, value: int, count: int, *, first: int = 0) -> None:
        """Store a word `count` times to the mapped multicast object, and wait until that is done."""
        self._send("multimem_store", value=value, count=count, first=first, timeout=self._reply_limit)

    def close_multicast(self, timeout: float = 20.0) -> None:
        """Close the multicast object, and what was bound to it; raises for what was not released."""
        self._send("close_multicast", timeout=timeout)

    def _send(
        self, name: str, handle: FdHandle | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], bytes, list[FdHandle]]:
        self._wire.send({"call": name, "arguments": arguments}, b"", [handle] if handle is not None else [])
        if handle is not None:
            handle.close()
        received = self._wire.receive()
        if received is None:
            raise PeerError(f"the second process of the test did not answer {name!r} (status {self.process.poll()}).")
        if "error" in received[0]:
            kind = getattr(errors, received[0]["error"], PeerError)
            raise errors._rebuild(kind, (received[0]["text"],), {})  # `__init__` may want more than the text
        return received


class _Placed:
    """The memory of an attached array, on a stream."""

    def __init__(self, buffer: Buffer, start: int, stream: Stream) -> None:
        self._buffer, self._start, self._stream = buffer, start, stream

    def fill(self, byte: int, *, offset: int, size: int) -> None:
        self._buffer.fill(byte, offset=self._start + offset, size=size, stream=self._stream)

    def copy_to_host(self, target: Any, *, offset: int) -> None:
        self._stream.synchronize(20)
        self._buffer.copy_to_host(target, offset=self._start + offset)


class _Server:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._scope = ExitStack()
        self._stream = device.create_stream()
        self._buffer: Any = None
        self._semaphore: Any = None
        self._arrays: AttachedArrays
        self._object: MulticastObject
        self._bound: Allocation
        self._mapping: MulticastMapping

    def handle(
        self, name: str, arguments: dict[str, Any], handles: list[FdHandle]
    ) -> tuple[Any, bytes, list[FdHandle]]:
        match name:
            case "import_allocation":
                imported: Any = handles[0]
                allocation = self._scope.enter_context(self._device.import_allocation(imported, size=arguments["size"]))
                self._buffer = allocation.buffer
            case "allocate":
                kind: Any = handle_types()[arguments["type_name"]]
                allocation = self._scope.enter_context(self._device.allocate(arguments["size"], kind))
                self._buffer = allocation.buffer
                exported: Any = allocation.export()
                return allocation.size, b"", [exported]
            case "fill":
                self._buffer.fill(arguments["byte"], offset=arguments["offset"], size=arguments["size"])
            case "read":
                target = np.zeros(arguments["size"], np.uint8)
                self._buffer.copy_to_host(target, offset=arguments["offset"])
                return None, target.tobytes(), []
            case "import_semaphore":
                semaphore: Any = handles[0]
                self._semaphore = self._scope.enter_context(self._device.import_semaphore(semaphore))
            case "create_semaphore":
                made: Any = handle_types()[arguments["type_name"]]
                self._semaphore = self._scope.enter_context(self._device.create_semaphore(made))
                return None, b"", [self._semaphore.export()]
            case "signal":
                self._semaphore.signal(self._stream, *self._value(arguments))
                self._stream.synchronize(20)
            case "host_signal":
                self._semaphore.host_signal(*self._value(arguments))
            case "enqueue":
                if (value := arguments["wait"]) is not None:
                    self._semaphore.wait(self._stream, *self._value({"value": value}))
                if arguments["fill"] is not None:
                    byte, offset, size = arguments["fill"]
                    self._buffer.fill(byte, offset=offset, size=size, stream=self._stream)
                if (value := arguments["signal"]) is not None:
                    self._semaphore.signal(self._stream, *self._value({"value": value}))
            case "idle":
                try:
                    self._stream.synchronize(arguments["timeout"])
                except SemaphoreTimeoutError:
                    return False, b"", []
                return True, b"", []
            case "wait":
                try:
                    self._semaphore.host_wait(*self._value(arguments), timeout=arguments["timeout"])
                except SemaphoreTimeoutError:
                    return False, b"", []
                return True, b"", []
            case "attach" | "acquire" | "release" | "detach":
                self._share(name, arguments)
            case _:
                self._multicast(name, arguments, handles)
        return None, b"", []

    def _share(self, name: str, arguments: dict[str, Any]) -> None:
        match name:
            case "attach":
                self._arrays = attach(bytes.fromhex(arguments["descriptor"]), device=self._device)
                self._buffer = _Placed(*self._arrays._place(arguments["array"]), self._stream)
            case "detach":
                self._arrays.close(timeout=20)
            case _:
                getattr(self._arrays, name)(self._stream)

    def _multicast(self, name: str, arguments: dict[str, Any], handles: list[FdHandle]) -> None:
        match name:
            case "import_multicast":
                imported: Any = handles[0]
                self._object = import_multicast(imported, arguments["devices"], arguments["size"], device=self._device)
            case "add_device":
                self._object.add_device(self._device)
            case "bind_memory":
                self._bound = self._device.allocate(arguments["size"])
                self._buffer = self._bound.buffer
                self._object.bind_memory(self._bound, assume_all_added=True)
            case "map_multicast":
                self._mapping = self._object.map(assume_all_added=True)
            case "multimem_store":
                multimem_store(self._stream, self._mapping, **arguments)
            case "close_multicast":
                with leaks_raised():
                    self._object.close(timeout=arguments["timeout"])
                    self._bound.close(timeout=arguments["timeout"])
            case _:
                raise PeerError(f"the second process of the test has no command {name!r}.")

    def _value(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        return () if self._semaphore.kind is Binary else (arguments["value"],)


def _main() -> None:
    parent, connection, backend, ordinal = sys.argv[1:]
    die_with(int(parent))  # else a process that hangs in a driver would stay
    wire = _Wire(socket.socket(fileno=int(connection)))
    server = _Server(registry.get_backend(backend).device(int(ordinal)))
    while (received := wire.receive()) is not None:
        message, _, handles = received
        try:
            result, data, out = server.handle(message["call"], message["arguments"], handles)
        except GpuInteropError as error:
            wire.send({"error": type(error).__name__, "text": str(error)})
            continue
        wire.send({"result": result}, data, out)
        for handle in out:
            handle.close()
    os._exit(0)  # a parent that has gone wants no more of us, whatever is pending
