"""torch.multiprocessing over gpuinterop: ``import gpuinterop.sharing.torch`` in each process that sends tensors.

`reduce_tensor` replaces torch's in ``torch.multiprocessing``, for queues, pipes, pools and process arguments, and in
``torch.multiprocessing.reductions``, where Ray, vLLM and others call it. (Import this module before a module that
imports ``reduce_tensor`` from there.) You can then send GPU tensors, however their memory was allocated, to any process
on the host that runs as the same user and can connect to the sender's socket, also in another container.

As in torch, tensors of one storage share one storage on the other side, even if sent in several messages;
``requires_grad``, ``Parameter`` and argument positions are kept; and tensors in a graph are refused. torch's own code
sends what gpuinterop does not share: empty, sparse, nested and quantized tensors, other devices, and CPU tensors
outside memory that gpuinterop allocated or imported. If a GPU tensor's memory cannot be shared, gpuinterop raises an
error that says what to change; it never copies.

**What is sent.** The storage's location: the memory's number and size, an offset, and a slot of the counts. A receiver
connects to each sending process once, maps each allocation once, and reuses the mapping for the next tensor.

**Lifetime.** As in torch, the sender keeps a storage until all its messages are received and all receivers have dropped
it, even if the sender's own tensor is gone. Both sides count in a shared page, so a tensor costs neither a message nor
a wake-up. A process can have 1,048,576 storages that were sent and not dropped yet. A receiver can send a tensor on,
or back: the first process then gets its own memory. When a process exits, its holds are dropped; messages that it has
sent can still arrive. **If a message is never received**, because no process reads the queue or the receiver exits
before it unpickles it, its storage is kept until the sender exits. A message that is received more often than it was
sent raises `ResourceClosedError` once the other receivers have dropped the storage. As with torch, the sender must run
as long as its storages are used.

**Order.** The receiver's current stream waits for the work that was queued on the sender's current stream. A ``Queue``
sends from its own thread on the default stream, as with torch, so synchronize another stream before you put its tensor
there. Later writes are not ordered; for memory that you write again and again, use `gpuinterop.share`.

A forked child has none of its parent's sent storages.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, cast

import torch
from torch.multiprocessing import reductions

from .. import system
from .._core.device import Device
from .._core.dlpack import capsule_of
from .._core.foreign_arrays import hidden_values
from .._core.layout import Layout, layout_of
from .._core.lifetime import FINAL, Lifetime, after_fork, alive, retire
from .._core.memory import Mapping
from .._core.release import drain
from .._core.streams import fail_waits
from ..backend import Block, MemoryKind
from ..errors import GpuInteropError, PeerError, ResourceClosedError, UnsupportedError
from ..handles import Handle, TimelineFd
from .find_memory import check_block, describe, device_of, find_runs
from .imports import Import, device_for, import_all, import_of, keep
from .link import ENDED, Link, link_to
from .loop import loop
from .messages import ENROL, MAGIC, Contents, Descriptor, Region
from .order import store, unsignalled
from .server import Offer, is_here, region_of, server

__all__ = ["rebuild_cuda_tensor", "reduce_tensor"]


_torchs_reduce: Final[Callable[..., Any]] = reductions.reduce_tensor
_torchs_rebuild: Final[Callable[..., Any]] = reductions.rebuild_cuda_tensor


def _patience() -> float:
    """Seconds that a sender has to answer. If it exits, gpuinterop notices at once."""
    return 60.0


class _Run:
    """Blocks at consecutive addresses that contain sent storages."""

    def __init__(self, device: Device, run: Sequence[Block]) -> None:
        self.start, self.end, self.uses = run[0].address, run[-1].end, 0
        self.blocks = server().use(device, run)
        try:
            self.source, self.region = _source(device, run[0].kind), region_of(self.blocks)[1:]
        except BaseException:
            server().drop(self.blocks)
            raise


@lru_cache
def _source(device: Device, kind: MemoryKind) -> bytes:
    """The part of a message that identifies this process, a device, and the handle type of its memory."""
    contents = Contents(os.getpid(), True, device.identity, [Region(kind.handle_type, (), ())], {})
    return server().descriptor(Offer()) + bytes(contents)


class _Place:
    """A torch device, and its blocks in use."""

    def __init__(self, device: Any) -> None:
        self.device = device_of({"": describe(torch.empty(0, device=device), "tensor")})
        self.runs: list[tuple[int, _Run]] = []
        """Runs of one block, by address. A storage keeps its block, but a part of several blocks can change."""
        self.seen = set[tuple[MemoryKind, int]]()
        """The kinds of memory that `check_block` has accepted."""

    def use(self, start: int, end: int) -> _Run:
        """Find or make the run that contains these bytes, and count one use more."""
        at = bisect_right(self.runs, (start + 1,))
        if not at or end > (run := self.runs[at - 1][1]).end:
            (blocks,), _ = find_runs(self.device, [(start, end, "")], check_block, self.seen)
            run = _Run(self.device, blocks)
            if len(blocks) == 1:
                self.runs.insert(at, (run.start, run))
        run.uses += 1
        return run

    def drop(self, run: _Run) -> None:
        run.uses -= 1
        if not run.uses:
            server().drop(run.blocks)
            if len(run.blocks) == 1:
                del self.runs[bisect_left(self.runs, (run.start,))]


_place = lru_cache(_Place)


class _Sent(Offer):
    def __init__(self, storage: Any) -> None:
        self.storage, self.place, start = storage, _place(storage.device), storage.data_ptr()
        self.span = start, storage.nbytes()
        """The bytes it occupies; `resize_` replaces them."""
        self.run = run = self.place.use(start, start + storage.nbytes())
        try:
            server().enter(self, 1)
        except BaseException:
            self.place.drop(run)
            raise
        self.message = run.source, (self.slot, self.serial, start - run.start, run.region)

    def end(self) -> None:
        system.under(_state.lock, self._end)
        self.storage = None

    def _end(self) -> None:
        if _state.sent.get(self.storage._cdata) is self:
            del _state.sent[self.storage._cdata]
        self.place.drop(self.run)


class _Theirs:
    """Another process's storages in this process. It changes under the link's `importing`."""

    def __init__(self, link: Link) -> None:
        self.link, self.state = link, _state
        self.storages: dict[tuple[int, int], Any] = {}
        """Weak references to storages, by slot and serial."""
        self.dropped: deque[_Received] = deque()
        """Storages that are gone, but whose slots this process still holds."""
        self.to_be_polled = False

    def storage(self, source: bytes, size: int, place: tuple[int, int, int, Any]) -> Any:
        """Count a message, and return its storage; None if it has arrived too late."""
        slot, serial, offset, region = place
        link, key = self.link, (slot, serial)
        weak = self.storages.get(key)
        if weak is not None and (storage := torch.UntypedStorage._new_with_weak_ptr(weak.cdata)) is not None:
            link.move(slot, 1)
            return storage
        if not link.receive(slot, serial):
            if link.ended:
                raise PeerError(ENDED)
            return None
        try:
            device, kind = _maps(source)
            run = Region(kind, *region)
            while True:
                imported, address = import_of(link, device, run) or import_all(link, device, [run], _patience, {})[0]
                if keep(imported):  # else its last attachment has just ended
                    break
        except BaseException:
            link.drop(slot)
            raise
        received = _Received(self, key, imported, None if device.info.is_cpu else device.info.dlpack[1])
        capsule = capsule_of(_bytes(size), address + offset, device.info.dlpack, received)
        storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
        received.weak = self.storages[key] = reductions.StorageWeakRef(storage)
        self.state.received[storage._cdata] = link, (source, place)
        return storage

    def poll(self) -> bool:
        """Drop the slots of dropped storages whose streams have done their work. The loop calls this."""
        return system.under(self.link.importing, self._poll, limit=0)

    def _poll(self) -> bool:
        if not system.holds(self.link.importing):  # a thread waits for the other process; the loop must not wait too
            return False
        self.to_be_polled = False  # first, so that a storage dropped after this causes another poll
        gone = list[_Received]()
        for _ in range(len(self.dropped)):
            received = self.dropped.popleft()
            if received.work is None or received.work.query():
                gone.append(received)
            else:
                self.to_be_polled = True
                self.dropped.append(received)
        for received in gone:
            if (weak := received.weak) is not None:
                self.state.received.pop(weak.cdata, None)
                if self.storages.get(received.key) is weak:  # else it was received again
                    del self.storages[received.key]
        counts = Counter(received.imported for received in gone)
        ending = Lifetime("dropped tensors", lambda slots: self.link.drop(*slots), parents=tuple(counts))
        ending.untracked = tuple({imported.device for imported in counts})
        ending.create(lambda: [received.key[0] for received in gone])
        for imported, count in counts.items():
            imported.count -= count
            imported.ends_with_children = not imported.count
        retire(ending)  # also ends the imports that nothing else uses
        loop().repeat(partial(_is_gone, ending))
        return not self.to_be_polled

    def poison(self) -> None:
        self.state.theirs.pop(self.link.process, None)


@lru_cache(256)
def _maps(source: bytes) -> tuple[Device, type[Handle]]:
    """The device that maps a source's memory, and the handle type."""
    _, contents = _parsed(source)
    device = device_for(contents, None)
    if not device.info.is_cpu:
        torch.cuda._lazy_init()
    return device, contents.regions[0].kind


