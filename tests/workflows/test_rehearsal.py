"""A made-up library takes the reusable workflow's steps, as scripts on this machine; then one table of its rows.

The library is that of the manual (docs/examples/library), in a folder of its own, with gpuinterop from a wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gpuinterop.testing.results import read_run
from tests.limits import LIMIT
from tests.simulated.amd import amd_library

from .steps import ROOT, Done, Runner, inputs, read, variables

FALLBACK: Final = "wait_on_host()"
HANGS: Final = """
import threading

def test_a_frame_that_never_comes(gpuinterop_device):
    threading.Event().wait()
"""
ROWS: Final[dict[str, dict[str, str]]] = {
    "host": {"backend": "host", "extras": "vulkan"},
    "host-as-amd": {"backend": "host", "disable": "profile:hip-linux"},
    "cuda": {"backend": "cuda", "simulated": "cuda"},
    "hip": {"backend": "hip", "simulated": "hip"},
    "amds-runtime": {"backend": "hip", "extras": "hip", "options": "--gpuinterop-simulated=hip"},
    "no-driver": {"backend": "cuda", "extras": "cuda"},
    "hangs": {"backend": "host"},
    "does-not-begin": {"backend": "host"},
    "no name": {"backend": "host"},
    "broken-fallback": {"backend": "host", "disable": "profile:hip-linux"},
}
if not os.environ.get("SOURCES"):
    del ROWS["amds-runtime"]
SEEN: Final = {
    "no-driver": ("'cuda' is not available: the NVIDIA driver is not installed", "1 failed"),
    "hangs": ("in test_a_frame_that_never_comes", "threading.Event().wait()"),
    "does-not-begin": ("the conftest broke",),
    "no name": ("expected a row's name of letters",),
    "broken-fallback": ('assert waited == ([] if on_device else ["on the host"])',),
}
"""The rows that are red on purpose, and what their logs show."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the library."""
    target = tmp_path_factory.mktemp("library") / "brighten"
    shutil.copytree(ROOT / "docs" / "examples" / "library", target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gpuinterop's wheel, which pip looks into."""
    folder = tmp_path_factory.mktemp("index")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=LIMIT)
    return folder


def _driver(row: str) -> dict[str, str]:
    """The variables of a machine that has AMD's runtime, if that is the row's."""
    if row != "amds-runtime":
        return {}
    library = amd_library(Path(os.environ["SOURCES"]))
    # hip-python looks into ROCM_PATH first.
    paths = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "ROCM_PATH": str(library.parent / "none")}


class Rehearsal:
    """One machine, which takes row after row as jobs; its environment stays."""

    def __init__(self, library: Path, index: Path, temporary: Path) -> None:
        self.library = library
        self._index = index
        self._temporary = temporary
        self._workflow = read("library.yml")
        self._ran: dict[str, list[Done]] = {}

    def row(self, name: str) -> list[Done]:
        """What the steps of a row came to; they run the first time."""
        if name not in self._ran:
            with self._broken(name):
                options = {"limit": "15", "lock": str(self._temporary / "lock"), "tests": "-k 'not nonesuch'"}
                if self._ran:  # the library is there
                    options["install"] = "true"
                given = inputs(self._workflow, rows="", **options)
                row = {"name": name, **ROWS[name]}
                self._ran[name] = self._runner(name).run(
                    self._workflow["jobs"]["test"], inputs=given, matrix={"row": row}
                )
        return self._ran[name]

    def table(self) -> tuple[list[Done], str]:
        """What the steps of the last job came to, and the summary that the forge shows."""
        rows = [*ROWS, "never-began"]
        for name in ROWS:
            self.row(name)
        runner = self._runner("")
        given = inputs(self._workflow, rows=json.dumps([{"name": name} for name in rows]))
        return runner.run(self._workflow["jobs"]["table"], inputs=given), runner.file("GITHUB_STEP_SUMMARY").read_text()

    def _runner(self, row: str) -> Runner:
        pip = {"PIP_FIND_LINKS": str(self._index), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        wide = {"COLUMNS": "400"}  # a row of the table is one line
        return Runner(self.library, self._temporary, {**variables(), **pip, **wide, **_driver(row)})

    @contextmanager
    def _broken(self, row: str) -> Iterator[None]:
        """The library, with what is wrong with it in that row."""
        library, tests = self.library / "brighten.py", self.library / "tests"
        hangs, conftest = tests / "test_hangs.py", tests / "conftest.py"
        good = library.read_text()
        assert FALLBACK in good
        if row == "hangs":
            hangs.write_text(HANGS)
        if row == "does-not-begin":
            conftest.write_text("raise RuntimeError('the conftest broke')")
        if row == "broken-fallback":
            library.write_text(good.replace(FALLBACK, "pass"))
        yield
        hangs.unlink(missing_ok=True)
        conftest.unlink(missing_ok=True)
        library.write_text(good)


@pytest.fixture(scope="module")
def rehearsal(library: Path, index: Path, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return Rehearsal(library, index, tmp_path_factory.mktemp("runner"))


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_green_that_should_be_red(rehearsal: Rehearsal, name: str) -> None:
    """And in the log a maintainer sees the cause, before its consequences."""
    steps = rehearsal.row(name)
    failed = [done.name for done in steps if done.status]
    output = steps[-1].output
    assert failed == (["install" if name == "no name" else "test"] if name in SEEN else []), output
    for words in SEEN.get(name, ()):
        assert words in output, output
    if name not in SEEN:
        assert re.search(r"\b[1-9]\d* passed", output), output
    if "simulated" in ROWS[name]:
        assert "Simulated" in steps[1].output, "what is here, on that driver"
    if "disable" in ROWS[name]:
        here = " ".join(steps[1].output.split())
        assert "turned off by GPUINTEROP_DISABLE=profile:hip-linux: HIP" in here, here


def test_the_table(rehearsal: Rehearsal) -> None:
    steps, summary = rehearsal.table()
    assert [(done.name, bool(done.status)) for done in steps] == [("install", False), ("one table", True)], steps
    output = steps[-1].output
    print(output)
    lines = output.splitlines()
    first: dict[str, Any] = {line.split("  ")[0]: line for line in reversed(lines[: lines.index("What failed")])}
    words = {
        "no-driver": "FAILED", "hangs": "MISSING", "does-not-begin": "MISSING", "no name": "MISSING",
        "broken-fallback": "FAILED", "never-began": "MISSING",
    }  # fmt: skip
    for name in (*ROWS, "never-began"):
        assert words.get(name, "passed") in first[name], first
    simulated = len(ROWS.keys() & {"cuda", "hip", "amds-runtime"})
    assert f"{len(ROWS) + 1} rows, {simulated} simulated: {len(words)} red" in output
    assert re.search(r"Simulated GPU 0 \(.*\) \(simulated\)", first["cuda"])
    assert "not there" not in output, "every row has the same tests; what failed of none, no other row lacks"
    whole = ROWS.keys() - {"hangs", "does-not-begin", "no name"}
    assert {file.name for file in (rehearsal.library / "reports").iterdir()} == {f"{name}.xml" for name in whole}
    for name in whole:  # what the library's own calls, without a fixture, take
        run = read_run(rehearsal.library / "reports" / f"{name}.xml")
        assert f"GPUINTEROP_BACKEND={ROWS[name]['backend']}" in run.properties["gpuinterop.variables"].split()
    assert "| never-began | MISSING |" in summary
