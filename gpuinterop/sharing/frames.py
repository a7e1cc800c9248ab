"""Named streams of frames: one process publishes, and any number of readers take the newest frame.

>>> with gi.publish("doc-camera", shape=(2, 2), dtype="float32", device=device) as camera:
...     with gi.subscribe("doc-camera") as viewer:  # in any process of this user
...         with camera.write() as frame:  # a GPU: camera.write(torch.cuda.current_stream())
...             np.asarray(frame)[:] = 7  # torch.from_dlpack(frame)
...         for frame in viewer:
...             with frame.read() as picture:
...                 print(frame.number, np.asarray(picture).sum())
...             break
1 28.0

**The newest frame wins.** The writer uses the slot whose frame is oldest and that no reader uses. It never waits for a
reader if there are enough slots: the number of readers that can read at once + 2. A GPU reader uses a slot until its
stream has done the work of ``read``. If that stream is late, the reader uses a slot for each frame that it has not read
yet. With too few slots the writer waits for a reader, and warns once.

**Names** belong to the user: letters, digits, ``-``, ``_`` and ``.``. A name is a file in the user's socket folder
(`GPUINTEROP_SHARE_DIR`). It contains the descriptor of the publisher's share, and the publisher keeps it locked
(``flock``). When the publisher exits, the kernel frees the lock, and another process can publish the name.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final, Self, cast

from .. import system
from .._arguments import NoCopy, NotAnArray, check_int, check_timeout
from .._core.device import Device, check_device
from .._core.discovery import device as default_device
from .._core.layout import layout_of
from .._core.lifetime import Lifetime
from .._core.memory import round_up
from .._core.resource import Resource
from .._core.view import View
from ..errors import InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError, SemaphoreTimeoutError
from .arrays import Access
from .attachments import AttachedArrays, attached
from .names import Name, path_of, published, remove_unlocked
from .order import MAX_BUFFERS, FrameReader, FrameWriter, Turn, time_left
from .shares import ALIGNMENT, ArrayShare, share_described

_CHECK_S: Final = 0.02
"""Seconds between two checks whether a process publishes a name."""
_ANSWER_S: Final = 0.05
"""Seconds that another writer has to answer, even in a call that does not block."""
_POLL_S: Final = 0.0005


class Publisher(Resource):
    """The writer of named frames. Made by `gpuinterop.publish`.

    Attributes
    ----------
    name : str
        The name.
    device : Device
        The device that has the frames.
    shape, dtype
        Shape and element type of each frame (see `View`).

    Examples
    --------
    >>> with gi.publish("doc-camera", shape=4, dtype="uint8", device=device) as camera:
    ...     for step in range(3):
    ...         with camera.write(stream) as frame:
    ...             np.asarray(frame)[:] = step  # torch.from_dlpack(frame), on the same stream
    """

    def __init__(self, name: str, file: Name, share: ArrayShare) -> None:
        super().__init__(Lifetime("Publisher", Name.close, device=share.device.streams, label=name))
        self.name, self.device, self._share = name, share.device, share
        share.lifetime.warns = False
        self._writer = cast(FrameWriter, share._side())  # raises if the device has no timelines
        self._views = [share[slot] for slot in share]
        self.shape, self.dtype = self._views[0].shape, self._views[0].dtype
        self.lifetime.create(lambda: file)

    def write(self, stream: object = None, *, timeout: float | None = None) -> Access[View]:
        """Write a frame in a ``with``, which gives its slot; readers get the frame when the ``with`` ends.

        The ``with`` begins at once. Enqueue its work on the stream: readers' streams wait for that work. The slot
        contains an older frame or undefined bytes. After an exception the frame is not published.

        Parameters
        ----------
        stream : Stream, int, or stream of torch or CuPy
            See `ArrayShare.acquire`.
        timeout : float, optional
            Seconds to wait for a free slot. Default: the stream waits, without a limit.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed; the message names the reader.
        InvalidArgumentError
            The last frame is still being written.
        ResourceClosedError
            `close` was called.
        ResourceBusyError
            The name's file was removed, and another process publishes the name now.

        Warns
        -----
        RuntimeWarning
            All slots are in use, so the writer waits for a reader. The warning is given once.
        """
        return Access(self._share, self._begin, stream, timeout)

    def _begin(self, stream: object, timeout: float | None) -> tuple[View, Turn]:
        bound = self._share._stream(stream)
        if problem := self.lifetime.handle.problem:
            raise ResourceBusyError(problem)
        turn = Turn(self._writer, bound).begin(time_left(timeout))
        return self._views[self._writer.buffer], turn

    def close(self, timeout: float | None = None) -> None:
        """End the frames, and free the name. Readers can still take the last frame.

        A frame that is being written is not published. The memory is freed when no reader and no array uses it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until the memory is freed. Default: do not wait.

        Raises
        ------
        ResourceBusyError
            `timeout` passed.
        """
        check_timeout(timeout)
        super().close()
        self._views.clear()
        self._share.close(timeout)


def publish(
    name: str, shape: int | Sequence[int], dtype: object = "uint8", device: Device | None = None, *, slots: int = 3
) -> Publisher:
    """Publish frames under a name, for any number of readers of this user on this host (`gpuinterop.subscribe`).

    Parameters
    ----------
    name : str
        Up to 100 letters, digits, ``-``, ``_`` and ``.``.
    shape : int or sequence of int
        Shape of each frame.
    dtype : numpy.dtype or str
        Element type (see `Buffer.view`).
    device : Device, optional
        Device that holds the frames, in memory of `Device.allocate`. Default: the device of `gpuinterop.device`.
    slots : int
        Number of frames to allocate, 2 to 256: the number of readers that can read at once + 2.

    Returns
    -------
    Publisher
        The writer, which the caller closes.

    Raises
    ------
    ResourceBusyError
        A running process publishes the name.
    InvalidArgumentError, ArgumentTypeError
        An argument is not as described, or the name's folder does not exist or is not only this user's
        (`GPUINTEROP_SHARE_DIR`).
    UnsupportedError
        The device cannot export allocations, or has no timelines.
    OutOfMemoryError
        The device has not enough free memory.

    Examples
    --------
    >>> with gi.publish("doc-camera", shape=(1080, 1920, 4), dtype="uint8", device=device) as camera:
    ...     gi.publish("doc-camera", shape=4, dtype="uint8", device=device)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ResourceBusyError: 'doc-camera' is published already; ...
    """
    path, count = path_of(name), check_int(slots, "slots", minimum=2, maximum=MAX_BUFFERS)
    remove_unlocked(os.path.dirname(path))
    device = default_device() if device is None else check_device(device, "device")
    layout = layout_of(shape, dtype, None)
    step = round_up(max(layout.high, 1), ALIGNMENT)
    with ExitStack() as undo:
        file = undo.enter_context(closing(Name(name, path)))
        with device.allocate(step * count) as allocation:
            arrays = {str(slot): allocation.buffer._view(layout, step * slot)._described() for slot in range(count)}
            share = undo.enter_context(share_described(device, arrays, None, name, buffers=count))
        file.write(bytes(share))
        publisher = Publisher(name, file, share)
        undo.pop_all()
        return publisher


class Subscription(NoCopy):
    """A reader of named frames. Made by `gpuinterop.subscribe`. Use it in one thread at a time.

    Iterate over it (``for``, ``async for``): each step waits for a frame that you have not taken, and returns the
    newest. The iteration ends when the writer closes. If the writer exits and another process publishes the name, the
    iteration continues with that process's frames, the first of which has ``frame.restarted``.

    Attributes
    ----------
    name : str
        The name.
    device : Device
        The device that holds the frames here.
    shape, dtype
        Shape and element type of each frame (see `View`).

    Examples
    --------
    >>> with gi.publish("doc-camera", shape=2, dtype="uint8", device=device) as camera:
    ...     viewer = gi.subscribe("doc-camera")
    ...     with camera.write() as frame:
    ...         np.asarray(frame)[:] = 7
    >>> for frame in viewer:  # ends: the writer has closed
    ...     with frame.read() as picture:
    ...         np.asarray(picture)
    array([7, 7], dtype=uint8)
    >>> viewer.close()
    """

    _arrays: AttachedArrays
    _views: list[View]
    _closed = False
    _last: int  # version of the last frame taken
    _number: int  # and its number

    def __init__(self, name: str, timeout: float | None, device: Device | None) -> None:
        self.name, self._timeout, self._wanted = name, timeout, device
        self._path = path_of(name)
        remove_unlocked(os.path.dirname(self._path))
        self._join(timeout)
        self._restarted = False

    @property
    def ended(self) -> bool:
        """Whether the writer has closed or exited, so that no newer frame will arrive unless another one takes over."""
        return self._arrays.ended

    def latest(self) -> Frame | None:
        """Take the newest frame if you have not taken it; None otherwise. Does not block.

        If the writer has exited, this looks for another one, which has 50 ms to answer. The frame stays whole until you
        read it, or wait for or take the next one.

        Raises
        ------
        ResourceClosedError
            The writer has closed, and you have taken its last frame. Or `close` was called.
        PeerError
            The writer has exited, and no process has taken over.
        """
        return self._take()

    def next(self, timeout: float | None = None) -> Frame:
        """Take the newest frame that you have not taken; block the calling thread until there is one.

        It blocks an event loop too: in a coroutine, write ``await camera.next_async()``.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. Default: no limit; if the writer exits, the time-out of `subscribe` for another one.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed.
        ResourceClosedError, PeerError
            See `latest`.
        """
        left = time_left(timeout)
        while True:
            try:
                self._reader.unclaim()  # the writer may wait for it
                self._arrays.wait(newer_than=self._last, timeout=left())
                if frame := self._take():
                    return frame
            except PeerError:
                rest = left()
                self._join(self._timeout if rest is None else rest)

    async def next_async(self, timeout: float | None = None) -> Frame:
        """Take the newest frame that you have not taken; other tasks of asyncio run until there is one. See `next`."""
        left, patience = time_left(timeout), None
        while True:
            try:
                if frame := self._take():
                    return frame
                patience = None  # there is a writer
            except PeerError:
                patience = patience or system.seconds_left(self._timeout)
                if patience() == 0:
                    raise
            if left() == 0:
                raise SemaphoreTimeoutError(f"{self.name!r} has no newer frame; is its writer alive?")
            self._reader.unclaim()  # the writer may wait for it
            await asyncio.sleep(_POLL_S)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Frame:
        try:
            return self.next()
        except ResourceClosedError:
            raise StopIteration from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Frame:
        try:
            return await self.next_async()
        except ResourceClosedError:
            raise StopAsyncIteration from None

    def close(self, timeout: float | None = None) -> None:
        """Detach from the frames; a frame that is being read is released. See `AttachedArrays.close`."""
        check_timeout(timeout)
        self._closed, self._views = True, []
        self._arrays.close(timeout)

    def __enter__(self) -> Self:
        self._arrays._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscription to {self.name!r}{' closed' if self._arrays.closed else ''}>"

    def _take(self) -> Frame | None:
        over = None
        while True:
            reader, before, views = self._reader, self._number, self._views
            version = reader.claim(self._last) if views else None  # empty after `close`
            if version is not None and (reader.failure is None or reader.is_whole()):
                frame = Frame(self, reader, views[reader.buffer], version)
                frame.dropped = frame.number - before - 1 if before else 0
                self._restarted = False
                self._last, self._number = version, frame.number
                return frame
            if isinstance(over, PeerError):
                self._join(0.0)
            elif over is not None:
                raise over
            if (over := self._arrays._over()) is None:  # else check again: the last frame is published before the end
                return None

    def _attach(self, timeout: float | None) -> tuple[AttachedArrays, FrameReader]:
        """Attach to the name's writer once there is one, and take a place in its order."""
        left = system.seconds_left(timeout)
        while True:
            if self._closed:
                raise ResourceClosedError(f"{self!r}; subscribe again.")
            rest = left()
            limit = 10.0 if rest is None else max(_ANSWER_S, rest)
            why = f"expected a process that publishes {self.name!r}, got none; start one as this user, in its folder."
            if descriptor := published(self._path):
                try:
                    with ExitStack() as undo:
                        arrays = undo.enter_context(
                            attached(descriptor, limit, self._wanted, (), self.name, frames=True)
                        )
                        reader = cast(FrameReader, arrays._side(limit))
                        undo.pop_all()
                        return arrays, reader
                except (PeerError, ResourceClosedError) as error:
                    why = f"{self.name!r} is published, but its writer cannot be read: {error}"
            if rest == 0:
                raise PeerError(why)
            time.sleep(_CHECK_S if rest is None else min(_CHECK_S, rest))

    def _join(self, timeout: float | None) -> None:
        """Attach to the first writer, or to another one after it has exited."""
        before = getattr(self, "_arrays", None)
        self._arrays, self._reader = self._attach(timeout)
        self._views = [self._arrays[slot] for slot in self._arrays]
        for view in self._views:
            view.read_only = True  # libraries see that they must not write
        first, self.device = self._views[0], self._arrays.device
        self.shape, self.dtype = first.shape, first.dtype
        self._last, self._number, self._restarted = 0, 0, True
        if before is not None:
            before.close()
        if self._closed:  # by another thread, meanwhile
            self.close()


