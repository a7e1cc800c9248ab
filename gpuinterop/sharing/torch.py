"""torch.multiprocessing over gpuinterop: ``import gpuinterop.sharing.torch`` in each process that sends.

`reduce_tensor` takes the place of torch's: in ``torch.multiprocessing``, for its queues, pipes, pools and arguments of
processes, and in ``torch.multiprocessing.reductions``, where Ray, vLLM and others call it. (Import this before a module
that takes ``reduce_tensor`` from there by name.) Tensors of a GPU then go to any process of the host and the user that
can connect to the sender's socket, also in another container, and whichever way their memory was allocated.

What stays as torch has it: tensors of one storage have one storage on the other side, also where they come in several
messages; ``requires_grad`` and ``Parameter``; the refusal of tensors that are part of a graph; the places of the
arguments. What gpuinterop does not share goes torch's own way: tensors without elements, sparse, nested and quantized
ones, other devices, and all tensors of the CPU but those in memory that gpuinterop allocated or imported. A tensor of a
GPU whose memory cannot go to another process raises gpuinterop's error, which says what to change; nothing is copied.

**What is sent.** Where the storage is: the memory's number and size, an offset, and a slot of the counts. A receiver
connects to the sender's process once, maps each allocation once, and finds it at the next tensor.

**Lifetime.** As with torch: the sender keeps a storage until all its messages were received, and all receivers have
dropped it, also if the sender has dropped its tensor. Both count in a page that they share, so a tensor costs neither a
message nor a wake-up. A process can have 1,048,576 storages that were sent, and not dropped yet. A receiver can send
what it has received, also back: the first process then gets its own memory. What a process held that dies is dropped;
messages that it has sent may still come. **A message that is never received**, as of a queue that nobody reads, keeps
its storage until the sender ends. So does one that is lost with a receiver that dies before it has unpickled it. A
message that is received more often than it was sent raises `ResourceClosedError` once the others have dropped the
storage. The sender must live as long as its storages are used, as with torch.

**Order.** The receiver's current stream waits for what the sender's current stream had been given. A ``Queue`` sends in
a thread of its own, whose current stream is the default one, as with torch: synchronize another stream before you put
its tensor there. Later writes are not ordered; share what is written again and again by `gpuinterop.share`.

A child that is forked sends anew: it has nothing of what its parent sent.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, cast

import torch
from torch.multiprocessing import reductions

from .. import system
from .._core.device import Device
from .._core.drain import drain
from .._core.interchange import Described, capsule_of, hidden_values, layout_of
from .._core.known_stream import fail_waits
from .._core.lifetime import GONE, LIVE, Lifetime, alive, retire
from .._core.memory import Mapping
from .._core.monitor import after_fork
from .._core.registry import search
from ..errors import GpuInteropError, PeerError, ResourceClosedError, UnsupportedError
from ..handles import Handle, TimelineFd
from .attachment import Import, device_for, import_all
from .descriptor import ENROL, MAGIC, Contents, Descriptor
from .link import Link, link_to
from .loop import loop
from .order import DIED, store
from .origin import describe, device_of, locate
from .rendezvous import Exported, Offer, is_here, region_of, server

__all__ = ["rebuild_cuda_tensor", "reduce_tensor"]

_PATIENCE_S: Final = 60.0
"""Seconds that a sender has to answer; one that has ended is noticed at once."""

_torchs_reduce: Final[Callable[..., Any]] = reductions.reduce_tensor
_torchs_rebuild: Final[Callable[..., Any]] = reductions.rebuild_cuda_tensor


class _Sent(Offer):
    """A storage that was sent."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.source, self.blocks, self.offset = _place_of(storage)
        try:
            server().enter(self, 1)
        except BaseException:
            server().drop(self.blocks)
            raise

    def end(self) -> None:
        system.under(_state.lock, self._forget)
        server().drop(self.blocks)
        self.storage = None

    def _forget(self) -> None:
        if _state.sent.get(self.storage._cdata) is self:
            del _state.sent[self.storage._cdata]


