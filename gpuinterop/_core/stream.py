"""Streams, events, and other libraries' streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from .._arguments import NoCopy, check_int, check_timeout
from ..errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError, ResourceBusyError, again
from .lifetime import LIVE, MARK, OF_PARENT, Lifetime, Marks, dropped, marked, note_use
from .release import drain, run_blocked_releases, tidy
from .resource import Resource
from .streams import CapturedError, KnownStream, NativeEvent, note_passed

if TYPE_CHECKING:
    from ..backend import DriverHandle
    from .device import Device
    from .graph import Graph
    from .host_array import HostArray

T = TypeVar("T")

_DEFAULT_STREAM = 0
_POLL_S = 0.0005  # how often an awaited event is polled


class Stream(Resource):
    """Work that the device does in order. `Device.create_stream` and `Device.wrap_stream` return it.

    gpuinterop owns the streams of `create_stream`: `close()` lets their work finish, then destroys them. Streams of
    `wrap_stream` still belong to the other library.

    Attributes
    ----------
    device : Device
        Device that does the work.

    Examples
    --------
    >>> with device.create_stream() as stream:
    ...     buffer.fill(7, stream=stream)
    ...     event = stream.record()
    ...     event.wait(timeout=10)
    ...     event.done
    True
    """

    def __init__(self, device: Device, known: KnownStream, lifetime: Lifetime) -> None:
        super().__init__(lifetime)
        lifetime.warns = known.owned and lifetime is known  # a wrapped stream cannot leak
        self.device = device
        self.driver = device.driver
        self._ptr = known.pointer
        self._native = known.handle
        self._failure: GpuInteropError | None = None
        # None for the per-thread default stream: each call uses that of its thread (`_known_as`).
        self.known: KnownStream | None = None if known.thread is not None else known

    def _known_as(self) -> KnownStream:
        """The native stream that a call on this thread uses."""
        return self.known or self.device.streams.of_this_thread(self._native)

    @property
    def _handle(self) -> DriverHandle:
        return self._native

    @property
    def ptr(self) -> int:
        """The native stream (``CUstream`` / ``hipStream_t``) as an integer."""
        self._check_open()
        return self._ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol: (version, stream). It exists only on devices with CUDA streams."""
        if self.device.info.array_interface != "__cuda_array_interface__":
            raise InvalidArgumentError("stream", f"{self.device.name} has no CUDA streams; pass Stream.ptr instead.")
        return (0, self.ptr)

    @property
    def capturing(self) -> bool:
        """Whether any library is capturing the stream's work into a graph (``cuStreamIsCapturing``)."""
        self._check_open()
        return self._known_as().is_capturing()

    def capture(self, *, label: str | None = None) -> AbstractContextManager[Graph]:
        """Capture the work in a ``with`` block into a graph (``cuStreamBeginCapture``, ``cuGraphInstantiate``).

        This includes other libraries' work on the stream. Captured work runs only when you call `Graph.launch`. The
        capture waits up to a second for other threads' calls on the stream to finish. A call made while the capture
        begins or ends raises `InvalidArgumentError`.

        Raises
        ------
        UnsupportedError
            The device cannot capture graphs (`Operation.GRAPH_CAPTURE`).
        """
        return self.device._capture(self, label)

    def query(self) -> bool:
        """Return whether all earlier work is done (``cuStreamQuery`` / ``hipStreamQuery``). Never blocks.

        Raises
        ------
        GpuInteropError
            Work on the stream has failed.
        InvalidArgumentError
            The stream is being captured, so its work does not run.
        """
        self._check_open()
        stream = self._known_as()
        seen = stream.enqueued()
        done = stream.uncaptured(lambda _: self._call(stream, self.driver.is_idle), True)
        if done:
            note_passed(stream, seen)
            self._check_failure()
        return bool(done)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until the stream is idle, at most `timeout` seconds.

        Without a timeout, CUDA's driver blocks (``cuStreamSynchronize``). With a timeout, and always on HIP, the call
        polls an event (``cuEventQuery`` / ``hipEventQuery``).

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` seconds passed. The message names the semaphores and values that the stream waits for. The stream
            continues. If the process that should signal has exited, see `ExternalSemaphore`.
        GpuInteropError
            Work on the stream has failed. On the host backend, the stream stays failed and skips all later work.
        InvalidArgumentError
            The stream is being captured, so its work does not run.
        """
        limit = check_timeout(timeout)
        self._check_open()
        stream = self._known_as()
        if not stream.synchronize(limit):
            raise stream.timeout_error(f" is not idle after {limit:g} s")
        drain()
        self._check_failure()

    def wait_stream(self, other: Stream | object) -> None:
        """Make this stream's later work wait for all earlier work of `other`. Returns at once.

        Native calls: ``cuEventRecord`` and ``cuStreamWaitEvent`` / ``hip...``. `other` can belong to another device of
        the same backend if it is a `Stream`, but not if it is another library's.

        Raises
        ------
        InvalidArgumentError
            `other` belongs to another backend.
        GpuInteropError
            Work on one of the streams has failed.
        """
        self._check_open()
        if not isinstance(other, Stream):
            other = check_stream(self.device, other)
        other._check_open()
        if other is self:
            return
        if other.driver is not self.driver:
            raise InvalidArgumentError(
                "other", "belongs to another backend; synchronize it, or share a semaphore between the two."
            )
        other._check_failure()
        self._check_failure()
        self._follow(other._known_as())
        other._check_failure()  # it may have failed after the check above, but before the wait was enqueued

    def record(self) -> Event:
        """Return an event that is done when all earlier work is done (``cuEventRecord`` / ``hipEventRecord``)."""
        self._check_open()
        self._check_failure()
        tidy()
        return Event(self, self._known_as())

    def _call(self, stream: KnownStream, call: Callable[[DriverHandle], T], *lifetimes: Lifetime) -> T:
        """Call the driver with the stream, and keep it and one or two objects from being released meanwhile."""
        with marked(stream.calls, *[lifetime.calls for lifetime in lifetimes]):
            for lifetime in (*lifetimes, stream):
                lifetime.check()
            self._check_open()
            stream.refuse_capture_change()
            if lifetimes:
                stream.unfenced = stream.thread is not None  # until `after_call` records an event
            result = call(stream.handle)
            if lifetimes:
                stream.after_call()
            return result

    def _enqueue(
        self, call: Callable[[DriverHandle], None], *lifetimes: Lifetime, host: HostArray | None = None
    ) -> None:
        """Enqueue work with one or two objects. The stream keeps them and the host memory until the work is done."""
        stream = self._known_as()
        if host is None:
            self._call(stream, call, *lifetimes)
            return

        def copy(handle: DriverHandle) -> None:
            if stream.captured:  # a capture began after the check
                raise CapturedError(stream)
            call(handle)

        host_memory = Lifetime("host memory", keep=host)
        note_use(host_memory, stream, None)
        # The copy may hold the GIL, so no wait may be enqueued after the check: it would never end.
        shut: list[Any] = stream.device.gate.shut if self.driver.holds_gil else Marks()
        shut += MARK
        try:
            if self.driver.holds_gil:
                self._refuse_host_copy(host)
            host_memory.open()
            self._call(stream, copy, *lifetimes)
        finally:
            del shut[-1]
            dropped.append(host_memory)  # for the next drain; an exception in `retire` could leave it open

    def _follow(self, other: KnownStream) -> None:
        """Make later work wait for all earlier work of another native stream, which may be closed."""
        stream = self._known_as()
        if other is stream:
            return
        gate = stream.device.gate
        if gate.delays_waits and other.pending():
            run_blocked_releases(gate)

        def wait_for(event: DriverHandle) -> None:
            other.refuse_capture_change()
            graph = other.graph if stream.graph is None else None
            try:
                if graph is not None:
                    graph._enter(stream)
                    graph._join(stream)
                follow(event)
            except BaseException:
                if graph is not None:
                    graph._drop_streams([stream])
                raise

        def follow(event: DriverHandle) -> None:
            waits = stream.inherited_from(other)  # after the record, which covers other threads' waits on `other`

            def noted(handle: DriverHandle) -> None:  # like `Enqueueable._enqueue`
                try:
                    for wait in waits:
                        stream.note(wait)
                    if waits and gate.shut:
                        gate.let_releases_end()
                    self.driver.wait_event(handle, event)
                finally:
                    for wait in waits:
                        wait.enqueued = True
                stream.after_call()

            self._call(stream, noted)

        other.with_event(wait_for)

    def _check_failure(self, known: KnownStream | None = None) -> None:
        """Raise the failure of the stream, or of `known` instead of the calling thread's. The first failure stays."""
        failure = self._failure or (known or self._known_as()).take_failure()
        if self.known is not None:  # each thread's default stream has its own failure
            self._failure = failure
        if failure is not None:
            raise again(failure)

    def _check_host_copy(self, host: HostArray) -> None:
        """Release the host memory of finished copies. Raise if a graph would keep the copy, or if it would block."""
        drain()
        self._refuse_host_copy(host)

    def _refuse_host_copy(self, host: HostArray) -> None:
        if self.capturing:
            raise InvalidArgumentError(
                "stream",
                f"{self.label} is being captured, and each launch of the graph would use the host array, which may no "
                "longer exist: copy between buffers in the capture, and to and from the host outside of it.",
            )
        backend, stream = self.driver, self._known_as()
        if (
            host.pageable
            and backend.pageable_copies_block
            and (waits := stream.streams_ahead())
            and backend.is_pageable(self.device._handle, host.ptr)
            and (first := next((other for other in waits if other.is_held()), None)) is not None
        ):
            raise ResourceBusyError(
                f"a copy of pageable memory blocks the caller until {first.label} reaches it{first.waiting_for()}, "
                "which can deadlock: use pinned memory, or synchronize the stream first."
            )


class Event(NoCopy):
    """A point in a stream's work. `Stream.record` returns it; it is freed when you drop it.

    ``await event`` lets other asyncio tasks run until the stream reaches the event.

    Examples
    --------
    >>> import asyncio
    >>> async def frame():
    ...     buffer.fill(7, stream=stream)
    ...     await stream.record()
    >>> asyncio.run(frame())
    """

    def __init__(self, stream: Stream, known: KnownStream) -> None:
        backend = stream.driver
        self._stream = stream
        self._known = known
        self._reached = False
        self.lifetime = NativeEvent("Event", known)
        self.lifetime.create(lambda: known.uncaptured(backend.record, None))

    @property
    def done(self) -> bool:
        """Whether the stream has reached the event. Never blocks. Raises if the stream failed before the event."""
        return self._poll(self._stream.driver.is_done)

    def wait(self, timeout: float | None = None) -> None:
        """Block the calling thread until the stream reaches the event, at most `timeout` seconds.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` seconds passed.
        """
        limit = check_timeout(timeout)
        if not self._poll(lambda event: self._stream.driver.wait_done(event, limit)):
            raise self._known.timeout_error(f" did not reach the event in {limit:g} s")

    def _poll(self, call: Callable[[DriverHandle], bool]) -> bool:
        if self.lifetime.state is OF_PARENT:
            self.lifetime.check()
        done: bool = self.lifetime.try_use(call, True)
        if done and not self._reached:
            self._known.poll_fences()  # fences before the event
            note_passed(self._known, self.lifetime.covers)
            self._stream._check_failure(self._known)
            self._reached = True  # a later failure does not concern the event
        return done

    def __await__(self) -> Generator[Any, None, None]:
        while not self.done:
            yield from asyncio.sleep(_POLL_S).__await__()

    __del__ = Resource.__del__


def foreign_pointer(stream: object) -> tuple[int, object]:
    """Return the native pointer of another library's stream, and the object that must be kept alive.

    For torch's CPU stream the pointer is 0: the calling thread. numba's ``handle`` is an int, or an object of ctypes or
    CUDA's bindings.
    """
    if isinstance(stream, bool) or stream is None:
        raise ArgumentTypeError("stream", f"expected a stream, got {stream!r}; pass 0 for the device's default stream.")
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        if not (isinstance(pair, tuple) and len(pair) == 2 and pair[0] == 0):
            raise InvalidArgumentError("stream", f"expected version 0 of __cuda_stream__, got {pair!r}.")
        return check_int(pair[1], "stream", minimum=0), stream
    for attribute in ("cuda_stream", "ptr"):
        if (pointer := getattr(stream, attribute, None)) is not None:
            return check_int(pointer, "stream", minimum=0), stream
    if hasattr(stream, "__index__"):
        return check_int(stream, "stream", minimum=0), None
    if hasattr(stream, "handle") and hasattr(stream, "__int__"):
        return check_int(int(stream), "stream", minimum=0), stream
    if type(stream).__module__ == "torch.cpu" and type(stream).__name__ == "Stream":
        return _DEFAULT_STREAM, stream
    raise ArgumentTypeError(
        "stream",
        "expected a Stream, an int, an object with __cuda_stream__, or a stream of torch, CuPy or numba, got "
        f"{type(stream).__name__}.",
    )


def check_foreign_device(device: Device, stream: object) -> None:
    """Raise if another library's stream belongs to another GPU. Its number may not show that: each GPU has a 0."""
    index = getattr(getattr(stream, "device", None), "index", None)  # torch
    if index is None:
        index = getattr(stream, "device_id", None)  # CuPy; -1 for its default stream, on the current device
    if isinstance(index, int) and not isinstance(index, bool) and index >= 0 and index != device.info.dlpack[1]:
        raise InvalidArgumentError(
            "stream",
            f"expected a stream of device {device.info.dlpack[1]}, {device.name}, got one of that library's device "
            f"{index}; wrap it with gpuinterop.device({index}), or make the device current before you ask for it.",
        )


