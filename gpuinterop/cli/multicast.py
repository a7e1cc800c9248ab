"""``gpuinterop selftest multicast``: every step of multicast, in a child process that may hang."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

from .._core.discovery import get_backend
from ..capabilities import Cell, Operation
from ..errors import InvalidArgumentError
from ..testing import stand_ins
from ..testing.results import RUNS, UNRECORDED, make_run
from .console import note, say
from .selftest import add_arguments as add_report_arguments, begin_report

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.discovery import LoadedBackend

__all__ = ["add_arguments", "command"]

_START: Final = "start a process"
_END: Final = "end the process"
_STARTED: Final = 60.0
"""Least seconds for a process to start, which does not depend on the driver."""
_KILLED: Final = 10.0
"""Seconds for a killed process to exit."""

_FABRIC: Final = (
    "the fabric between the devices does not work (its manager does not run, or does not know a device), or "
    "confidential computing or a virtual machine blocks it"
)
_BLOCKS: Final = f"the driver blocks until every device of the team has joined: {_FABRIC}"
_CAUSES: Final = {
    _START: "the machine is busy, or this Python cannot be started again",
    "open the devices": "a device is broken: `gpuinterop selftest` shows more, without multicast",
    **dict.fromkeys(("add the devices", "add the devices of both"), f"one of them does not join: {_FABRIC}"),
    **dict.fromkeys(("bind memory", "map", "bind addresses", "bind in both", "map in both"), _BLOCKS),
    **dict.fromkeys(
        ("multimem store", "multimem store from both"), f"a store to the fabric does not return: {_FABRIC}"
    ),
    "multimem add": f"a load from the fabric does not return: {_FABRIC}",
    "start a second process": "two processes cannot use these devices: their compute mode is exclusive, or it is busy",
    _END: "the driver does not release the process's resources: the kernel's log may show why (`dmesg`)",
}
"""The likely reason if a step hangs or ends its process; for all other steps it is the fabric."""


@dataclass(slots=True)
class Step:
    """A step, with its outcome: ``right``, ``wrong``, ``hung``, or ``died`` if its process ended."""

    step: str
    outcome: str = ""
    seconds: float = 0.0
    detail: str = ""
    likely_cause: str | None = None


@dataclass(slots=True)
class Result:
    """The result that ``--json`` prints."""

    backend: str
    devices: list[dict[str, Any]]
    stand_in: str | None
    steps: list[Step] = field(default_factory=list)
    correct: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpuinterop selftest multicast``."""
    add_report_arguments(parser)
    parser.add_argument(
        "--devices", metavar="0,1,...", type=_ordinals, help="two or more ordinals; by default all that report it"
    )
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=60.0, help="most seconds for a step (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def command(given: argparse.Namespace) -> int:
    """Try multicast: create, bind, map, store to all devices, add over all, in one process and in two.

    A device that reports multicast may still not support it, so this command tries every step. It does so in a child
    process, which it kills when a step takes too long. It then checks each device's memory with ordinary copies.

    Run it on a machine you do not share: if the fabric is broken, the command can block, or disturb other users.

    Exit status: 0 if every step was right, 1 if one was not, and 2 if nothing was tried.
    """
    loaded = get_backend(given.backend)
    team = _team(loaded, given.devices)
    begin_report(given.report)
    double = stand_ins.stand_in(loaded.libraries)
    result = Result(loaded.name, [{"ordinal": device.ordinal, "name": device.name} for device in team], double or None)
    if not given.json:
        say(("multicast", "bold"), (f" on {_names(team)}", ""))
        if double:
            note(f"{double} replaces the driver: this proves nothing about hardware.")
    for step in _run(loaded.name, team, given.timeout):
        result.steps.append(step)
        if not given.json:
            _show(step)
    result.correct = [(step.step, step.outcome) for step in result.steps] == [(n, "right") for n in _names_of_steps()]
    if given.json:
        print(json.dumps(asdict(result), indent=2))
    elif result.correct:
        say(("multicast works here", "green"))
    if given.report is not None:
        _write_report(given.report, result, _runs(result, loaded, team))
    return 0 if result.correct else 1