class _Blocks:
    """Blocks of a device that storages were found in."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._starts: list[int] = []
        self._found: list[tuple[Exported, bytes]] = []
        """Each with the source that tells of it, by address."""
        self._most = 64

    def find(self, start: int, size: int) -> tuple[bytes, list[Exported], int]:
        """The source of bytes, their blocks, which are used once more, and the offset there."""
        at = bisect_right(self._starts, start)
        if at:
            known, source = self._found[at - 1]
            # A block stays as long as a storage in it does, and so do its address and its number.
            if start + size <= known.block.end and server().use_again(known):
                return source, [known], start - known.block.address
        array = Described(self.device.info.dlpack, start, layout_of(size, "uint8", None), False, (None, None))
        (run,), _ = locate(self.device, {"": array})
        used = server().use(self.device, run)
        contents = Contents(os.getpid(), True, self.device.identity, [region_of(used)], {})
        source = server().descriptor(Offer()) + bytes(contents)
        if len(run) == 1:
            self._keep(used[0], source)
        return source, used, start - run[0].address

    def _keep(self, one: Exported, source: bytes) -> None:
        address = one.block.address
        at = bisect_right(self._starts, address)
        same = at > 0 and self._starts[at - 1] == address
        self._starts[at - same : at], self._found[at - same : at] = [address], [(one, source)]
        if len(self._starts) > self._most:
            self._found = [found for found in self._found if found[0].uses]
            self._starts = [found[0].block.address for found in self._found]
            self._most = 64 + 2 * len(self._starts)


class _Source:
    """Another process's blocks, which storages came from."""

    def __init__(self, source: bytes) -> None:
        self.descriptor, contents = Descriptor.split(source)
        self.contents = Contents.parse(contents)
        self.link: Link | None = None
        self.device: Device
        self.mapped: tuple[Import, int] | None = None
        self.users: Lifetime | None = None
        """Keeps the import as long as there are storages in it."""
        self.count = 0
        self.dropped: deque[tuple[Link, int]] = deque()
        """Links and slots of storages that are gone."""
        self.looks = False
        """Whether the loop is going to look at them."""
        self.key, self.state = source, _state
        self.lock = threading.RLock()

    def take(self, slot: int, serial: int) -> tuple[Link, int]:
        """Hold a storage, and count its message; return by which link, and the address of the blocks."""
        return system.under(self.lock, self._take, slot, serial)

    def _take(self, slot: int, serial: int) -> tuple[Link, int]:
        while (link := self.link) is None or not link.receive(slot, serial):
            if link is not None and not link.ended:
                raise _given_up()
            left = system.seconds_left(_PATIENCE_S)
            link = self.link = link_to(self.descriptor, left, ())
            self.device = device_for(self.contents, None)
        try:
            if self.users is None or self.mapped is None or self.users.state is not LIVE:
                self._map(link)
            self.count += 1
        except BaseException:
            link.drop(slot)
            raise
        return link, cast("tuple[Import, int]", self.mapped)[1]

    def _map(self, link: Link) -> None:
        while True:
            found = import_all(link, self.device, self.contents.regions, system.seconds_left(_PATIENCE_S), {})
            users = Lifetime("received tensors", parents=(found[0][0],), device=self.device.streams)
            with suppress(ResourceClosedError):  # the last attachment of the import ends meanwhile
                users.open()
                break
        self.mapped, self.users, self.count = found[0], users, 0

    def look(self) -> bool:
        """Drop what is gone, once all streams have done the work that they have now. The loop calls this."""
        return system.under(self.lock, self._look, limit=0)

    def _look(self) -> bool:
        if not system.holds(self.lock):  # a thread waits for the other process: the loop must not
            return False
        self.looks = False  # first: what is dropped from now on has another look
        gone = [self.dropped.popleft() for _ in range(len(self.dropped))]
        if gone and self.users is not None:
            ending = Lifetime("dropped tensors", _drop_all, parents=(self.users,), device=self.device.streams)
            ending.untracked = (self.device.streams,)
            ending.create(lambda: gone)
            self.count -= len(gone)
            retire(ending)
            if not self.count:
                retire(self.users)
                self.state.sources.pop(self.key, None)
            loop().look_again(partial(_is_gone, ending))
        return True


def _drop_all(holds: list[tuple[Link, int]]) -> None:
    for link, slot in holds:
        link.drop(slot)


def _is_gone(lifetime: Lifetime) -> bool:
    drain()
    return lifetime.state in GONE


class _Received:
    """A storage of a source, as long as it lives here. The storage's memory keeps this."""

    __slots__ = ("hold", "key", "source", "storage")

    def __init__(self, source: _Source, hold: tuple[Link, int], key: object) -> None:
        self.source, self.hold, self.key, self.storage = source, hold, key, 0

    def __del__(self) -> None:
        source = self.source
        source.state.received.pop(self.storage, None)
        source.state.storages.pop(self.key, None)
        source.dropped.append(self.hold)
        if not source.looks and source.state is _state:  # else it is a parent's, which drops it
            source.looks = True
            loop().look_again(source.look)


class _Clock(Offer):
    """Numbers the work of a stream, on a timeline that other processes get."""

    def __init__(self, device: Device, stream: Any) -> None:
        self.device, self.stream = device, device.wrap_stream(stream)
        self.word = device.create_semaphore(TimelineFd)
        self.word.lifetime.warns = False
        self.ticks = 0
        server().enter(self, 0)
        self.link = server().me
        self.descriptor = server().descriptor(self)

    def tick(self) -> tuple[bytes, int]:
        """A number that comes after the stream's work so far."""
        self.word.signal(self.stream, self.ticks + 1)
        self.ticks += 1
        return self.descriptor, self.ticks

    def enrol(self, guest: object) -> tuple[int, Sequence[Handle]]:
        return 0, [self.word.export()]


