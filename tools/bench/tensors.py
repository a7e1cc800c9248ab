"""Send tensors of torch to another process: with torch's own transport, and with gpuinterop's."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from gpuinterop import Device, DeviceNotFoundError, get_backend

from .clock import OURS, Figure
from .device import Bench
from .processes import Process


def tensors(bench: Bench) -> Iterator[Figure]:
    """Pickle a list of tensors for a queue, and unpickle it in another process."""
    count = 40 if bench.quick else 400
    groups = [(count, "16 KiB", 1 << 14), (count, "1 MiB", 1 << 20), (4, "256 MiB", 1 << 28)]
    with ExitStack() as scope:
        pairs = {name: [scope.enter_context(Process()) for _ in range(2)] for name in (OURS, "torch")}
        for name, pair in pairs.items():
            for answer in [process.ask(_begin, bench.backend.name, name) for process in pair]:
                answer.result()
        for count, size, nbytes in groups[:1] if bench.device.info.is_cpu else groups:
            comparison = bench.compare(20)
            for name, (sender, receiver) in pairs.items():
                comparison.add(name, partial(_send, sender, receiver, count, nbytes))
            comparison.measure()
            yield comparison.figure(f"torch: dump {count:,} tensors of {size}", "list", "dump")
            yield comparison.figure(f"torch: load {count:,} tensors of {size}", "list", "load")


def _send(sender: Process, receiver: Process, count: int, nbytes: int) -> Mapping[str, float]:
    dump, data = sender(_dump, count, nbytes)
    return {"dump": dump, "load": receiver(_load, data)}


# -- in the sender and the receiver ------------------------------------------------------------------------------------

_device: Device
_ours: bool
_tensors: list[Any] = []


def _begin(backend: str, name: str) -> None:
    """Import torch, check that it has the device, and choose whose reductions it uses."""
    global _device, _ours
    import torch.multiprocessing  # registers torch's own reductions

    _device, _ours = get_backend(backend).device(), name == OURS
    if not _device.info.is_cpu:
        if not torch.cuda.is_available():
            raise DeviceNotFoundError(f"expected torch on a GPU, got torch {torch.__version__} on {_device.name}")
        torch.cuda.set_device(_device.ordinal)
        torch.zeros(1, device="cuda")
    if _ours:
        import gpuinterop.sharing.torch  # noqa: F401 - replaces torch's


def _dump(count: int, nbytes: int) -> tuple[float, bytes]:
    """Pickle new tensors; return how long that took, and the bytes."""
    import torch

    _tensors.clear()
    _wait()
    if _ours and _device.info.is_cpu:  # the host's tensors go through gpuinterop if they are in its memory
        with _device.allocate(count * nbytes) as allocation:
            views = [allocation.buffer.view(nbytes, "uint8", nbytes * number) for number in range(count)]
            _tensors[:] = [torch.from_dlpack(view).fill_(7) for view in views]
    else:
        place = "cpu" if _device.info.is_cpu else "cuda"
        _tensors[:] = [torch.full((nbytes,), 7, dtype=torch.uint8, device=place) for _ in range(count)]
    _wait()
    return _timed(lambda: bytes(ForkingPickler.dumps(_tensors)))


def _load(data: bytes) -> float:
    """Unpickle tensors, look at them and drop them; return how long the first took."""
    took, tensors = _timed(lambda: pickle.loads(data))
    if any(int(found) != 7 for found in (tensors[0][0], tensors[-1][-1])):
        raise ValueError(f"expected tensors of 7, got {tensors[0]} to {tensors[-1]}")
    return took


def _wait() -> None:
    """Wait until the GPU has done its work, and free what the other process has dropped."""
    import torch

    if not _device.info.is_cpu:
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - began) / 1000, result


PARTS: Final = {"sharing tensors of torch": tensors}
