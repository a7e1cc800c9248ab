"""Frames by name: one process publishes, and any number of readers take the newest, on the order and link of shares.

>>> with gi.publish("doc-camera", shape=(2, 2), dtype="float32", device=device) as camera:
...     with gi.subscribe("doc-camera") as viewer:  # in any process of this user
...         with camera.write() as frame:  # a GPU: camera.write(torch.cuda.current_stream())
...             np.asarray(frame)[:] = 7  # torch.from_dlpack(frame)
...         for frame in viewer:
...             with frame.read() as picture:
...                 print(frame.number, np.asarray(picture).sum())
...             break
1 28.0

**The newest frame wins.** A frame is written into the slot that was published longest ago and that no reader uses. The
writer never waits for a reader if there are enough slots: the readers that may read at once + 2. A reader on a GPU uses
a slot until its stream has done the work of ``read``: one that runs late uses a slot for each frame that it has yet to
read. With fewer slots the writer waits for a reader, and warns once.

**Names** belong to the user: letters, digits, ``-``, ``_`` and ``.``. A name is a file in the folder of this user's
sockets (`GPUINTEROP_SHARE_DIR`), which the publishing process keeps locked (``flock``), and which has the descriptor of
its share. The kernel frees the lock when the process dies, and another one can publish the name.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, Final, Self, cast

from .. import system
from .._arguments import NoCopy, NotAnArray, check_int, check_timeout, check_type
from .._core.device import Device, check_device
from .._core.interchange import View, layout_of
from .._core.lifetime import Lifetime
from .._core.memory import round_up
from .._core.monitor import after_fork
from .._core.registry import device as default_device
from .._core.resource import Resource
from .._core.stream import Stream
from ..errors import InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError, SemaphoreTimeoutError
from .arrays import Access
from .attachment import AttachedArrays, attached
from .offer import ALIGNMENT, ArrayShare, share_described
from .order import MAX_BUFFERS, FrameReader, FrameWriter
from .rendezvous import folder

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_LOOK_S: Final = 0.02
"""Seconds between two looks whether somebody publishes a name."""
_ANSWER_S: Final = 0.05
"""Seconds that another writer is given to answer, also by a call that does not block."""
_POLL_S: Final = 0.0005
"""Seconds between two looks for a frame that is awaited."""
_files: Final[dict[int, None]] = {}
"""The locked files of this process."""


class Publisher(Resource):
    """The writer of a name's frames. Made by `gpuinterop.publish`.

    Attributes
    ----------
    name : str
        The name.
    device : Device
        The device that has the frames.
    shape, dtype
        Of each frame, as `View` has them.

    Examples
    --------
    >>> with gi.publish("doc-camera", shape=4, dtype="uint8", device=device) as camera:
    ...     for step in range(3):
    ...         with camera.write(stream) as frame:
    ...             np.asarray(frame)[:] = step  # torch.from_dlpack(frame), on the same stream
    """

    def __init__(self, name: str, path: str, file: int, share: ArrayShare) -> None:
        super().__init__(Lifetime("Publisher", _unlock, device=share.device.streams, label=name))
        self.name, self.device, self._share = name, share.device, share
        share.lifetime.warns = False
        share._turns()  # raises where there are no timelines
        self._views = [share[slot] for slot in share]
        self.shape, self.dtype = self._views[0].shape, self._views[0].dtype
        self.lifetime.create(lambda: (file, path))

    def write(self, stream: object = None, *, timeout: float | None = None) -> Access[View]:
        """Write a frame in a ``with``, which gives its slot; readers get it after that.

        The ``with`` returns at once, and the work in it belongs on the stream. Readers' streams wait for that work. The
        slot has an older frame's bytes, or undefined ones. After an exception the frame is not published.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, an int
            See `ArrayShare.acquire`. None is the calling thread, on a CPU only.
        timeout : float, optional
            Seconds to wait for a slot that no reader uses. Default: the stream waits, without a limit.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed; the message names the reader.
        InvalidArgumentError
            A frame is being written.
        ResourceClosedError
            `close` was called.

        Warns
        -----
        RuntimeWarning
            Once, if all slots are in use: the writer waits for a reader.

        Examples
        --------
        >>> with gi.publish("doc-camera", shape=4, dtype="uint8", device=device) as camera:
        ...     with camera.write() as frame:
        ...         np.asarray(frame)[:] = 7
        """
        return Access(self._share, self, stream, timeout)

    def _begin(self, stream: Stream, timeout: float | None) -> View:
        turns = cast(FrameWriter, self._share._turns())
        turns.begin(stream, timeout)
        return self._views[turns.taken]

    def _end(self, stream: Stream, whole: bool) -> None:
        if not self.closed:
            cast(FrameWriter, self._share._turns()).whole = whole
            self._share._end(stream, whole)

    def close(self, timeout: float | None = None) -> None:
        """Give the name back, and end the frames; readers are told after they have taken the last one.

        A frame that is being written is not published. The memory is freed once no reader and no array has it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for that. Default: do not wait.

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
    """Publish frames by a name, for any number of readers of this user on this host (`gpuinterop.subscribe`).

    Parameters
    ----------
    name : str
        Up to 100 letters, digits, ``-``, ``_`` and ``.``.
    shape : int or sequence of int
        Shape of each frame.
    dtype : numpy.dtype or str
        Element type, as `Buffer.view` takes it.
    device : Device, optional
        Device that has the frames, in memory of `Device.allocate`. Default: that of `gpuinterop.device`.
    slots : int
        Number of frames that there is memory for, 2 to 256: the readers that may read at once + 2.

    Returns
    -------
    Publisher
        The writer, which the caller closes.

    Raises
    ------
    ResourceBusyError
        A process that lives publishes the name.
    InvalidArgumentError, ArgumentTypeError
        An argument is not as above, or there is no folder for the name (`GPUINTEROP_SHARE_DIR`).
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
    path, count = _path(name), check_int(slots, "slots", minimum=2, maximum=MAX_BUFFERS)
    device = default_device() if device is None else check_device(device, "device")
    layout = layout_of(shape, dtype, None)
    step = round_up(max(layout.high, 1), ALIGNMENT)
    file = _locked(path, name)
    try:
        with device.allocate(step * count) as allocation:
            arrays = {str(slot): allocation.buffer._view(layout, step * slot)._described() for slot in range(count)}
            share = share_described(device, arrays, None, name, buffers=count)
        try:
            os.ftruncate(file, os.pwrite(file, bytes(share), 0))
            return Publisher(name, path, file, share)
        except BaseException:
            share.close()
            raise
    except BaseException:
        _unlock((file, path))
        raise


class Subscription(NoCopy):
    """A reader of a name's frames. Made by `gpuinterop.subscribe`. One thread at a time uses it.

    Iterate over it (``for``, ``async for``): each turn gives the newest frame that was not seen yet, and waits for one.
    The iteration ends when the writer closes. If the writer dies and another process publishes the name, the frames go
    on with that one's, whose first has ``frame.restarted``.

    Attributes
    ----------
    name : str
        The name.
    device : Device
        The device that has the frames here.
    shape, dtype
        Of each frame, as `View` has them.

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
    _last: int
    """Number of the last frame that was taken."""

    def __init__(self, name: str, timeout: float | None, device: Device | None) -> None:
        self.name, self._timeout, self._wanted = name, timeout, device
        self._path = _path(name)
        self._join(timeout)
        self._restarted = False

    @property
    def ended(self) -> bool:
        """Whether the writer has closed, or has died: no newer frame will come, unless another process takes over."""
        return self._arrays.ended

    def latest(self) -> Frame | None:
        """Take the newest frame, if it was not taken before; None otherwise. Does not block.

        After the death of a writer it looks for another one, which it gives 50 ms to answer.

        It stays whole until it was read, or the next one is waited for or taken.

        Raises
        ------
        ResourceClosedError
            The writer has closed, and its last frame was taken. Or `close` was called.
        PeerError
            The writer has died, and nobody has taken over.
        """
        frame = Frame(self)
        return frame if self._takes(frame) else None

    def next(self, timeout: float | None = None) -> Frame:
        """Take the newest frame that was not taken before; block the calling thread until there is one.

        In a coroutine write ``await camera.next()``, which lets other tasks run. (Where a loop of asyncio runs, the
        call returns at once, and the frame waits where it is awaited or first used.)

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. Default: no limit; for another writer after the death of one, that of `subscribe`.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed.
        ResourceClosedError, PeerError
            See `latest`.
        """
        frame = Frame(self, timeout)
        try:
            if self._takes(frame):
                return frame
        except PeerError:  # another writer may come
            pass
        if asyncio._get_running_loop() is None:
            self._wait(frame)
        return frame

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Frame:
        try:
            self._wait(frame := Frame(self))
        except ResourceClosedError:
            raise StopIteration from None
        return frame

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Frame:
        try:
            return await Frame(self)
        except ResourceClosedError:
            raise StopAsyncIteration from None

    def close(self, timeout: float | None = None) -> None:
        """Give the frames back; a frame that is being read is released. See `AttachedArrays.close`."""
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

    def _takes(self, frame: Frame) -> bool:
        """Take the newest frame, if it was not taken before."""
        over = None
        while True:
            reader, before, views = self._reader, self._last, self._views
            if (
                views  # none after `close`
                and (number := reader.claim(before)) is not None
                and (reader.failure is None or reader.is_whole())
            ):
                frame.number, frame.dropped = number, number - before - 1 if before else 0
                frame.restarted, self._restarted = self._restarted, False
                frame._reader, frame._arrays, frame._view = reader, self._arrays, views[reader.buffer]
                self._last = number
                return True
            if isinstance(over, PeerError):
                self._join(0.0)
            elif over is not None:
                raise over
            if (over := self._arrays._over()) is None:  # else it looks again: the last frame came before the end
                return False

    def _wait(self, frame: Frame) -> None:
        """Take the newest frame, once there is one that was not taken before. Give the last one back meanwhile."""
        while True:
            try:
                self._reader.unclaim()  # the writer may wait for it
                self._arrays.wait(newer_than=self._last, timeout=frame._left())
                if self._takes(frame):
                    return
            except PeerError:
                rest = frame._left()
                self._join(self._timeout if rest is None else rest)

    def _found(self, timeout: float | None) -> tuple[AttachedArrays, FrameReader]:
        """Attach what the name's writer shares, once there is one, and take a place in its order."""
        left = system.seconds_left(timeout)
        while True:
            if self._closed:
                raise ResourceClosedError(f"{self!r}; subscribe again.")
            rest = left()
            limit = 10.0 if rest is None else max(_ANSWER_S, rest)
            try:
                with open(self._path, "rb") as file:
                    descriptor = file.read()
                if not descriptor:
                    raise FileNotFoundError("its writer is about to begin")
                found = attached(descriptor, limit, self._wanted, (), self.name, frames=True)
                try:
                    return found, cast(FrameReader, found._turns(limit))
                except BaseException:
                    found.close()
                    raise
            except (FileNotFoundError, PeerError, ResourceClosedError) as problem:
                if rest == 0:
                    raise PeerError(
                        f"expected a process that publishes {self.name!r}, got none; start one as this user, with the "
                        "same folder."
                    ) from problem
            time.sleep(_LOOK_S if rest is None else min(_LOOK_S, rest))

    def _join(self, timeout: float | None) -> None:
        """Begin with a writer, or go on with another one in place of one that has died."""
        before = getattr(self, "_arrays", None)
        self._arrays, self._reader = self._found(timeout)
        self._views = [self._arrays[slot] for slot in self._arrays]
        for view in self._views:
            view.read_only = True  # libraries are told not to write
        first, self.device = self._views[0], self._arrays.device
        self.shape, self.dtype = first.shape, first.dtype
        self._last, self._restarted = 0, True
        if before is not None:
            before.close()
        if self._closed:  # by another thread, meanwhile
            self.close()