def _owns(owner: object) -> bool:
    """Whether the object owns its stream. If it only wraps a number, the stream can be destroyed earlier."""
    kind = type(owner)
    library = kind.__module__.partition(".")[0]
    return library in ("torch", "cupy", "numba") and kind.__name__ == "Stream" and not getattr(owner, "external", False)


def check_stream(device: Device, stream: object) -> Stream:
    """Return the stream, or wrap another library's stream as `Device.wrap_stream` does. Raise if it is unusable.

    The device remembers the last stream whose object torch, CuPy or numba owns, and keeps that object alive.
    """
    if not isinstance(stream, Stream):
        pointer, owner = foreign_pointer(stream)
        last = device._last_stream
        known = None if last is None or last._ptr != pointer else last.known
        # A number can be reused by a later stream, but not while its owner is alive. A failure is raised only once.
        if last is None or known is None or known.failure is not None or last._failure is not None:
            last = device.wrap_stream(stream)
            device._last_stream = last if not pointer or _owns(owner) else None
        elif not pointer:  # 0 on every device
            check_foreign_device(device, stream)
        stream = last
    if (
        stream.lifetime.state is not LIVE
        or stream.known is None
        or stream.known.needs_checks
        or stream._failure is not None
    ):
        stream._check_open()  # the conditions above are inline because this is a hot path
        stream._check_failure()
    if stream.device is not device:
        raise InvalidArgumentError(
            "stream", f"belongs to {stream.device.name}, the object to {device.name}; use a stream of that device."
        )
    return stream
