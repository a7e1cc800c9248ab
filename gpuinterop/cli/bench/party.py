"""A second process of the bench: it shares or attaches with gpuinterop or other means, and takes the times.

It is a process because torch's reductions are per process, and a driver opens memory of other processes only.
"""

from __future__ import annotations

import faulthandler
import gc
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Final, Self, TypeAlias

from ...errors import DeviceNotFoundError
from ...sharing import ArrayShare, AttachedArrays, attach, share
from .camera import Camera
from .clock import OURS, NotMeasured, Times, why
from .rig import Bench

__all__ = ["BY_HAND", "BY_NAME", "TORCH", "Party"]

PATIENCE_S: Final = 300.0
"""Seconds until an answer. A process that takes longer prints its stacks and exits."""
TURNS: Final = 50
"""Calls on arrays per time of `Work.turns`."""
BY_HAND, BY_NAME, TORCH = "by hand", "shared_memory", "torch"
Calls: TypeAlias = Mapping[str, Callable[[], Any]]
"""Calls by figure."""
_work: Work


class Party:
    """A process with this backend that runs the methods of `Work`.

    `common` is what it shares with another process (see `Camera`).
    """

    def __init__(self, backend: str, *common: object) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _start, (backend, common))

    def ask(self, what: str, *arguments: object, seconds: float = PATIENCE_S) -> Future[Any]:
        """Start a method of `Work`; its result must arrive within `seconds`."""
        return self._process.submit(_do, what, arguments, seconds)

    def __call__(self, what: str, *arguments: object, seconds: float = PATIENCE_S) -> Any:
        """Run a method of `Work`. Raises `NotMeasured` if it failed, or the process has ended."""
        try:
            return self.ask(what, *arguments, seconds=seconds).result()
        except BrokenProcessPool:
            raise NotMeasured(f"it failed: its process ended; {what!r} may take {seconds:g} s", True) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(NotMeasured):
            self("close")
        self._process.shutdown()


def _start(backend: str, common: Sequence[Any]) -> None:
    global _work  # noqa: PLW0603 - what a process has one of
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    if sys.platform != "win32":
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each block on the host is a descriptor
    gc.disable()
    _work = Work(Bench(backend, quick=True), *common)
    gc.freeze()  # makes later collections quick
    faulthandler.cancel_dump_traceback_later()


def _do(what: str, arguments: Sequence[object], seconds: float) -> Any:
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        gc.collect()
        return getattr(_work, what)(*arguments)
    except Exception as error:  # sent as text: not every error can be pickled
        raise NotMeasured(*why(error)) from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Call, and return the microseconds and the result."""
    began = time.perf_counter_ns()
    found = call()
    return (time.perf_counter_ns() - began) / 1000, found


class _Array:
    """A part of a block that was allocated by hand."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


class _Pages:
    """The host's calls by hand: ``multiprocessing.shared_memory``."""

    def allocate(self, nbytes: int) -> SharedMemory:
        return SharedMemory(create=True, size=nbytes)

    def export(self, block: SharedMemory) -> str:
        return block.name

    open = SharedMemory

    def shut(self, block: SharedMemory) -> None:
        block.close()

    def free(self, block: SharedMemory) -> None:
        block.close()
        block.unlink()


