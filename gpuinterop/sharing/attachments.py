"""Attaches shared arrays: holds their share, maps their memory through `imports`, and takes a place in the order."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count, islice
from typing import Any, Final, cast

from .. import system
from .._arguments import NoCopy, check_int, check_timeout
from .._core.device import Device, check_device
from .._core.lifetime import Lifetime
from .._core.release import drain
from .._core.stream import Stream
from ..errors import GpuInteropError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import OpaqueFd, TimelineFd
from .arrays import Access, Arrays
from .folder import users_of
from .imports import Import, Received, device_for, end_unused, import_all, sent_blocks
from .link import ENDED, Link, SecondsLeft, link_to
from .loop import loop
from .memory import memory_of
from .messages import ATTACH, ENROL, Contents, Descriptor, boot_id
from .order import ControlPage, FrameReader, OwnTimeline, Reader, Writer, time_left
from .server import is_here, server
from .shares import ArrayOffer

_numbers: Final = count()


class ShareHold(NoCopy):
    """A hold on a share, until its reader has released and its arrays are gone."""

    def __init__(self, descriptor: Descriptor, timeout: float | None, users: frozenset[int]) -> None:
        self.descriptor, self.timeout, left = descriptor, timeout, system.seconds_left(timeout)
        self.is_here = is_here(descriptor.process)
        # In the sharing process itself, the link only counts.
        self.link = cast(Link, server().me) if self.is_here else link_to(descriptor, left, users)
        self._is_known = self.link.hold(descriptor.slot)  # if held before, the memory has not changed
        self._number = next(_numbers).to_bytes(8, "little")
        """Identifies the reader, so that it gets one place even if it asks again."""
        self.received: Received = {}
        self._lock = threading.RLock()
        self.device: Device
        self.reader: Reader | None = None
        self.buffers, self.label = 0, ""

    def contents(self, left: SecondsLeft) -> tuple[Contents, ArrayOffer | None]:
        """The share's contents, and its offer if this process shares it. Adds descriptors to `received`."""
        link, descriptor = self.link, self.descriptor
        if self.is_here:
            offer = server().find(descriptor, ArrayOffer, attached=False)
            offer.check()
            return offer.contents, offer
        key = descriptor.serial, descriptor.token
        known = link.known.get(key) if self._is_known and not link.ended else None
        if known is None or not link.is_open(descriptor.slot, descriptor.serial):
            with link.ask(ATTACH, descriptor.request, left) as answer:
                known = Contents.parse(answer.body)
                blocks = islice(sent_blocks(known.regions), len(answer.fds))
                self.received.update((number, answer.take(kind)) for number, kind in blocks)
            link.known[key] = known
        return known, None

    @system.locked
    def enrol(self, timeout: float | None) -> Reader:
        """Take a place in the order."""
        self.reader = self.reader or (self._enrolled_here() if self.is_here else self._enrolled(timeout))
        return self.reader

    def _enrolled_here(self) -> Reader:
        offer = server().find(self.descriptor, ArrayOffer, attached=True)
        place, writer = offer.take_place(server().me, self._number), offer.writer()
        return self._reader(writer.page, writer.own, writer.reader_timelines[place], place, writer)

    def _enrolled(self, timeout: float | None) -> Reader:
        left = system.seconds_left(self.timeout if timeout is None else check_timeout(timeout))
        with self.link.ask(ENROL, self.descriptor.request + self._number, left) as answer, ExitStack() as undo:
            with answer.take(TimelineFd) as first, answer.take(TimelineFd) as second:
                control = ControlPage(undo.enter_context(answer.take(OpaqueFd)), max(1, self.buffers))
                writer, own = (undo.enter_context(self.device.import_semaphore(fd)) for fd in (first, second))
            reader = self._reader(control, writer, own, int.from_bytes(answer.body, "little"))
            self.link.watch(reader)
            undo.pop_all()
            return reader

    def _reader(
        self, page: ControlPage, writer: OwnTimeline, own: OwnTimeline, place: int, lender: Writer | None = None
    ) -> Reader:
        return (FrameReader if self.buffers else Reader)(page, writer, own, place, self.label, lender)

    def over(self) -> GpuInteropError | None:
        """Why no newer version will arrive: the writer has closed the share, or has exited."""
        if not self.link.is_open(self.descriptor.slot, self.descriptor.serial):  # first: it can close and then exit
            return ResourceClosedError("the writer has closed: nothing newer will come.")
        return PeerError(ENDED) if self.link.ended else None

    def leave(self) -> None:
        """Release; do not acquire again."""
        if self.reader is not None:
            self.reader.end(ResourceClosedError(f"{self.reader.label} is closed; attach again."))

    def end(self) -> None:
        """Drop the share once the reader has released."""
        for handle in self.received.values():
            handle.close()
        self.leave()
        self.link.drop(self.descriptor.slot) if self.reader is None else loop().repeat(self._is_over)

    def _is_over(self) -> bool:
        reader = cast(Reader, self.reader)
        if not reader.close_if_released() and not self.link.ended and not loop().exits:
            return False  # at exit, the sharing process drops what is left
        self.link.readers.pop(reader, None)
        self.link.ring()  # because the reader has left, even if others here still hold the share
        self.link.drop(self.descriptor.slot)
        return True


class AttachedArrays(Arrays):
    """Arrays of another process, in place. Made by `gpuinterop.attach`.

    After `close`, gpuinterop detaches once the queued work of the streams is done and the last array made from a view
    is gone. Until then the sharing process keeps its arrays. The driver maps memory once for all attachments of a
    process.

    Examples
    --------
    >>> with gi.share({"field": buffer.view((2, 2), "float32")}) as shared:
    ...     with gi.attach(bytes(shared)) as attached:
    ...         attached.acquire(stream)
    ...         stream.synchronize(timeout=10)
    ...         field = np.asarray(attached["field"])  # a GPU: torch.from_dlpack, without the synchronize
    ...         float(field.sum())
    ...         attached.release(stream)
    ...         del field
    0.0
    """

    def __init__(self, device: Device, contents: Contents, lease: ShareHold, label: str | None) -> None:
        noun = "Subscription" if lease.buffers else "AttachedArrays"
        super().__init__(Lifetime(noun, ShareHold.end, device=device.streams, label=label))
        self.device, self._contents, self._lease = device, contents, lease
        lease.label, lease.device = self.label, device
        self.lifetime.create(lambda: lease)

    def close(self, timeout: float | None = None) -> None:
        """Release once the work of the stream that acquired is done, and detach (see `Resource.close`).

        Native calls, for the last attachment of the memory in this process: ``cuIpcCloseMemHandle``, or
        ``cuMemUnmap`` and ``cuMemAddressFree`` (``hip...``).
        """
        check_timeout(timeout)  # first, so that a bad argument closes nothing
        if not self.closed:
            self._lease.leave()
        super().close(timeout)

    @property
    def ended(self) -> bool:
        """Whether the writer has closed the share or exited, so that no newer version will arrive."""
        return self._lease.over() is not None

    def read(self, stream: Stream | object = None, *, timeout: float | None = None) -> Access[Any]:
        """Acquire in a ``with``, which gives the array, or all arrays by name; release when the ``with`` ends.

        Type checkers cannot know which of the two, a `View` or this object, so they check neither.

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

    def wait(self, *, newer_than: int, timeout: float | None = None) -> int:
        """Block the calling thread until the writer has published a newer version.

        The writer's stream may still be working on it; `acquire` makes a stream wait for that work.

        Parameters
        ----------
        newer_than : int
            Number of a version; -1 is older than every version.
        timeout : float, optional
            Seconds to wait. Default: no limit.

        Returns
        -------
        int
            The newest version.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed.
        ResourceClosedError
            There is no newer version, and the writer has closed the share or you have called `close`.
        PeerError
            There is no newer version, and the writer has exited.

        Examples
        --------
        >>> with gi.share(buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        ...     with shared.write():
        ...         buffer.fill(7)
        ...     attached.wait(newer_than=0, timeout=10)
        1
        """
        left = time_left(timeout)
        check_int(newer_than, "newer_than", minimum=-1)
        return self._side(timeout).await_version(newer_than, left, self._over)

    def _over(self) -> GpuInteropError | None:
        return self.lifetime.refusal() if self.closed else self._lease.over()

    def _map(self, offer: ArrayOffer | None, left: SecondsLeft) -> None:
        lease, regions, imports = self._lease, self._contents.regions, list[Import]()
        addresses = offer.addresses if offer is not None else []
        while True:
            if offer is None:
                mapped = import_all(lease.link, self.device, regions, left, lease.received)
                imports, addresses = [imported for imported, _ in mapped], [address for _, address in mapped]
            try:
                self._placed = memory_of(self.device, regions, addresses, (*imports, self.lifetime))
                return
            except ResourceClosedError:  # an import's last attachment has just ended, or this attachment was closed
                self._check_open()
            finally:
                for imported in imports:
                    end_unused(imported)

    def _side(self, timeout: float | None = None) -> Reader:
        return self._lease.reader or self.lifetime.use(lambda lease: lease.enrol(timeout))


def attach(
    descriptor: bytes | str, *, timeout: float | None = 10.0, device: Device | None = None, users: Iterable[int] = (),
    label: str | None = None,
) -> AttachedArrays:  # fmt: skip
    """Attach the arrays of a share: the same memory, in this process.

    `attach` connects to the sharing process, receives the handles, and maps them with ``cuIpcOpenMemHandle``, or
    ``cuMemImportFromShareableHandle``, ``cuMemMap`` and ``cuMemSetAccess`` (``hip...``); on the host with ``mmap``. It
    does not map again what another attachment of this process maps already. All attachments to one process share a
    connection, which lasts until one of the two processes exits. In the sharing process itself, `attach` returns that
    process's own memory.

    You can read and write the bytes at any time. Order your accesses with `AttachedArrays.acquire`, or in your own way.

    Parameters
    ----------
    descriptor : bytes or str
        ``bytes(share)`` or ``str(share)``. Until the share is closed, you can attach it any number of times.
    timeout : float, optional
        Seconds for the whole call, and for the answer to the first `acquire`. None: no limit. Default: 10.
    device : Device, optional
        Device that maps the memory. If it is not the arrays' own device, it needs peer access to that one
        (`Device.can_access`). Default: the arrays' own, found by its identity and not by its number.
    users : iterable of int
        User ids that the sharing process may have, besides this process's own.
    label : str, optional
        Name of the object in messages, warnings and its `repr`.

    Returns
    -------
    AttachedArrays
        The arrays, which the caller closes. Received handles are consumed, even after an error.

    Raises
    ------
    ArgumentTypeError, InvalidArgumentError
        `descriptor` is not a share's, is damaged, or is of another version of gpuinterop.
    ResourceClosedError
        The share was closed, or its memory was freed. Ask its process for a new descriptor.
    PeerError
        The sharing process is not there, does not answer, runs as another user, or sends an invalid answer. Or the
        descriptor was made on another host, or before a restart of this one.
    DeviceNotFoundError
        The device that has the memory is hidden from this process. Pass another one as `device`.
    UnsupportedError
        The device cannot import such memory (`Operation.IMPORT_ARRAY`) or has no peer access to it. Or both processes
        have the same PID in different namespaces, so the driver takes them for one process.
    DriverError
        The driver refused.

    Examples
    --------
    >>> with gi.share(buffer.view((2, 2), "float32")) as shared:
    ...     descriptor = bytes(shared)  # send it any way you like
    ...     with gi.attach(descriptor) as attached:  # in any process of this host
    ...         attached.view.shape
    (2, 2)

    A closed share refuses new readers:

    >>> gi.attach(descriptor)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ResourceClosedError: the share was closed...
    """
    return attached(descriptor, timeout, device, users, label)


def attached(
    descriptor: object, timeout: float | None, device: Device | None, users: Iterable[int], label: str | None, *,
    frames: bool = False,
) -> AttachedArrays:  # fmt: skip
    """Attach a share, or the slots of frames."""
    parsed = Descriptor.parse(descriptor)
    if parsed.boot != boot_id():
        problem = "the share was made on another host, or before a restart of this one"
        raise PeerError(f"{problem}; attach it where its process runs.")
    limit, allowed = check_timeout(timeout), users_of(users)
    left = system.seconds_left(limit)
    if device is not None:
        check_device(device, "device")
    drain()
    lease = ShareHold(parsed, limit, allowed)
    try:
        contents, offer = lease.contents(left)
        lease.buffers = len(contents.arrays) if frames else 0
        if offer is None:
            used = device_for(contents, device)
        elif device in (None, offer.device):
            used = offer.device
        else:
            raise InvalidArgumentError("device", f"expected {offer.device!r} in the sharing process, got {device!r}.")
        arrays = AttachedArrays(used, contents, lease, label)
    except BaseException:
        lease.end()
        raise
    try:
        arrays._map(offer, left)
    except BaseException:
        arrays.close()
        raise
    return arrays
