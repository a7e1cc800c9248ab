# ruff: noqa: B905, E501, E731, PLW1510, SIM115, UP022
# mypy: ignore-errors
"""What lifetime costs: this library beside the same calls by hand, in the same run, call by call in turn.

    OUT=folder python tests/vendors/cuda/lifetime_bench.py [--label old] [--phases abcde] [--frames 10000] [--rounds 300]

It uses public names only (but for one count, which is left out where it is not known), so it runs on any version.
Each phase is a process of its own with a time limit; it prints what it has by then, and the stacks where it stands.
Results: a table, and $OUT/lifetime_LABEL.json.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import statistics
import subprocess
import sys
import time

LIMITS = {"a": 100, "b": 150, "c": 30, "d": 60, "e": 150}
NAMES = {
    "a": "import + map + close",
    "b": "wrap_stream",
    "c": "gi.device()",
    "d": "signal and wait",
    "e": "frames, two in flight",
}
clock = time.perf_counter_ns


def spread(samples):
    """Median, p10, p90, max in microseconds."""
    cuts = statistics.quantiles(samples, n=10) if len(samples) > 1 else [samples[0]] * 9
    micro = lambda ns: round(ns / 1000, 2)
    return {
        "median": micro(statistics.median(samples)),
        "p10": micro(cuts[0]),
        "p90": micro(cuts[8]),
        "max": micro(max(samples)),
        "n": len(samples),
    }


class Bench:
    def __init__(self, given):
        from cuda.bindings import driver as cu

        import gpuinterop as gi

        self.gi, self.cu, self.given = gi, cu, given
        self.device = gi.get_backend("cuda").device()
        self.simulated = "Simulated" in self.device.name
        self.ok(cu.cuInit(0))
        self.number = self.ok(cu.cuDeviceGet(self.device.ordinal))
        self.ok(cu.cuCtxSetCurrent(self.ok(cu.cuDevicePrimaryCtxRetain(self.number))))
        self.keep = []  # ends with the process

    def ok(self, result):
        if int(result[0]) != 0:
            raise RuntimeError(f"CUDA says {result[0]!r}")
        return result[1] if len(result) == 2 else result[1:]

    def foreign(self):
        """A stream by hand, as torch's are."""
        return self.ok(self.cu.cuStreamCreate(1))

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self):
        """A descriptor that cuImportExternalMemory takes, and its size: of a VMM allocation, as facts/cuda.md says."""
        gi = self.gi
        allocation = self.device.allocate(2 << 20)
        handle = allocation.export()
        self.keep += [allocation, handle]
        try:
            self.device.import_memory(self.handle(handle.fd, allocation.size), size=allocation.size).close(timeout=5)
            return handle.fd, allocation.size
        except gi.GpuInteropError:
            if not self.simulated:
                raise
        from gpuinterop.exporters import open_exporter

        exporter = open_exporter("memfd", identity=self.device.identity)
        theirs = exporter.create_memory(2 << 20)
        handle = theirs.export()
        self.keep += [exporter, theirs, handle]
        return handle.fd, theirs.size

    def handle(self, fd, size):
        gi = self.gi
        from gpuinterop.handles import HandleOrigin, OriginKind

        origin = HandleOrigin(
            kind=OriginKind.MEMORY, device=self.device.identity, size=size, dedicated=False, trusted=True
        )
        return gi.OpaqueFd.adopt(os.dup(fd), origin=origin)

    def by_hand(self, size):
        """One round by hand, with structs that are made once."""
        cu, ok = self.cu, self.ok
        desc = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
        desc.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
        desc.size = size
        where = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        where.size = size

        def one(fd):
            desc.handle.fd = os.dup(fd)
            memory = ok(cu.cuImportExternalMemory(desc))
            pointer = ok(cu.cuExternalMemoryGetMappedBuffer(memory, where))
            ok(cu.cuMemFree(pointer))
            ok(cu.cuDestroyExternalMemory(memory))

        return one

    def ours(self, fd, size):
        with self.handle(fd, size) as handle:
            memory = self.device.import_memory(handle, size=size)
        buffer = memory.map_buffer()
        memory.close()
        assert buffer.closed

    def phase_a(self, say):
        fd, size = self.memory()
        hand = self.by_hand(size)
        streams = []
        for count in (0, 1, 16, 64, 256):
            while len(streams) < count:
                streams.append(self.device.create_stream())
            for _ in range(20):
                self.ours(fd, size)
                hand(fd)
            ours, theirs = [], []
            stop = time.monotonic() + 15
            for _ in range(self.given.rounds):
                start = clock()
                self.ours(fd, size)
                middle = clock()
                hand(fd)
                end = clock()
                ours.append(middle - start)
                theirs.append(end - middle)
                if time.monotonic() > stop:
                    break
            one = {"streams": count, "ours": spread(ours), "by_hand": spread(theirs)}
            one["ratio"] = round(one["ours"]["median"] / one["by_hand"]["median"], 2)
            say(one)

    # -- wrap_stream ----------------------------------------------------------------------------------------------

    def phase_b(self, say):
        pointer = int(self.foreign())
        fd, size = self.memory()

        def measure(what):
            wrap, both = [], []
            stop = time.monotonic() + 8
            for index in range(1000):
                start = clock()
                stream = self.device.wrap_stream(pointer)
                middle = clock()
                stream.close()
                end = clock()
                if index >= 20 or end - start > 10**7:
                    wrap.append(middle - start)
                    both.append(end - start)
                if time.monotonic() > stop:
                    break
            say({"with": what, "wrap": spread(wrap), "wrap_and_close": spread(both)})

        measure("nothing")
        holds = []
        stop = time.monotonic() + 45
        for _ in range(3000):
            with self.handle(fd, size) as handle:
                memory = self.device.import_memory(handle, size=size)
            holds.append(memory.map_buffer().hold())
            memory.close()
            if time.monotonic() > stop:
                break
        measure(f"{len(holds)} retired entries pending")
        del holds
        self.device.drain()
        with self.handle(fd, size) as handle:
            memory = self.device.import_memory(handle, size=size)
        buffer = memory.map_buffer()
        arrays = []
        stop = time.monotonic() + 30
        while len(arrays) < 5000 and time.monotonic() < stop:
            arrays.append(buffer.view(16, "uint8").__dlpack__(stream=-1))
        measure(f"{len(arrays)} live DLPack arrays")
        memory.close()
        measure(f"{len(arrays)} of a closed memory")
        del arrays

    # -- the device -----------------------------------------------------------------------------------------------

    def phase_c(self, say):
        gi = self.gi
        for name in (None, "cuda"):
            os.environ.pop("GPUINTEROP_BACKEND", None)
            if name:
                os.environ["GPUINTEROP_BACKEND"] = name
            start = clock()
            gi.device()
            first = clock() - start
            samples = []
            for _ in range(1000):
                start = clock()
                gi.device()
                samples.append(clock() - start)
            say({"GPUINTEROP_BACKEND": name, "first_us": round(first / 1000, 1), "call": spread(samples)})

    # -- semaphores -----------------------------------------------------------------------------------------------

    def phase_d(self, say):
        cu, ok, gi = self.cu, self.ok, self.gi
        stream = self.device.create_stream()
        theirs = self.foreign()

        def measure(what, our_signal, our_wait, hand_signal, hand_wait):
            samples = {"signal": [], "signal_by_hand": [], "wait": [], "wait_by_hand": []}
            for value in range(1, 4001):
                t0 = clock()
                our_signal(value)
                t1 = clock()
                our_wait(value)
                t2 = clock()
                last = hand_signal(value)
                t3 = clock()
                hand_wait(value)
                t4 = clock()
                if value == 1:  # none of them may fail: that is fast
                    ok(last)
                    ok(hand_wait(value))
                if value > 200:
                    for name, took in zip(
                        ("signal", "wait", "signal_by_hand", "wait_by_hand"), (t1 - t0, t2 - t1, t3 - t2, t4 - t3)
                    ):
                        samples[name].append(took)
                if value % 100 == 0:
                    stream.synchronize()
                    ok(cu.cuStreamSynchronize(theirs))
            one = {"semaphore": what, **{name: spread(found) for name, found in samples.items()}}
            one["signal_ratio"] = round(one["signal"]["median"] / one["signal_by_hand"]["median"], 2)
            one["wait_ratio"] = round(one["wait"]["median"] / one["wait_by_hand"]["median"], 2)
            say(one)

        # Our own timeline: words, and the same stores and waits by hand.
        own = self.device.create_semaphore(gi.TimelineFd)
        host = ok(cu.cuMemHostAlloc(4096, 0))
        word = int(ok(cu.cuMemHostGetDevicePointer(host, 0)))
        address = cu.CUdeviceptr(word)
        write, wait_value = cu.cuStreamWriteValue64, cu.cuStreamWaitValue64
        measure(
            "own timeline",
            lambda value: own.signal(stream, value),
            lambda value: own.wait(stream, value),
            lambda value: write(theirs, address, value, 0),
            lambda value: wait_value(theirs, address, value, 0),
        )
        # A driver's: of Vulkan's exporter on the GPU, of the memfd exporter on the simulator.
        made = self.timelines()
        if made is None:
            say({"semaphore": "driver's timeline", "skipped": "no exporter here: no Vulkan driver of this GPU"})
            return
        mine, other = made
        imported = self.device.import_semaphore(mine.export())
        desc = cu.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
        desc.type = cu.CUexternalSemaphoreHandleType.CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
        handle = other.export()
        desc.handle.fd = handle.detach()
        semaphore = ok(cu.cuImportExternalSemaphore(desc))
        signals, waits = cu.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS(), cu.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS()
        one_semaphore, one_signal, one_wait = [semaphore], [signals], [waits]

        def hand_signal(value):
            signals.params.fence.value = value
            return cu.cuSignalExternalSemaphoresAsync(one_semaphore, one_signal, 1, theirs)

        def hand_wait(value):
            waits.params.fence.value = value
            return cu.cuWaitExternalSemaphoresAsync(one_semaphore, one_wait, 1, theirs)

        measure(
            "driver's timeline",
            lambda value: imported.signal(stream, value),
            lambda value: imported.wait(stream, value),
            hand_signal,
            hand_wait,
        )

    def timelines(self):
        gi = self.gi
        from gpuinterop.exporters import open_exporter

        try:
            if self.simulated:
                exporter = open_exporter("memfd", identity=self.device.identity)
            else:
                from gpuinterop.exporters.vulkan import list_drivers

                found = next(one for one in list_drivers() if one.identity.matches(self.device.identity))
                exporter = open_exporter("vulkan", device_index=found.index)
            pair = exporter.create_semaphore(gi.Timeline), exporter.create_semaphore(gi.Timeline)
        except (StopIteration, gi.GpuInteropError, ImportError, OSError) as error:
            print(f"no exporter: {error!r}", file=sys.stderr)
            return None
        self.keep += [exporter, *pair]
        return pair

    # -- frames ---------------------------------------------------------------------------------------------------

    def phase_e(self, say):
        """A stream that another one signals, some time later; the host is two frames ahead, so waits are always pending."""
        cu, ok, gi = self.cu, self.ok, self.gi
        fd, size = self.memory()
        producer = self.foreign()
        # What the other side's work takes: 1.5 ms, so that the host is always ahead, and two waits are pending.
        room = (1 << 20) if self.simulated else (256 << 20)
        area = ok(cu.cuMemAlloc(room))
        target = cu.CUdeviceptr(int(area))

        def delay(times):
            for _ in range(times):
                cu.cuMemsetD8Async(target, 1, room, producer)

        delay(20)
        ok(cu.cuStreamSynchronize(producer))
        start = clock()
        delay(100)
        ok(cu.cuStreamSynchronize(producer))
        times = max(1, round(1.5e6 / ((clock() - start) / 100)))
        signals = self.device.wrap_stream(int(producer))
        stream = self.device.create_stream()
        semaphore = self.device.create_semaphore(gi.TimelineFd)
        events, frames, parts = {}, [], {"import": [], "map": [], "wait": [], "fill": [], "close": []}
        rows = []
        known = objects_known()

        def sample(frame):
            free = int(ok(cu.cuMemGetInfo())[0])
            rows.append(
                {
                    "frame": frame,
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "free_mib": round(free / 2**20, 1),
                    "objects": known(),
                    "maps": sum(1 for _ in open("/proc/self/maps")),
                }
            )

        def result(count, cut):
            late = [took for took in frames[100:] if took > 5e6]
            one = {
                "frames": count,
                "cut_short": cut,
                "memsets_a_frame": times,
                "frame": spread(frames),
                "over_5_ms": len(late),
                "of_which_first_100": sum(took > 5e6 for took in frames[:100]),
                **{name: spread(found) for name, found in parts.items()},
                "samples": rows,
                "objects_max": max((row["objects"] or 0) for row in rows),
                "descriptors": [
                    rows[0]["descriptors"],
                    max(row["descriptors"] for row in rows),
                    rows[-1]["descriptors"],
                ],
                "free_mib": [rows[0]["free_mib"], min(row["free_mib"] for row in rows), rows[-1]["free_mib"]],
            }
            say(one)

        for _ in range(20):  # warm
            self.ours(fd, size)
        sample(0)
        stop = time.monotonic() + self.given.frame_seconds
        step = max(1, self.given.frames // 100)
        frame = 0
        with contextlib.suppress(KeyboardInterrupt):
            for frame in range(1, self.given.frames + 1):
                begin = clock()
                delay(times)
                semaphore.signal(signals, frame)
                t0 = clock()
                semaphore.wait(stream, frame)
                t1 = clock()
                with self.handle(fd, size) as handle:
                    memory = self.device.import_memory(handle, size=size)
                t2 = clock()
                buffer = memory.map_buffer()
                t3 = clock()
                buffer.fill(frame % 256, size=4096, stream=stream)
                t4 = clock()
                memory.close()
                t5 = clock()
                events[frame] = stream.record()
                if frame > 2:
                    events.pop(frame - 2).wait(timeout=20)
                frames.append(clock() - begin)
                for name, took in zip(
                    ("wait", "import", "map", "fill", "close"), (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4)
                ):
                    parts[name].append(took)
                if frame % step == 0:
                    sample(frame)
                    if time.monotonic() > stop:
                        break
        result(frame, frame < self.given.frames)
        start = clock()
        stream.synchronize(timeout=20)
        self.device.drain()
        drained = clock() - start
        sample(frame)
        say({"after": "synchronize and drain", "ms": round(drained / 1e6, 1), **rows[-1]})


def objects_known():
    """How to ask the library how many native objects it knows; None where this version cannot say."""
    try:
        from gpuinterop._core.native import count_alive

        return count_alive
    except ImportError:
        pass
    try:
        from gpuinterop._core import resource

        reclaimers = resource._reclaimers
        return lambda: sum(len(one._pending) for one in list(reclaimers))
    except (ImportError, AttributeError):
        return lambda: None


def child(given):
    limit = LIMITS[given.child]
    faulthandler.dump_traceback_later(limit - 5, exit=False)
    import gpuinterop as gi  # noqa: F401 - before what follows, so that an import that fails says so

    bench = Bench(given)

    def say(row):
        print("ROW " + json.dumps(row), flush=True)

    getattr(bench, f"phase_{given.child}")(say)
    print("ROW " + json.dumps({"ended": True, "device": bench.device.name}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # what is kept to the end is not what is measured


def table(phase, rows):
    def cell(found):
        return f"{found['median']:9.2f} [{found['p10']:.2f} {found['p90']:.2f}]"

    print(f"\n{phase}: {NAMES[phase]} (us: median [p10 p90])")
    for row in rows:
        if phase == "a" and "ours" in row:
            print(
                f"  {row['streams']:4} streams  ours {cell(row['ours'])}  by hand {cell(row['by_hand'])}  ratio {row['ratio']}"
            )
        elif phase == "b" and "wrap" in row:
            print(f"  {row['with']:32} wrap {cell(row['wrap'])}  wrap + close {cell(row['wrap_and_close'])}")
        elif phase == "c" and "call" in row:
            print(f"  {row['GPUINTEROP_BACKEND'] or 'unset':8} {cell(row['call'])}  first {row['first_us']}")
        elif phase == "d" and "signal" in row:
            print(
                f"  {row['semaphore']:18} signal {cell(row['signal'])} by hand {cell(row['signal_by_hand'])} ratio {row['signal_ratio']}"
            )
            print(f"  {'':18} wait   {cell(row['wait'])} by hand {cell(row['wait_by_hand'])} ratio {row['wait_ratio']}")
        elif phase == "e" and "frame" in row and isinstance(row["frame"], dict):
            print(
                f"  {row['frames']} frames{' (cut short)' if row['cut_short'] else ''}: {cell(row['frame'])} max {row['frame']['max']}; over 5 ms: {row['over_5_ms']}"
            )
            for name in ("wait", "import", "map", "fill", "close"):
                print(f"    {name:7} {cell(row[name])} max {row[name]['max']}")
            print(
                f"    descriptors first, most, last {row['descriptors']}; free MiB first, least, last {row['free_mib']}; objects at most {row['objects_max']}"
            )
        else:
            print(f"  {json.dumps(row)[:300]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="run")
    parser.add_argument("--phases", default="cdabe")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--frames", type=int, default=10000)
    parser.add_argument("--frame-seconds", type=float, default=110)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given)
    results = {"label": given.label, "python": platform.python_version(), "phases": {}}
    for phase in given.phases:
        command = [sys.executable, "-X", "faulthandler", __file__, *sys.argv[1:], "--child", phase]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=LIMITS[phase]
            )
            out, err, status = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as expired:
            text = lambda it: it.decode(errors="replace") if isinstance(it, bytes) else it or ""
            out, err, status = text(expired.stdout), text(expired.stderr), "timed out"
        rows = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("ROW ")]
        results["phases"][phase] = {
            "name": NAMES[phase],
            "rows": rows,
            "status": status,
            "seconds": round(time.monotonic() - start, 1),
            "stderr": err[-6000:],
        }
        table(phase, rows)
        if status != 0 or not any(row.get("ended") for row in rows):
            print(f"  status {status}\n{err[-2500:]}")
        sys.stdout.flush()
    path = os.path.join(os.environ.get("OUT", "."), f"lifetime_{given.label}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    print(f"\n{path}")


if __name__ == "__main__":
    main()