class Work(Camera):
    """The methods that the process runs."""

    def __init__(self, bench: Bench, *common: Any) -> None:
        super().__init__(bench, *common)
        self.by_hand = bench.by_hand
        self._hand: Any = _Pages() if self.is_host else self.by_hand if hasattr(self.by_hand, "export") else None
        self._blocks: list[Any] = []
        """Blocks by hand. On a GPU, gpuinterop's arrays are in them too."""
        self._allocations: list[Any] = []
        self._arrays: dict[str, Any] = {}
        self._shares: list[ArrayShare] = []
        self._held: list[AttachedArrays] = []
        self._tensors: Any = None
        self._events: list[Any] = []

    def close(self) -> None:
        """Release everything."""
        for one in filter(None, (self._reader, self._writer, *self._held, *self._shares)):
            one.close()
        for block in self._blocks:
            self._hand.free(block)

    # -- the sharing process ---------------------------------------------------------------------------------------

    def make(self, blocks: int, parts: int, nbytes: int) -> None:
        """Allocate blocks of `nbytes` bytes, each with this many arrays."""
        step = nbytes // parts
        if self._hand is not None:
            self._blocks = [self._hand.allocate(nbytes) for _ in range(blocks)]
        if self._hand is None or self.is_host:
            self._allocations = [self.device.allocate(nbytes) for _ in range(blocks)]
        for number in range(blocks):
            for part in range(parts):
                self._arrays[f"{number}.{part}"] = (
                    self._allocations[number].buffer.view(step, "uint8", part * step)
                    if self._allocations
                    else _Array(self._blocks[number] + part * step, step)
                )

    def share(self, name: str = "") -> bytes:
        """Share the array of this name, or all in one share; return the descriptor."""
        self._shares.append(share(self._arrays[name] if name else self._arrays))
        return bytes(self._shares[-1])

    def shares(self, rounds: int) -> Times:
        """Share all arrays, and export all blocks by hand; names on the host need no export."""

        def ours() -> Mapping[str, float]:
            took, _ = timed(self.share)
            self._shares.pop().close()
            return {"share": took}

        by_hand = {} if self.is_host or self._hand is None else {BY_HAND: lambda: {"share": timed(self.handles)[0]}}
        return Times().rounds(rounds, {OURS: ours, **by_hand})

    def handles(self) -> list[Any]:
        """The handle of each block, by hand; empty if its backend has no such calls."""
        return [self._hand.export(block) for block in self._blocks]

    # -- the attaching process -------------------------------------------------------------------------------------

    def hold(self, descriptor: bytes) -> None:
        """Attach and stay attached."""
        self._held.append(attach(descriptor))

    def opens(self, key: str, descriptor: bytes, handles: Sequence[Any], rounds: int) -> Times:
        """Attach to all of a share, make all views, close; and open and close the handles by hand, if any."""

        def ours() -> Mapping[str, float]:
            took, attached = timed(lambda: attach(descriptor))
            views, _ = timed(lambda: [attached[name] for name in attached.names])
            return {f"attach{key}": took, f"views{key}": views, f"close{key}": timed(attached.close)[0]}

        def by_hand() -> Mapping[str, float]:
            took, opened = timed(lambda: [self._hand.open(handle) for handle in handles])
            return {f"attach{key}": took, f"close{key}": timed(lambda: [self._hand.shut(one) for one in opened])[0]}

        name = BY_NAME if self.is_host else BY_HAND
        return Times().rounds(rounds, {OURS: ours, name: by_hand} if handles else {OURS: ours})

    # -- the order -------------------------------------------------------------------------------------------------

    def event(self) -> bytes:
        """Make an IPC event with torch, and return its handle."""
        self._events.append(self._torch().cuda.Event(interprocess=True))
        self._events[0].record()
        return bytes(self._events[0].ipc_handle())

    def turns(self, event: bytes | None, rounds: int, each: int = TURNS) -> Times:
        """Acquire and release the held or shared array, or write and read frames; and make equivalent calls by hand.

        `event` is the other process's; without it this process uses its own, if it has one. One time is the mean of
        `each` calls. Frames that are queued ahead use separate slots.
        """

        def run(calls: Calls, settle: Callable[[], Any]) -> Mapping[str, float]:
            took = dict.fromkeys(calls, 0.0)
            for _ in range(each):
                for figure, call in calls.items():
                    took[figure] += timed(call)[0] / each
            settle()
            return took

        return Times().rounds(rounds, {name: partial(run, *found) for name, found in self._turns(event).items()})

    def _turns(self, event: bytes | None) -> dict[str, tuple[Calls, Callable[[], Any]]]:
        arrays: Any = next(iter((*self._held, *self._shares)), None)

        def calls(acquire: Callable[[], Any], release: Callable[[], Any]) -> Calls:
            """The calls of one side; for a frame, of both sides."""
            if arrays:
                return {"acquire": acquire, "release": release}
            return {"frame": lambda: (acquire(), release(), acquire(), release())}

        def ours(stream: Any) -> tuple[Calls, Callable[[], Any]]:
            of_arrays = calls(lambda: arrays.acquire(stream), lambda: arrays.release(stream))
            of_frames = {"frame": lambda: self.both(stream)}
            return of_arrays if arrays else of_frames, stream.synchronize if stream else gc.collect

        found = {OURS: ours(self._stream)}
        if event or self._events:
            torch = self._torch()
            stream = torch.cuda.Stream()
            mine = torch.cuda.Event.from_ipc_handle(stream.device, event) if event else self._events[0]
            found["gpuinterop, its own stream"] = found[OURS]
            found[OURS] = ours(stream)
            found[f"{TORCH}'s IPC event"] = (
                calls(lambda: stream.wait_event(mine), lambda: mine.record(stream)),
                stream.synchronize,
            )
        if hasattr(self.by_hand, "word"):
            native = self.by_hand.stream()
            write, wait = self.by_hand.word(native)
            found[BY_HAND] = calls(lambda: wait(1), lambda: write(1)), lambda: self.by_hand.synchronize(native)
        return found

    # -- tensors of torch ------------------------------------------------------------------------------------------

    def _torch(self) -> Any:
        """Import torch, and check that it has this GPU."""
        try:
            import torch
        except ImportError as error:
            raise DeviceNotFoundError(f"expected torch, it cannot be imported: {error}") from error
        if self.is_host or not torch.cuda.is_available():
            raise DeviceNotFoundError(f"expected torch on a GPU, got torch {torch.__version__} on {self.device.name}")
        torch.cuda.set_device(self.device.ordinal)
        return torch

    def torch(self, drop_in: bool) -> None:
        """Start torch; from now on use its own reductions, or gpuinterop's."""
        self._torch().zeros(1, device="cuda")
        _reduce_by(drop_in)
        gc.freeze()

    def dump(self, count: int, nbytes: int) -> tuple[float, bytes]:
        """Pickle new tensors; return how long that took, and the bytes."""
        torch = self._torch()
        self._tensors = [torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda") for _ in range(count)]
        torch.cuda.synchronize()
        return timed(lambda: bytes(ForkingPickler.dumps(self._tensors)))

    def load(self, data: bytes) -> float:
        """Unpickle tensors, look at them and drop them; return how long the first took."""
        took, tensors = timed(lambda: pickle.loads(data))
        _check(tensors[0][0], tensors[-1][-1])
        return took

    def drop(self) -> None:
        self._tensors = None
        self._torch().cuda.ipc_collect()

    def pool(self, drop_in: bool, rounds: int) -> Times:
        """Send tasks with a tensor to a pool of one process, which answers each with a tensor."""
        torch = self._torch()
        with torch.multiprocessing.get_context("spawn").Pool(1, _reduce_by, (drop_in,)) as pool:

            def run() -> Mapping[str, float]:
                tensor = torch.full((1024,), 6, dtype=torch.uint8, device="cuda")
                torch.cuda.synchronize()
                took, found = timed(lambda: pool.apply(_next, (tensor,)))
                _check(found[-1])
                return {"pool": took}

            run()  # the pool's process imports torch and opens its GPU
            return Times().rounds(rounds, {OURS if drop_in else TORCH: run})


def _check(*found: Any) -> None:
    if any(int(one) != 7 for one in found):
        raise ValueError(f"expected tensors of 7, got {found}")


def _reduce_by(drop_in: bool) -> None:
    import torch.multiprocessing  # noqa: F401 - registers torch's own

    if drop_in:
        from ...sharing import torch as _  # noqa: F401


def _next(tensor: Any) -> Any:
    return tensor + 1
