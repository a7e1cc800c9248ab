"""Child runs of pytest, each with the toy backend installed as a third party would install it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.programs import python

TOY = Path(__file__).parent / "toy"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "backend"


@dataclass
class Outcome:
    """What a child run said."""

    status: int
    output: str
    failed: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)


def _install(site: Path, name: str, target: str) -> None:
    """What pip would write: the metadata through which alone the backend is found."""
    info = site / f"{name}backend-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}backend\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[gpuinterop.backends]\n{name} = {target}\n")


@pytest.fixture
def run_pytest(tmp_path: Path) -> Callable[..., Outcome]:
    """Run pytest in a child process and an empty directory."""

    def run(
        *arguments: str,
        toy: str | None = "toybackend:ToyBackend",
        entry: str = "toy",
        files: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
        kit: bool = True,
        limit: str = "1",
        seconds: float = LIMIT,
    ) -> Outcome:
        site, work = tmp_path / "site", tmp_path / "work"
        work.mkdir(exist_ok=True)
        paths = [str(site)]
        if toy is not None:
            _install(site, entry, toy)
            paths += [str(TOY), str(EXAMPLE)]
        for name, text in (files or {}).items():
            (work / name).write_text(text)
        ours = ("GPUINTEROP_", "PYTEST_")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        # A broken backend is given up soon; what is on its way takes milliseconds.
        variables |= {"GPUINTEROP_KIT_LIMIT": limit, "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
        variables |= {"PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        without = ("no:cacheprovider", "no:hypothesispytest")  # the latter takes a third of a run to say nothing
        command = ["-m", "pytest", *(f"-p{name}" for name in without), "-rfE", "--tb=short", *arguments]
        if kit:
            command += ["--pyargs", "gpuinterop.testing"]
        done = python(*command, cwd=work, env=variables, seconds=seconds)
        output = done.stdout + done.stderr
        failed = {match[1] for match in re.finditer(r"^(?:FAILED|ERROR) (?:\S*::)?(\w+::\w+)", output, re.MULTILINE)}
        tail = output.rstrip().splitlines()[-1] if output.strip() else ""
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", tail)}
        return Outcome(done.returncode, output, failed, counts)

    return run