def _ordinals(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a list of ordinals such as 0,1, got {text!r}.") from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, got {text}.")
    return seconds


def _team(backend: LoadedBackend, ordinals: Sequence[int] | None) -> list[Device]:
    """Return the devices that take part; raises before any call if one cannot."""
    from ..testing.multicast import CELLS

    every = [backend.device(number) for number in ordinals] if ordinals is not None else list(backend.devices())
    able = [device for device in every if device.capabilities.supports(Operation.CREATE_MULTICAST)]
    for device in every if ordinals is not None or not able else able:
        device.capabilities.require(*CELLS)
    if len(able) < 2:
        there = _names(able) if ordinals is not None else f"{_names(able)}, of {_names(backend.devices())}"
        raise InvalidArgumentError("devices", f"expected two or more devices with multicast, got {there}.")
    return able


def _names_of_steps() -> list[str]:
    """Every step that must be right: a process that exits normally may have skipped some."""
    from ..testing.multicast import Life

    return [name for name, _ in Life([]).steps()]


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.backend}:{device.ordinal} {device.name}" for device in devices) or "none"


# -- the child -----------------------------------------------------------------------------------------------------


def _run(backend: str, team: Sequence[Device], timeout: float) -> Generator[Step, None, None]:
    """Yield each step as it ends; the first one that is not right is the last."""
    from ..testing.multicast import START

    expected = _names_of_steps()
    step = Step(_START)
    with tempfile.TemporaryFile("w+", errors="replace") as errors, _child(backend, team, errors) as (child, lines):
        while True:
            begun = time.monotonic()
            limit = max(timeout, _STARTED) if step.step in (_START, START) else timeout
            try:
                line = lines.get(timeout=limit)
                status = child.wait(limit) if line is None else None
            except (queue.Empty, subprocess.TimeoutExpired):
                yield _ended(step, "hung", begun, f"it did not end in {limit:g} s, and {_kill(child)}")
                return
            if status == 0 and not expected:
                return
            if line is None:
                _kill(child)  # its own child process may still run
                errors.seek(0)
                yield _ended(step, "died", begun, f"its process {_how(child.returncode)} {errors.read()[-2000:]}")
                return
            if "error" in line:
                yield _ended(step, "wrong", begun, line["error"])
                return
            if "detail" in line:
                expected.remove(step.step)
                yield _ended(step, "right", begun, line["detail"])
                step = Step(_END)  # unless another step is announced
            else:
                step = Step(line["step"])


def _ended(step: Step, outcome: str, begun: float, detail: str) -> Step:
    step.outcome, step.detail = outcome, detail.strip()
    step.seconds = round(time.monotonic() - begun, 6)
    if outcome in ("hung", "died"):
        step.likely_cause = _CAUSES.get(step.step, _FABRIC)
    return step


_Lines: TypeAlias = "queue.Queue[dict[str, str] | None]"


