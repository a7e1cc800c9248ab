"""An exporter in a child process, with the same interface, so that everything is also tested across processes.

Calls and results are pickled messages of :mod:`gpuinterop.ipc` over a Unix socket pair, with the descriptors of their
handles. Objects stay in the child, which runs their methods. It answers in any order: a call that may block runs on its
own thread and never delays another call. The child exits when its parent closes it or exits. It ignores Ctrl-C, which
is for the parent to handle. Every call ends, whatever happens to the child.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from typing import Any, Final

from ... import ipc, system
from ..._arguments import check_type
from ...bridge import Endpoint, OwnTimelineEndpoint
from ...capabilities import Capabilities
from ...errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    GpuInteropError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
)
from ...handles import AllocationHandle, FdHandle, Timeline
from .base import Exporter, ExporterImage, ExporterMemory, ExporterSemaphore, Submission

__all__ = ["ProcessExporter", "Wire"]

_LIMIT = 300.0  # seconds for an answer or an exit; it only ends a hang, also on a machine that does other work
_MAX_THREADS = 1 << 16  # enough for every blocking call, or the call that would end a wait could not run


# -- the wire ---------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, name: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._name = name

    def persistent_id(self, thing: Any) -> Any:
        return self._name(thing)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, find: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._find = find

    def persistent_load(self, name: Any) -> Any:
        return self._find(name)


class Wire:
    """Messages with handles, in both directions. Any thread can send, one thread receives.

    `name` returns the name by which the other side finds an object, or None for an object that is sent itself. `find`
    returns the object of the other side's name.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: Callable[[Any], Any] = lambda thing: None,
        find: Callable[[Any], Any] = lambda name: None,
    ) -> None:
        self.socket = connection
        self._connection = ipc.Connection(connection)
        self._name, self._find = name, find
        self._lock = threading.Lock()

    def send(self, message: object, limit: float | None = None) -> None:
        """Send a message within `limit` seconds; the caller keeps its handles."""
        handles: list[FdHandle] = []

        def name(thing: Any) -> Any:
            if not isinstance(thing, FdHandle):
                return self._name(thing)
            handles.append(thing)
            return ipc.pack(thing)

        body = io.BytesIO()
        _Pickler(body, name).dump(message)
        if (size := body.tell()) > ipc.MAX_BODY:
            raise InvalidArgumentError(
                "size", f"expected at most {ipc.MAX_BODY} bytes per call to another process, got {size}; use parts."
            )
        with self._lock:
            self._connection.send(0, 0, body.getvalue(), handles, left=system.seconds_left(limit))

    def receive(self, limit: float | None = None) -> tuple[Any, list[FdHandle]] | None:
        """Return a message and its handles, which the caller owns; None if the connection ends, or after `limit` s."""
        try:
            message = self._connection.receive(system.seconds_left(limit))
        except OSError:
            with self._lock:
                self._connection.discard()
            return None
        handles: list[FdHandle] = []

        def find(name: Any) -> Any:
            if not isinstance(name, bytes):
                return self._find(name)
            handles.extend(ipc.unpack(name, message))
            handles[-1].trusted = True
            return handles[-1]

        with message:
            try:
                return _Unpickler(io.BytesIO(message.body), find).load(), handles
            except BaseException:
                for handle in handles:
                    handle.close()
                raise


# -- the parent's side ------------------------------------------------------------------------------------------------


