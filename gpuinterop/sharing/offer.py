"""The exporter's side: arrays that are held, described, and published in versions."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

from .. import ipc, system
from .._arguments import Sole, check_int, check_timeout
from .._core.device import Device
from .._core.drain import drain
from .._core.lifetime import Lifetime
from .._core.memory import round_up
from .._core.resource import Resource
from .._core.stream import Stream
from ..backend import Block, SharingBackend
from ..errors import ArgumentTypeError, InvalidArgumentError, PeerError, ResourceBusyError, ResourceClosedError
from ..handles import Handle, IpcMemHandle, TimelineFd
from .attachment import Arrays, AttachedArrays, Import, Lease, SharedMemory, driver_lock
from .descriptor import BLOCKS, ENROL, Contents, Descriptor, Region
from .order import SLOTS, Board, Reader, Word, Writer
from .origin import Described, Laid, Range, describe, device_of
from .rendezvous import here

_ALIGNMENT: Final = 256


class _Offer(Sole):
    """What readers get of a share. It lives until the share is closed and the last lease has ended."""

    def __init__(
        self, descriptor: Descriptor, laid: Laid, *, single: bool, users: Collection[int], threaded: bool,
        stands_on: Sequence[Resource],
    ) -> None:  # fmt: skip
        self.descriptor, self.laid, self.users, self.threaded = descriptor, laid, users, threaded
        regions = tuple(map(self._region, laid.ranges))
        self.contents = Contents(os.getpid(), single, regions, laid.placed(), laid.device.identity)
        self._told = self.contents.write()
        self.label = f"share {descriptor.share}"
        self._stands_on = stands_on
        self._lock = threading.RLock()
        self._writer: Writer | None = None
        self._leases: dict[object, int | None] = {}
        self._withdrawn = False
        self.is_over = False

    # -- the rendezvous ----------------------------------------------------------------------------------------------

    def answer(self, lease: object, verb: int, number: int) -> tuple[int, Sequence[Handle]]:
        if verb == BLOCKS:
            ranges = (one for one in self.laid.ranges if one.region.kind is not IpcMemHandle)
            blocks = [block for one in ranges for block in one.blocks][number : number + ipc.MAX_HANDLES]
            return 0, system.under(driver_lock, self._export, blocks)
        if verb == ENROL:
            writer, own, slot = self.take_slot(lease)
            return slot, [writer.own.export(), own.export(), writer.board.export()]
        self.laid.check()
        self._leases[lease] = None
        return 0, [self._told.duplicate()]

    def left(self, lease: object) -> None:
        writer, slot = self._writer, self._leases[lease]
        own = None if writer is None or slot is None else writer.leases[slot]

        def is_over() -> bool:
            if writer is not None and slot is not None and own is not None and not writer.lets_go(slot, own):
                return False
            del self._leases[lease]
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
            own = self.laid.device.create_semaphore(TimelineFd)
            self._writer = Writer(Board.make(), own, self.label)
            self._writer.publish_first(stream)
        return self._writer

    def take_slot(self, lease: object) -> tuple[Writer, Word, int]:
        """A lease's place in the order."""
        writer = self.writer()
        if self._leases[lease] is not None:
            raise PeerError("the reader is enrolled already.")
        slot = next((one for one in range(SLOTS) if one not in writer.leases), None)
        if slot is None:
            raise PeerError(f"expected {SLOTS} readers or fewer that acquire {self.label}, got one more.")
        own = self.laid.device.create_semaphore(TimelineFd)
        writer.board.slots[slot].value = 0
        writer.leases[slot] = own
        self._leases[lease] = slot
        return writer, own, slot

    # -- this process ------------------------------------------------------------------------------------------------

    def regions(self, lease: Lifetime) -> list[SharedMemory]:
        """The memory as this process has it already; what is made of it keeps the arrays."""
        found = []
        for one in self.laid.ranges:
            known = Import(self.laid.device, one.region, keep=self.laid)
            known.open()
            found.append(SharedMemory(self.laid.device, one.address, one.region.size, (known, lease)))
        return found

    def attach_here(self) -> AttachedArrays:
        """Attach in the process that shares: the same memory."""
        key = object()

        def enrol() -> Reader:
            writer, _, slot = self.take_slot(key)
            words = writer.own, writer.leases[slot]
            return Reader(writer.board, *words, writer.board.slots[slot], "these arrays", lent=True)

        def end(reader: Reader | None) -> None:
            def ended() -> bool:
                if over := reader is None or reader.is_out():
                    self.left(key)
                return over

            here().look_again(ended)

        self._leases[key] = None
        attached = AttachedArrays(self.laid.device, self.descriptor, self.contents, Lease(enrol, end))
        attached._regions = self.regions(attached.lifetime)
        return attached

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let nobody in any more."""
        self.leave()
        here().withdraw(self)
        self._withdrawn = True
        here().post(self._end_if_over)

    def leave(self) -> None:
        """The writer goes out, and does not come in again."""
        if self._writer is not None:
            self._writer.end(ResourceClosedError(f"{self.label} is closed; share the arrays anew."))

    def _end_if_over(self) -> None:
        if not self._withdrawn or self._leases or self.is_over:
            return
        if (writer := self._writer) is not None:
            self._writer = None
            for word in (*writer.leases.values(), writer.own):
                word.close()
            writer.board.close()
        self._told.close()
        self.laid = replace(self.laid, arrays={})  # lets them go
        for one in self._stands_on:
            one.close()
        self.is_over = True

    def what_holds(self) -> str:
        """Why it goes on, for messages."""
        return f"{len(self._leases)} reader(s) are attached" if self._leases else "its thread has not ended it yet"

    def _region(self, memory: Range) -> Region:
        region = memory.region
        if region.kind is not IpcMemHandle:
            return region
        (handle,) = system.under(driver_lock, self._export, memory.blocks)
        return region._replace(data=cast(IpcMemHandle, handle).data.hex())

    def _export(self, blocks: Sequence[Block]) -> list[Handle]:
        device = self.laid.device
        backend = cast(SharingBackend, device.driver)
        made: list[Handle] = []
        try:
            made.extend(backend.export_block(device.handle, block) for block in blocks)
            return made
        except BaseException:
            for handle in made:
                handle.close()
            raise


class ArrayShare(Arrays):
    """Arrays that other processes can attach. Made by `gpuinterop.share`."""

    def __init__(self, make: Callable[[], _Offer], device: Device, stream: Stream | None) -> None:
        super().__init__(Lifetime("ArrayShare", _Offer.close, device=device.streams))
        self.device = device
        offer: _Offer = self.lifetime.create(make)
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
        """The descriptor, which any process of this host attaches, any number of times."""
        return self.lifetime.use(lambda offer: bytes(offer.descriptor))

    def serve(self, timeout: float | None = None) -> None:
        """Serve readers in the calling thread, where the share was made with ``threaded=False``."""
        limit = check_timeout(timeout)
        offer: _Offer = self.lifetime.use(lambda offer: offer)
        if offer.threaded:
            raise InvalidArgumentError("serve", "a thread of the library serves this share; share with threaded=False.")
        here().serve(limit)

    def close(self, timeout: float | None = None) -> None:
        """Refuse new readers at once; what is attached stays valid until it is detached.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until the last reader has detached, and the arrays are let go. Default: do not wait.

        Raises
        ------
        ResourceBusyError
            `timeout` passed. The share stays closed, and the last reader still ends it.
        """
        offer: _Offer = self.lifetime.handle
        if not self.closed:
            offer.leave()
        super().close(timeout)
        if timeout is not None and not system.until(lambda: offer.is_over, timeout):
            raise ResourceBusyError(f"{self.label} is still in use after close({timeout:g}): {offer.what_holds()}.")

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
    arrays: object, *, stream: object = None, copy: bool = False, users: Iterable[int] = (), threaded: bool = True
) -> ArrayShare:
    """Share arrays that exist with other processes, in place."""
    single = not isinstance(arrays, Mapping)
    given: Mapping[object, object] = {"": arrays} if single else arrays  # type: ignore[assignment]
    if not given:
        raise InvalidArgumentError("arrays", "expected an array or more, got none.")
    found: dict[str, Described] = {}
    for name, array in given.items():
        if not isinstance(name, str):
            raise ArgumentTypeError("arrays", f"expected names as keys, got {name!r}.")
        found[name] = describe(array, name or "array")
    allowed = frozenset(check_int(user, "users", minimum=0) for user in users)
    drain()
    device = device_of(next(iter(found.values())))
    for name, one in found.items():
        if (other := device_of(one)) is not device:
            raise InvalidArgumentError(
                name, f"expected arrays of one device, {device!r}, got one of {other!r}; share each device's by itself."
            )
    order = _on(device, stream)
    stands_on: list[Resource] = []
    if copy:
        found = _copied(device, found, order, stands_on)
    try:
        laid = Laid.of(found, device)

        def make() -> _Offer:
            return here().offer(
                lambda descriptor: _Offer(
                    descriptor, laid, single=single, users=allowed, threaded=threaded, stands_on=stands_on
                ),
                allowed,
            )

        return ArrayShare(make, device, order)
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
    try:
        for (name, array), offset in zip(arrays.items(), itertools.accumulate(sizes, initial=0), strict=False):
            start, end = spans[name]
            allocation.buffer.copy_from(start, end - start, offset=offset, stream=stream)
            view = allocation.buffer.view(array.shape, array.dtype, offset + array.pointer - start, array.strides)
            found[name] = describe(view, name or "array")
        if stream is not None:
            stream.synchronize()
    except BaseException:
        allocation.close()
        raise
    return found
