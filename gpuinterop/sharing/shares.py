"""Shares arrays: describes them to readers, gives and withdraws places in the order, and publishes versions."""

from __future__ import annotations

import base64
import itertools
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final, cast

from .. import system
from .._arguments import NoCopy, check_timeout
from .._core.device import Device
from .._core.foreign_arrays import Described
from .._core.lifetime import Lifetime
from .._core.memory import round_up
from .._core.release import drain
from .._core.stream import Stream, check_stream
from ..backend import SharingBackend
from ..errors import ArgumentTypeError, InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError
from ..handles import Handle, TimelineFd
from .arrays import Access, Arrays
from .counts import Holds
from .find_memory import check_pointers, describe, device_of, locate
from .folder import users_of
from .loop import loop
from .memory import SharedMemory, memory_of
from .messages import Contents, Placed
from .order import DEPARTED, SLOTS, ControlPage, FrameWriter, OwnTimeline, Reader, Writer
from .server import Guest, Offer, region_of, server

ALIGNMENT: Final = 256
_CHECKS: Final = 8
"""Number of arrays that each acquire checks; more would slow it down."""


class ArrayOffer(NoCopy, Offer):
    """The part of a share that readers use. It ends when the share is closed and no process holds it."""

    def __init__(
        self, device: Device, arrays: Mapping[str, Described], *, single: bool, users: Collection[int], buffers: int
    ) -> None:
        self.device, self.arrays, self.users, self.buffers = device, arrays, users, buffers
        """Number of slots, if the share has frames."""
        self._is_written = self._is_checked = self.is_over = False
        self.label, self.token = "the share", secrets.token_bytes(16)  # a label until the share has one
        runs, places = locate(device, arrays)
        self.addresses = [run[0].address for run in runs]
        self.blocks = server().use(device, itertools.chain.from_iterable(runs))
        with ExitStack() as undo:
            undo.callback(server().drop, self.blocks)
            blocks = iter(self.blocks)
            regions = [region_of(list(itertools.islice(blocks, len(run)))) for run in runs]
            placed = {name: Placed(*places[name], array.layout, array.read_only) for name, array in arrays.items()}
            self.contents = Contents(os.getpid(), single, device.identity, regions, placed)
            self._encoded = bytes(self.contents)
            undo.pop_all()
        self.movable = [name for name, array in arrays.items() if array.data_ptr is not None]
        self._next, self._lock = itertools.cycle(self.movable), threading.RLock()
        self._writer: Writer | None = None
        self._places: dict[int, tuple[Guest | Holds, bytes]] = {}
        """The process and the number of each reader that has a place in the order."""
        self._leaving: set[OwnTimeline] = set()
        """Timelines of readers that have left. Streams may still wait for them."""

    # -- the server --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `ResourceClosedError` if an array's library has freed or moved its memory."""
        check_pointers(self.arrays)
        if not all(cast(SharingBackend, self.device.driver).is_there(shared.block) for shared in self.blocks):
            raise ResourceClosedError("the memory that was shared has been freed, and may be another array's now.")

    def check_some(self) -> None:
        """Raise if one of the next few arrays has moved to other memory: readers would not see what is written."""
        names = itertools.islice(self._next, min(_CHECKS, len(self.movable)))
        check_pointers({name: self.arrays[name] for name in names})

    def encoded(self) -> bytes:
        self.check()
        return self._encoded

    def enrol(self, guest: Guest, number: bytes) -> tuple[int, Sequence[Handle]]:
        place, writer = self.take_place(guest, number), self.writer()
        with ExitStack() as undo:
            undo.callback(lambda: writer.reader_timelines.pop(place).close())
            undo.callback(self._places.pop, place)
            exports = writer.own.export, writer.reader_timelines[place].export, writer.page.handle.duplicate
            handles: list[Handle] = [undo.enter_context(export()) for export in exports]
            undo.pop_all()
            return place, handles

    def poll(self) -> None:
        """Drop the readers that have left the order or detached, or whose process has exited."""
        if (writer := self._writer) is not None:
            for place, (guest, _) in self._places.copy().items():
                attached = not guest.ended and guest.counts is not None and guest.counts.holds(self.slot)
                if writer.page.slots[place] == DEPARTED or not attached:
                    self._drop_readers(writer, [place])

    def _drop_readers(self, writer: Writer, places: Iterable[int]) -> None:
        for place in places:
            if self._places.pop(place, None) is not None:  # two threads can do this at once
                own = writer.reader_timelines.pop(place)
                self._leaving.add(own)
                loop().repeat(partial(self._unblock, writer, own))

    def _unblock(self, writer: Writer, own: OwnTimeline) -> bool:
        if over := writer.unblock(own):
            own.close()
            self._leaving.discard(own)
        return over

    # -- the order ---------------------------------------------------------------------------------------------------

    @system.locked
    def writer(self, stream: Stream | None = None) -> Writer:
        """The writer's place in the order, made on first use; version 0 follows the stream's queued work."""
        if self._writer is None:
            with ExitStack() as undo:
                own = undo.enter_context(self.device.create_semaphore(TimelineFd))
                page = undo.enter_context(closing(ControlPage(buffers=max(1, self.buffers))))
                arguments = page, own, self.label
                writer = FrameWriter(*arguments, self.buffers) if self.buffers else Writer(*arguments)
                writer.publish_first(stream)
                undo.pop_all()
            self._writer = writer  # last, so that no reader waits for a version that is never published
        return self._writer

    @system.locked
    def take_place(self, guest: Guest | Holds, number: bytes) -> int:
        """A reader's place in the order. The loop calls this, and so do threads of this process that attach."""
        if self.is_over:
            raise ResourceClosedError(f"{self.label} is closed; share the arrays again.")
        writer = self.writer()
        for taken, reader in self._places.items():
            if reader == (guest, number):  # it asks again after it gave up waiting for the answer
                return taken
        place = next((slot for slot in range(SLOTS) if slot not in writer.reader_timelines), None)
        if place is None:
            raise PeerError(f"expected {SLOTS} readers or fewer that acquire {self.label}, got one more.")
        pid = os.getpid() if isinstance(guest, Holds) else guest.pid
        own: OwnTimeline = self.device.create_semaphore(TimelineFd, label=f"the reader in process {pid}")
        own.lifetime.warns = False  # the share gives the warning
        for buffer in range(max(1, self.buffers)):
            writer.page.slots[SLOTS * buffer + place] = 0
        writer.reader_timelines[place] = own
        self._places[place] = guest, number
        server().ordered[self] = None
        return place

    def begin_to_write(self) -> None:
        """Raise if another share of the same bytes is written: each share waits only for its own readers."""
        if self._is_checked:  # not `_is_written`: an interrupt may end the check
            return
        self._is_written = True  # before the check, because another thread may check too
        for other in list(server().offers.values()):
            if isinstance(other, ArrayOffer) and self._is_rival(other):
                self._is_written = False
                problem = f"expected bytes that one share writes, {other.label} writes some of them, too; close one."
                raise InvalidArgumentError("arrays", problem)
        self._is_checked = True

    def _is_rival(self, other: ArrayOffer) -> bool:
        unrelated = other is self or set(self.blocks).isdisjoint(other.blocks)
        if unrelated or not (other._is_written and server().me.is_open(other.slot, other.serial)):
            return False
        ends = [0, 0]
        spans = [(*array.span, which) for which in (0, 1) for array in (self, other)[which].arrays.values()]
        for start, end, which in sorted(spans):
            if start < min(end, ends[1 - which]):
                return True
            ends[which] = max(end, ends[which])
        return False

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.leave()
        server().withdraw(self)

    def leave(self) -> None:
        """Release, do not acquire again, and wake the readers that wait."""
        server().shut(self, ends=False)
        if (writer := self._writer) is not None:
            writer.end(ResourceClosedError(f"{self.label} is closed; share the arrays again."))
            writer.page.wake()

    def end(self) -> None:
        """End the offer: it is withdrawn, and no process holds it, not even one that gave up while it enrolled."""
        if not self._has_ended():  # readers may still wait, so the loop asks again
            loop().repeat(self._has_ended)

    @system.locked
    def _has_ended(self) -> bool:
        """Free everything; False while a thread of the writer still works, or a reader may still wait."""
        if (writer := self._writer) is not None:
            self._drop_readers(writer, list(self._places))  # includes places taken meanwhile
            if not writer.is_over() or self._places or self._leaving:
                return False
            self._writer = None
            server().ordered.pop(self, None)
            writer.own.close()
            writer.page.close()
        server().drop(self.blocks)
        self.blocks, self.arrays = [], {}
        self.is_over = True
        return True

    def has_ended(self) -> bool:
        server().poll()
        return self.is_over


class ArrayShare(Arrays):
    """Arrays that other processes can attach. Made by `gpuinterop.share`.

    This process is the writer: each `release` publishes the next version, starting at 1. The share holds the arrays
    until it is closed and the last reader has detached.

    Examples
    --------
    >>> field = np.asarray(buffer.view(4))
    >>> with gi.share(field) as shared:
    ...     shared.acquire()  # a GPU: shared.acquire(torch.cuda.current_stream())
    ...     field[:] = 7
    ...     shared.release()
    ...     with gi.attach(bytes(shared)) as attached:
    ...         np.asarray(attached.view)
    array([7, 7, 7, 7], dtype=uint8)
    """

    _instead = "send bytes(shared) or str(shared), and call gpuinterop.attach there."

    def __init__(self, offer: ArrayOffer, stream: Stream | None, label: str | None) -> None:
        device = offer.device
        noun = "Publisher" if offer.buffers else "ArrayShare"
        super().__init__(Lifetime(noun, ArrayOffer.close, device=device.streams, label=label))
        self.device, self._contents, self._offer, offer.label = device, offer.contents, offer, self.label
        self._immutable = next((name for name, placed in offer.contents.arrays.items() if placed.read_only), None)
        if stream is not None:
            offer.writer(stream)
        server().enter(offer, 0)
        self.lifetime.create(lambda: offer)

    def __bytes__(self) -> bytes:
        """Return the descriptor. Processes on this host attach it any number of times (`gpuinterop.attach`).

        It contains the address of this process's socket and a token for this share, but no handle. Send it any way you
        like, but keep it secret: a process of this user or of ``users=`` that has read it can attach.

        Raises
        ------
        ResourceClosedError
            `close` was called.
        """
        return self.lifetime.use(lambda offer: server().descriptor(offer))

    def __str__(self) -> str:
        """Return the descriptor as text: letters, digits, ``-`` and ``_``, for a command line, a URL or JSON.

        The text is as secret as the bytes, so do not log it. Log the `repr` instead.
        """
        return base64.urlsafe_b64encode(bytes(self)).decode().rstrip("=")

    def close(self, timeout: float | None = None) -> None:
        """Refuse new readers at once. Attached memory stays valid until it is detached.

        The writer releases after the work of the stream that acquired. The share holds the arrays until the last reader
        has detached or exited.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until the last reader has detached and the arrays are released. Default: do not wait.

        Raises
        ------
        ResourceBusyError
            `timeout` passed. The share is closed all the same, and ends when the last reader detaches.

        Examples
        --------
        >>> shared = gi.share(buffer.view(4))
        >>> attached = gi.attach(bytes(shared))
        >>> shared.close(timeout=0.01)
        Traceback (most recent call last):
            ...
        gpuinterop.errors.ResourceBusyError: ... is still in use after close(0.01): 1 reader(s) are attached.
        >>> attached.close()
        >>> shared.close(timeout=10)
        """
        limit = check_timeout(timeout)  # first, so that a bad argument closes nothing
        if not self.closed:
            self._offer.leave()
        super().close(timeout)
        if timeout is not None and not system.until(self._offer.has_ended, limit):
            readers = f"{server().holders(self._offer.slot)} reader(s) are attached."
            raise ResourceBusyError(f"{self.label} is still in use after close({limit:g}): {readers}")

    def write(self, stream: Stream | object = None, *, timeout: float | None = None) -> Access[Any]:
        """Acquire in a ``with``, which gives the array, or all arrays by name; release when the ``with`` ends.

        Type checkers cannot know which of the two, a `View` or this object, so they check neither.

        An exception releases too: the arrays have changed in place, so what was written is the next version.

        Parameters
        ----------
        stream, timeout
            See `acquire`.

        Raises
        ------
        GpuInteropError
            See `acquire`.
        """
        return Access(self, self._begin, stream, timeout)

    def _place_all(self) -> tuple[SharedMemory, Sequence[int]]:
        addresses = self.lifetime.use(lambda offer: offer.addresses)
        self._placed = placed = memory_of(self.device, self._contents.regions, addresses, (self.lifetime,))
        return placed

    def _side(self, timeout: float | None = None) -> Writer:
        if self._immutable is not None:
            problem = "its library treats it as immutable, so it cannot be written; share with copy=True."
            raise InvalidArgumentError(self._immutable or "array", problem)
        return self._offer._writer or self.lifetime.use(ArrayOffer.writer)

    def _prepare(self, stream: object, timeout: float | None) -> tuple[Writer | Reader, Stream]:
        if self._offer.movable:
            self.lifetime.use(ArrayOffer.check_some)
        prepared = super()._prepare(stream, timeout)
        self._offer.begin_to_write()
        return prepared