class Frame(NotAnArray):
    """A frame that a `Subscription` has taken. It stays whole until it was read, or a newer one is waited for or taken.

    Attributes
    ----------
    number : int
        Number of the frame: 1 for the writer's first, one more for each. Another writer begins anew.
    dropped : int
        How many frames the reader has missed since the last one that it took from this writer.
    restarted : bool
        Whether it is the first frame that the reader takes from another writer, after the death of one.

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
    number: int
    dropped: int
    restarted: bool
    _reader: FrameReader
    _arrays: AttachedArrays
    _view: View

    def __init__(self, camera: Subscription, timeout: float | None = None) -> None:
        self._camera, self._left = camera, system.seconds_left(check_timeout(timeout))

    def read(self, stream: object = None, *, timeout: float | None = None) -> Access[View]:
        """Read the frame in a ``with``, which gives its array, to read; the writer may use the slot after that.

        The stream waits for the bytes, and releases the slot after the work that it was given in the ``with``.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, an int
            See `ArrayShare.acquire`. None is the calling thread, on a CPU only.
        timeout : float, optional
            Seconds to wait for the writer's stream. Default: the stream waits, without a limit.

        Raises
        ------
        InvalidArgumentError
            The frame was read, or a newer one was waited for or taken.
        PeerError
            The writer died before its stream had written the frame.
        """
        return Access(self._arrays, self, stream, timeout)

    def _begin(self, stream: Stream, timeout: float | None) -> View:
        if not (reader := self._reader).claims(self.number):
            raise InvalidArgumentError(
                "frame",
                f"expected a frame to read, got {self.number}, which was read or passed over; take the next one.",
            )
        try:
            reader.begin(stream, timeout)
        except PeerError:
            if not reader.is_whole():
                raise
        return self._view

    def _end(self, stream: Stream, whole: bool) -> None:
        try:
            if self._reader.failure is None:  # else nobody writes the slot any more, or `close` has released
                self._arrays._end(stream, whole)
        except PeerError:  # the writer has died just now
            pass

    def __await__(self) -> Generator[Any, None, Frame]:
        gone = None
        while True:
            try:
                if "number" in self.__dict__ or self._camera._takes(self):
                    return self
            except PeerError:
                gone = gone or system.seconds_left(self._camera._timeout)
                if gone() == 0:
                    raise
            if self._left() == 0:
                raise SemaphoreTimeoutError(f"{self._camera.name!r} has no newer frame; is its writer alive?")
            self._camera._reader.unclaim()
            yield from asyncio.sleep(_POLL_S).__await__()

    def __getattr__(self, name: str) -> Any:
        """Wait for a frame that was to be awaited, and is used before."""
        if name not in Frame.__annotations__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._camera._wait(self)
        return self.__dict__[name]

    def __repr__(self) -> str:
        return f"<Frame {self.__dict__.get('number', 'to come')} of {self._camera.name!r}>"


def subscribe(name: str, *, timeout: float | None = 10.0, device: Device | None = None) -> Subscription:
    """Read the frames that a process of this user publishes by a name on this host (`gpuinterop.publish`).

    Parameters
    ----------
    name : str
        The name.
    timeout : float, optional
        Seconds to wait until a process publishes the name, also after the death of one. None: no limit. Default: 10.
    device : Device, optional
        See `gpuinterop.attach`. Default: the device that has the frames.

    Returns
    -------
    Subscription
        The reader, which the caller closes.

    Raises
    ------
    PeerError
        No process has published the name within the time-out.
    InvalidArgumentError, ArgumentTypeError
        The name is none, or there is no folder for it (`GPUINTEROP_SHARE_DIR`).
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


# -- names -------------------------------------------------------------------------------------------------------------


def _path(name: str) -> str:
    if not _NAME.fullmatch(check_type(name, str, "name", "a str")):
        raise InvalidArgumentError("name", f"expected up to 100 letters, digits, '-', '_' and '.', got {name!r}.")
    return os.path.join(folder(), f"gpuinterop-{name}.frames")


def _locked(path: str, name: str) -> int:
    """The file of a name, which this process keeps locked."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file: int = system.call(f"open({path})", os.open, path, flags, 0o600)
        _files[file] = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except BlockingIOError:
            _close(file)
            raise ResourceBusyError(f"{name!r} is published already; take another name, or end that writer.") from None
        _close(file)  # a writer has just removed it


def _unlock(owned: tuple[int, str]) -> None:
    file, path = owned
    with suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(file)):  # else it was removed, and is another writer's
            os.unlink(path)
    _close(file)


def _close(file: int) -> None:
    del _files[file]
    os.close(file)


@after_fork
def _forked() -> None:
    """Close the child's copies: they would keep the names locked after the parent's death."""
    for file in _files:
        os.close(file)
    _files.clear()
