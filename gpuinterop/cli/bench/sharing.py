"""Measure sharing arrays with another process, compared with torch, the driver's calls and shared memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Final

from ...errors import DeviceNotFoundError
from ...vulkan._buffer import import_array
from ...vulkan._device import Instance, VulkanDevice
from .camera import LOCK, PIPE, RATE, SMALL, WORDS
from .clock import OURS, Figure, Spread, Times
from .party import TORCH, Party

if TYPE_CHECKING:
    from .rig import Bench

MIB: Final = 1 << 20
PART, PER_BLOCK = 4096, 500
"""Size in bytes of an array when many are in one block, and how many are."""


def _start(scope: ExitStack, bench: Bench, count: int, *common: object) -> list[Party]:
    """Make this many processes, which start on their first call and end with the scope."""
    if sys.platform != "linux":
        raise DeviceNotFoundError("expected Linux, where processes share arrays")
    return [scope.enter_context(Party(bench.backend.name, *common)) for _ in range(count)]


def _begin(parties: Sequence[Party], what: str, *arguments: object) -> None:
    """Run a slow method in all processes at the same time."""
    for answer in [party.ask(what, *arguments) for party in parties]:
        answer.result()


def tensors(bench: Bench) -> Iterator[Figure]:
    """Send tensors through torch's queues with torch's own reductions, or with gpuinterop's."""
    if bench.device.info.is_cpu or find_spec("torch") is None:
        raise DeviceNotFoundError("expected torch and a GPU, whose tensors its reductions send as handles")
    counts = (40, 160) if bench.quick else (400, 1600)
    groups = [(count, size) for size in ("16 KiB", "1 MiB") for count in counts]
    with ExitStack() as scope:
        setting, pairs = Times(), {name: _start(scope, bench, 2) for name in (OURS, TORCH)}
        for name, pair in pairs.items():
            with setting.measuring(name):
                _begin(pair, "torch", name == OURS)
        for count, size in [*groups, (4, "256 MiB")]:
            times = Times()
            times.update(setting)
            times.rounds(bench.rounds(20), {name: partial(_send, pair, count, size) for name, pair in pairs.items()})
            yield times.figure("dump", f"torch: dump {count:,} tensors of {size}", "list")
            yield times.figure("load", f"torch: load {count:,} tensors of {size}", "list")
        times = Times()
        times.update(setting)
        for name, (party, _) in pairs.items():
            with times.measuring(name):
                times.update(party("pool", name == OURS, bench.rounds(200)))
        yield times.figure("pool", "torch: a pool's task with a tensor each way", "task")


def _send(pair: Sequence[Party], count: int, size: str) -> Mapping[str, float]:
    (sender, receiver), (number, unit) = pair, size.split()
    nbytes = int(number) << {"KiB": 10, "MiB": 20}[unit]
    dump, data = sender("dump", count, nbytes)
    load = receiver("load", data)
    sender("drop")
    return {"dump": dump, "load": load}


def many(bench: Bench) -> Iterator[Figure]:
    """One share of many arrays, each in its own block, or many in each block."""
    yield from _share_many(bench, *((25, 100) if bench.quick else (50, 1000)), 1, 2 * MIB)
    yield from _share_many(bench, *((1, 4) if bench.quick else (2, 40)), PER_BLOCK, PER_BLOCK * PART)


def _share_many(bench: Bench, few: int, many: int, parts: int, nbytes: int) -> Iterator[Figure]:
    """Share many blocks, with and without gpuinterop; and compare the time per array with that of few blocks."""
    rounds, each, times = bench.rounds(10), Times(), Times()
    for blocks in (few, many):
        count, times = blocks * parts, Times()
        with ExitStack() as scope, times.measuring(OURS):
            sender, receiver = _start(scope, bench, 2)
            sender("make", blocks, parts, nbytes)
            times.update(sender("shares", rounds))
            times.update(receiver("opens", "", sender("share"), sender("handles"), rounds))
        name = OURS if blocks == many else f"gpuinterop, {count:,} arrays"
        with each.measuring(name):
            for took in times.sums("share", "attach", "views"):
                each.add(name, {"each": took / count})
    arrays = f"{many * parts:,} arrays in {many:,} blocks"
    for key in ("share", "attach", "views"):
        yield times.figure(key, f"{'all views of' if key == 'views' else key} {arrays}", "share")
    yield each.figure("each", f"share + attach + all views, {arrays}, each", "array")


def one(bench: Bench) -> Iterator[Figure]:
    """Attach an array, as the first between two processes and later, and close it."""
    rounds, times = bench.rounds(300), Times()
    with ExitStack() as scope, times.measuring(OURS):
        receiver, *senders = _start(scope, bench, 4 if bench.quick else 9)
        _begin(senders, "make", 2, 1, 2 * MIB)
        for sender in senders:
            times.update(receiver("opens", "", sender("share", "0.0"), sender("handles")[1:], 1))
    yield times.figure("attach", "attach the first array between two processes, 2 MiB")
    for size, nbytes in (("2 MiB", 2 * MIB), ("1 GiB", 1 << 30)):
        times = Times()
        with ExitStack() as scope, times.measuring(OURS):
            sender, receiver = _start(scope, bench, 2)
            sender("make", 3, 2, nbytes)
            receiver("hold", sender("share", "0.0"))
            handles = sender("handles")[2:]
            for key, name in ((" another", "1.0"), (" the same", "0.1")):
                times.update(receiver("opens", key, sender("share", name), handles, rounds))
        for key in ("another", "the same"):
            yield times.figure(f"attach {key}", f"attach an array of {key} block, {size}")
            yield times.figure(f"close {key}", f"close an array of {key} block, {size}")


