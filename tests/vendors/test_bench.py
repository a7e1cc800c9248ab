"""``gpuinterop bench`` on the vendor's backend, and its yardsticks. It is looked at what it measures, at no time."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

from tests.simulated.driver import Simulator

from .table import VENDOR

ALWAYS = {
    "signal, gpuinterop timeline": ["gpuinterop", "by hand"],
    "wait, gpuinterop timeline": ["gpuinterop", "by hand"],
    "import + map + close": ["gpuinterop", "by hand"],
    "import + map + close, among 256 streams and 1,000 objects": [
        "gpuinterop",
        "gpuinterop, without them",
        "by hand",
    ],
    "import gpuinterop": ["gpuinterop", "import numpy"],
}
REUSED, ANEW = "by hand, reused structs", "by hand, new structs"
WITH_SEMAPHORES = {
    "signal": ["gpuinterop", REUSED, ANEW, "C"],
    "wait": ["gpuinterop", REUSED, ANEW, "C"],
    "signal, batch of 16": ["gpuinterop", REUSED],
    "wait, batch of 16": ["gpuinterop", REUSED],
    "signal, 8 threads at once": ["gpuinterop", REUSED],
}
PROBLEMS = {
    "frames on a transfer queue": "expected a Vulkan driver of Simulated",
    "frames on a compute queue": "expected a Vulkan driver of Simulated",
    "view + torch.from_dlpack": "it needs CuPy and torch: No module named 'cupy'",
}
NO_SEMAPHORES = dict.fromkeys(
    ("signal and wait", "batches", "threads"), "import_semaphore TimelineFd: HIP cannot import semaphores on Linux"
)
OURS = ["gpuinterop"]
OPENED = [
    "attach the first array between two processes, 2 MiB",
    *(
        f"{what} an array of {block} block, {size}"
        for size in ("2 MiB", "1 GiB")
        for block in ("another", "the same")
        for what in ("attach", "close")
    ),
    *(
        f"{what} {many}"
        for many in ("100 arrays in 100 blocks", "2,000 arrays in 4 blocks")
        for what in ("share", "attach")
    ),
]
"""What only CUDA has by hand."""
TURNS = [f"{what}, the {side}" for side in ("reader", "writer") for what in ("acquire", "release")]
SHARING = {
    **dict.fromkeys(OPENED, [*OURS, "by hand"] if VENDOR.name == "cuda" else OURS),
    **{name: [*OURS, "by hand"] for name in TURNS},
    "all views of 100 arrays in 100 blocks": OURS,
    "all views of 2,000 arrays in 4 blocks": OURS,
    "share + attach + all views, 100 arrays in 100 blocks, each": [*OURS, "gpuinterop, 25 arrays"],
    "share + attach + all views, 2,000 arrays in 4 blocks, each": [*OURS, "gpuinterop, 500 arrays"],
}
FRAMES = {
    "a frame of 1 KiB, until another process has read it": [*OURS, "shared memory, sequence lock"],
    "a frame of 1 KiB, from its release until a reader that waits has it": [*OURS, "a byte in a pipe"],
    "all calls for a frame, of the writer and the reader": [*OURS, "by hand"],
    "1080p at 60 a second, beside a reader that takes 1 s for each": OURS,
}
NOT_SHARED = {
    **dict.fromkeys([*TURNS, list(FRAMES)[2]], "torch's IPC event: expected torch"),
    list(FRAMES)[3]: " a second; of ",
    "sharing tensors of torch": "expected torch and a GPU",
    "sharing with vulkan": "expected a Vulkan driver of Simulated",
    "opengl": "expected an OpenGL driver of Simulated",
}
IN_C = {name: [*contenders, "C"] for name, contenders in ALWAYS.items() if name.startswith("import + map")}
TIMES = ALWAYS | SHARING | FRAMES | (WITH_SEMAPHORES | IN_C if VENDOR.name == "cuda" else {})
REASONS = PROBLEMS | NOT_SHARED | (NO_SEMAPHORES if VENDOR.name == "hip" else {})


def bench(simulator: Simulator, *arguments: str, **environment: str) -> dict[str, Any]:
    words = ["bench", "--backend", VENDOR.name, "--quick", "--json", *arguments]
    printed = simulator.run(
        f"from gpuinterop.cli.app import run\nassert run({words!r}) == 0", GPUINTEROP_BACKEND=VENDOR.name, **environment
    )
    found: dict[str, Any] = json.loads(printed)
    assert found["stand_in"]
    return {figure["name"]: figure for figure in found["figures"]}


def test_every_figure_has_its_yardsticks(simulator: Simulator) -> None:
    """What has no times says why, and nothing else has none."""
    found = bench(simulator)
    assert {
        name: [one["name"] for one in figure["times"]] for name, figure in found.items() if figure["times"]
    } == TIMES
    assert all(one["median"] > 0 for figure in found.values() for one in figure["times"])
    # On a slow machine a figure has fewer rounds, and says so.
    said = {
        name: re.sub(r"(; )?\d+ of \d+ rounds, in 2 s$", "", figure["problem"] or "") for name, figure in found.items()
    }
    problems = {name: words for name, words in said.items() if words}
    assert problems.keys() == REASONS.keys()
    for name, reason in REASONS.items():
        assert reason in problems[name]


HEAD = f"""
import ctypes, os, struct
from contextlib import ExitStack
import gpuinterop as gi
from gpuinterop.cli.bench import floor
from gpuinterop.cli.bench.rig import Bench
from tests.simulated.driver import Simulator

simulator = Simulator.attach({VENDOR.name!r})
bench = Bench({VENDOR.name!r}, quick=True)
by_hand, party = bench.by_hand, bench.party
stream = by_hand.stream()
"""
TAIL = "\nassert simulator.violations() == []\nbench.__exit__()\n"


def run(simulator: Simulator, program: str) -> list[str]:
    return simulator.run(HEAD + textwrap.dedent(program) + TAIL, GPUINTEROP_BACKEND=VENDOR.name).splitlines()


def test_the_yardsticks(simulator: Simulator) -> None:
    """By the driver's log and counts."""
    log, words, left, imported, mapped, failed = run(
        simulator,
        f"""
        write, wait = by_hand.word(stream)
        by_hand.synchronize(stream)
        simulator.forget_log()
        for value in (2, 3):
            by_hand.check(write(value))
        by_hand.check(wait(3))
        by_hand.synchronize(stream)
        print([(one.operation, one.value) for one in simulator.log()])
        print(len({{one.address for one in simulator.log()}}))

        with party.create_memory(1 << 16) as theirs, theirs.export() as handle:
            once = by_hand.memory(theirs.size)
            before, fds = simulator.live(), os.listdir("/proc/self/fd")
            for _ in range(3):
                once(handle.fd)
            os.fstat(handle.fd)
            print(simulator.live() == before, os.listdir("/proc/self/fd") == fds)
            print(simulator.calls("{VENDOR.call("ImportExternalMemory")}"))
            print(simulator.calls("{VENDOR.call("ExternalMemoryGetMappedBuffer")}"))

        simulator.fail("{VENDOR.prefix}StreamSynchronize", code=999)
        try:
            by_hand.synchronize(stream)
        except gi.DriverError as error:
            print(error)
        """,
    )
    assert log == str([("write_value", 2), ("write_value", 3), ("wait_value", 3)])
    assert words == "1"
    assert (left, imported, mapped) == ("True True", "3", "3"), "something is left, or the descriptor is closed"
    assert "(999)" in failed
    assert f"{VENDOR.symbols[999]} (999)" in failed