class _TheirClock:
    """Another process's clock."""

    def __init__(self, device: Device, descriptor: Descriptor) -> None:
        left = system.seconds_left(_PATIENCE_S)
        self.device = device
        self.link = link_to(descriptor, left, ())
        with self.link.ask(ENROL, descriptor.request, left) as answer, answer.take(TimelineFd) as handle:
            self.word = device.import_semaphore(handle)
        self.word.lifetime.warns = False
        self.link.watch(self)

    def poison(self) -> None:
        """The process has ended: fail the streams that wait for it, and have them go on."""
        fail_waits(self.word.lifetime, PeerError(DIED))
        loop().look_again(partial(store, self.word))


class _State:
    """What this process has sent and received."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards `sent` and `blocks`."""
        self.asking = threading.RLock()
        """Held while another process is asked for a clock."""
        self.sent: dict[int, _Sent] = {}
        self.blocks: dict[object, _Blocks] = {}
        """Blocks, by torch's device."""
        self.sources: dict[bytes, _Source] = {}
        self.received: dict[int, tuple[bytes, tuple[Any, ...], Link]] = {}
        """What storages came by."""
        self.storages: dict[object, Any] = {}
        """Weak references to storages, by process, slot and serial."""
        self.streams: dict[tuple[int, int], Any] = {}
        """Torch's streams, by device and number."""
        self.clocks: dict[tuple[int, int], _Clock] = {}
        self.their_clocks: dict[bytes, _TheirClock] = {}


_state = _State()
_parents: list[_State] = []


@after_fork
def _forked() -> None:
    global _state  # noqa: PLW0603 - locks of the parent's threads
    _parents.append(_state)  # the tensors are the parent's: a child must not free them
    _state = _State()


