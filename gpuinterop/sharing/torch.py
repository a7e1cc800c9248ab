"""torch.multiprocessing over gpuinterop: ``import gpuinterop.sharing.torch`` in each process that sends.

`reduce_tensor` takes the place of torch's: in ``torch.multiprocessing``, for its queues, pipes, pools and arguments of
processes, and in ``torch.multiprocessing.reductions``, where Ray, vLLM and others call it. (Import this before a module
that takes ``reduce_tensor`` from there by name.) Tensors of a GPU then go to any process of the host that can connect
to the sender's socket, also in another container, and whichever way their memory was allocated.

What stays as torch has it: tensors of one storage have one storage on the other side, also where they come in several
messages; ``requires_grad`` and ``Parameter``; the refusal of tensors that are part of a graph; the places of the
arguments. What gpuinterop does not share goes torch's own way: tensors without elements, sparse, nested and quantized
ones, other devices, and all tensors of the CPU but those in memory that gpuinterop allocated or imported. A tensor of a
GPU whose memory cannot go to another process raises gpuinterop's error, which says what to change; nothing is copied.

**Lifetime.** The sender keeps a storage until all its messages were received and the receivers have dropped it; they
need not tell. It keeps at most 1,000 storages, as torch warns of that many: for one more it gives up the one that was
sent least recently. A process that has received that one keeps the memory. A message of a storage that was given up
raises `ResourceClosedError` where it is received. So does a message that is received more often than it was sent, once
the earlier receivers have dropped the storage. A receiver can send what it has received, also back: the first process
then gets its own memory.

**Order.** The receiver's current stream waits for what the sender's current stream had been given. A ``Queue`` sends in
a thread of its own, whose current stream is the default one, as with torch: synchronize another stream before you put
its tensor there. Later writes are not ordered; share what is written again and again by `gpuinterop.share`.

A child that is forked sends anew: it has nothing of what its parent sent.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.multiprocessing import reductions

from .. import system
from .._core.drain import drain
from .._core.interchange import hidden_values
from .._core.lifetime import GONE, Lifetime, alive
from .._core.memory import Mapping
from .._core.monitor import after_fork
from .._core.stream import Stream
from ..errors import GpuInteropError, PeerError, ResourceClosedError, UnsupportedError
from .attachment import AttachedArrays, attach
from .descriptor import MAGIC, Descriptor
from .offer import ArrayShare, share
from .rendezvous import here

__all__ = ["rebuild_cuda_tensor", "reduce_tensor"]

MOST: Final = 1000
"""Number of storages that are kept for their receivers."""
_PATIENCE_S: Final = 60.0
"""Seconds that a sender has to answer; one that has ended is noticed at once."""

_torchs_reduce: Final[Callable[..., Any]] = reductions.reduce_tensor
_torchs_rebuild: Final[Callable[..., Any]] = reductions.rebuild_cuda_tensor


class _Sent:
    """A storage that was sent, and how many of its messages have not come."""

    def __init__(self, storage: Any) -> None:
        self.share = share(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        self.descriptor = bytes(self.share)
        self.storage = storage._cdata
        self.due = 0
        self.offer: Any = self.share.lifetime.use(lambda offer: offer)
        self.offer.on_change = self.changed

    def changed(self, by: int) -> None:
        if system.under(_state.lock, self._is_over, by):
            self.share.close()

    def _is_over(self, by: int) -> bool:
        self.due = max(0, self.due + by)  # a message may be received more often than it was sent
        over = not self.due and not self.offer.leases
        if over and _state.sent.get(self.storage) is self:
            del _state.sent[self.storage]
        return over


class _State:
    """What this process has sent and received."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards `sent`. The loop of the rendezvous takes it, so no call under it waits for another process."""
        self.asking = threading.RLock()
        """Held while another process is asked."""
        self.open: Any = None
        """The offer that stays from the first message on."""
        self.sent: dict[int, _Sent] = {}
        """Entries by storage. The one that was sent least recently comes first."""
        self.received: dict[int, tuple[bytes, AttachedArrays]] = {}
        """Descriptors that storages came by."""
        self.storages = reductions.SharedCache()
        """Weak references to the storages of descriptors."""
        self.clocks: dict[object, tuple[ArrayShare, Stream]] = {}
        """Clocks of streams. Each tick numbers the work before it, and is a version of an array of the clock's own."""
        self.their_clocks: dict[bytes, AttachedArrays] = {}


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
    try:
        descriptor = _descriptor_of(storage)
        clock, tick = _tick(storage.device) if tensor.is_cuda else (None, 0)
    except GpuInteropError:
        if tensor.is_cuda:
            raise
        return _torchs_reduce(tensor)  # type: ignore[no-any-return]
    return rebuild_cuda_tensor, (
        type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), type(tensor._typed_storage()),
        tensor.dtype, storage.device.index if tensor.is_cuda else "cpu", descriptor, storage.nbytes(), 0,
        tensor.requires_grad, (tensor.is_conj(), tensor.is_neg()), 0, clock, tick,
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
    kind, size, stride, offset, _, dtype, _, descriptor, _, _, requires_grad, bits, _, clock, tick = arguments
    storage = system.under(_state.asking, _storage_of, descriptor)
    if clock is not None:
        system.under(_state.asking, _wait, storage.device, clock, tick)
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
    return storage if tensor.is_cuda or _is_of_gpuinterop(storage) else None


