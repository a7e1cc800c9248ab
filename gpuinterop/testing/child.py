"""Calls to functions and objects in a child process, with handles.

A call is a pickled message of :mod:`gpuinterop.ipc` over a Unix socket pair, with the descriptors of its handles; so is
its result or error. Objects with ``remote_attributes`` stay in the child, and the parent gets a `Remote`. Calls of
several threads run at the same time, each on its own connection and on its own thread of the child. Every call ends,
whatever happens to the child. Ctrl-C in a terminal is for its parent to handle.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pkgutil import resolve_name
from typing import IO, Any, Final, NoReturn, Self

from .. import ipc, system
from ..errors import (
    ArgumentTypeError,
    DriverError,
    GpuInteropError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
)
from ..handles import FdHandle

__all__ = ["Child", "ChildError", "Remote"]

_LIMIT: Final = 300.0
"""Seconds for an answer; it only ends a hang, also on a machine that does other work."""
_EXIT: Final = 20.0
"""Seconds for a process to exit."""
_SET_PARENT_DEATH_SIGNAL: Final = 1


class ChildError(PeerError):
    """The child has ended, or does not answer or exit. Where a call has only failed, the child goes on."""


class _Pickler(pickle.Pickler):
    name: Callable[[Any], Any]

    def persistent_id(self, thing: Any) -> Any:
        return self.name(thing)


class _Unpickler(pickle.Unpickler):
    find: Callable[[Any], Any]

    def persistent_load(self, name: Any) -> Any:
        return self.find(name)


class _Channel:
    """Messages with handles over a socket, for one thread at a time.

    `name` returns the name by which the other side finds an object, or None for an object that is sent itself. `find`
    returns the object of the other side's name.
    """

    def __init__(self, connection: socket.socket, name: Callable[[Any], Any], find: Callable[[Any], Any]) -> None:
        connection.settimeout(None)  # the program may have set a default
        self._socket, self._name, self._find = connection, name, find
        self._connection = ipc.Connection(connection)

    def send(self, message: object, limit: float | None = None) -> list[FdHandle]:
        """Send a message within `limit` seconds; returns its handles, which the caller still owns."""
        handles: list[FdHandle] = []

        def name(thing: Any) -> Any:
            if not isinstance(thing, FdHandle):
                return self._name(thing)
            handles.append(thing)
            return ipc.pack(thing)

        pickler = _Pickler(body := io.BytesIO())
        pickler.name = name
        pickler.dump(message)
        if (size := body.tell()) > ipc.MAX_BODY:
            raise InvalidArgumentError(
                "size", f"expected at most {ipc.MAX_BODY} bytes per call to another process, got {size}; use parts."
            )
        self._connection.send(0, 0, body.getvalue(), handles, left=system.seconds_left(limit))
        return handles

    def receive(self, limit: float | None = None) -> tuple[Any, list[FdHandle]]:
        """Return a message and its handles, which the caller owns. Raises `UnpicklingError` if it cannot be read."""
        handles: list[FdHandle] = []

        def find(name: Any) -> Any:
            if not isinstance(name, bytes):
                return self._find(name)
            handles.extend(ipc.unpack(name, message))
            handles[-1].trusted = True
            return handles[-1]

        with self._connection.receive(system.seconds_left(limit)) as message:
            unpickler = _Unpickler(io.BytesIO(message.body))
            unpickler.find = find
            try:
                return unpickler.load(), handles
            except Exception as error:
                for handle in handles:
                    handle.close()
                raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._connection.discard()
        self._socket.close()


class Remote:
    """An object in a child, with the attributes that it had when it was made."""

    def __init__(self, child: Child, number: int, attributes: Mapping[str, Any]) -> None:
        self.child, self.number = child, number
        vars(self).update(attributes)

    def call(self, method: str, *arguments: Any, waits: float = 0.0, **keywords: Any) -> Any:
        """Call a method of the object, which may wait `waits` seconds by itself."""
        return self.child.call(self.number, method, *arguments, waits=waits, **keywords)

    def __del__(self) -> None:
        self.child.dropped.add(self.number)


class Child:
    """A child process, and calls to it. It exits with the thread that started it.

    Parameters
    ----------
    name : str
        Its name in messages.
    module : str
        The module that starts it, for lists of processes.
    limit : float, optional
        Seconds for an answer; None waits for ever. You can change it.
    remotes : mapping
        The subclass of `Remote` for a class whose objects stay in the child.
    output : file, optional
        Receives what the child prints, also to stderr.
    """

    def __init__(
        self, name: str, module: str, *, limit: float | None = _LIMIT,
        remotes: Mapping[type, type[Remote]] | None = None, output: IO[str] | None = None,
    ) -> None:  # fmt: skip
        self.limit = limit
        self.dropped: set[int] = set()
        """Numbers of objects that this process no longer uses; the next call lets the child forget them."""
        self._name, self._remotes = name, remotes or {}
        self._idle: list[_Channel] = []
        self._closed = False
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            # -c instead of -m: the package may have imported this module, and -m would load it a second time.
            command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
            with theirs:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid()), module],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    process_group=0,  # a terminal sends Ctrl-C to its parent's
                )  # fmt: skip
            undo.pop_all()
        self._control = ours

    def run(self, function: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the function with this name, ``module:name``, in the child."""
        return self.call(None, function, *arguments, **keywords)

    def call(self, number: int | None, method: str, *arguments: Any, waits: float = 0.0, **keywords: Any) -> Any:
        """Call a method of the child's object with this number. You keep the handles among the arguments.

        Raises
        ------
        ChildError
            The child has ended, or does not answer in time.
        PeerError
            The method raised an error that is not gpuinterop's, or the other process cannot read what was sent.
        """
        if self._closed:
            raise ResourceClosedError(f"{self._name} was closed.")
        limit = None if self.limit is None else self.limit + waits
        try:
            channel = self._idle.pop()
        except IndexError:
            channel = self._connect()
        with ExitStack() as undo:
            undo.callback(channel.close)  # unless it answers: half a message may be on its way
            dropped = list(self.dropped)
            try:
                channel.send((number, method, arguments, keywords, dropped), limit)
                (failed, result), _ = channel.receive(limit)
            except TimeoutError:
                what = f"{self._name} {self.process.pid} did not answer {method!r} in {limit:g} s"
                raise ChildError(f"{what}; is it stopped?") from None
            except pickle.UnpicklingError as error:
                raise PeerError(f"{method!r} has a result that cannot be read: {error}") from None
            except OSError:
                raise self._death() from None
            if not self._idle and not self._closed:  # one connection is enough for most programs
                undo.pop_all()
                self._idle.append(channel)
        if failed:
            raise result
        self.dropped.difference_update(dropped)  # after a failed call the child may still have them
        return result

    def _connect(self) -> _Channel:
        ours, theirs = socket.socketpair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError:
                raise self._death() from None
            undo.pop_all()
        return _Channel(ours, self._number_of, self._remote)

    def _number_of(self, thing: Any) -> int | None:
        if isinstance(thing, Remote) and thing.child is self:
            return thing.number
        if isinstance(thing, Remote) or hasattr(type(thing), "remote_attributes"):
            got = f"got a {type(thing).__name__} of another process; pass one that {self._name} made."
            raise ArgumentTypeError("arguments", f"expected objects of {self._name}, {got}")
        return None

    def _remote(self, made: tuple[type, int, dict[str, Any]]) -> Remote:
        kind, number, attributes = made
        return self._remotes.get(kind, Remote)(self, number, attributes)

    def _death(self) -> ChildError:
        """Return what ended the connection, after at most as long as the child may take to exit."""
        limit = _EXIT if self.limit is None else min(self.limit, _EXIT)
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            what = f"{self._name} {self.process.pid} closed its connection but did not exit in {limit:g} s"
            return ChildError(f"{what}; does it hang in a driver?")
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return ChildError(f"{self._name} {self.process.pid} has ended ({how}).")

    def kill(self) -> bool:
        """Kill the child with SIGKILL, as a crash would. Returns False if it hangs in a driver and does not exit."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT)
        return self.process.returncode is not None

    def end(self, limit: float | None = _EXIT) -> None:
        """Let the child exit, which finishes nothing. Raises `ChildError` without status 0 within `limit` seconds."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        with suppress(OSError):  # the child has exited
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may have the socket too
        self._control.close()
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise ChildError(f"{self._name} {self.process.pid} did not exit in {limit:g} s.") from None
        if status:
            raise self._death()

    def close(self) -> None:
        """End the child; kill it if it does not exit."""
        if not self._closed:
            with suppress(ChildError):
                self.end()
        if self.process.returncode is None:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.process.kill()
        self.close()