def reduce_tensor(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and arguments that make the tensor in another process, in place.

    Importing this module puts it where torch's is, so a call is seldom needed.

    Parameters
    ----------
    tensor : torch.Tensor
        Tensor or parameter; a leaf, if it requires a gradient.

    Returns
    -------
    tuple
        The function, and its arguments in the places of torch's ``rebuild_cuda_tensor``; any pickle takes both.

    Raises
    ------
    UnsupportedError
        The tensor is of a GPU, and its memory cannot go to another process; the error says what to change.
    RuntimeError
        The tensor requires a gradient and is not a leaf (torch's own refusal).

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
        clock, tick = _tick(storage.device.index) if on_gpu else (None, 0)  # first: it may raise
        source, place = _sent(storage)
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
    """Make a tensor of what `reduce_tensor` returned, or torch's own function did, in the process that received it.

    Parameters
    ----------
    *arguments, **named
        As torch's function takes them. A seventh argument of our own, the number of the GPU, is not read: the GPU is
        found by its identity. So callers may write another number there, as they do where ``CUDA_VISIBLE_DEVICES``
        differs.

    Raises
    ------
    ResourceClosedError
        The sender has given the storage up (see the module).
    PeerError
        The sender has ended, or its socket is not reached from here.

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
    storage = _storage_of(source, nbytes, *place)
    if clock is not None:
        _wait(storage.device.index, clock, tick)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    tensor = torch._utils._rebuild_tensor(typed, offset, size, stride)
    torch._C._set_conj(tensor, bits[0])
    torch._C._set_neg(tensor, bits[1])
    if kind == torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad = requires_grad
    return tensor


# -- the sender --------------------------------------------------------------------------------------------------------


def _shared_in_place(tensor: Any) -> Any:
    """The storage of a tensor that gpuinterop shares; the share tells whether the memory allows that."""
    if hidden_values(tensor) or not (tensor.is_cuda or tensor.is_cpu):
        return None
    if not (storage := tensor.untyped_storage()).nbytes():
        return None
    here = tensor.is_cuda or storage._cdata in _state.received
    return storage if here or _is_of_gpuinterop(storage) else None


def _is_of_gpuinterop(storage: Any) -> bool:
    """Whether memory of the host is ours. Most tensors are told by one look: torch allocated them."""
    if storage.resizable() or storage.is_shared():
        return False
    address = storage.data_ptr()
    return any(isinstance(one, Mapping) and one.address <= address < one.address + one.size for one in alive())


def _sent(storage: Any) -> tuple[bytes, tuple[int, int, int]]:
    """Count one more message of a storage. Where it is: the source, and slot, serial and offset."""
    if (came := _state.received.get(storage._cdata)) is not None:
        source, place, link = came
        if link.ended:
            raise PeerError(
                "expected a tensor whose first process lives, got one of a process that has ended; copy it."
            )
        link.move(place[0], -1)
        return source, place
    return system.under(_state.lock, _sent_once_more, storage)


def _sent_once_more(storage: Any) -> tuple[bytes, tuple[int, int, int]]:
    sent = _state.sent.get(storage._cdata)
    if sent is None or not server().send(sent):
        sent = _state.sent[storage._cdata] = _Sent(storage)
    return sent.source, (sent.slot, sent.serial, sent.offset)


def _place_of(storage: Any) -> tuple[bytes, list[Exported], int]:
    """The source of a storage's blocks; those, used once more; and the storage's offset there."""
    if (known := _state.blocks.get(storage.device)) is None:
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        known = _state.blocks[storage.device] = _Blocks(device_of({"": describe(tensor, "tensor")}))
    return known.find(storage.data_ptr(), storage.nbytes())


def _tick(index: int) -> tuple[bytes | None, int]:
    """The sign that the receiver waits for; none, if the current stream has done its work."""
    raw = torch._C._cuda_getCurrentRawStream(index)
    if (stream := _state.streams.get((index, raw))) is None:
        stream = _state.streams[index, raw] = torch.cuda.current_stream(index)
    if stream.query():
        return None, 0
    try:
        return system.under(_state.lock, _tick_of, (index, raw), stream)
    except UnsupportedError:  # the device has no timelines
        stream.synchronize()
    return None, 0


def _tick_of(key: tuple[int, int], stream: Any) -> tuple[bytes, int]:
    if (clock := _state.clocks.get(key)) is None:
        clock = _state.clocks[key] = _Clock(_device(key[0]), stream)
    return clock.tick()


# -- the receiver ------------------------------------------------------------------------------------------------------


def _storage_of(source: bytes, size: int, slot: int, serial: int, offset: int) -> Any:
    """The storage of a message, the same for all its messages. Each is counted."""
    if (known := _state.sources.get(source)) is None:
        known = _state.sources.setdefault(source, _Source(source))
    process = known.descriptor.process
    if is_here(process):
        sent = server().offers.get(slot)
        if not isinstance(sent, _Sent) or sent.serial != serial or (storage := sent.storage) is None:
            raise _given_up()
        server().me.move(slot, 1)
        return storage
    key = process, slot, serial
    if (weak := _state.storages.get(key)) is not None:
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is not None and (came := _state.received.get(storage._cdata)) is not None:
            came[2].move(slot, 1)
            return storage
    link, address = known.take(slot, serial)
    received = _Received(known, (link, slot), key)
    device = known.device
    if not device.info.is_cpu:
        torch.cuda._lazy_init()
    capsule = capsule_of(layout_of(size, "uint8", None), address + offset, device.info.dlpack, received)
    storage = torch.utils.dlpack.from_dlpack(capsule).untyped_storage()
    received.storage = storage._cdata
    _state.storages[key] = reductions.StorageWeakRef(storage)
    _state.received[storage._cdata] = source, (slot, serial, offset), link
    return storage


def _given_up() -> ResourceClosedError:
    return ResourceClosedError(
        "expected a tensor that its sender still has, got one that all receivers have dropped; send it anew, and "
        "receive each message once."
    )


def _wait(index: int, descriptor: bytes, tick: int) -> None:
    """Have the current stream wait for a tick of the sender's."""
    own = next((one for one in list(_state.clocks.values()) if one.descriptor == descriptor), None)
    clock = own or _state.their_clocks.get(descriptor)
    if clock is None or clock.link.ended:
        clock = system.under(_state.asking, _clock_of, _device(index), descriptor)
    if clock.word.value < tick:
        clock.word.wait(clock.device.wrap_stream(torch.cuda.current_stream(index)), tick)


def _device(index: int) -> Device:
    """Our device, by the number of torch's GPU."""
    return search(
        lambda one: not one.info.is_cpu and one.info.dlpack[1] == index,
        f"tensor: expected one of a GPU that works here, got one of torch's GPU {index}",
    )


def _clock_of(device: Device, descriptor: bytes) -> _TheirClock:
    clocks = _state.their_clocks
    for name in [name for name, one in clocks.items() if one.link.ended]:
        clocks.pop(name).word.close()
    if descriptor not in clocks:
        clocks[descriptor] = _TheirClock(device, Descriptor.parse(descriptor))
    return clocks[descriptor]


# -- in torch's place --------------------------------------------------------------------------------------------------

_registered: dict[Any, Any] = vars(ForkingPickler)["_extra_reducers"]
for _kind in [kind for kind, reduce in _registered.items() if reduce is _torchs_reduce]:
    ForkingPickler.register(_kind, reduce_tensor)
reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor
