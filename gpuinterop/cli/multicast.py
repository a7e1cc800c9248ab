"""``gpuinterop selftest multicast``: every step of multicast, in a child process that may hang."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .._core.discovery import get_backend
from ..capabilities import Cell, Operation
from ..errors import GpuInteropError, InvalidArgumentError
from ..testing import stand_ins
from ..testing.child import Child, ChildError
from ..testing.results import DEVICE, RUNS, UNRECORDED, make_run
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
_UNKILLABLE: Final = "It cannot be killed: it hangs in the driver, and the machine may need a restart."

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

    module = "gpuinterop.testing.multicast"
    with tempfile.TemporaryFile("w+", errors="replace") as output, Child("its process", module, output=output) as child:
        life: Any = None
        for name in (_START, *_names_of_steps(), _END):
            step, begun = Step(name), time.monotonic()
            limit = child.limit = max(timeout, _STARTED) if name in (_START, START) else timeout
            try:
                if name == _START:
                    life = child.run(f"{module}:open_life", backend, [device.ordinal for device in team])
                elif name == _END:
                    child.end(limit)
                else:
                    right, detail = life.call("step", name)
                    yield _ended(step, "right" if right else "wrong", begun, detail)
                    if not right:
                        return
            except ChildError as error:
                if child.process.poll() is None:
                    killed = "It was killed." if child.kill() else _UNKILLABLE
                    yield _ended(step, "hung", begun, f"{error} {killed}")
                else:
                    output.seek(0)
                    yield _ended(step, "died", begun, f"{error} {output.read()[-2000:]}")
                return
            except GpuInteropError as error:  # its process goes on
                yield _ended(step, "wrong", begun, f"{type(error).__name__}: {error}")
                return


def _ended(step: Step, outcome: str, begun: float, detail: str) -> Step:
    step.outcome, step.detail = outcome, detail.strip()
    step.seconds = round(time.monotonic() - begun, 6)
    if outcome in ("hung", "died"):
        step.likely_cause = _CAUSES.get(step.step, _FABRIC)
    return step


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
        name = f"{DEVICE}.{result.backend}:{device['ordinal']}"
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
