"""Programs to which a test gives Python, line by line: each line is answered within a limit, or the test fails.

What a line raises is raised in the test as `Raised`. What a program or a thread of it writes to stderr fails it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import pytest

from gpuinterop import system
from tests.limits import LIMIT

needs_root: Final = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs of other users")

PROGRAM: Final = r"""
import contextlib, gc, json, os, re, resource, signal, socket, struct, sys, threading, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import gpuinterop as gi
from gpuinterop.sharing import server
from gpuinterop.sharing.loop import loop
from gpuinterop.timeline import _opened as locks

kept = []

def array(size=4096):
    return np.asarray(gi.device().allocate(size).buffer.view(size, "uint8"))

def left():
    loop().start()  # which stays
    gc.collect()
    gi.device().drain()
    for one in list(locks):
        one._forget()  # a lock keeps a file for each thread that has waited for it
    found = ["a thread"] * threads()
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the look's own
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{one}")))
    with open("/proc/self/maps") as maps:
        return found + re.findall("/memfd:.*", maps.read())

def grown(before):
    # What was on its way out may have been counted before.
    return [*(Counter(left()) - Counter(before)).elements()]

def threads():
    return len(os.listdir("/proc/self/task"))

def leases():
    return sum(int(rows[1].sum()) for one in server.server.made for rows in list(one._sums._each.values()))

def rests():
    return not loop()._repeated

def offers():
    return sum(len(one.offers) for one in server.server.made)

def fill(room):
    # Leave room for so many descriptors.
    while len(kept) < 99:
        try: kept.append(os.open("/dev/null", 0))
        except OSError: break
    clear(room)

def clear(room=99):
    for one in kept[:room]: os.close(one)
    del kept[:room]

for call in gi.attach, gi.subscribe:  # where a line gives no time-out
    call.__kwdefaults__["timeout"] = 300.0
scope = globals()
for line in sys.stdin:
    try:
        code = json.loads(line)
        try:
            given = compile(code, "<test>", "eval")
        except SyntaxError:
            given = compile(code, "<test>", "exec")
        answer = json.dumps(["", eval(given, scope)], default=repr)
    except BaseException as error:
        answer = json.dumps([type(error).__name__, str(error)])
    print(answer, flush=True)
"""


def stop(pid: int) -> None:
    """Stop a process; its threads go on for a moment after the signal was sent."""

    def has_stopped() -> bool:
        stats = [file.read_text().rpartition(") ")[2] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(one.startswith("T") for one in stats)

    os.kill(pid, signal.SIGSTOP)
    assert system.until(has_stopped, LIMIT), f"{pid} does not stop"


class Raised(Exception):
    """What a line has raised: the name of its type, then its words."""


class Shell:
    """A program on the host backend; `before` are the words of a command that starts it."""

    def __init__(self, *before: str, **variables: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._rest = b""
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "GPUINTEROP_BACKEND": "host"}
        command = [*before, sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", PROGRAM]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, **environment, **variables},
        )  # fmt: skip
        self._answers = select.poll()  # select takes no descriptor above 1023
        assert self._process.stdout is not None
        self._answers.register(self._process.stdout, select.POLLIN)

    def __call__(self, code: str, limit: float = LIMIT) -> Any:
        """Run a line; return its value, or raise what it raised."""
        self.give(code)
        return self.answer(limit)

    def give(self, code: str) -> None:
        """Have a line run, and do not wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, limit: float = LIMIT) -> Any:
        """What the line has given."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            assert self._answers.poll(left * 1000), f"no answer in {limit} s"
            came = os.read(self._process.stdout.fileno(), 1 << 20)
            assert came, f"it has ended: {self._process.wait(LIMIT)}, {self._said()}"
            self._rest += came
        line, self._rest = self._rest.split(b"\n", 1)
        kind, value = json.loads(line)
        if kind:
            raise Raised(f"{kind}: {value}")
        return value

    def until(self, code: str, limit: float = LIMIT) -> None:
        """Ask until the line is true."""
        assert system.until(lambda: self(code), limit), f"{code} stays false: {self._said()}"

    def descriptor(self, share: str) -> str:
        """Python's words for the descriptor of a share, by the name that it has there."""
        return f"bytes.fromhex({self(f'bytes({share}).hex()')!r})"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT)

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        killed = self._process.poll() is not None
        self._process.send_signal(signal.SIGCONT)
        with self._process, self._errors:
            try:
                self._process.communicate(timeout=LIMIT)
                ended = self._process.returncode, self._said()
                assert kind is not None or killed or ended == (0, ""), ended
            finally:
                self._process.kill()


@contextmanager
def pair() -> Iterator[tuple[Shell, Shell]]:
    """An exporter of `array` as `share`; and a reader, which has its `descriptor`."""
    with Shell() as exporter, Shell() as reader:
        exporter("array = array(); array[:] = 7; share = gi.share(array); descriptor = bytes(share)")
        reader(f"descriptor = bytes.fromhex({exporter('descriptor.hex()')!r})")
        yield exporter, reader
