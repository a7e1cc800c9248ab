"""Streams, events, and taking over other libraries' streams."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from ..errors import (
    ArgumentTypeError,
    GpuInteropError,
    InvalidArgumentError,
    ResourceBusyError,
    ResourceClosedError,
    SemaphoreTimeoutError,
    again,
)
from .resource import Resource, StreamRetirement, check_timeout, destroy_event, is_capturing

if TYPE_CHECKING:
    from ..backend import Native
    from .device import Device
    from .graph import Graph
    from .interchange import HostArray

_DEFAULT_STREAM = 0
_POLL_S = 0.0005  # how often an awaited event is looked at
order = itertools.count(1)
"""Numbers what is enqueued where the order may matter later: which work was behind a wait that did not come."""


class Stream(Resource):
    """Work that the device does in order. Made by `Device.create_stream` and `Device.wrap_stream`.

    A stream of `create_stream` is ours: `close()` lets its work finish and then destroys it. A stream of
    `wrap_stream` stays its owner's.
    """

    _noun = "Stream"

    def __init__(self, device: Device, native: Native, *, owned: bool, keepalive: object = None) -> None:
        backend = device._backend
        # Host memory of copies still to run, with the event behind each: the caller may drop an array at once.
        kept: deque[tuple[Native, object]] = deque()

        reclaimer = device._reclaimer

        def release(_keepalive: object = keepalive) -> None:
            while kept:
                backend.destroy_event(kept.popleft()[0])
            if owned:
                reclaimer.failures.pop(backend.stream_pointer(native), None)  # the next stream may have its number
                backend.destroy_stream(native)

        super().__init__(device._reclaimer, release, kind=StreamRetirement)
        retirement = cast(StreamRetirement, self._retirement)
        retirement.native = native
        self._waits = retirement.waits = deque(maxlen=16)
        self._warns = owned  # a wrapped stream owns nothing that could leak
        self._device = device
        self._backend = backend
        self._native = native
        self._owned = owned
        self._keepalive = keepalive
        self._kept = kept
        self._ptr = backend.stream_pointer(native)
        # What `capture` makes, while it does: also of another wrapper's stream, and of those that join it.
        self._graph: Graph | None = device._captures.get(self._ptr)
        if self._graph is not None:
            self._graph.joined.append(self)
        if owned:  # the number may be that of a stream that is gone
            reclaimer.failures.pop(self._ptr, None)
        self._failure: GpuInteropError | None = None
        # What semaphores compare on the hot path: the device while the stream is open and has not failed, nobody's
        # device afterwards.
        self._open_on: object = device
        reclaimer.add_stream(self)
        if (failure := reclaimer.failures.get(self._ptr)) is not None:  # behind the line above: one of the two finds it
            self.fail(failure)

    # -- public ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        return self._device

    @property
    def ptr(self) -> int:
        """The native stream (``CUstream`` / ``hipStream_t``) as an integer."""
        self._check_open()
        return self._ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol: (version, stream). Only on devices whose streams are CUDA streams."""
        if self._device.info.array_interface != "__cuda_array_interface__":
            raise InvalidArgumentError("stream", f"{self._device.name} has no CUDA streams.")
        return (0, self.ptr)

    @property
    def capturing(self) -> bool:
        """Whether work goes into a graph instead of running (``cuStreamIsCapturing``), whoever captures."""
        self._check_open()
        return is_capturing(self._backend, self._native)

    def capture(self) -> AbstractContextManager[Graph]:
        """Capture what is enqueued in a ``with`` into a graph (``cuStreamBeginCapture``, ``cuGraphInstantiate``).

        Other libraries' work on the stream is captured with it. Nothing of it runs before `Graph.launch`.

        Raises
        ------
        UnsupportedError
            The device captures no graphs (`Operation.GRAPH_CAPTURE`).

        Examples
        --------
        >>> with stream.capture() as graph:
        ...     semaphore.wait(stream, 1)
        ...     buffer.fill(7, stream=stream)
        ...     semaphore.signal(stream, 2)
        >>> for frame in frames:
        ...     graph.launch(stream)
        ...     graph.semaphores.advance(2)
        """
        from .graph import capture  # it stands on this module

        return capture(self)

    def query(self) -> bool:
        """Whether all work enqueued so far is done; never blocks.

        Raises
        ------
        GpuInteropError
            An operation on the stream has failed.
        InvalidArgumentError
            The stream is being captured: nothing that was enqueued runs.
        """
        self._refuse_capture()
        seen = list(self._waits)  # another thread may add to it
        done = self._backend.is_idle(self._native)
        if done:
            cast(StreamRetirement, self._retirement).forget(seen)
            self.check_failure()
        return done

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the stream is idle.

        Parameters
        ----------
        timeout : float, optional
            Seconds.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed; the message names the semaphores and values that the stream still waits for. The stream
            goes on.
        GpuInteropError
            An operation on the stream has failed. On the host backend what came after it was not run, and the
            stream stays failed.
        InvalidArgumentError
            The stream is being captured: nothing that was enqueued runs.
        """
        timeout = check_timeout(timeout)
        self._refuse_capture()
        seen = list(self._waits)
        if timeout is None and not (self._backend.holds_gil or self._backend.synchronize_blocks_others):
            self._backend.synchronize(self._native)
        else:
            event = self._backend.record(self._native)
            try:
                if not self._backend.wait_done(event, timeout):
                    raise SemaphoreTimeoutError(f"{self._label} is not idle after {timeout:g} s{self.waiting_for()}.")
            finally:
                self._backend.destroy_event(event)
        cast(StreamRetirement, self._retirement).forget(seen)
        self._drop_kept()
        self._reclaimer.drain()
        self.check_failure()

    def waiting_for(self) -> str:
        """The waits that may still be pending, for messages; empty when there are none."""
        waits = list(self._waits)  # another thread may add to it
        if not waits:
            return ""
        return "; it may be waiting for " + ", ".join(
            label if value is None else f"{label} to reach {value}" for label, value in waits
        )

    def wait_stream(self, other: Stream) -> None:
        """Order what follows here behind what `other` has been given so far."""
        self._check_open()
        if not isinstance(other, Stream):
            raise ArgumentTypeError("other", f"must be a gpuinterop Stream, not {type(other).__name__}.")
        other._check_open()
        if other is self:
            return
        if other._backend is not self._backend:
            raise InvalidArgumentError(
                "other", "belongs to another backend; synchronize it, or share a semaphore between the two."
            )
        other.check_failure()
        self.check_failure()
        event = self._backend.record(other._native)
        try:
            other._reclaimer.note_follower(other._ptr, (self._reclaimer, self._ptr), next(order))
            with self._reclaimer.gate.enqueuing_wait():
                self._backend.wait_event(self._native, event)
                self._waits.extend(other._waits)
        finally:
            self._backend.destroy_event(event)
        other.check_failure()  # since the look above: whoever told it may have missed us
        if other._graph is not None and self._graph is None:
            self._graph = other._graph
            self._graph.joined.append(self)

    def record(self) -> Event:
        """An event that is done when everything enqueued so far is."""
        self.check_failure()
        self._refuse_capture()
        return Event(self, self._backend.record(self._native))

    # -- inside ------------------------------------------------------------------------------------------------

    def fail(self, error: GpuInteropError) -> None:
        """Something that the stream waited for will not come, and the stream was let go on: tell its owner.

        A driver's stream cannot fail by itself. From now on this one raises a copy of `error`, whatever it is given
        and as soon as it is idle. The first failure stays. Until it has been raised, a new wrapper of the same native
        stream inherits it (`Reclaimer.failures`).
        """
        if self._failure is None:
            self._failure = error
            self._open_on = None

    def check_failure(self) -> None:
        """Raise what `fail` was told."""
        if self._failure is not None:
            self._reclaimer.failures.pop(self._ptr, None)  # somebody knows
            raise again(self._failure)

    def _refuse_capture(self) -> None:
        if self.capturing:  # a driver would refuse as well, and give the capture up
            raise InvalidArgumentError(
                "stream", f"{self._label} is being captured: what is enqueued runs when the graph is launched."
            )

    def check_host_copy(self, host: HostArray) -> None:
        """Refuse a copy of host memory that a graph would outlive, or that would block behind a pending wait."""
        if self.capturing:
            raise InvalidArgumentError(
                "stream",
                f"{self._label} is being captured, and a graph would use the host array at every launch, when it may "
                "be gone: copy between buffers in the capture, and to and from the host outside of it.",
            )
        backend = self._backend
        if (
            host.pageable
            and self._waits
            and backend.pageable_copies_block
            and backend.is_pageable(self._device._native, host.ptr)
            and not self.query()
        ):
            raise ResourceBusyError(
                f"a copy of pageable memory blocks the caller until {self._label} gets there{self.waiting_for()}, "
                "which can deadlock: use pinned memory, or synchronize the stream first."
            )

    def keep_until_done(self, thing: object) -> None:
        """Keep `thing` alive until the work enqueued so far is done."""
        self._drop_kept()
        self._kept.append((self._backend.record(self._native), thing))

    def _drop_kept(self) -> None:
        while True:
            try:
                event, thing = self._kept.popleft()
            except IndexError:
                return
            try:
                done = self._backend.is_done(event)
            except GpuInteropError:
                done = True  # the stream failed: what is left on it never runs
            if not done:
                self._kept.appendleft((event, thing))
                return
            self._backend.destroy_event(event)

    def _ended(self) -> None:
        self._open_on = None


class Event:
    """A point in a stream's work. Made by `Stream.record`; freed when dropped."""

    def __init__(self, stream: Stream, native: Native) -> None:
        self._stream = stream
        self._native = native
        self._reached = False

    @property
    def done(self) -> bool:
        """Whether the stream got there; never blocks. Raises the stream's failure, if it failed before."""
        done = self._stream._backend.is_done(self._native)
        if done:
            self._check_failure()
        return done

    def wait(self, timeout: float | None = None) -> None:
        """Block the calling thread until the stream got there.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` seconds passed.
        """
        timeout = check_timeout(timeout)
        if not self._stream._backend.wait_done(self._native, timeout):
            raise SemaphoreTimeoutError(
                f"{self._stream._label} did not reach the event in {timeout:g} s{self._stream.waiting_for()}."
            )
        self._check_failure()

    def _check_failure(self) -> None:
        if not self._reached:
            self._stream.check_failure()
            self._reached = True  # what fails from now on has failed behind it

    def __await__(self) -> Generator[Any, None, None]:
        while not self.done:
            yield from asyncio.sleep(_POLL_S).__await__()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # by then there may be no `sys`
        if not _ending():
            destroy_event(self._stream._backend, self._native)


