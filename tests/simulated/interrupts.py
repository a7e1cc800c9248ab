"""Interrupts at random, in all public operations: nothing hangs, nothing dead is used, nothing is released early.

``python -m tests.simulated.interrupts cuda 600 1``

The main thread makes the operations of `stress`. In some of them a signal handler raises what Ctrl-C, a deep recursion
or a lack of memory raises, at a random point of the library; exporters are the other party, which it spares. After each
interrupt no lock is held and the gate is open. A round is a process of its own. At its end all is
closed, and all streams have gone on. What was being made or released may stay; it is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any, Final

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import lifetime, release
from tests.simulated.stress import KEPT, ROOT, STANDSTILL, Run, Thread, World
from tests.spare_pages import unpin_spare_pages

ROUND_S: Final = 10.0
EXIT_S: Final = 3 * STANDSTILL
"""Seconds after its operations in which a round has ended; one that stands still tells where before, and ends."""
ONE_IN: Final = 8
"""Every so many operations one is interrupted, about: the others fill the pools."""
LIBRARY: Final = (f"{ROOT}/gpuinterop/", f"{ROOT}/backends/")
OTHERS: Final = (f"{ROOT}/gpuinterop/testing/exporters/", f"{ROOT}/tests/")


class Stopped(KeyboardInterrupt):
    """Ctrl-C."""


class TooDeep(RecursionError): ...


class NoMemory(MemoryError): ...


STRIKES: Final = (Stopped, TooDeep, NoMemory)


class Round(Run):
    """The child: one thread's operations, with interrupts, and what they leave."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.natives = set(lifetime.alive())
        self.chance = random.Random(f"strikes {given.seed}")
        self.armed = False
        self.where: list[str] = []
        self.struck = self.operations = 0
        signal.signal(signal.SIGALRM, self._strike)
        warnings.simplefilter("ignore", gi.LeakedResourceWarning)
        sys.unraisablehook = self._unraisable

    def __call__(self) -> dict[str, Any]:  # type: ignore[override]
        with contextlib.ExitStack() as scope:
            worlds = [World(device, f"{self.given.seed}-{device.ordinal}", scope) for device in self.devices]
            worker = Thread(worlds, f"{self.given.seed}", self)
            ticking = threading.Event()
            ticker = threading.Thread(target=self._tick, args=(worlds, ticking), name="clock")
            ticker.start()
            end = time.monotonic() + self.given.seconds
            while time.monotonic() < end and not self.failures:
                self._operate(worker)
            faulthandler.dump_traceback_later(2 * STANDSTILL, exit=True)
            for stream in worker.streams.values():
                stream.close()
            self._end(worlds, scope, ticking)
        ticker.join()
        self.failures += [f"unexpected: {trace}" for trace in worker.bad.values()]
        self._look(worlds, _locks())
        found = self._count_left()
        faulthandler.cancel_dump_traceback_later()
        return found

    # -- interrupts ----------------------------------------------------------------------------------------------------

    def _operate(self, worker: Thread) -> None:
        """Make an operation; interrupt some."""
        name, operation = worker.choose()
        before = self.struck
        self.operations += 1
        if self.chance.random() * ONE_IN < 1:
            self._arm(self.chance.choice([1e-5, 1e-4, 1e-3, 1e-2]) * self.chance.uniform(0.5, 5))
        try:
            operation()
        except BaseException as error:
            self.armed = False
            if self.struck == before:
                worker.note(name, error)
        self.armed = False
        if self.struck > before:
            faulthandler.dump_traceback_later(STANDSTILL, exit=True)
            self._look(worker.worlds, _MODULE_LOCKS)

    def _arm(self, seconds: float) -> None:
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _strike(self, _number: int, frame: types.FrameType | None) -> None:
        """Raise in the library's code, or in what that calls; else come again soon."""
        found = frame
        while found is not None and not found.f_code.co_filename.startswith(LIBRARY + OTHERS):
            found = found.f_back
        if not self.armed:
            return
        if found is None or found.f_code.co_filename.startswith(OTHERS):
            self._arm(self.chance.uniform(1e-5, 1e-4))
            return
        self.armed = False
        self.struck += 1
        stack = traceback.extract_stack(frame)
        self.where = [f"{one.filename}:{one.lineno} {one.name}" for one in stack[-12:]]
        raise self.chance.choice(STRIKES)("at random")

    def _unraisable(self, told: Any) -> None:
        """Finalizers and drains report what struck there."""
        if not isinstance(told.exc_value, STRIKES):
            self.failures.append("unraisable: " + "".join(traceback.format_exception(told.exc_value)))

    # -- what is looked at ---------------------------------------------------------------------------------------------

    def _look(self, worlds: list[World], locks: list[Any]) -> None:
        """Behind an interrupt: no lock is held, no gate is shut. Other threads may shut it for a moment."""
        wrong = [f"{lock!r} is held" for lock in locks if system.holds(lock)]
        if release._this_thread.calling_back:
            wrong.append("this thread runs no more callbacks")
        gates = [device.gate for device in self.devices]
        wrong += ["a gate is shut" for gate in gates if not _soon(lambda gate=gate: not gate.shut.copy())]
        for one in lifetime.alive():
            if not _soon(lambda one=one: not one.callback_runs.copy()):
                wrong += [f"the callbacks of {one!r} are left running"]
        handles = [handle for world in worlds for handle in world.pools["handles"].all() if handle.calls]
        wrong += [f"a mark is left on {handle!r}" for handle in handles]
        self.failures += [f"{one}, behind {self.where}" for one in wrong]

    def _count_left(self) -> dict[str, Any]:
        """Count what stays, and what the driver has beyond that; a drain does not wait for it."""
        for device in self.devices:
            device._last_stream = None
            while device._copiers:
                device._copiers.pop().close()
            unpin_spare_pages(device)
        gc.collect()
        system.until(self._is_settled, 30.0)  # or not: after an interrupt, an object may stay until the exit
        left = self._left()
        natively = {kind: count - self.before[kind] for kind, count in self.live().items() if kind in KEPT}
        if any(count > self.struck + len(left) for count in natively.values()):
            self.failures.append(f"{self.struck} interrupts and {len(left)} objects that stay, but {natively}")
        if self.simulator is not None:
            self.failures += [f"violation: {line}" for line in self.simulator.violations()]
        return {
            "operations": self.operations,
            "interrupts": self.struck,
            "left": len(left),
            "failures": self.failures,
        }

    def _is_settled(self) -> bool:
        for device in self.devices:
            device.drain()
        return not any(one.state is lifetime.RETIRED and not (one.dependents or one.calls) for one in self._left())

    def _left(self) -> list[lifetime.Lifetime]:
        return [one for one in lifetime.alive() if one not in self.natives]


