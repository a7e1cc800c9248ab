"""What a share and an attachment have in common: arrays by name, their transport, and the order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .._arguments import NotAnArray
from .._core.device import Device
from .._core.interchange import View, layout_of
from .._core.memory import Buffer
from .._core.resource import Resource
from .._core.stream import Stream
from ..errors import ArgumentTypeError, InvalidArgumentError
from .descriptor import Contents
from .order import Reader, Writer, acquire_all

if TYPE_CHECKING:
    from .attachment import SharedMemory


class Arrays(Resource, NotAnArray):
    """The common part of `ArrayShare` and `AttachedArrays`: arrays by name, their way, and the order.

    It is a mapping of names to views: iterate over the names, and take ``arrays[name]``.
    """

    _as_array = "numpy.asarray(arrays.view), or numpy.asarray(arrays[name]) of several"
    _contents: Contents
    device: Device
    """The device that has them."""
    key: tuple[bytes, int]
    """The sharing process and the number of its share: equal in all processes that have it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order in which they were shared; ``("",)`` for a single array.

        Examples
        --------
        >>> with gi.share({"weight": buffer.view(8), "bias": buffer.view(2, offset=256)}) as shared:
        ...     shared.names
        ('weight', 'bias')
        """
        return tuple(self._contents.arrays)

    @property
    def view(self) -> View:
        """The single array, in place: a `View`, which array libraries take.

        ``np.asarray(view)`` on the host backend, ``torch.from_dlpack(view)`` and ``cupy.from_dlpack(view)`` on a GPU
        work on the shared bytes. Shape, strides and element type are the array's own. An array that is made of the view
        keeps the bytes mapped as long as it lives, also after `close`.

        Raises
        ------
        InvalidArgumentError
            The share has names: take ``arrays[name]``.
        ResourceClosedError
            `close` was called.

        Examples
        --------
        >>> with gi.share(buffer.view((2, 3), "int16")) as shared, gi.attach(bytes(shared)) as attached:
        ...     attached.view.shape, attached.view.strides
        ((2, 3), (6, 2))
        """
        if not self._contents.single:
            first, count = self.names[0], len(self.names)
            raise InvalidArgumentError(
                "view", f"expected a single array, got {count} with names; take each by its own, as [{first!r}]."
            )
        return self[self.names[0]]

    def __getitem__(self, name: str) -> View:
        """Return an array in place, by its name (see `view`).

        Raises
        ------
        InvalidArgumentError
            No array has that name.
        ResourceClosedError
            `close` was called.

        Examples
        --------
        >>> with gi.share({"bias": buffer.view(2, "float32")}) as shared, gi.attach(bytes(shared)) as attached:
        ...     np.asarray(attached["bias"])
        array([0., 0.], dtype=float32)
        """
        self._check_open()
        if (placed := self._contents.arrays.get(name)) is None:
            if self._contents.single:
                raise InvalidArgumentError(
                    "name", f"expected no name, for the array has none, got {name!r}; take view."
                )
            known, more = ", ".join(map(repr, self.names[:8])), ", ..." if len(self.names) > 8 else ""
            raise InvalidArgumentError("name", f"expected one of {known}{more}, got {name!r}.")
        return self._memory()[placed.region].buffer.view(placed.shape, placed.dtype, placed.offset, placed.strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def way(self) -> str:
        """Types of the handles by which the memory travels: ``VmmFd``, ``IpcMemHandle``, ``OpaqueFd``.

        - ``VmmFd``: memory of `Device.allocate`, torch's expandable segments, JAX's pool
          (``cuMemRetainAllocationHandle``, ``cuMemExportToShareableHandle``; on HIP memory of `Device.allocate` alone,
          ``hipMemExportToShareableHandle``).
        - ``IpcMemHandle``: memory of ``cudaMalloc`` or ``hipMalloc``, the default of torch and of CuPy
          (``cuIpcGetMemHandle`` / ``hipIpcGetMemHandle``).
        - ``OpaqueFd``: memfds, on the host backend.

        Arrays that take several ways have their names, with commas.

        Examples
        --------
        >>> with gi.share(buffer.view(8)) as shared:
        ...     shared.way
        'OpaqueFd'
        """
        return self._contents.way

    @property
    def exposes(self) -> str:
        """The memory that a reader can touch, in words: whole allocations, of which the arrays are a part.

        Drivers map whole allocations. A reader of one small tensor of torch can read and write the whole segment that
        torch's allocator has put it in, with the tensors beside it; of JAX, the whole pool. Share such arrays with
        processes that you trust with all of that, or pass ``copy=True`` to `share`.

        Examples
        --------
        >>> with gi.share(buffer.view(8)) as shared:
        ...     shared.exposes
        '1 allocation(s) of 65,536 bytes in all, of which the arrays span 8'
        """
        regions = self._contents.regions
        pieces, whole = sum(len(region.keys) for region in regions), sum(region.size for region in regions)
        arrays = sum(layout_of(one.shape, one.dtype, one.strides).high for one in self._contents.arrays.values())
        return f"{pieces} allocation(s) of {whole:,} bytes in all, of which the arrays span {arrays:,}"

    def acquire(self, stream: Stream | object = None, *, timeout: float | None = None) -> None:
        """Come in: make a stream wait for its turn, before its later work with the arrays.

        The writer (`ArrayShare`) waits for the readers that are in. A reader (`AttachedArrays`) waits for the newest
        version; while the writer is in, for the next. The call returns at once, and the stream waits
        (``cuStreamWaitValue64`` / ``hipStreamWaitValue64``). Without a stream the calling thread waits here. The first
        call of a reader asks the sharing process for its place in the order, over their connection.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, an int
            Stream of the arrays' device, as `Device.wrap_stream` takes it. None is the calling thread, on a CPU only.
        timeout : float, optional
            Seconds that the stream may wait, where its device has waits with a limit (`Operation.WAIT_TIMEOUT`: the
            host backend). Elsewhere leave it out, and call ``stream.synchronize(timeout)``. Default: no limit.

        Raises
        ------
        InvalidArgumentError
            `acquire` out of turn: `release` comes first. Or the writer's arrays are immutable (JAX's). Or the stream is
            of another device, or is being captured.
        ArgumentTypeError
            `stream` is None on a GPU, or is not a stream.
        SemaphoreTimeoutError
            `timeout` passed, and the calling thread is out again.
        PeerError
            The sharing process has died, or does not answer the reader's first call; or 504 readers have a place.
        UnsupportedError
            The device has no waits with a limit, or no timelines (`Operation.CREATE_SEMAPHORE` for `TimelineFd`).
        ResourceClosedError
            `close` was called.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        ...     attached.acquire(stream)  # version 0
        ...     buffer.copy_to_host(found := np.empty(4, np.uint8), stream=stream)
        ...     attached.release(stream)
        ...     shared.acquire(timeout=10)  # this thread waits for that reader
        ...     shared.release()
        """
        self._turns().acquire(self._stream(stream), timeout)

    def release(self, stream: Stream | object = None) -> None:
        """Go out, behind the work that a stream was given (``cuStreamWriteValue64`` / ``hipStreamWriteValue64``).

        The writer's `release` publishes the next version: readers that wait for it go on once the stream's work is
        done. A reader's lets the writer in. The call returns at once.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, an int
            See `acquire`. It may be another stream than that of `acquire`; then order the two yourself.

        Raises
        ------
        InvalidArgumentError
            `release` out of turn: `acquire` comes first.
        ArgumentTypeError, PeerError, ResourceClosedError
            See `acquire`.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared:
        ...     for step in range(3):
        ...         shared.acquire(stream)
        ...         buffer.fill(step, stream=stream)
        ...         shared.release(stream)  # versions 1, 2, 3
        """
        self._turns().release(self._stream(stream))

    def _place(self, name: str) -> tuple[Buffer, int]:
        """The buffer that an array lies in, and the offset of its first element."""
        placed = self._contents.arrays[name]
        return self._memory()[placed.region].buffer, placed.offset

    def _memory(self) -> Sequence[SharedMemory]:
        raise NotImplementedError

    def _turns(self) -> Writer | Reader:
        raise NotImplementedError

    def _stream(self, stream: object) -> Stream:
        self._check_open()
        if isinstance(stream, Stream):
            return stream
        if stream is None and not self.device.info.is_cpu:
            raise ArgumentTypeError(
                "stream", "expected a stream, got None, which stands for the calling thread of a CPU."
            )
        return self.device.wrap_stream(0 if stream is None else stream)


def acquire(arrays: Iterable[Arrays], stream: object = None, *, timeout: float | None = None) -> None:
    """Acquire several shares or attachments, each once, for one stream; none if one fails.

    Two processes that acquire the same shares one after the other, each in its own order, can wait for each other for
    good. Those that acquire them by this call do not. Release each by itself.

    Parameters
    ----------
    arrays : iterable of ArrayShare or AttachedArrays
        The shares and attachments. One that is named twice is acquired once.
    stream, timeout
        See `ArrayShare.acquire`; the time-out is of each wait.

    Raises
    ------
    GpuInteropError
        The error of the one that failed (`ArrayShare.acquire`). The others are released.

    Examples
    --------
    >>> one, other = buffer.view(4), buffer.view(4, offset=4)
    >>> with gi.share(one) as first, gi.share(other) as second, gi.attach(bytes(first)) as reader:
    ...     gi.sharing.acquire([second, reader], stream)
    ...     for arrays in (second, reader):
    ...         arrays.release(stream)
    ...     stream.synchronize(timeout=10)
    """
    ordered = sorted(dict.fromkeys(arrays), key=_key)
    turns = [(one._turns(), one._stream(stream)) for one in ordered]
    written = {one.key for one, (turn, _) in zip(ordered, turns, strict=True) if isinstance(turn, Writer)}
    if sum(one.key in written for one in ordered) > len(written):
        raise InvalidArgumentError(
            "arrays", "expected a share or an attachment of it, got both, which wait for each other; acquire one first."
        )
    if turns:
        locks = {array.key: one.board.lock for array, (one, _) in zip(ordered, turns, strict=True)}
        acquire_all(turns, list(locks.values()), timeout)


def _key(arrays: Arrays) -> tuple[tuple[bytes, int], int]:
    return arrays.key, id(arrays)
