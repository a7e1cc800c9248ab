"""What a share and an attachment have in common: arrays by name, their transport, and the order."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from .._arguments import NotAnArray, check_timeout
from .._core.device import Device
from .._core.interchange import View
from .._core.memory import Buffer
from .._core.resource import Resource
from .._core.stream import Stream, check_stream
from ..errors import ArgumentTypeError, GpuInteropError, InvalidArgumentError, PeerError
from .descriptor import Contents
from .loop import loop
from .order import Reader, Side, Writer, acquire_all

if TYPE_CHECKING:
    from .attachment import SharedMemory

T = TypeVar("T")


class Access(Generic[T], NotAnArray):
    """What ``write`` and ``read`` return: acquires where a ``with`` begins, and releases where it ends."""

    _as_array = "numpy.asarray(array) in a with: with frame.read() as array"

    def __init__(self, arrays: Arrays, accessed: Any, stream: object, timeout: float | None) -> None:
        self._arrays, self._accessed, self._stream, self._timeout = arrays, accessed, stream, timeout

    def __enter__(self) -> T:
        self._stream = stream = self._arrays._stream(self._stream)
        self._turns = turns = self._arrays._turns()
        self._turn = turns._turn + 1
        try:
            found: T = self._accessed._begin(stream, self._timeout)
        except Exception:  # it has not acquired, or has released
            del self._turns
            raise
        return found

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        try:
            self._accessed._end(self._stream, error is None)
        except GpuInteropError:
            if error is None:
                raise

    def __del__(self) -> None:
        turns = getattr(self, "_turns", None)
        if turns is not None and turns.inside and turns._turn == self._turn:  # an interrupt has struck in these calls
            loop().look_again(partial(turns.drop, self._turn))


class Arrays(Resource):
    """The common part of `ArrayShare` and `AttachedArrays`: arrays by name, their transport, and the order.

    It is a mapping of names to views: iterate over the names, and take ``arrays[name]``. With a single array it is an
    array itself, as its `view` is: pass it to ``numpy.asarray`` or ``torch.from_dlpack``. What takes it by
    ``__cuda_array_interface__``, as ``cupy.asarray`` does, keeps it, and from then on it keeps the bytes, also after
    `close`: drop it with the array.
    """

    _contents: Contents
    _placed: tuple[SharedMemory, Sequence[int]] | None = None
    """The memory of all regions, and the offset of each there."""
    device: Device
    """The device that has them."""
    _shown: View | None = None
    """Whose hold on the bytes lasts as long as this object, which a library keeps as the owner of its array."""
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

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.view.__dlpack__(**options)

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.view.__array__(*args, **options)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """That of `view`."""
        view = self._shown = self._shown or self.view
        return view.__cuda_array_interface__

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
        buffer, start = self._place(name)
        return buffer._view(placed.layout, start, read_only=placed.read_only)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def transport(self) -> str:
        """Types of the handles by which the memory travels: ``VmmFd``, ``IpcMemHandle``, ``OpaqueFd``.

        - ``VmmFd``: memory of `Device.allocate`, torch's expandable segments, JAX's pool
          (``cuMemRetainAllocationHandle``, ``cuMemExportToShareableHandle``; on HIP memory of `Device.allocate` only,
          ``hipMemExportToShareableHandle``).
        - ``IpcMemHandle``: memory of ``cudaMalloc`` or ``hipMalloc``, the default of torch and of CuPy
          (``cuIpcGetMemHandle`` / ``hipIpcGetMemHandle``).
        - ``OpaqueFd``: memfds, on the host backend.

        Arrays that travel by several types have their names, with commas.

        Examples
        --------
        >>> with gi.share(buffer.view(8)) as shared:
        ...     shared.transport
        'OpaqueFd'
        """
        return ", ".join(sorted({region.kind.__name__ for region in self._contents.regions}))

    @property
    def way(self) -> str:
        """The old name of `transport`, for one more version."""
        warnings.warn("way is now transport; the old name will go.", DeprecationWarning, stacklevel=2)
        return self.transport

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
        pieces, whole = sum(len(region.numbers) for region in regions), sum(region.size for region in regions)
        spans = sorted(
            (at, offset + one.low, offset + one.high) for at, offset, one, _ in self._contents.arrays.values()
        )
        spanned, reached = 0, (-1, 0)
        for region, start, end in spans:  # arrays may have bytes in common
            first = max((region, start), reached)
            if (region, end) > first:
                spanned, reached = spanned + end - first[1], (region, end)
        return f"{pieces} allocation(s) of {whole:,} bytes in all, of which the arrays span {spanned:,}"

    def acquire(self, stream: Stream | object = None, *, timeout: float | None = None) -> None:
        """Make a stream wait for its turn, before its later work with the arrays.

        The writer (`ArrayShare`) waits for the readers that have acquired and not released. A reader (`AttachedArrays`)
        waits for the newest version; while the writer writes, for the next. The call returns at once, and the stream
        waits (``cuStreamWaitValue64`` / ``hipStreamWaitValue64``). Without a stream, and with a `timeout`, the calling
        thread waits here. The first call of a reader asks the sharing process for its place in the order, over their
        connection.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, numba's, an int
            Stream of the arrays' device, as `Device.wrap_stream` takes it. None is the calling thread, on a CPU only.
        timeout : float, optional
            Seconds that the calling thread waits until it is the stream's turn, and that a reader's first call may wait
            for the sharing process's answer. Default: the stream waits, without a limit; that of the answer is that of
            `attach`.

        Raises
        ------
        InvalidArgumentError
            `acquire` out of turn: `release` comes first. Or the writer's arrays are immutable (JAX's). Or the stream is
            of another device, or is being captured. Nothing has changed then.
        ArgumentTypeError
            `stream` is None on a GPU, or is not a stream.
        SemaphoreTimeoutError
            `timeout` passed, and nothing was acquired.
        PeerError
            The sharing process has died, or does not answer the reader's first call; or 504 readers have a place.
        UnsupportedError
            The device has no timelines (`Operation.CREATE_SEMAPHORE` for `TimelineFd`).
        ResourceClosedError
            `close` was called, or the stream is closed. Or an array of the writer has other memory now than it had when
            it was shared (``parameter.data = new``): readers would never see what is written there. A call looks at up
            to eight arrays with ``data_ptr()``, and the next call at the next.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        ...     attached.acquire(stream)  # version 0
        ...     buffer.copy_to_host(found := np.empty(4, np.uint8), stream=stream)
        ...     attached.release(stream)
        ...     shared.acquire(timeout=10)  # this thread waits for that reader
        ...     shared.release()
        """
        side = self._side(stream, timeout)
        acquire_all([side], [side[0].page.lock], timeout)

    def release(self, stream: Stream | object = None) -> None:
        """Release, after the work that a stream was given (``cuStreamWriteValue64`` / ``hipStreamWriteValue64``).

        The writer's `release` publishes the next version: readers that wait for it go on once the stream's work is
        done. A reader's lets the writer acquire. The call returns at once.

        Parameters
        ----------
        stream : Stream, or torch's, CuPy's, numba's, an int
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
        bound = self._stream(stream)
        self._turns().release(bound)

    @property
    def version(self) -> int:
        """Number of the newest version that the writer has published; while this side reads, of the one that it reads.

        The writer's stream may still be working on it. A reader's first look asks as its first `acquire` does.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared:
        ...     with shared.write():
        ...         buffer.fill(7)
        ...     shared.version
        1
        """
        return self._turns().version

    def _begin(self, stream: Stream, timeout: float | None) -> View | Self:
        self.acquire(stream, timeout=timeout)
        return self.view if self._contents.single else self

    def _end(self, stream: Stream, whole: bool) -> None:
        if not self.closed:  # else `close` has released
            self._turns().release(stream)  # also a stream that is closed now: the host releases in its place

    def _place(self, name: str) -> tuple[Buffer, int]:
        """The buffer that an array lies in, and the offset of its first element."""
        region, offset, layout, _ = self._contents.arrays[name]
        memory, starts = self._placed or self._place_all()
        if region < 0:
            return memory.buffer, 0
        if offset + layout.low < 0 or offset + layout.high > self._contents.regions[region].size:
            raise PeerError(f"expected array {name!r} within its memory, got bytes beyond it; attach it anew.")
        return memory.buffer, starts[region] + offset

    def _place_all(self) -> tuple[SharedMemory, Sequence[int]]:
        """Find `_placed`, where the first view does so."""
        raise NotImplementedError

    def _turns(self, timeout: float | None = None) -> Writer | Reader:
        """The place in the order, which the first call takes, within `timeout` seconds."""
        raise NotImplementedError

    def _side(self, stream: object, timeout: float | None) -> Side:
        """What is to acquire, for which stream."""
        bound = self._stream(stream)
        return self._turns(check_timeout(timeout)), bound, bound._known_as()

    def _stream(self, stream: object) -> Stream:
        self._check_open()
        return check_stream(self.device, 0 if stream is None and self.device.info.is_cpu else stream)