def _soon(condition: Callable[..., bool]) -> bool:
    return system.until(condition, STANDSTILL)


_RLOCK: Final = type(threading.RLock())


def _locks() -> list[Any]:
    """Every lock of the process that a thread may hold twice."""
    return [lock for one in gc.get_objects() for lock in gc.get_referents(one) if isinstance(lock, _RLOCK)]


_MODULE_LOCKS: Final = [
    lock
    for name, module in sys.modules.copy().items()
    if name.startswith("gpuinterop")
    for lock in vars(module).values()
    if isinstance(lock, _RLOCK)
]


def run(backend: str, seconds: float, seed: int) -> dict[str, Any]:
    """Run rounds in processes of their own; return the sums, and what has failed."""
    count = max(1, round(seconds / ROUND_S))
    total = dict.fromkeys(("operations", "interrupts", "left"), 0)
    failures: list[str] = []
    for number in range(seed, seed + count):
        command = [sys.executable, "-X", "faulthandler", "-m", __spec__.name, "--child"]
        command += [backend, f"{seconds / count}", f"{number}"]
        limit = seconds / count + EXIT_S
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired as error:
            failures.append(f"seed {number}: it hangs; {error.stderr!r}")
            break
        if done.returncode:
            failures.append(f"seed {number}: exit status {done.returncode}: {done.stdout}{done.stderr}")
            break
        found = json.loads(done.stdout.splitlines()[-1])
        failures += [f"seed {number}: {one}" for one in found["failures"]]
        total = {name: amount + found[name] for name, amount in total.items()}
    return {**total, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("cuda", "hip", "host"))
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=int(time.time()))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        print(json.dumps(Round(given)()))
        return 0
    found = run(given.backend, given.seconds, given.seed)
    print(*found["failures"], sep="\n", end="\n" if found["failures"] else "")
    made, struck = found["operations"], found["interrupts"]
    print(
        f"{given.backend}, seed {given.seed}: {made} operations, {struck} interrupts;",
        f"each hundred left {100 * found['left'] / max(1, struck):.1f} objects;",
        f"{len(found['failures'])} failures" if found["failures"] else "no hang, no violation, the gate open",
    )
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