@lru_cache(256)
def _bytes(size: int) -> Layout:
    return layout_of(size, "uint8", None)


def _is_gone(lifetime: Lifetime) -> bool:
    drain()
    return lifetime.state in FINAL


class _Received:
    """A received storage's record; the storage's memory keeps it while the storage exists here."""

    __slots__ = ("gpu", "imported", "key", "theirs", "weak", "work")

    def __init__(self, theirs: _Theirs, key: tuple[int, int], imported: Import, gpu: int | None) -> None:
        self.theirs, self.key, self.imported, self.gpu = theirs, key, imported, gpu
        self.weak: Any = None
        self.work: Any = None
        """The current stream's work when the storage was dropped; like torch, the drop waits for it."""

    def __del__(self) -> None:
        theirs = self.theirs
        if theirs.state is not _state:  # the parent's storage, which the parent drops
            return
        if self.gpu is not None and not (loop().exits or torch.cuda.is_current_stream_capturing()):
            stream = torch.cuda.current_stream(self.gpu)
            self.work = None if stream.query() else stream.record_event()
        theirs.dropped.append(self)
        if not theirs.to_be_polled:
            theirs.to_be_polled = True
            loop().repeat(theirs.poll)


class _Clock(Offer):
    """Numbers a stream's work, on a timeline that other processes import."""

    def __init__(self, stream: Any) -> None:
        self.torchs, self.ticks, self.descriptor = stream, 0, b""

    def tick(self, device: Any) -> tuple[bytes, int]:
        """Return a number that the timeline reaches after the stream's work so far."""
        if not self.descriptor:
            self.device = _place(device).device
            self.stream, self.word = self.device.wrap_stream(self.torchs), self.device.create_semaphore(TimelineFd)
            self.word.lifetime.warns = False
            server().enter(self, 0)
            self.descriptor = server().descriptor(self)
            _state.heard[self.descriptor] = self
        self.ticks += 1
        self.word.signal(self.stream, self.ticks)
        return self.descriptor, self.ticks

    def enrol(self, guest: object, number: bytes) -> tuple[int, Sequence[Handle]]:
        return 0, [self.word.export()]