def _is_of_gpuinterop(storage: Any) -> bool:
    """Whether memory of the host is ours. Most tensors are told by one look: torch allocated them."""
    if storage.resizable() or storage.is_shared():
        return False
    address = storage.data_ptr()
    return any(isinstance(one, Mapping) and one.address <= address < one.address + one.size for one in alive())


def _reachable(descriptor: Descriptor) -> Any:
    """Make an offer of nothing: while it is there, a late reader is told what has become of its storage."""
    return SimpleNamespace(descriptor=descriptor, users=(), threaded=True)


def _descriptor_of(storage: Any) -> bytes:
    """The descriptor for one more receiver."""
    if (came := _state.received.get(storage._cdata)) is not None:
        descriptor, attached = came
        system.under(_state.asking, partial(attached._count, coming=True))
        return descriptor
    sent, over = system.under(_state.lock, _one_more, storage)
    if over is not None:
        over.share.close()
    return sent.descriptor


def _one_more(storage: Any) -> tuple[_Sent, _Sent | None]:
    """The storage's entry, and the one that is given up for it."""
    _state.open = _state.open or here().offer(_reachable, ())
    sent = _state.sent.pop(storage._cdata, None)
    if sent is None:
        sent = _Sent(storage)
        _state.storages[sent.descriptor] = reductions.StorageWeakRef(storage)
    _state.sent[storage._cdata] = sent
    sent.due += 1
    return sent, _state.sent.pop(next(iter(_state.sent))) if len(_state.sent) > MOST else None


def _tick(device: Any) -> tuple[bytes | None, int]:
    """The sign that the receiver waits for; none, if the current stream has done its work."""
    stream = torch.cuda.current_stream(device)
    if not stream.query():
        try:
            return system.under(_state.lock, _tick_of, stream)
        except UnsupportedError:  # the device has no timelines
            stream.synchronize()
    return None, 0


def _tick_of(stream: Any) -> tuple[bytes, int]:
    key = stream.device_index, stream.cuda_stream
    if key not in _state.clocks:
        clock = share(torch.empty(1, dtype=torch.uint8, device=stream.device), stream=stream)
        _state.clocks[key] = clock, clock.device.wrap_stream(stream)
    clock, ours = _state.clocks[key]
    clock.acquire(ours)
    clock.release(ours)
    return bytes(clock), clock._turns().board.newest.value + 1


# -- the receiver ------------------------------------------------------------------------------------------------------


def _storage_of(descriptor: bytes) -> Any:
    """The storage of a descriptor, the same for all its messages. The sender counts each."""
    known = _state.storages.get(descriptor)
    if known is not None and (storage := torch.UntypedStorage._new_with_weak_ptr(known.cdata)) is not None:
        _take(storage, descriptor)
        return storage
    try:
        attached = attach(descriptor, timeout=_PATIENCE_S)
    except ResourceClosedError:
        raise ResourceClosedError(
            f"expected a tensor that its sender still has, got one that it gave up: all receivers had dropped it, or "
            f"{MOST} others were sent later; send it anew, and receive each message once."
        ) from None
    with attached:  # the storage keeps the memory, and the lease
        if not attached.device.info.is_cpu:
            torch.cuda._lazy_init()
        storage = torch.from_dlpack(attached.view).untyped_storage()
        _state.storages[descriptor] = reductions.StorageWeakRef(storage)
        _state.received[storage._cdata] = descriptor, attached
        weakref.finalize(storage, _dropped, _state.received, storage._cdata, attached.lifetime).atexit = False
    return storage


def _take(storage: Any, descriptor: bytes) -> None:
    """Count a message of a storage that is here. Its sender may have given it up, or ended."""
    if (came := _state.received.get(storage._cdata)) is not None:
        with contextlib.suppress(PeerError):
            came[1]._count(coming=False)
    elif (sent := _state.sent.get(storage._cdata)) is not None and sent.descriptor == descriptor:
        sent.changed(-1)


def _dropped(received: dict[int, Any], storage: int, lifetime: Lifetime) -> None:
    """End the lease, now that the storage is about to let go of the memory."""
    received.pop(storage, None)
    if lifetime.state not in GONE:
        here().look_again(partial(_is_gone, lifetime))


def _is_gone(lifetime: Lifetime) -> bool:
    drain()
    return lifetime.state in GONE


def _wait(device: Any, descriptor: bytes, tick: int) -> None:
    """Have the current stream wait for a tick of the sender's."""
    clocks = _state.their_clocks
    if descriptor not in clocks:
        readers = [(name, one.lifetime.handle.reader) for name, one in clocks.items()]
        for ended in [name for name, reader in readers if reader is None or reader.failure is not None]:
            clocks.pop(ended).close()
        clocks[descriptor] = attach(descriptor, timeout=_PATIENCE_S)
    clock = clocks[descriptor]
    word = clock._turns().writer
    if word.value < tick:
        word.wait(clock.device.wrap_stream(torch.cuda.current_stream(device)), tick)


# -- in torch's place --------------------------------------------------------------------------------------------------

_registered: dict[Any, Any] = vars(ForkingPickler)["_extra_reducers"]
for _kind in [kind for kind, reduce in _registered.items() if reduce is _torchs_reduce]:
    ForkingPickler.register(_kind, reduce_tensor)
reductions.reduce_tensor, reductions.rebuild_cuda_tensor = reduce_tensor, rebuild_cuda_tensor