def share(
    arrays: object, *, stream: object = None, copy: bool = False, users: Iterable[int] = (),
    label: str | None = None,
) -> ArrayShare:  # fmt: skip
    """Share existing arrays with other processes, in place.

    `share` asks the driver about each array's memory (``cuPointerGetAttributes`` / ``hipPointerGetAttribute``), and
    lets readers attach at this process's socket. gpuinterop makes and owns the handles: an IPC handle here
    (``cuIpcGetMemHandle`` / ``hipIpcGetMemHandle``), or descriptors for each process that attaches
    (``cuMemRetainAllocationHandle`` and ``cuMemExportToShareableHandle``; ``hipMemExportToShareableHandle``).

    Parameters
    ----------
    arrays : array, or mapping of str to array
        Arrays with ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``, all on one device. Any
        strides, also negative ones, but elements must not overlap. Element types: see `Buffer.view`; share others, such
        as int4, as a view of bytes (``tensor.view(torch.uint8)``). The share holds the arrays until it is closed and
        the last reader has detached. Do not resize them meanwhile: they must keep their memory.
    stream : Stream, int, or stream of torch, CuPy or numba
        Version 0 is visible when the work already queued on this stream is done. Default: at once.
    copy : bool
        Copy the arrays once, after `stream`, into one allocation of `Device.allocate`, and share that. The call returns
        when the copy is done. From then on write to ``share[name]`` or ``share.view``, not to your arrays. Strides are
        kept, so the bytes between the elements are copied too.
    users : iterable of int
        User ids whose processes may attach, besides this process's own. They must be able to enter the socket's folder:
        set ``GPUINTEROP_SHARE_DIR``.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    ArrayShare
        The share, which the caller closes.

    Raises
    ------
    ArgumentTypeError
        An argument is not an array, or a name is not a str.
    InvalidArgumentError
        An array's elements overlap, or their type is unsupported; or, without ``copy=True``, their address is not
        aligned for the type. Or an array's memory does not contain its values: it has a mask or nulls, JAX has deleted
        it, or it is a conjugate, negative, sparse or fake torch tensor; the error says what to share. Or the arrays are
        on several devices, or their names and layouts need more than 64 MiB. Or the socket's folder does not exist, or
        its path is too long (`GPUINTEROP_SHARE_DIR`).
    UnsupportedError
        Another process cannot map the memory (`Operation.EXPORT_ARRAY`): a stream-ordered pool, managed memory, host
        memory that is not a memfd, or a VMM allocation made without export. The error says what to change.
    DeviceNotFoundError
        The backend in use has no device with that memory.
    OutOfMemoryError
        ``copy=True``, and the device has not enough free memory.

    Examples
    --------
    >>> layers = {"weight": buffer.view((4, 4), "float32"), "bias": buffer.view(4, "float32", offset=64)}
    >>> with gi.share(layers, stream=stream) as shared, gi.attach(bytes(shared)) as attached:
    ...     {name: attached[name].shape for name in attached}
    {'weight': (4, 4), 'bias': (4,)}

    Plain NumPy memory cannot be shared; a copy can:

    >>> array = np.arange(4)
    >>> gi.share(array)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.UnsupportedError: ... host memory, which only its own process has: ...
    >>> with gi.share(array, copy=True) as shared:
    ...     np.asarray(shared.view)
    array([0, 1, 2, 3])
    """
    if isinstance(arrays, list | tuple):
        got = f"a {type(arrays).__name__}; pass a mapping of names to arrays, or numpy.asarray(...) of numbers"
        raise ArgumentTypeError("arrays", f"expected an array, or several by name, got {got}.")
    single = not isinstance(arrays, Mapping)
    by_name: Mapping[object, object] = {"": arrays} if single else arrays  # type: ignore[assignment]
    if not by_name:
        raise InvalidArgumentError("arrays", "expected an array or more, got none.")
    described: dict[str, Described] = {}
    for name, array in by_name.items():
        if not isinstance(name, str):
            raise ArgumentTypeError("arrays", f"expected names as keys, got {name!r}.")
        if name.encode(errors="ignore").decode() != name:
            raise InvalidArgumentError("arrays", f"expected names that UTF-8 can encode, got {name!r}.")
        described[name] = describe(array, name or "array", in_place=not copy)
    allowed = users_of(users)
    drain()
    device = device_of(described)
    order = None if stream is None else check_stream(device, stream)
    if copy:
        described = _copied(device, described, order)
    return share_described(device, described, order, label, single=single, users=allowed)