def acquire(arrays: Iterable[Arrays], stream: object = None, *, timeout: float | None = None) -> None:
    """Acquire several shares or attachments, each once, for one stream; none if one fails.

    Two processes that acquire the same shares one after the other, each in its own order, can wait for each other for
    good. Those that acquire them by this call do not. Release each by itself.

    Parameters
    ----------
    arrays : iterable of ArrayShare or AttachedArrays
        The shares and attachments. One that is named twice is acquired once.
    stream, timeout
        See `ArrayShare.acquire`; the time-out is for all together.

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
    if isinstance(arrays, Resource):
        raise ArgumentTypeError("arrays", "expected several, got one; call shared.acquire(stream), or pass [shared].")
    ordered = sorted(dict.fromkeys(arrays), key=lambda one: (one.key, id(one)))
    sides = [one._side(stream, timeout) for one in ordered]
    locks = {one.key: turns.page.lock for one, (turns, *_) in zip(ordered, sides, strict=True)}
    kinds = {(one.key, type(turns)) for one, (turns, *_) in zip(ordered, sides, strict=True)}
    if len(kinds) > len(locks):
        raise InvalidArgumentError(
            "arrays", "expected a share or an attachment of it, got both, which wait for each other; acquire one first."
        )
    acquire_all(sides, list(locks.values()), timeout)