def foreign_pointer(stream: object) -> tuple[int, object]:
    """The native pointer of another library's stream, and what must stay alive with it.

    Understands an int, the ``__cuda_stream__`` protocol, torch (``cuda_stream``) and CuPy (``ptr``). torch's CPU
    stream, which has no work of its own, is the calling thread: pointer 0.
    """
    if isinstance(stream, bool) or stream is None:
        raise ArgumentTypeError("stream", f"must be a stream, not {stream!r}; 0 is the device's default stream.")
    if isinstance(stream, int):
        if stream < 0:
            raise InvalidArgumentError("stream", f"{stream} is no stream pointer.")
        return stream, None
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] == 0):
            raise InvalidArgumentError("stream", f"__cuda_stream__ gave {pair!r}; only version 0 is known.")
        return int(pair[1]), stream
    for attribute in ("cuda_stream", "ptr"):
        pointer = getattr(stream, attribute, None)
        if isinstance(pointer, int):
            return pointer, stream
    if type(stream).__module__ == "torch.cpu" and type(stream).__name__ == "Stream":
        return _DEFAULT_STREAM, stream
    raise ArgumentTypeError(
        "stream",
        f"a {type(stream).__name__} is no stream: pass an int, an object with __cuda_stream__, or a stream of torch or "
        "CuPy.",
    )