@contextmanager
def _child(
    backend: str, team: Sequence[Device], errors: IO[str]
) -> Generator[tuple[subprocess.Popen[bytes], _Lines], None, None]:
    """Start the process; return it and a queue of its messages, with None at the end. Kill it when the block ends."""
    lines: _Lines = queue.Queue()
    with ExitStack() as scope:
        # SIGTERM, and closing the terminal, end this block as Ctrl-C does; on SIGKILL the child exits on its own.
        scope.enter_context(_ended_by(signal.SIGTERM, signal.SIGHUP))
        # A separate pipe: it carries nothing that drivers or the child's own child print.
        reading, writing = os.pipe()
        reader = threading.Thread(target=_read, args=(reading, lines), daemon=True)
        reader.start()
        scope.callback(reader.join, _KILLED)  # with a limit, in case the process cannot be killed
        arguments = [str(os.getpid()), str(writing), backend, *(str(one.ordinal) for one in team)]
        with os.fdopen(writing, "wb"):
            # A separate session, to kill the child and its own child together, and to keep Ctrl-C to this process.
            child = subprocess.Popen(
                [sys.executable, "-m", "gpuinterop.testing.multicast", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[writing],
                start_new_session=True,
            )
            scope.callback(lambda: _kill(child) if child.returncode is None else None)
        yield child, lines


def _read(reading: int, lines: _Lines) -> None:
    with os.fdopen(reading) as file, contextlib.suppress(ValueError):  # half a line of a killed process
        for line in file:
            lines.put(json.loads(line))
    lines.put(None)


@contextmanager
def _ended_by(*numbers: int) -> Generator[None, None, None]:
    """Let signals end this process with its cleanup, in the main thread and if they have no other handler."""
    mine = threading.current_thread() is threading.main_thread()
    taken = [number for number in numbers if mine and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, lambda number, _frame: sys.exit(128 + number))
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _kill(child: subprocess.Popen[bytes]) -> str:
    """Kill the process and its own child; return what happened."""
    with contextlib.suppress(ProcessLookupError):  # both have exited
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(_KILLED)
    except subprocess.TimeoutExpired:
        return f"its process {child.pid} cannot be killed: it hangs in the driver, and the machine may need a restart."
    return "its process was killed."


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}:"
    try:
        return f"was ended by {signal.Signals(-status).name}:"
    except ValueError:
        return f"was ended by signal {-status}:"


# -- what is shown -------------------------------------------------------------------------------------------------


def _show(step: Step) -> None:
    if step.outcome == "right":
        say(("  ", ""), ("✓", "green"), (f" {step.step:<32} ", ""), (step.detail, "dim"))
        return
    verb = {"wrong": "", "hung": "hung: ", "died": "died: "}[step.outcome]
    say((f"  ✗ {step.step:<32} {verb}{step.detail}", "red"))
    if step.likely_cause:
        say(("    ", ""), ("likely:", "yellow"), (f" {step.likely_cause} (docs/howto/multicast.md)", ""))


def _write_report(file: Path, result: Result, runs: Sequence[dict[str, Any]]) -> None:
    """Write JUnit XML: a test for each step, and what may be recorded if every step was right on hardware."""
    suite = ET.Element("testsuite", name="multicast", timestamp=datetime.now(UTC).isoformat(timespec="seconds"))
    properties = ET.SubElement(suite, "properties")
    for device in result.devices:
        name = f"gpuinterop.device.{result.backend}:{device['ordinal']}"
        ET.SubElement(properties, "property", name=name, value=device["name"])
    why = f"it ran on {result.stand_in}" if result.stand_in else "a step was not right" * (not result.correct)
    name, value = (UNRECORDED, why) if why else (RUNS + result.backend, json.dumps(runs))
    ET.SubElement(properties, "property", name=name, value=value)
    for step in result.steps:
        case = ET.SubElement(suite, "testcase", classname="multicast", name=step.step, time=str(step.seconds))
        if step.outcome != "right":
            printable = "".join(letter if letter.isprintable() else " " for letter in step.detail)
            ET.SubElement(case, "failure", message=f"{step.outcome}: {printable}")
    ET.ElementTree(suite).write(file, encoding="utf-8", xml_declaration=True)


def _runs(result: Result, backend: LoadedBackend, team: Sequence[Device]) -> list[dict[str, Any]]:
    """One run for each device name, with the results of the devices of that name."""
    from ..testing.multicast import Life

    life = Life(team)
    cells: dict[str, set[Cell]] = {}
    for index, device in enumerate(team):
        cells.setdefault(device.name, set()).update(life.shown(index))
    tests = {f"steps passed, with {len(team)} devices": len(result.steps)}
    return [make_run(name, backend.versions, shown, tests) for name, shown in cells.items()]