def order(bench: Bench) -> Iterator[Figure]:
    """A writer and a reader acquire and release."""
    setting, theirs = Times(), None
    with ExitStack() as scope:
        sender, receiver = _start(scope, bench, 2)
        with setting.measuring(OURS):
            sender("make", 1, 1, PART)
            receiver("hold", sender("share", "0.0"))
        if not bench.device.info.is_cpu:
            with setting.measuring(f"{TORCH}'s IPC event"):
                _begin([sender, receiver], "torch", False)
                theirs = sender("event")
        for side, party, its in (("reader", receiver, theirs), ("writer", sender, None)):  # which then has a reader
            times = Times()
            times.update(setting)
            with times.measuring(OURS):
                times.update(party("turns", its, bench.rounds(100)))
            yield times.figure("acquire", f"acquire, the {side}")
            yield times.figure("release", f"release, the {side}")


def frames(bench: Bench) -> Iterator[Figure]:
    """Frames by name: between processes, their calls, and at a camera's rate with a slow reader."""
    name = f"bench-{os.getpid()}"
    with ExitStack() as scope:
        common = RawArray("q", WORDS), RawArray("c", SMALL), [scope.enter_context(end) for end in Pipe(duplex=False)]
        sender, reader, own = _start(scope, bench, 3, *common)
        for party in (sender, reader):
            party("camera", party is sender, name, SMALL)
        first = 1
        for key, until, theirs, rounds, pause in (
            ("frame", "until another process has read it", LOCK, 500, 0.0),
            ("return", "from its release until a reader that waits has it", PIPE, 100, 0.003),
        ):
            times = Times()
            for way in (OURS, theirs) * 4:
                numbers = range(first, first := first + bench.rounds(rounds))
                with times.measuring(way):
                    taken = reader.ask("takes", way, numbers)
                    times.update(sender("sends", way, numbers, pause))
                    taken.result()
            yield times.figure(key, f"a frame of 1 KiB, {until}", "frame")
        times = Times()
        if not bench.device.info.is_cpu:
            with times.measuring(f"{TORCH}'s IPC event"):
                own("torch", False)
                own("event")
        with times.measuring(OURS):
            for writes in (True, False):
                own("camera", writes, f"{name}-own", SMALL)
            times.update(own("turns", None, bench.rounds(1000), 2))
        yield times.figure("frame", "all calls for a frame, of the writer and the reader", "frame")
    with ExitStack() as scope:
        sender, *readers = _start(scope, bench, 3)
        for party in (sender, *readers):
            party("camera", party is sender, name, 1080, 1920, 4)
        count = bench.rounds(3 * RATE)
        watched = [one.ask("watches", seconds) for one, seconds in zip(readers, (0.0, 1.0), strict=True)]
        took = sender("films", count)
        fast, slow = (count - one.result() for one in watched)
        told = f"{count * 1e6 / sum(took):.1f} a second; of {count} the fast reader missed {fast}, the slow one {slow}"
        what = f"1080p at {RATE} a second, beside a reader that takes 1 s for each"
        yield Figure(what, "frame", {OURS: Spread.of(took)}, problem=told)


def into_vulkan(bench: Bench) -> Iterator[Figure]:
    """Import arrays as VkBuffers."""
    driver = bench.need_vulkan()
    few, many = (1, 4) if bench.quick else (2, 20)  # a GPU takes 0.5 ms for each

    def imports(blocks: int) -> Callable[[], Mapping[str, float]]:
        def run() -> Mapping[str, float]:
            with ExitStack() as scope:
                memory = [scope.enter_context(bench.device.allocate(PER_BLOCK * PART)) for _ in range(blocks)]
                instance = scope.enter_context(Instance())
                device = VulkanDevice(instance, instance.physical_devices()[driver.index])
                scope.callback(device.close)
                arrays = [one.buffer.view(PART, "uint8", PART * part) for one in memory for part in range(PER_BLOCK)]
                began = time.perf_counter()
                for array in arrays:
                    import_array(device.vk, array)
                return {"import": (time.perf_counter() - began) * 1e6 / len(arrays)}

        return run

    sizes = {OURS: imports(many), f"gpuinterop, {few * PER_BLOCK:,} arrays": imports(few)}
    times = Times().rounds(bench.rounds(5), sizes)
    yield times.figure("import", f"gi.vulkan.import_array, {many * PER_BLOCK:,} arrays, each", "array")


PARTS: Final = {
    "sharing tensors of torch": tensors,
    "sharing one array": one,
    "sharing many arrays": many,
    "sharing in order": order,
    "sharing frames": frames,
    "sharing with vulkan": into_vulkan,
}