class Frame(NotAnArray):
    """A frame that a `Subscription` has taken. It stays whole until you read it, or wait for or take a newer one.

    Attributes
    ----------
    number : int
        Number of the frame: 1 for the writer's first, then one more for each. Another writer starts at 1 again.
    dropped : int
        Number of published frames that the reader missed since the last frame that it took from this writer.
    restarted : bool
        Whether it is the reader's first frame from a new writer, after the previous one exited.

    Examples
    --------
    >>> with gi.publish("doc-camera", 2, "uint8", device) as camera, gi.subscribe("doc-camera") as viewer:
    ...     for value in (7, 8):
    ...         with camera.write() as array:
    ...             np.asarray(array)[:] = value
    ...     frame = viewer.next(timeout=10)
    ...     with frame.read() as picture:
    ...         frame.number, frame.dropped, np.asarray(picture)
    (2, 0, array([8, 8], dtype=uint8))
    """

    _as_array = "numpy.asarray(picture) in a with: with frame.read() as picture"

    def __init__(self, camera: Subscription, reader: FrameReader, view: View, version: int) -> None:
        self._name, self._arrays = camera.name, camera._arrays
        self._reader, self._view, self._version = reader, view, version
        self.number, self.dropped, self.restarted = reader.number, 0, camera._restarted

    def read(self, stream: object = None, *, timeout: float | None = None) -> Access[View]:
        """Read the frame in a ``with``, which gives its array; do not write to it.

        The stream waits for the frame. When the ``with`` ends, the slot is released after the stream's queued work.

        Parameters
        ----------
        stream : Stream, int, or stream of torch or CuPy
            See `ArrayShare.acquire`.
        timeout : float, optional
            Seconds to wait for the writer's stream. Default: the stream waits, without a limit.

        Raises
        ------
        InvalidArgumentError
            You have read the frame, or waited for or taken a newer one.
        PeerError
            The writer exited before its stream had written the frame.
        """
        return Access(self._arrays, self._begin, stream, timeout)

    def _begin(self, stream: object, timeout: float | None) -> tuple[View, Turn | None]:
        bound, reader = self._arrays._stream(stream), self._reader
        if not reader.claims(self._version):
            problem = f"expected a frame to read, got {self.number}, which was read or passed over; take the next one."
            raise InvalidArgumentError("frame", problem)
        try:
            return self._view, Turn(reader, bound).begin(time_left(timeout))
        except PeerError:
            if not reader.is_whole():
                raise
            return self._view, None  # no process writes the slot any more

    def __repr__(self) -> str:
        return f"<Frame {self.number} of {self._name!r}>"


def subscribe(name: str, *, timeout: float | None = 10.0, device: Device | None = None) -> Subscription:
    """Read the frames that a process of this user publishes under a name on this host (`gpuinterop.publish`).

    Parameters
    ----------
    name : str
        The name.
    timeout : float, optional
        Seconds to wait until a process publishes the name, also after a writer has exited. None: no limit. Default: 10.
    device : Device, optional
        See `gpuinterop.attach`.

    Returns
    -------
    Subscription
        The reader, which the caller closes.

    Raises
    ------
    PeerError
        No process published the name within the time-out, or its writer did not answer or accept this reader.
    InvalidArgumentError, ArgumentTypeError
        The name is invalid, or its folder does not exist or is not only this user's (`GPUINTEROP_SHARE_DIR`).
    DeviceNotFoundError, UnsupportedError, DriverError
        See `gpuinterop.attach`.

    Examples
    --------
    >>> with gi.publish("doc-camera", shape=4, dtype="uint8", device=device):
    ...     with gi.subscribe("doc-camera", timeout=10) as viewer:
    ...         print(viewer.latest())
    None
    """
    limit = check_timeout(timeout)
    if device is not None:
        check_device(device, "device")
    return Subscription(name, limit, device)
