"""An exporter in a child process: the same interface, so that whatever is tested is tested across processes too.

Commands go over a Unix socket pair, as a length-prefixed JSON object and the bytes that belong to it; handles go over
the same socket through :mod:`gpuinterop.ipc`. The child answers in any order: what may block runs on threads of its
own, and never keeps another command waiting. It ends when its parent closes it or dies, and not at Ctrl-C: that is for
the parent to act on. A call takes no longer than its time-out, whatever has become of the child.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from dataclasses import asdict, replace
from typing import Any

from .. import errors, system
from .._arguments import check_type
from ..bridge import Endpoint, OwnTimelineEndpoint
from ..capabilities import Capabilities, Capability, Cell, Scope, Support
from ..errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    GpuInteropError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    UnsupportedError,
)
from ..handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    Binary,
    DeviceIdentity,
    FdHandle,
    MemoryHandle,
    Timeline,
    TimelineFd,
    handle_types,
)
from ..ipc import receive_handles, send_handles
from .base import (
    Exporter,
    ExporterImage,
    ExporterMemory,
    ExporterSemaphore,
    Fill,
    ImageParameters,
    Kernel,
    Submission,
)

__all__ = ["ProcessExporter"]

_START_LIMIT = 60.0  # an interpreter, a Vulkan loader and its drivers, on a loaded machine
_REPLY_LIMIT = 30.0
_END_LIMIT = 20.0
_HEADER = struct.Struct("<III")  # bytes of JSON, bytes of data, number of handles
_MAX_MESSAGE = 1 << 31
_MAX_THREADS = 1 << 16  # as many as there are commands that block: with any fewer, one that would end a wait waits too
_KINDS: Mapping[str, type] = {"binary": Binary, "timeline": Timeline}


def _kind_name(kind: type) -> str:
    for name, known in _KINDS.items():
        if kind is known:
            return name
    raise ArgumentTypeError("kind", f"expected Binary or Timeline, got {kind!r}.")


# -- the wire ---------------------------------------------------------------------------------------------------------


class _Stuck(Exception):
    """A message could not be sent in time."""


class _Wire:
    """Messages both ways; sending is safe from any thread, receiving is one thread's."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.broken = False
        """Whether a message was left unfinished: what would follow it could not be told from its rest."""
        self._lock = threading.Lock()

    def send(
        self,
        message: Mapping[str, Any],
        data: bytes = b"",
        handles: Sequence[FdHandle] = (),
        *,
        deadline: float | None = None,
    ) -> None:
        """Send a message; raises _Stuck when it is not on its way by `deadline`, of time.monotonic()."""
        text = json.dumps({**message, "types": [type(handle).type_name for handle in handles]}).encode()
        if not self._lock.acquire(timeout=-1 if deadline is None else _left(deadline)):
            raise _Stuck("an earlier message is still being sent")
        try:
            if self.broken:
                raise _Stuck("an earlier message was not taken to its end")
            self._all(_HEADER.pack(len(text), len(data), len(handles)) + text + data, deadline)
            if handles:
                send_handles(self.socket, handles)
        finally:
            self._lock.release()

    def _all(self, data: bytes, deadline: float | None) -> None:
        if deadline is None:
            self.socket.sendall(data)
            return
        # Not settimeout(): the reader, on the same socket, waits for as long as it takes.
        rest, ready = memoryview(data), select.poll()
        ready.register(self.socket, select.POLLOUT)
        self.broken = True  # until the end; Ctrl-C leaves it so
        while rest:
            try:
                rest = rest[self.socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                left = _left(deadline)
                if not left:
                    self.broken = len(rest) < len(data)
                    raise _Stuck("it does not read") from None
                ready.poll(math.ceil(left * 1000))
        self.broken = False

    def receive(self) -> tuple[dict[str, Any], bytes, list[FdHandle]] | None:
        """None at the end of the connection."""
        header = self._exactly(_HEADER.size)
        if header is None:
            return None
        length, size, count = _HEADER.unpack(header)
        if length + size > _MAX_MESSAGE:
            raise PeerError("the other process sent no message of an exporter.")
        text, data = self._exactly(length), self._exactly(size)
        if text is None or data is None:
            return None
        message: dict[str, Any] = json.loads(text)
        handles: list[FdHandle] = []
        if count:
            handles = receive_handles(self.socket, [handle_types()[name] for name in message["types"]])
            for handle in handles:
                handle.trusted = True  # one of the two has started the other
        return message, data, handles

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self.socket.recv(min(size - len(data), 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _describe_error(error: BaseException) -> dict[str, Any]:
    plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | bool | None)}
    described: dict[str, Any] = {"error": type(error).__name__, "text": str(error), "attributes": plain}
    if isinstance(error, UnsupportedError):
        found = error.capability
        described["capability"] = found.as_dict()
    return described


def _rebuild_error(described: Mapping[str, Any]) -> BaseException:
    cls = getattr(errors, described["error"], None)
    if not (isinstance(cls, type) and issubclass(cls, GpuInteropError)):
        return PeerError(f"the exporter's process failed with {described['error']}: {described['text']}")
    error = cls.__new__(cls)
    error.args = (described["text"],)
    error.__dict__.update(described["attributes"])
    if "capability" in described:
        error.__dict__["capability"] = _capability(described["capability"])
    return error


def _capability(entry: Mapping[str, Any]) -> Capability:
    kind = entry["handle_type"]
    cell = Cell.parse(f"{entry['operation']}:{kind}" if kind else entry["operation"])
    return Capability(
        operation=cell.operation,
        handle_type=cell.handle_type,
        support=Support(entry["support"]),
        scope=Scope(entry["scope"]) if entry["scope"] else None,
        reason=entry["reason"] or "",
        reference=entry["reference"] or "",
        workaround=entry["workaround"] or "",
    )


def _describe_identity(identity: DeviceIdentity) -> dict[str, Any]:
    return {
        "name": identity.name,
        "uuid": identity.uuid.hex() if identity.uuid else None,
        "luid": identity.luid.hex() if identity.luid else None,
        "pci_bus_id": identity.pci_bus_id,
        "driver_uuid": identity.driver_uuid.hex() if identity.driver_uuid else None,
        "is_cpu": identity.is_cpu,
    }


def _identity(entry: Mapping[str, Any]) -> DeviceIdentity:
    marks = {name: bytes.fromhex(entry[name]) if entry[name] else None for name in ("uuid", "luid", "driver_uuid")}
    return DeviceIdentity(
        name=entry["name"],
        uuid=marks["uuid"],
        luid=marks["luid"],
        driver_uuid=marks["driver_uuid"],
        pci_bus_id=entry["pci_bus_id"],
        is_cpu=entry["is_cpu"],
    )


# -- the parent's side ------------------------------------------------------------------------------------------------


class _Child:
    """The process, and the calls to it."""

    def __init__(self, inner: str, options: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self._wire = _Wire(ours)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[tuple[Any, bytes, list[FdHandle]]]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._closing = False
        with theirs, contextlib.ExitStack() as left:
            left.callback(ours.close)
            left.callback(ours.shutdown, socket.SHUT_RDWR)
            self._reader = system.start_thread(self._read)
            # -c and not -m: the package has imported this module, so running it would make a second copy of it.
            code = "from gpuinterop.exporters.process import _main; _main()"
            command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
            # A terminal sends Ctrl-C to the child too. Held back from its first instruction on: it would die of it in
            # the middle of its imports, traceback and all.
            held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
            left.pop_all()
        try:
            self.start = self.call("open", timeout=_START_LIMIT, inner=inner, options=dict(options))[0]
        except BaseException:
            self.close()
            raise

    def call(
        self,
        name: str,
        *,
        timeout: float = _REPLY_LIMIT,
        data: bytes = b"",
        handles: Sequence[FdHandle] = (),
        **arguments: Any,
    ) -> tuple[Any, bytes, list[FdHandle]]:
        deadline = time.monotonic() + timeout
        number = next(self._numbers)
        future: Future[tuple[Any, bytes, list[FdHandle]]] = Future()
        with self._lock:
            if self._closing:
                raise ResourceClosedError("the exporter of another process was closed.")
            if self._ended:
                raise self._death()
            self._waiting[number] = future
        try:
            with contextlib.suppress(OSError):  # the reader sees the end, and says so below
                message = {"number": number, "call": name, "arguments": arguments}
                self._wire.send(message, data, handles, deadline=deadline)
            return future.result(_left(deadline))
        except _Stuck as error:
            raise PeerError(
                f"the exporter's process {self.process.pid} did not take {name!r} in {timeout:g} s ({error}); "
                "is it stopped? Close it."
            ) from None
        except FutureTimeoutError:
            # TimeoutError is also what a SemaphoreTimeoutError of the child's is.
            if future.done():
                raise
            raise PeerError(
                f"the exporter's process {self.process.pid} did not answer {name!r} in {timeout:g} s; is it stopped?"
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _read(self) -> None:
        try:
            while (received := self._wire.receive()) is not None:
                message, data, handles = received
                with self._lock:
                    future = self._waiting.pop(message["number"], None)
                if future is None:
                    for handle in handles:
                        handle.close()
                elif "error" in message:
                    future.set_exception(_rebuild_error(message))
                else:
                    future.set_result((message["result"], data, handles))
        except Exception:  # no message of ours: treated as the end
            pass
        with self._lock:
            self._ended = True
            waiting, self._waiting = self._waiting, {}
        death = None
        for future in waiting.values():
            death = death or self._death()
            future.set_exception(death)

    def _death(self) -> PeerError:
        try:
            status = self.process.wait(_END_LIMIT)
        except subprocess.TimeoutExpired:
            return PeerError(f"the exporter's process {self.process.pid} closed its connection and did not end.")
        how = f"exit status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how += f", {signal.Signals(-status).name}"
        return PeerError(f"the exporter's process {self.process.pid} died ({how}); open another one.")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_END_LIMIT)
        self._reader.join(_END_LIMIT)

    def close(self) -> None:
        if self._closing:
            return
        ending = False
        if not self._wire.broken:
            try:
                self.call("shutdown", timeout=_REPLY_LIMIT)
                ending = True
            except PeerError:  # a process that does not answer: its end may not come
                pass
            except GpuInteropError:  # of the exporter's close
                ending = True
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):
            self._wire.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(_END_LIMIT if ending else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(_END_LIMIT)
        self._wire.socket.close()


class _Remote:
    """An object of the child's."""

    def __init__(self, child: _Child, number: int) -> None:
        self.child = child
        self.number = number
        self.closed = False

    def call(self, method: str, *, timeout: float = _REPLY_LIMIT, data: bytes = b"", **arguments: Any) -> Any:
        return self.full(method, timeout=timeout, data=data, **arguments)[0]

    def full(
        self, method: str, *, timeout: float = _REPLY_LIMIT, data: bytes = b"", **arguments: Any
    ) -> tuple[Any, bytes, list[FdHandle]]:
        if self.closed:
            raise ResourceClosedError("the exporter's object was closed.")
        return self.child.call("method", timeout=timeout, data=data, object=self.number, method=method, **arguments)

    def export(self) -> Any:
        return self.full("export")[2][0]

    def close(self) -> None:
        if not self.closed:
            # A child that has died has closed it already.
            with contextlib.suppress(PeerError, ResourceClosedError):
                self.call("close")
            self.closed = True


class ProcessMemory(ExporterMemory):
    """Memory of an exporter in another process."""

    def __init__(self, remote: _Remote, size: int, dedicated: bool) -> None:
        self._remote = remote
        self.size = size
        self.dedicated = dedicated

    def export(self) -> MemoryHandle:
        handle: MemoryHandle = self._remote.export()
        return handle

    def write(self, offset: int, data: bytes) -> None:
        self._remote.call("write", data=bytes(data), offset=offset)

    def read(self, offset: int, size: int) -> bytes:
        return self._remote.full("read", offset=offset, size=size)[1]

    def close(self) -> None:
        self._remote.close()


class ProcessImage(ExporterImage):
    """An image of an exporter in another process."""

    def __init__(self, remote: _Remote, parameters: ImageParameters, *, size: int, dedicated: bool, usage: int) -> None:
        self._remote = remote
        self.parameters = parameters
        self.size = size
        self.dedicated = dedicated
        self.usage = usage

    def export(self) -> MemoryHandle:
        handle: MemoryHandle = self._remote.export()
        return handle

    def write(self, level: int, data: bytes) -> None:
        self._remote.call("write", data=bytes(data), level=level)

    def read(self, level: int) -> bytes:
        return self._remote.full("read", level=level)[1]

    def close(self) -> None:
        self._remote.close()


def _endpoint(handle: AnySemaphoreHandle) -> Endpoint:
    """Make an endpoint of a handle: only our own timelines' descriptors say how they are waited for."""
    assert isinstance(handle, TimelineFd)
    try:
        return OwnTimelineEndpoint(handle)
    except BaseException:
        handle.close()  # of a driver, most likely: only its own process can look at that
        raise


class ProcessSemaphore(ExporterSemaphore):
    """A semaphore of an exporter in another process."""

    def __init__(self, remote: _Remote, kind: type) -> None:
        self._remote = remote
        self.kind = kind

    def export(self) -> AnySemaphoreHandle:
        handle: AnySemaphoreHandle = self._remote.export()
        return handle

    def signal(self, value: int = 0) -> None:
        self._remote.call("signal", value=value)

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        return bool(self._remote.call("wait", timeout=timeout + _REPLY_LIMIT, value=value, seconds=timeout))

    def endpoint(self) -> Endpoint:
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "another process's binary semaphores cannot be reached from this one.")
        return _endpoint(self.export())

    def hold_lock(self) -> None:
        """Call :meth:`.memfd.MemfdSemaphore.hold_lock` in the other process."""
        self._remote.call("hold_lock")

    def close(self) -> None:
        self._remote.close()


class ProcessSubmission(Submission):
    """Work of an exporter in another process, which forgets it when it has said that it is done."""

    def __init__(self, remote: _Remote) -> None:
        self._remote = remote
        self._finished = False

    def done(self, timeout: float = 0.0) -> bool:
        if not self._finished and self._remote.call("done", timeout=timeout + _REPLY_LIMIT, seconds=timeout):
            self._finished = self._remote.closed = True
        return self._finished

    def close(self) -> None:
        self._remote.close()


class ProcessExporter(Exporter):
    """Another exporter in a child process.

    Parameters
    ----------
    inner : str
        ``memfd`` or ``vulkan``.
    identity : DeviceIdentity, optional
        See :func:`gpuinterop.exporters.open_exporter`.
    **options
        For the inner exporter; what JSON can say.

    Attributes
    ----------
    inner : str
        The name that was given.
    pid : int
        The child's process id.

    Raises
    ------
    PeerError
        The child died, or did not answer in time; from every call.
    GpuInteropError
        The inner exporter's errors come back as what they are.
    """

    name = "process"

    def __init__(self, inner: str = "memfd", *, identity: DeviceIdentity | None = None, **options: Any) -> None:
        if not hasattr(socket, "AF_UNIX") or sys.platform == "win32":
            raise BackendUnavailableError(
                f"handles are passed over Unix sockets, which {sys.platform} does not have.", fix="Use it on Linux."
            )
        if inner not in ("memfd", "vulkan"):
            raise InvalidArgumentError("inner", f"expected memfd or vulkan, got {inner!r}.")
        self.inner = inner
        self._ours = inner == "memfd" and identity is None  # our own timelines, which every process can see
        if identity is not None:
            options["identity"] = _describe_identity(identity)
        self._child = _Child(inner, options)
        # A child outlives an exporter that was dropped without close() otherwise, or interrupted below.
        self._finalizer = weakref.finalize(self, _Child.close, self._child)
        start = self._child.start
        self.pid = self._child.process.pid
        self.driver = start["driver"]
        self.device = start["device"]
        self.identity = _identity(start["identity"])
        self._capabilities = Capabilities(map(_capability, start["capabilities"]), owner=self.device)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def create_memory(self, size: int) -> ProcessMemory:
        made = self._child.call("create_memory", size=size)[0]
        return ProcessMemory(_Remote(self._child, made["object"]), made["size"], made["dedicated"])

    def import_memory(self, handle: AllocationHandle, size: int) -> ProcessMemory:
        fd = check_type(handle, FdHandle, "handle", "a VmmFd")
        made = self._child.call("import_memory", handles=[fd], size=size)[0]
        handle.close()  # what the child has taken over is its duplicate
        return ProcessMemory(_Remote(self._child, made["object"]), made["size"], made["dedicated"])

    def image_gap(self, parameters: ImageParameters) -> str:
        return str(self._child.call("image_gap", parameters=asdict(parameters))[0])

    def create_image(self, parameters: ImageParameters) -> ProcessImage:
        made = self._child.call("create_image", parameters=asdict(parameters))[0]
        return ProcessImage(_Remote(self._child, made.pop("object")), parameters, **made)

    @property
    def endpoint_gap(self) -> str:
        if self._ours:
            return ""
        return "the other process's driver keeps its semaphores to itself: this process's CPU cannot look at them"

    def create_semaphore(self, kind: type, *, exportable: bool = True) -> ProcessSemaphore:
        made = self._child.call("create_semaphore", kind=_kind_name(kind))[0]
        return ProcessSemaphore(_Remote(self._child, made["object"]), kind)

    def submit(
        self,
        *,
        wait: Sequence[tuple[ExporterSemaphore, int]] = (),
        fill: Sequence[Fill] = (),
        run: Sequence[Kernel] = (),
        signal: Sequence[tuple[ExporterSemaphore, int]] = (),
    ) -> Submission:
        number = self._child.call(
            "submit",
            wait=[[self._number(semaphore), value] for semaphore, value in wait],
            fill=[asdict(replace(item, memory=self._number(item.memory))) for item in fill],
            run=[asdict(replace(kernel, memory=self._number(kernel.memory))) for kernel in run],
            signal=[[self._number(semaphore), value] for semaphore, value in signal],
        )[0]
        return ProcessSubmission(_Remote(self._child, number))

    def kill(self) -> None:
        """End the child with SIGKILL, as a crash would; returns when it is gone."""
        self._child.kill()

    def close(self) -> None:
        self._finalizer()

    def _number(self, thing: Any) -> int:
        remote = getattr(thing, "_remote", None)
        if not isinstance(remote, _Remote) or remote.child is not self._child:
            raise ArgumentTypeError("submit", f"takes objects of this exporter, not {type(thing).__name__}.")
        if remote.closed:
            raise ResourceClosedError("the exporter's object was closed.")
        return remote.number


# -- the child's side -------------------------------------------------------------------------------------------------

_Reply = tuple[Any, bytes, list[FdHandle]]
_BLOCKING = {
    "close", "create_image", "done", "read", "wait", "write",
}  # fmt: skip


class _Server:
    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._exporter: Exporter | None = None
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "gpuinterop-command")  # starts one when none is idle

    def serve(self) -> None:
        while (received := self._wire.receive()) is not None:
            message, data, handles = received
            name, arguments = message["call"], message["arguments"]
            if handles:
                arguments["handles"] = handles
            if name == "shutdown":
                self._answer(message["number"], self._shutdown, {}, b"")
                return
            handler = getattr(self, f"_call_{name}")
            if name in _BLOCKING or arguments.get("method") in _BLOCKING:
                with contextlib.suppress(RuntimeError):  # no thread can be started: then it is for the next idle one
                    self._threads.submit(self._answer, message["number"], handler, arguments, data)
            else:  # in the order of the commands
                self._answer(message["number"], handler, arguments, data)

    def _answer(self, number: int, handler: Callable[..., _Reply], arguments: dict[str, Any], data: bytes) -> None:
        try:
            result, reply, handles = handler(data, **arguments)
        except BaseException as error:
            reply_message, reply, handles = {"number": number, **_describe_error(error)}, b"", []
        else:
            reply_message = {"number": number, "result": result}
        try:
            with contextlib.suppress(OSError, PeerError):  # the parent has gone: the watch ends us
                self._wire.send(reply_message, reply, handles)
        finally:
            for handle in handles:
                handle.close()

    def _shutdown(self, data: bytes) -> _Reply:
        if self._exporter is not None:
            self._exporter.close()
        return None, b"", []

    def _keep(self, thing: Any) -> int:
        number = next(self._numbers)
        self._objects[number] = thing
        return number

    @property
    def exporter(self) -> Exporter:
        assert self._exporter is not None
        return self._exporter

    def _call_open(self, data: bytes, inner: str, options: dict[str, Any]) -> _Reply:
        from . import open_exporter

        if "identity" in options:
            options["identity"] = _identity(options["identity"])
        self._exporter = exporter = open_exporter(inner, **options)
        return (
            {
                "driver": exporter.driver,
                "device": exporter.device,
                "identity": _describe_identity(exporter.identity),
                "capabilities": [found.as_dict() for found in exporter.capabilities.values()],
            },
            b"",
            [],
        )

    def _call_create_memory(self, data: bytes, size: int) -> _Reply:
        memory = self.exporter.create_memory(size)
        return {"object": self._keep(memory), "size": memory.size, "dedicated": memory.dedicated}, b"", []

    def _call_import_memory(self, data: bytes, handles: list[FdHandle], size: int) -> _Reply:
        with contextlib.ExitStack() as left:
            for handle in handles:
                left.callback(handle.close)  # does nothing to a handle that was taken over
            allocation: Any = handles[0]
            memory = self.exporter.import_memory(allocation, size)
        return {"object": self._keep(memory), "size": memory.size, "dedicated": memory.dedicated}, b"", []

    def _call_image_gap(self, data: bytes, parameters: dict[str, Any]) -> _Reply:
        return self.exporter.image_gap(ImageParameters(**parameters)), b"", []

    def _call_create_image(self, data: bytes, parameters: dict[str, Any]) -> _Reply:
        image = self.exporter.create_image(ImageParameters(**parameters))
        described = {"size": image.size, "dedicated": image.dedicated, "usage": image.usage}
        return {"object": self._keep(image), **described}, b"", []

    def _call_create_semaphore(self, data: bytes, kind: str) -> _Reply:
        return {"object": self._keep(self.exporter.create_semaphore(_KINDS[kind]))}, b"", []

    def _call_submit(self, data: bytes, wait: list[Any], fill: list[Any], run: list[Any], signal: list[Any]) -> _Reply:
        submission = self.exporter.submit(
            wait=[(self._objects[number], value) for number, value in wait],
            fill=[Fill(**{**item, "memory": self._objects[item["memory"]]}) for item in fill],
            run=[Kernel(**{**kernel, "memory": self._objects[kernel["memory"]]}) for kernel in run],
            signal=[(self._objects[number], value) for number, value in signal],
        )
        return self._keep(submission), b"", []

    def _call_method(self, data: bytes, object: int, method: str, **arguments: Any) -> _Reply:
        if method == "done" and object not in self._objects:  # another thread of the parent's was told already
            return True, b"", []
        target = self._objects[object]
        if method == "close":
            self._objects.pop(object)
            target.close()
        elif method == "export":
            return None, b"", [target.export()]
        elif method == "read":
            return None, target.read(**arguments), []
        elif method == "write":
            target.write(data=data, **arguments)
        elif method == "wait":
            return target.wait(arguments["value"], timeout=arguments["seconds"]), b"", []
        elif method == "done":
            finished = target.done(arguments["seconds"])
            if finished:  # most callers drop what is done, and never close it
                self._objects.pop(object, None)
                target.close()
            return finished, b"", []
        else:
            getattr(target, method)(**arguments)
        return None, b"", []


def _watch(parent: int) -> None:
    """End this process with its parent. The socket's end would not tell: a fork of the parent may hold it open."""
    try:
        fd = os.pidfd_open(parent)
    except (AttributeError, OSError):
        return
    if os.getppid() == parent:
        select.select([fd], [], [])
    os._exit(1)


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    system.start_thread(functools.partial(_watch, int(sys.argv[2])))
    try:
        _Server(_Wire(connection)).serve()
    finally:
        # Not through the interpreter's end: a thread that is blocked in a driver would keep it from coming.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    _main()