def share_described(
    device: Device,
    arrays: Mapping[str, Described],
    stream: Stream | None,
    label: str | None,
    *,
    single: bool = False,
    users: Collection[int] = (),
    buffers: int = 0,
) -> ArrayShare:
    """Share arrays, or the slots of frames."""
    offer = ArrayOffer(device, arrays, single=single, users=users, buffers=buffers)
    try:
        return ArrayShare(offer, stream, label)
    except BaseException:
        server().withdraw(offer)
        raise


def _copied(device: Device, arrays: Mapping[str, Described], stream: Stream | None) -> dict[str, Described]:
    """Copies of the arrays, with their strides, in one new allocation, which they keep; finished on return."""
    spans = {name: array.span for name, array in arrays.items() if 0 not in array.layout.shape}
    if not spans:
        return dict(arrays)
    sizes = [round_up(end - start, ALIGNMENT) for start, end in spans.values()]
    copies = dict(arrays)
    with device.allocate(sum(sizes)) as allocation:
        for (name, (start, end)), offset in zip(spans.items(), itertools.accumulate(sizes, initial=0), strict=False):
            array, whole = arrays[name], allocation.buffer
            whole._copy_from(start, end - start, offset=offset, stream=stream)
            copies[name] = describe(whole._view(array.layout, offset + array.pointer - start), name or "array")
        if stream is not None:
            stream.synchronize()
    return copies