class _Child:
    """The process, and calls to it."""

    def __init__(self, inner: str, options: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(None)  # the program may have set a default
        self._wire = Wire(ours, self._name, self._find)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._closing = False
        with theirs, contextlib.ExitStack() as left:
            left.callback(ours.close)
            left.callback(ours.shutdown, socket.SHUT_RDWR)
            self._reader = system.start_thread(self._read)
            # -c instead of -m: the package has imported this module, and -m would load it a second time.
            code = "from gpuinterop.testing.exporters.process import _main; _main()"
            command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
            # A terminal sends Ctrl-C to the child too. Block it from the start, or it would end the child's imports
            # with a traceback.
            held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
            left.pop_all()
        try:
            self.start = self.call(0, "open", inner, **options)
        except BaseException:
            self.close()
            raise

    def _name(self, thing: Any) -> Any:
        """The number of an object in the child."""
        if not isinstance(thing, _CLOSING):
            return None
        if not isinstance(thing, _Remote) or thing.child is not self:
            raise ArgumentTypeError("submit", f"expected objects of this exporter, got {type(thing).__name__}.")
        thing.check_open()
        return ("object", thing.number)

    def _find(self, made: Any) -> Any:
        """Make the proxy of an object that the child has made."""
        kind, number, attributes = made
        return _REMOTES[kind](self, number, attributes)

    def call(self, number: int, method: str, *arguments: Any, limit: float | None = None, **keywords: Any) -> Any:
        """Call a method of the child's object with this number; the exporter has number 0."""
        limit = _LIMIT if limit is None else limit
        turn = next(self._numbers)
        future: Future[Any] = Future()
        with self._lock:
            if self._closing:
                raise ResourceClosedError("the exporter of another process was closed.")
            if self._ended:
                raise self._death()
            self._waiting[turn] = future
        try:
            self._send((turn, number, method, arguments, keywords))
            return future.result(limit)
        except FutureTimeoutError:
            # A SemaphoreTimeoutError from the child is a TimeoutError too.
            if future.done():
                raise
            raise PeerError(
                f"the exporter's process {self.process.pid} did not answer {method!r} in {limit:g} s; is it stopped?"
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(turn, None)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._wire.send(message, _LIMIT)
        except TimeoutError:
            # After half a message, the child could not find the beginning of the next.
            self.process.kill()
            raise PeerError(
                f"the exporter's process {self.process.pid} read nothing for {_LIMIT:g} s, and was killed."
            ) from None
        except OSError:  # the reader sees the end, and reports it
            pass

    def _read(self) -> None:
        try:
            while (received := self._wire.receive()) is not None:
                (turn, failed, result), handles = received
                with self._lock:
                    future = self._waiting.pop(turn, None)
                if future is None:
                    for handle in handles:
                        handle.close()
                elif failed:
                    future.set_exception(result)
                else:
                    future.set_result(result)
        except Exception:  # not a message of this protocol: treat it as the end
            pass
        with self._lock:
            self._ended = True
            waiting, self._waiting = self._waiting, {}
        death = self._death() if waiting else None
        for future in waiting.values():
            future.set_exception(death)

    def _death(self) -> PeerError:
        try:
            status = self.process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            return PeerError(f"the exporter's process {self.process.pid} closed its connection but did not exit.")
        how = f"{signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return PeerError(f"the exporter's process {self.process.pid} has ended ({how}); open another one.")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_LIMIT)
        self._reader.join(_LIMIT)

    def close(self) -> None:
        if self._closing:
            return
        try:
            self.call(0, "close")
        except PeerError:  # it does not answer, and may not exit
            self.process.kill()
        except GpuInteropError:
            pass
        with self._lock:
            self._closing = True
        with contextlib.suppress(OSError):
            self._wire.socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(_LIMIT)
        self._wire.socket.close()


def _called(method: str) -> Any:
    """Make a method that calls the child's object."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return self.call(method, *arguments, **keywords)

    return call


class _Remote:
    """An object in the child."""

    def __init__(self, child: _Child, number: int, attributes: dict[str, Any]) -> None:
        self.child = child
        self.number = number
        self.closed = False
        vars(self).update(attributes)

    def check_open(self) -> None:
        if self.closed:
            raise ResourceClosedError("the exporter's object was closed.")

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        self.check_open()
        return self.child.call(self.number, method, *arguments, **keywords)

    def close(self) -> None:
        if not self.closed:
            # A child that has exited has closed it.
            with contextlib.suppress(PeerError, ResourceClosedError):
                self.call("close")
            self.closed = True


class ProcessMemory(_Remote, ExporterMemory):
    """Memory of an exporter in another process."""

    export, write, read = map(_called, ("export", "write", "read"))


class ProcessImage(_Remote, ExporterImage):
    """An image of an exporter in another process."""

    export, write, read = map(_called, ("export", "write", "read"))


class ProcessSemaphore(_Remote, ExporterSemaphore):
    """A semaphore of an exporter in another process."""

    export, signal, hold_lock = map(_called, ("export", "signal", "hold_lock"))

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        return bool(self.call("wait", value, timeout=timeout, limit=timeout + _LIMIT))

    def endpoint(self) -> Endpoint:
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "another process's binary semaphores cannot be reached from this one.")
        handle = self.export()
        try:
            return OwnTimelineEndpoint(handle)
        except BaseException:
            handle.close()  # most likely a driver's: only its own process can read it
            raise


class ProcessSubmission(_Remote, Submission):
    """Work of an exporter in another process; the child forgets it after reporting that it is done."""

    _finished = False

    def done(self, timeout: float = 0.0) -> bool:
        if not self._finished and self.call("done", timeout, limit=timeout + _LIMIT):
            self._finished = self.closed = True
        return self._finished


_CLOSING: Final = (ExporterMemory, ExporterImage, ExporterSemaphore, Submission)
_REMOTES: Final[dict[type, type[_Remote]]] = {
    ExporterMemory: ProcessMemory,
    ExporterImage: ProcessImage,
    ExporterSemaphore: ProcessSemaphore,
    Submission: ProcessSubmission,
}
"""The proxy class of each kind of object."""
_ATTRIBUTES: Final = {
    ExporterMemory: ("size", "dedicated"),
    ExporterImage: ("parameters", "size", "dedicated", "usage"),
    ExporterSemaphore: ("kind",),
    Submission: (),
}


class ProcessExporter(Exporter):
    """Another exporter, `inner` (``memfd`` or ``vulkan``), in a child process; `options` are for its class.

    Any call can raise `PeerError`, if the child has ended or did not answer in time, and the inner exporter's errors.
    """

    name = "process"

    def __init__(self, inner: str = "memfd", **options: Any) -> None:
        if not hasattr(socket, "AF_UNIX") or sys.platform == "win32":
            raise BackendUnavailableError(
                f"handles are passed over Unix sockets, which {sys.platform} does not have.", fix="Use it on Linux."
            )
        self.inner = inner
        self._ours = inner == "memfd" and "identity" not in options  # gpuinterop's timelines: any process can read them
        self._child = _Child(inner, options)
        # Also ends the child if the exporter is dropped without close(), or interrupted below.
        self._finalizer = weakref.finalize(self, _Child.close, self._child)
        self.pid = self._child.process.pid
        self.driver, self.device, self.identity, table = self._child.start
        self._capabilities = Capabilities(table, owner=self.device)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        return self._child.call(0, method, *arguments, **keywords)

    create_memory, create_image, image_gap = map(_called, ("create_memory", "create_image", "image_gap"))
    create_semaphore, submit = map(_called, ("create_semaphore", "submit"))

    def import_memory(self, handle: AllocationHandle, size: int) -> ProcessMemory:
        memory: ProcessMemory = self.call("import_memory", check_type(handle, FdHandle, "handle", "a VmmFd"), size)
        handle.close()  # the child imported a duplicate
        return memory

    @property
    def endpoint_gap(self) -> str:
        if self._ours:
            return ""
        return "this process's CPU cannot reach the semaphores of a driver in another process"

    def kill(self) -> None:
        """Kill the child with SIGKILL, as a crash would; returns when it has exited."""
        self._child.kill()

    def close(self) -> None:
        self._finalizer()


# -- the child's side -------------------------------------------------------------------------------------------------

_BLOCKING = frozenset(("close", "create_image", "done", "read", "wait", "write"))


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._wire = Wire(connection, self._name, lambda name: self._objects.get(name[1]))
        self._objects: dict[int, Any] = {0: self}  # until there is an exporter
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "gpuinterop-command")  # starts one when none is idle

    def _name(self, thing: Any) -> Any:
        """Keep an object that the exporter has made, and return its number."""
        kind = next((kind for kind in _CLOSING if isinstance(thing, kind)), None)
        if kind is None:
            return None
        number = next(self._numbers)
        self._objects[number] = thing
        return kind, number, {name: getattr(thing, name) for name in _ATTRIBUTES[kind]}

    def open(self, inner: str, **options: Any) -> tuple[Any, ...]:
        from . import open_exporter

        self._objects[0] = exporter = open_exporter(inner, **options)
        return exporter.driver, exporter.device, exporter.identity, [*exporter.capabilities.values()]

    def serve(self) -> None:
        while (received := self._wire.receive()) is not None:
            (turn, number, method, arguments, keywords), handles = received
            answer = functools.partial(self._answer, turn, number, method, arguments, keywords, handles)
            if method in _BLOCKING:
                with contextlib.suppress(RuntimeError):  # no new thread can start: the next idle one runs it
                    self._threads.submit(answer)
            else:  # in the order of the calls
                answer()

    def _answer(
        self, turn: int, number: int, method: str, arguments: Any, keywords: Any, handles: list[FdHandle]
    ) -> None:
        result: Any
        try:
            failed, result = False, self._call(number, method, arguments, keywords)
        except GpuInteropError as error:
            failed, result = True, error
        except BaseException as error:
            failed, result = True, PeerError(f"the exporter's process failed with {type(error).__name__}: {error}")
        try:
            with contextlib.suppress(OSError, PeerError):  # the parent has exited, and `_watch` ends this process
                try:
                    self._wire.send((turn, failed, result))
                except (pickle.PicklingError, TypeError, AttributeError, InvalidArgumentError) as error:
                    # No byte has been sent yet.
                    problem = f"the exporter's process has a result that cannot be sent: {error}"
                    self._wire.send((turn, True, PeerError(problem)))
        finally:
            for handle in handles:
                handle.close()  # a handle that was taken over is closed already
            if isinstance(result, FdHandle):
                result.close()

    def _call(self, number: int, method: str, arguments: Any, keywords: Any) -> Any:
        if method == "done" and number not in self._objects:  # another thread of the parent's has the answer
            return True
        target = self._objects[number]
        result = getattr(target, method)(*arguments, **keywords)
        if number and (method == "close" or (method == "done" and result)):
            # Most callers drop work that is done, and never close it.
            self._objects.pop(number, None)
        return result


def _watch(parent: int) -> None:
    """End this process with its parent. The socket does not show that: a fork of the parent may keep it open."""
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
        _Server(connection).serve()
    finally:
        # Not the interpreter's normal exit, which waits for threads that are blocked in a driver.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    _main()
