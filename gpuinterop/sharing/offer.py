"""The exporter's side: arrays that are held, described, and published in versions."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from ..errors import ArgumentTypeError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import FdHandle, Handle, TimelineFd
from .attachment import Arrays, AttachedArrays, Import, Lease, SharedMemory, driver_lock
from .descriptor import Contents, Descriptor, Status, answer
from .order import SLOTS, Board, Reader, Word, Writer
from .origin import Described, Laid, describe, device_of
from .rendezvous import Part, here

_ALIGNMENT: Final = 256


class _Offer(Sole):
    """What readers get of a share. It lives until the share is closed and the last lease has ended."""

    def __init__(
        self, descriptor: Descriptor, laid: Laid, *, single: bool, users: Collection[int], threaded: bool,
        stands_on: Sequence[Resource],
    ) -> None:  # fmt: skip
        self.descriptor, self.laid, self.users, self.threaded = descriptor, laid, users, threaded
        self.contents = Contents(
            pid=os.getpid(),
            single=single,
            device=laid.device.identity,
            regions=tuple(one.region for one in laid.ranges),
            arrays=laid.placed(),
        )
        self.label = f"share {descriptor.share}"
        self._stands_on = stands_on
        self._lock = threading.RLock()
        self._writer: Writer | None = None
        self._leases: dict[object, int | None] = {}
        self._withdrawn = False

    # -- the rendezvous ----------------------------------------------------------------------------------------------

    def attach(self, lease: object) -> Iterator[Part]:
        self.laid.check()
        blocks = [block for one in self.laid.ranges for block in one.blocks]
        chunk = self._export(blocks[: ipc.MAX_HANDLES])  # before the answer, which can still be an error
        self._leases[lease] = None
        lease.offer = self  # type: ignore[attr-defined]
        yield answer(Status.DONE, self.contents.as_json(), len(blocks)), ()
        for at in range(ipc.MAX_HANDLES, len(blocks) + ipc.MAX_HANDLES, ipc.MAX_HANDLES):
            yield _part(chunk)
            chunk = self._export(blocks[at : at + ipc.MAX_HANDLES])

    def enrol(self, lease: object) -> Iterator[Part]:
        writer, own, slot = self.take_slot(lease)
        yield answer(Status.DONE, {"slot": slot}, 3), ()
        yield _part([writer.own.export(), own.export(), writer.board.export()])

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

        def end(is_out: Callable[[], bool]) -> None:
            def ended() -> bool:
                if over := is_out():
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
        if not self._withdrawn or self._leases:
            return
        if (writer := self._writer) is not None:
            self._writer = None
            for word in (*writer.leases.values(), writer.own):
                word.close()
            writer.board.close()
        self.laid = replace(self.laid, arrays={})  # lets them go
        for one in self._stands_on:
            one.close()

    def _export(self, blocks: Sequence[Block]) -> list[Handle]:
        return system.under(driver_lock, self._export_all, blocks)

    def _export_all(self, blocks: Sequence[Block]) -> list[Handle]:
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


def _part(handles: Sequence[Handle]) -> Part:
    return ipc.packed(handles), [one for one in handles if isinstance(one, FdHandle)]


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
        """Refuse new readers at once; what is attached stays valid until it is detached."""
        if not self.closed:
            self.lifetime.handle.leave()
        super().close(timeout)

    def _memory(self) -> Sequence[SharedMemory]:
        if self._regions is None:
            self._regions = self.lifetime.use(lambda offer: offer.regions(self.lifetime))
        return self._regions

    def _turns(self) -> Writer:
        if name := next((name for name, one in self._contents.arrays.items() if one.read_only), None):
            raise InvalidArgumentError(
                name or "array", "its library treats it as immutable, so it cannot be written; share with copy=True."
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