# -- the child ---------------------------------------------------------------------------------------------------------

_objects: dict[int, Any] = {}
_numbers = itertools.count()


def _keep(thing: Any) -> Any:
    """Keep an object that stays here, and return its class, number and attributes."""
    if not hasattr(type(thing), "remote_attributes"):
        return None
    kind = next(base for base in type(thing).__mro__ if "remote_attributes" in vars(base))
    _objects[number := next(_numbers)] = thing
    return kind, number, {name: getattr(thing, name) for name in thing.remote_attributes}


def _answer(channel: _Channel) -> None:
    """Answer the calls of a connection until it ends."""
    try:
        while True:
            try:
                (number, method, arguments, keywords, dropped), handles = channel.receive()
            except (pickle.UnpicklingError, DriverError) as error:  # only this message is lost
                channel.send((True, PeerError(f"the other process cannot read the arguments: {error}")))
                continue
            for old in dropped:
                _objects.pop(old, None)
            answer = _call(number, method, arguments, keywords)
            try:
                sent = channel.send(answer)
            except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
                # No byte has been sent yet.
                sent = channel.send((True, PeerError(f"{method!r} has a result that cannot be sent: {error}")))
            for handle in (*handles, *sent):
                handle.close()  # a handle that was taken over is closed already
    except OSError:
        channel.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the parent waits for an answer


def _call(number: int | None, method: str, arguments: Any, keywords: Any) -> tuple[bool, Any]:
    """Return whether the call failed, and its result or error."""
    try:
        function = resolve_name(method) if number is None else getattr(_objects[number], method)
        return False, function(*arguments, **keywords)
    except GpuInteropError as error:
        return True, error
    except BaseException as error:
        return True, PeerError(f"the other process failed with {type(error).__name__}: {error}")


def serve() -> NoReturn:
    """The child's program: answer each connection that arrives, until the parent ends the child or exits."""
    control, status = socket.socket(fileno=int(sys.argv[1])), 1
    if sys.platform == "linux":
        # The kernel kills this process when the thread that started it ends, also if it hangs in a driver.
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(sys.argv[2]):  # the parent has exited already
            os._exit(1)
    try:
        control.settimeout(None)  # the parent may have set a default, which makes its sockets non-blocking
        while (received := socket.recv_fds(control, 1, 1))[0]:
            if not received[1]:  # the kernel drops a descriptor for which there is no room
                raise system.driver_error("recvmsg", errno.EMFILE)
            channel = _Channel(socket.socket(fileno=received[1][0]), _keep, _objects.__getitem__)
            system.start_thread(functools.partial(_answer, channel))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not the interpreter's normal exit, which waits for threads that are blocked in a driver.
        sys.stderr.flush()
        os._exit(status)