class _TheirClock:
    def __init__(self, device: Any, key: bytes) -> None:
        descriptor = Descriptor.parse(key)
        self.device, self.key, self.heard = _place(device).device, key, _state.heard
        link = link_to(descriptor, _patience, ())
        with link.ask(ENROL, descriptor.request, _patience) as answer, answer.take(TimelineFd) as handle:
            self.word = self.device.import_semaphore(handle)
        self.word.lifetime.warns, self.word.lifetime.unsignalled = False, unsignalled
        self.heard[key] = self  # another thread may have made one too
        link.watch(self)

    def poison(self) -> None:
        """The process has exited: fail the streams that wait for it, and let them continue."""
        self.heard.pop(self.key, None)
        fail_waits(self.word.lifetime)
        loop().repeat(partial(store, self.word))


class _State:
    """The storages that this process has sent and received."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards `sent`, and the clocks' ticks."""
        self.sent: dict[int, _Sent] = {}
        self.theirs: dict[bytes, _Theirs] = {}
        """By the sharing process's number."""
        self.received: dict[int, tuple[Link, tuple[bytes, tuple[Any, ...]]]] = {}
        """The link and the message of each received storage."""
        self.clocks: dict[tuple[int, int], _Clock] = {}
        """By torch device and stream."""
        self.heard: dict[bytes, _Clock | _TheirClock] = {}


