"""The exporter's side: arrays that are held, described, and published in versions."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final, cast

from .. import ipc, system
from .._arguments import NoCopy, check_timeout
from .._core.device import Device
from .._core.drain import drain
from .._core.interchange import Described
from .._core.lifetime import Lifetime
from .._core.memory import round_up
from .._core.resource import Resource
from .._core.stream import Stream
from ..backend import Block, SharingBackend
from ..errors import ArgumentTypeError, InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError
from ..handles import Handle, IpcMemHandle, TimelineFd
from .arrays import Arrays
from .attachment import AttachedArrays, Lease, SharedMemory, driver_lock
from .descriptor import BLOCKS, COUNT, ENROL, Contents, Descriptor, Region
from .order import SLOTS, Board, Reader, Word, Writer
from .origin import Laid, Range, describe, device_of
from .rendezvous import here, users_of

_ALIGNMENT: Final = 256


class _Offer(NoCopy):
    """The part of a share that readers get. It lives until the share is closed and the last lease has ended."""

    def __init__(
        self, descriptor: Descriptor, laid: Laid, *, single: bool, users: Collection[int], threaded: bool,
        stands_on: Sequence[Resource],
    ) -> None:  # fmt: skip
        self.descriptor, self.laid, self.users, self.threaded = descriptor, laid, users, threaded
        regions = tuple(map(self._region, laid.ranges))
        self.contents = Contents(os.getpid(), single, regions, laid.placed(), laid.device.identity)
        self.label = "the share"  # until the share is made
        self._stands_on = stands_on
        self._lock = threading.RLock()
        self._writer: Writer | None = None
        self.leases: dict[object, int | None] = {}
        """The slot of each lease that has one."""
        self.on_change: Callable[[int], object] | None = None
        """Called with the change in the number of readers that are to come. It is -1 behind an attach, what a lease
        counts, and 0 behind the end of a lease."""
        self._withdrawn = False
        self.is_over = False

    # -- the rendezvous ----------------------------------------------------------------------------------------------

    def answer(self, lease: object, verb: int, number: int) -> tuple[int, Sequence[Handle]]:
        if verb == BLOCKS:
            ranges = (one for one in self.laid.ranges if one.region.kind is not IpcMemHandle)
            blocks = [block for one in ranges for block in one.blocks][number : number + ipc.MAX_HANDLES]
            return 0, system.under(driver_lock, self._export, blocks)
        if verb == ENROL:
            return self._enrolled(lease)
        if verb == COUNT:
            self.count(number)
            return 0, ()
        self.laid.check()
        told = self.contents.write()
        self.leases[lease] = None
        self.changed(-1)
        return 0, [told]

    def changed(self, by: int) -> None:
        """Tell of a change in the number of readers that are to come, or of the end of one."""
        if self.on_change is not None:
            self.on_change(by)

    def count(self, coming: int) -> None:
        """Tell what a lease counts: one more reader is to come, or 0, has come."""
        self.changed(1 if coming else -1)

    def _enrolled(self, lease: object) -> tuple[int, Sequence[Handle]]:
        writer, own, slot = self.take_slot(lease)
        try:
            return slot, _all_or_none(one.export() for one in (writer.own, own, writer.board))
        except BaseException:
            self.leases[lease] = None
            writer.leases.pop(slot).close()
            raise

    def left(self, lease: object) -> None:
        writer, slot = self._writer, self.leases.get(lease)
        own = None if writer is None or slot is None else writer.leases.get(slot)

        def is_over() -> bool:
            if lease in self.leases:
                if writer is not None and slot is not None and own is not None and not writer.lets_go(slot, own):
                    return False
                del self.leases[lease]
                self.changed(0)
                self._end_if_over()
            return True

        if not is_over():
            here().look_again(is_over)

    # -- the order ---------------------------------------------------------------------------------------------------

    def writer(self, stream: Stream | None = None) -> Writer:
        """The writer's place in the order, made on first use; version 0 is behind what the stream was given."""
        return self._writer or system.under(self._lock, self._make_writer, stream)

    def _make_writer(self, stream: Stream | None) -> Writer:
        if self._writer is None:
            with ExitStack() as undo:
                own = undo.enter_context(self.laid.device.create_semaphore(TimelineFd))
                made = Writer(undo.enter_context(Board.make()), own, self.label)
                made.publish_first(stream)
                undo.pop_all()
            self._writer = made  # not before: a reader would wait for a version that is never published
        return self._writer

    def take_slot(self, lease: object) -> tuple[Writer, Word, int]:
        """A lease's place in the order. The loop calls it, and threads of this process that attach here."""
        return system.under(self._lock, self._take_slot, lease)

    def _take_slot(self, lease: object) -> tuple[Writer, Word, int]:
        writer = self.writer()
        if self.leases[lease] is not None:
            raise PeerError("the reader is enrolled already.")
        slot = next((one for one in range(SLOTS) if one not in writer.leases), None)
        if slot is None:
            raise PeerError(f"expected {SLOTS} readers or fewer that acquire {self.label}, got one more.")
        own = self.laid.device.create_semaphore(TimelineFd)
        writer.board.slot(slot).value = 0
        writer.leases[slot] = own
        self.leases[lease] = slot
        return writer, own, slot

    # -- this process ------------------------------------------------------------------------------------------------

    def regions(self, lease: Lifetime) -> list[SharedMemory]:
        """The memory as this process has it already. What is made of it keeps the lease, by which the offer has it."""
        return [SharedMemory(self.laid.device, one.address, one.region.size, (lease,)) for one in self.laid.ranges]

    def attach_here(self, label: str | None = None) -> AttachedArrays:
        """Attach in the process that shares: the same memory."""
        key = object()

        def enrol(label: str) -> Reader:
            writer, _, slot = self.take_slot(key)
            words = writer.own, writer.leases[slot]
            return Reader(writer.board, *words, writer.board.slot(slot), label, lent=True)

        def end(reader: Reader | None) -> None:
            def ended() -> bool:
                if over := reader is None or reader.is_released():
                    self.left(key)
                return over

            here().look_again(ended)

        system.under(self._lock, self._come_here, key)
        self.changed(-1)
        lease = Lease(enrol, end, self.count)
        attached = AttachedArrays(self.laid.device, self.descriptor, self.contents, lease, label)
        attached._regions = self.regions(attached.lifetime)
        return attached

    def _come_here(self, lease: object) -> None:
        if self.is_over:  # another thread has closed it meanwhile
            raise ResourceClosedError("the share was closed; share the arrays anew.")
        self.laid.check()
        self.leases[lease] = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let no reader in any more."""
        self.leave()
        here().withdraw(self)
        self._withdrawn = True
        here().post(self._end_if_over)

    def leave(self) -> None:
        """The writer releases, and does not acquire again."""
        if self._writer is not None:
            self._writer.end(ResourceClosedError(f"{self.label} is closed; share the arrays anew."))

    def _end_if_over(self) -> None:
        if not self._has_ended():
            here().look_again(self._has_ended)

    def _has_ended(self) -> bool:
        return system.under(self._lock, self._end)

    def _end(self) -> bool:
        """End the offer that is over; False while a thread of the writer is still in."""
        if not self._withdrawn or self.leases or self.is_over:
            return True
        if (writer := self._writer) is not None:
            if writer.inside is not None:
                return False
            self._writer = None
            writer.own.close()
            writer.board.close()
        self.laid = replace(self.laid, arrays={})  # lets the arrays go
        for one in self._stands_on:
            one.close()
        self.is_over = True
        return True

    def serves_out(self) -> bool:
        """Whether the share has ended; without a thread the caller serves the readers that are left."""
        if not self.threaded:
            here().serve(0.0)
        return self.is_over

    def what_holds(self) -> str:
        """The reason why the share goes on, for messages."""
        return f"{len(self.leases)} reader(s) are attached" if self.leases else "it has not been ended yet"

    def _region(self, memory: Range) -> Region:
        region = memory.region
        if region.kind is not IpcMemHandle:
            return region
        (handle,) = system.under(driver_lock, self._export, memory.blocks)
        return region._replace(data=cast(IpcMemHandle, handle).data.hex())

    def _export(self, blocks: Sequence[Block]) -> list[Handle]:
        device = self.laid.device
        backend = cast(SharingBackend, device.driver)
        return _all_or_none(backend.export_block(device._handle, block) for block in blocks)


def _all_or_none(handles: Iterable[Handle]) -> list[Handle]:
    """The handles as they are made; an error closes those that were made before."""
    with ExitStack() as undo:
        made = [undo.enter_context(handle) for handle in handles]
        undo.pop_all()
        return made


class ArrayShare(Arrays):
    """Arrays that other processes can attach. Made by `gpuinterop.share`.

    This process is the writer of the order: `release` publishes version 1, 2 and so on. The share holds the arrays
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

    def __init__(self, make: Callable[[], _Offer], device: Device, stream: Stream | None, label: str | None) -> None:
        super().__init__(Lifetime("ArrayShare", _Offer.close, device=device.streams, label=label))
        self.device = device
        offer: _Offer = self.lifetime.create(make)
        offer.label = self.label
        self._contents = offer.contents
        self.key = offer.descriptor.process, offer.descriptor.share
        self._regions: Sequence[SharedMemory] | None = None
        if stream is not None:
            try:
                offer.writer(stream)
            except BaseException:
                self.close()
                raise

    def __bytes__(self) -> bytes:
        """Return the descriptor, which processes of this host attach, any number of times (`gpuinterop.attach`).

        It has the address of this process's socket and a token that opens this share, and no handle. Send it by any
        way, and keep it from those who may not attach: a process of this user or of ``users=`` that has read it can.

        Raises
        ------
        ResourceClosedError
            `close` was called.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared:
        ...     text = bytes(shared).hex()  # for a command line, or JSON
        ...     len(text) < 500
        True
        """
        return self.lifetime.use(lambda offer: bytes(offer.descriptor))

    def serve(self, timeout: float | None = None) -> None:
        """Serve readers in the calling thread, where the share was made with ``threaded=False``.

        It serves all shares of this process, and returns after `timeout` seconds, or when the last share is closed.
        Readers attach, enrol and are dropped only meanwhile, so call it again and again: a reader that waits for an
        answer gives up after the time-out of its `attach`, and the writer waits for a dead reader until the next call.

        Parameters
        ----------
        timeout : float, optional
            Seconds; 0 serves what has come. Default: until the last share of this process is closed.

        Raises
        ------
        InvalidArgumentError
            A thread of the library serves this share.
        ResourceClosedError
            `close` was called.

        Examples
        --------
        >>> with gi.share(buffer.view(4), threaded=False) as shared:
        ...     for step in range(3):
        ...         buffer.fill(step)
        ...         shared.serve(timeout=0)
        """
        limit = check_timeout(timeout)
        offer: _Offer = self.lifetime.use(lambda offer: offer)
        if offer.threaded:
            raise InvalidArgumentError("serve", "a thread of the library serves this share; share with threaded=False.")
        here().serve(limit)

    def close(self, timeout: float | None = None) -> None:
        """Refuse new readers at once; what is attached stays valid until it is detached.

        The writer releases, after the work of the stream that acquired. The arrays are held until the last reader has
        detached or died.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until the last reader has detached, and the arrays are let go. Default: do not wait.

        Raises
        ------
        ResourceBusyError
            `timeout` passed. The share stays closed, and the last reader still ends it.

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
        offer: _Offer = self.lifetime.handle
        limit = check_timeout(timeout)  # first: what is refused ends nothing
        if not self.closed:
            offer.leave()
        super().close(timeout)
        if timeout is not None and not system.until(offer.serves_out, limit):
            raise ResourceBusyError(f"{self.label} is still in use after close({limit:g}): {offer.what_holds()}.")

    def _memory(self) -> Sequence[SharedMemory]:
        if self._regions is None:
            self._regions = self.lifetime.use(lambda offer: offer.regions(self.lifetime))
        return self._regions

    def _turns(self) -> Writer:
        for name, one in self._contents.arrays.items():
            if one.read_only:
                raise InvalidArgumentError(
                    name or "array",
                    "its library treats it as immutable, so it cannot be written; share with copy=True.",
                )
        return self.lifetime.use(_Offer.writer)


def share(
    arrays: object, *, stream: object = None, copy: bool = False, users: Iterable[int] = (), threaded: bool = True,
    label: str | None = None,
) -> ArrayShare:  # fmt: skip
    """Share arrays that exist with other processes, in place.

    Asks the driver what is behind each array (``cuPointerGetAttribute`` / ``hipPointerGetAttribute``), and lets readers
    in at this process's socket. The library makes the handles, and owns them: an IPC handle here
    (``cuIpcGetMemHandle`` / ``hipIpcGetMemHandle``), descriptors for each reader that attaches
    (``cuMemRetainAllocationHandle`` and ``cuMemExportToShareableHandle``; ``hipMemExportToShareableHandle``).

    Parameters
    ----------
    arrays : array, or mapping of str to array
        Arrays with ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``, all of one device. Strides
        are kept, also negative ones; elements must not overlap. Element types: those of `Buffer.view`; of others, as
        int4, share a view of bytes (``tensor.view(torch.uint8)``). The share holds them until it is closed and the last
        reader has detached. They must keep their memory meanwhile: do not resize them.
    stream : Stream, or torch's, CuPy's, an int
        Version 0 of the order is behind what this stream was given. Default: the bytes are there now.
    copy : bool
        Copy the arrays once, behind `stream`, into one allocation of `Device.allocate`, and share that. Then write
        ``share[name]`` or ``share.view``, not the arrays. It returns when the bytes are there. Strides are kept: the
        bytes between the elements of a part of an array come along.
    users : iterable of int
        User ids whose processes may attach, beside this process's own. They must be able to enter the socket's folder:
        set ``GPUINTEROP_SHARE_DIR``.
    threaded : bool
        Let a thread of the library serve readers: one for all shares of this process. With False call
        `ArrayShare.serve`.
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
        An array has no elements, or elements that overlap, or an element type without a name here; or it is a tensor of
        torch whose memory does not have its values (conjugate, negative, sparse, fake), and the error says what to
        share. Or the arrays are of several devices. Or there is no folder for the socket, or its path is too long
        (`GPUINTEROP_SHARE_DIR`).
    UnsupportedError
        The memory cannot get to another process (`Operation.EXPORT_ARRAY`): a stream-ordered pool, managed memory, host
        memory that is not a memfd, a VMM allocation that was made without the right to export it. The error says what
        to change.
    DeviceNotFoundError
        The backend that works here has no device with that memory.
    OutOfMemoryError
        ``copy=True``, and the device has not enough free memory.

    Examples
    --------
    >>> layers = {"weight": buffer.view((4, 4), "float32"), "bias": buffer.view(4, "float32", offset=64)}
    >>> with gi.share(layers, stream=stream) as shared, gi.attach(bytes(shared)) as attached:
    ...     {name: attached[name].shape for name in attached}
    {'weight': (4, 4), 'bias': (4,)}

    Plain memory of NumPy has no way to another process; a copy has:

    >>> array = np.arange(4)
    >>> gi.share(array)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.UnsupportedError: ... host memory, which only its own process has: ...
    >>> with gi.share(array, copy=True) as shared:
    ...     np.asarray(shared.view)
    array([0, 1, 2, 3])
    """
    single = not isinstance(arrays, Mapping)
    given: Mapping[object, object] = {"": arrays} if single else arrays  # type: ignore[assignment]
    if not given:
        raise InvalidArgumentError("arrays", "expected an array or more, got none.")
    found: dict[str, Described] = {}
    for name, array in given.items():
        if not isinstance(name, str):
            raise ArgumentTypeError("arrays", f"expected names as keys, got {name!r}.")
        found[name] = describe(array, name or "array", in_place=not copy)
    allowed = users_of(users)
    drain()
    devices = {name: device_of(one, name or "array") for name, one in found.items()}
    device = next(iter(devices.values()))
    for name, other in devices.items():
        if other is not device:
            raise InvalidArgumentError(
                name, f"expected arrays of one device, {device!r}, got one of {other!r}; share each device's by itself."
            )
    order = _on(device, stream)
    stands_on: list[Resource] = []
    try:
        if copy:
            found = _copied(device, found, order, stands_on)
        laid = Laid.of(found, device)

        def make() -> _Offer:
            return here().offer(
                lambda descriptor: _Offer(
                    descriptor, laid, single=single, users=allowed, threaded=threaded, stands_on=stands_on
                ),
                allowed,
            )

        return ArrayShare(make, device, order, label)
    except BaseException:
        for allocation in stands_on:
            allocation.close()
        raise


def _on(device: Device, stream: object) -> Stream | None:
    return stream if stream is None or isinstance(stream, Stream) else device.wrap_stream(stream)


def _copied(
    device: Device, arrays: Mapping[str, Described], stream: Stream | None, made: list[Resource]
) -> dict[str, Described]:
    """The arrays in one allocation of ours, with their strides; the bytes are there on return."""
    spans = {name: array.span for name, array in arrays.items()}
    sizes = [round_up(end - start, _ALIGNMENT) for start, end in spans.values()]
    allocation = device.allocate(sum(sizes))
    made.append(allocation)
    found = {}
    for (name, array), offset in zip(arrays.items(), itertools.accumulate(sizes, initial=0), strict=False):
        start, end = spans[name]
        allocation.buffer._copy_from(start, end - start, offset=offset, stream=stream)
        view = allocation.buffer.view(array.shape, array.dtype, offset + array.pointer - start, array.strides)
        found[name] = describe(view, name or "array")
    if stream is not None:
        stream.synchronize()
    return found