def check_foreign_device(device: Device, stream: object) -> None:
    """Refuse another library's stream that says that it is another GPU's.

    The default streams need this: their number, 0, is the same on every GPU.
    """
    index = getattr(getattr(stream, "device", None), "index", None)  # torch
    if index is None:
        index = getattr(stream, "device_id", None)  # CuPy; -1 for its default stream, which is the current device's
    if isinstance(index, int) and not isinstance(index, bool) and index >= 0 and index != device.info.dlpack[1]:
        raise InvalidArgumentError(
            "stream",
            f"is a stream of that library's device {index}, and {device.name} is device {device.info.dlpack[1]}: wrap "
            f"it with gpuinterop.device({index}), or make the device current before you ask for the stream.",
        )


def check_stream(device: Device, stream: object) -> Stream:
    """`stream` if it can be used on `device`; otherwise the error that says why not."""
    if not isinstance(stream, Stream):
        raise ArgumentTypeError(
            "stream",
            f"must be a gpuinterop Stream, not {type(stream).__name__}; use device.wrap_stream(stream).",
        )
    if stream._closed:
        raise ResourceClosedError(f"{stream._label} is closed; make a new one with device.create_stream().")
    stream.check_failure()
    if stream._device is not device:
        raise InvalidArgumentError(
            "stream", f"belongs to {stream._device.name}, the object to {device.name}; use a stream of that device."
        )
    return stream