_state = _State()
_parents: list[_State] = []


@after_fork
def _forked() -> None:
    global _state  # noqa: PLW0603 - locks of the parent's threads
    _parents.append(_state)  # keeps the parent's tensors, which a child must not free
    _state = _State()
    for cache in (_place, _source, _maps):
        cache.cache_clear()


def reduce_tensor(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and arguments that make the tensor in another process, in place.

    torch calls this, because importing this module replaces torch's own function.

    Parameters
    ----------
    tensor : torch.Tensor
        Tensor or parameter; a leaf, if it requires a gradient.

    Returns
    -------
    tuple
        The function, and its arguments in the positions of torch's ``rebuild_cuda_tensor``; any pickle accepts both.

    Raises
    ------
    UnsupportedError
        The tensor is on a GPU, and another process cannot map its memory; the error says what to change.
    RuntimeError
        The tensor requires a gradient and is not a leaf (raised by torch).

    Examples
    --------
    With torch:

    >>> import torch, gpuinterop.sharing.torch
    >>> tensor = torch.from_dlpack(buffer.view((2, 3), "float32"))
    >>> function, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
    >>> function(*arguments).data_ptr() == tensor.data_ptr()  # another process gets the same memory
    True
    """
    storage = None if tensor.requires_grad and not tensor.is_leaf else _shared_in_place(tensor)
    if storage is None:
        return _torchs_reduce(tensor)  # type: ignore[no-any-return]
    torch.utils.hooks.warn_if_has_hooks(tensor)
    on_gpu = tensor.is_cuda
    try:
        clock, tick = _tick(storage) if on_gpu else (None, 0)  # first, because it can raise
        source, place = system.under(_state.lock, _sent, storage)
    except GpuInteropError:
        if on_gpu:
            raise
        return _torchs_reduce(tensor)  # type: ignore[no-any-return]
    return rebuild_cuda_tensor, (
        type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), torch.UntypedStorage, tensor.dtype,
        storage.device.index if on_gpu else "cpu", source, storage.nbytes(), 0, tensor.requires_grad,
        (tensor.is_conj(), tensor.is_neg()), place, clock, tick,
    )  # fmt: skip


def rebuild_cuda_tensor(*arguments: Any, **named: Any) -> Any:
    """Make a tensor from the arguments that `reduce_tensor` or torch's own function returned, in the receiving process.

    Parameters
    ----------
    *arguments, **named
        See torch's function. In gpuinterop's arguments the seventh, the number of the GPU, is ignored: the GPU is found
        by its identity. So callers may write another number there, for example if ``CUDA_VISIBLE_DEVICES`` differs.

    Raises
    ------
    ResourceClosedError
        The sender has dropped the storage (see the module).
    PeerError
        The sender has exited, or this process cannot reach its socket.

    Examples
    --------
    With torch:

    >>> import torch, gpuinterop.sharing.torch
    >>> function, arguments = gpuinterop.sharing.torch.reduce_tensor(torch.from_dlpack(buffer.view(8, "float32")))
    >>> function is gpuinterop.sharing.torch.rebuild_cuda_tensor
    True
    >>> function(*arguments).shape
    torch.Size([8])
    """
    if len(arguments) < 15 or not isinstance(arguments[7], bytes) or not arguments[7].startswith(MAGIC):
        return _torchs_rebuild(*arguments, **named)
    kind, size, stride, offset, _, dtype, _, source, nbytes, _, requires_grad, bits, place, clock, tick = arguments
    storage = _storage_of(source, nbytes, place)
    if clock is not None:
        _wait(storage, clock, tick)
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if any(bits):
        torch._C._set_conj(tensor, bits[0])
        torch._C._set_neg(tensor, bits[1])
    if kind == torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad = requires_grad
    return tensor


# -- the sender --------------------------------------------------------------------------------------------------------


def _shared_in_place(tensor: Any) -> Any:
    """The storage of a tensor that gpuinterop shares, or None. Whether its memory allows that shows when it is sent."""
    if hidden_values(tensor) or not (tensor.is_cuda or tensor.is_cpu):
        return None
    if not (storage := tensor.untyped_storage()).nbytes():
        return None
    here = tensor.is_cuda or storage._cdata in _state.received
    return storage if here or _is_of_gpuinterop(storage) else None


def _is_of_gpuinterop(storage: Any) -> bool:
    """Whether host memory is gpuinterop's. One check excludes most tensors: torch allocated them."""
    if storage.resizable() or storage.is_shared():
        return False
    address = storage.data_ptr()
    mappings = (lifetime for lifetime in alive() if isinstance(lifetime, Mapping))
    return any(mapping.address <= address < mapping.address + mapping.size for mapping in mappings)


def _sent(storage: Any) -> tuple[bytes, tuple[Any, ...]]:
    """Count one more message of a storage; return its source, and its slot, serial, offset and blocks."""
    if (received := _state.received.get(storage._cdata)) is None:
        sent = _state.sent.get(storage._cdata)
        if sent is None or sent.span != (storage.data_ptr(), storage.nbytes()) or not server().send(sent):
            sent = _state.sent[storage._cdata] = _Sent(storage)
        return sent.message
    link, message = received
    if link.ended:
        raise PeerError("expected a tensor whose first process is running, got one of an exited process; copy it.")
    link.move(message[1][0], -1)
    return message


def _tick(storage: Any) -> tuple[bytes | None, int]:
    """The clock and the tick that the receiver waits for; none if the current stream has done its work."""
    index = storage.device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if (clock := _state.clocks.get(key)) is None:
        clock = _state.clocks.setdefault(key, _Clock(torch.cuda.current_stream(index)))
    if clock.torchs.query():
        return None, 0
    try:
        return system.under(_state.lock, clock.tick, storage.device)
    except UnsupportedError:  # the device has no timelines
        clock.torchs.synchronize()
    return None, 0


# -- the receiver ------------------------------------------------------------------------------------------------------


@lru_cache(256)
def _parsed(source: bytes) -> tuple[Descriptor, Contents]:
    descriptor, contents = Descriptor.split(source)
    return descriptor, Contents.parse(contents)


def _storage_of(source: bytes, size: int, place: tuple[int, int, int, Any]) -> Any:
    """The storage of a message; all messages of a storage return the same one. Each is counted."""
    descriptor, _ = _parsed(source)
    if is_here(descriptor.process):
        (slot, serial, *_), me, storage = place, server().me, None
        if me.receive(slot, serial):
            storage = cast(_Sent, server().offers[slot]).storage
            me.drop(slot)  # this rings, because the message may be the last one missing
    else:
        if (theirs := _state.theirs.get(descriptor.process)) is None:
            link = link_to(descriptor, _patience, ())
            theirs = _state.theirs.setdefault(descriptor.process, _Theirs(link))
            link.watch(theirs)
        storage = system.under(theirs.link.importing, theirs.storage, source, size, place)
    if storage is None:
        got = "one that all receivers have dropped; send it again, and receive each message once."
        raise ResourceClosedError(f"expected a tensor that its sender still has, got {got}")
    return storage


def _wait(storage: Any, key: bytes, tick: int) -> None:
    """Make the current stream wait for a sender's tick."""
    clock = _state.heard.get(key) or _TheirClock(storage.device, key)
    if clock.word.value < tick:
        clock.word.wait(torch.cuda.current_stream(storage.device.index), tick)


# -- replacing torch's functions ---------------------------------------------------------------------------------------

_registered: dict[Any, Any] = vars(ForkingPickler)["_extra_reducers"]
for _kind in [kind for kind, reduce in _registered.items() if reduce is _torchs_reduce]:
    ForkingPickler.register(_kind, reduce_tensor)
reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor
