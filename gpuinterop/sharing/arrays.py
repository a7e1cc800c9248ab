"""The common base of shares and attachments: named arrays, their transport, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from .._arguments import NotAnArray
from .._core.device import Device
from .._core.memory import Buffer
from .._core.resource import Resource
from .._core.stream import Stream, check_stream
from .._core.view import View
from ..errors import GpuInteropError, InvalidArgumentError, PeerError
from .memory import SharedMemory
from .messages import Contents
from .order import Reader, Turn, Writer, time_left

T = TypeVar("T")
Begin = Callable[[object, float | None], tuple[T, Turn | None]]
"""Acquires for a stream, within a time-out; returns what is accessed, and the turn."""


class Access(Generic[T], NotAnArray):
    """Returned by ``write`` and ``read``: acquires when a ``with`` begins, and releases when it ends."""

    _as_array = "numpy.asarray(array) in a with: with frame.read() as array"

    def __init__(self, arrays: Arrays, begin: Begin[T], stream: object, timeout: float | None) -> None:
        self._arrays, self._begin, self._stream, self._timeout = arrays, begin, stream, timeout

    def __enter__(self) -> T:
        accessed, self._turn = self._begin(self._stream, self._timeout)
        return accessed

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if self._turn is None or self._arrays.closed:  # `close` has released
            return
        try:
            self._turn.publish() if error is None else self._turn.drop()
        except GpuInteropError:
            if error is None:
                raise


class Arrays(Resource):
    """Named arrays that two processes share, and their order: the common base of `ArrayShare` and `AttachedArrays`.

    It is a mapping of names to views: iterate over the names, and index it as ``arrays[name]``. With a single array you
    can also pass it itself to ``numpy.asarray`` or ``torch.from_dlpack``. A library that reads
    ``__cuda_array_interface__``, as ``cupy.asarray`` does, keeps this object. It then keeps the bytes, even after
    `close`: drop it with the array.
    """

    _contents: Contents
    _placed: tuple[SharedMemory, Sequence[int]] | None = None
    """The memory of all regions, and each region's offset in it."""
    device: Device
    _shown: View | None = None
    """A view that keeps the bytes while this object exists; libraries keep this object as the owner of their array."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order in which they were shared; ``("",)`` for a single array."""
        return tuple(self._contents.arrays)

    @property
    def view(self) -> View:
        """The single array, in place: a `View` for array libraries.

        ``np.asarray(view)`` on the host backend, ``torch.from_dlpack(view)`` and ``cupy.from_dlpack(view)`` on a GPU
        work on the shared bytes, with the array's own shape, strides and element type. An array made from the view
        keeps the bytes mapped while it exists, even after `close`.

        Raises
        ------
        InvalidArgumentError
            The arrays have names: use ``arrays[name]``.
        ResourceClosedError
            `close` was called.
        """
        if not self._contents.single:
            first, count = self.names[0], len(self.names)
            problem = f"expected a single array, got {count} with names; take each by its own, as [{first!r}]."
            raise InvalidArgumentError("view", problem)
        return self[self.names[0]]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.view.__dlpack__(**options)

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.view.__array__(*args, **options)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        view = self._shown = self._shown or self.view
        return view.__cuda_array_interface__

    def __getitem__(self, name: str) -> View:
        """Return the array with this name, in place (see `view`).

        Raises
        ------
        InvalidArgumentError
            No array has that name.
        ResourceClosedError
            `close` was called.
        """
        self._check_open()
        if (placed := self._contents.arrays.get(name)) is None:
            if self._contents.single:
                problem = f"expected no name, because there is a single array, got {name!r}; use view."
                raise InvalidArgumentError("name", problem)
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
        """Handle types that share the memory: ``VmmFd``, ``IpcMemHandle``, ``OpaqueFd``.

        - ``VmmFd``: memory of `Device.allocate`, torch's expandable segments, JAX's pool
          (``cuMemRetainAllocationHandle``, ``cuMemExportToShareableHandle``; on HIP memory of `Device.allocate` only,
          ``hipMemExportToShareableHandle``).
        - ``IpcMemHandle``: memory of ``cudaMalloc`` or ``hipMalloc``, the default of torch and of CuPy
          (``cuIpcGetMemHandle`` / ``hipIpcGetMemHandle``).
        - ``OpaqueFd``: memfds, on the host backend.

        If the arrays need several types, the string lists them, separated by commas.
        """
        return ", ".join(sorted({region.kind.__name__ for region in self._contents.regions}))

    @property
    def exposes(self) -> str:
        """A sentence about the memory that a reader can access: whole allocations, which the arrays are a part of.

        Drivers map whole allocations. A reader of one small torch tensor can read and write the whole segment in which
        torch's allocator placed it, including other tensors; with JAX, the whole pool. Share such arrays only with
        processes that you trust with all of it, or pass ``copy=True`` to `share`.

        Examples
        --------
        >>> with gi.share(buffer.view(8)) as shared:
        ...     shared.exposes
        '1 allocation(s) of 65,536 bytes in all, of which the arrays span 8'
        """
        regions = self._contents.regions
        pieces, whole = sum(len(region.numbers) for region in regions), sum(region.size for region in regions)
        arrays = self._contents.arrays.values()
        spans = sorted((region, start + layout.low, start + layout.high) for region, start, layout, _ in arrays)
        spanned, reached = 0, (-1, 0)
        for region, start, end in spans:  # arrays may overlap
            first = max((region, start), reached)
            if (region, end) > first:
                spanned, reached = spanned + end - first[1], (region, end)
        return f"{pieces} allocation(s) of {whole:,} bytes in all, of which the arrays span {spanned:,}"

    def acquire(self, stream: Stream | object = None, *, timeout: float | None = None) -> None:
        """Make a stream wait until it can use the arrays.

        The writer (`ArrayShare`) waits for the readers that have acquired and not released. A reader (`AttachedArrays`)
        waits for the newest version, or for the next one while the writer is writing. The call returns at once, and the
        stream waits (``cuStreamWaitValue64`` / ``hipStreamWaitValue64``). On the calling thread, and with a `timeout`,
        the call itself waits. A reader's first call asks the sharing process for a place in the order.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
            Stream of the arrays' device (see `Device.wrap_stream`). None is the calling thread, on a CPU only.
        timeout : float, optional
            Seconds that the calling thread waits for the arrays, and that a reader's first call waits for the sharing
            process's answer. Default: the stream waits without a limit, and the answer has the time-out of `attach`.

        Raises
        ------
        InvalidArgumentError
            This side has acquired already: call `release` first. Or the writer's arrays are immutable (JAX's). Or the
            stream belongs to another device, or is being captured. Nothing has changed.
        ArgumentTypeError
            `stream` is None on a GPU, or is not a stream.
        SemaphoreTimeoutError
            `timeout` passed, and nothing was acquired.
        PeerError
            The sharing process has exited, or does not answer the reader's first call; or 504 readers have a place.
        UnsupportedError
            The device has no timelines (`Operation.CREATE_SEMAPHORE` for `TimelineFd`).
        ResourceClosedError
            `close` was called, or the stream is closed. Or an array of the writer has moved to other memory since it
            was shared (``parameter.data = new``), so readers would not see what you write. Each call checks up to eight
            arrays that have ``data_ptr()``, and the next call checks the next ones.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        ...     attached.acquire(stream)  # version 0
        ...     buffer.copy_to_host(found := np.empty(4, np.uint8), stream=stream)
        ...     attached.release(stream)
        ...     shared.acquire(timeout=10)  # this thread waits for that reader
        ...     shared.release()
        """
        left = time_left(timeout)
        side, bound = self._prepare(stream, left())
        side.acquire(bound, left)

    def release(self, stream: Stream | object = None) -> None:
        """Release once a stream's queued work is done (``cuStreamWriteValue64`` / ``hipStreamWriteValue64``).

        The writer's `release` publishes the next version: readers that wait for it continue. A reader's `release` lets
        the writer acquire. The call returns at once.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
            See `acquire`. If it is another stream than you passed to `acquire`, order the two yourself.

        Raises
        ------
        InvalidArgumentError
            Nothing is acquired: call `acquire` first.
        ArgumentTypeError, PeerError, ResourceClosedError
            See `acquire`.
        """
        bound = self._stream(stream)
        self._side().release(bound)  # if the stream is closed by now, the host releases instead

    @property
    def version(self) -> int:
        """Number of the newest published version, or of the version that this side is reading.

        The writer's stream may still be working on it. A reader's first use asks for a place, as `acquire` does.
        """
        return self._side().version

    def _begin(self, stream: object, timeout: float | None) -> tuple[View | Self, Turn]:
        self._side()  # within the time-out of `attach`; `timeout` is for the turn
        left = time_left(timeout)
        turn = Turn(*self._prepare(stream, left())).begin(left)
        return self.view if self._contents.single else self, turn

    def _place(self, name: str) -> tuple[Buffer, int]:
        """The buffer that an array lies in, and the offset of its first element."""
        region, offset, layout, _ = self._contents.arrays[name]
        memory, starts = self._placed or self._place_all()
        if region < 0:
            return memory.buffer, 0
        if offset + layout.low < 0 or offset + layout.high > self._contents.regions[region].size:
            raise PeerError(f"expected array {name!r} within its memory, got bytes beyond it; attach it again.")
        return memory.buffer, starts[region] + offset

    def _place_all(self) -> tuple[SharedMemory, Sequence[int]]:
        """Set `_placed`, if the first view does that."""
        raise NotImplementedError

    def _side(self, timeout: float | None = None) -> Writer | Reader:
        """The side in the order. The first call takes it, within `timeout` seconds."""
        raise NotImplementedError

    def _prepare(self, stream: object, timeout: float | None) -> tuple[Writer | Reader, Stream]:
        """The side that acquires, and its stream."""
        bound = self._stream(stream)
        return self._side(timeout), bound

    def _stream(self, stream: object) -> Stream:
        self._check_open()
        return check_stream(self.device, 0 if stream is None and self.device.info.is_cpu else stream)
