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
from pathlib import Path
from typing import Any, Final

import pytest

from tests.simulated.amd import amd_library
from tests.simulated.build import build

from .steps import ROOT, Done, Runner, inputs, read, variables

pytestmark = pytest.mark.timeout(600)

FALLBACK: Final = "wait_on_host()"
HANGS: Final = """
import threading

def test_a_frame_that_never_comes(gpuinterop_device):
    threading.Event().wait()
"""
ROWS: Final[dict[str, dict[str, str]]] = {
    "host": {"backend": "host", "extras": "vulkan"},
    "host-as-amd": {"backend": "host", "disable": "profile:hip-linux"},
    "cuda": {"backend": "cuda", "extras": "cuda", "options": "--gpuinterop-simulated=cuda"},
    "hip": {"backend": "hip", "extras": "hip", "options": "--gpuinterop-simulated=hip"},
    "amds-runtime": {"backend": "hip", "extras": "hip", "options": "--gpuinterop-simulated=hip"},
    "no-driver": {"backend": "cuda", "extras": "cuda"},
    "hangs": {"backend": "host"},
    "broken-fallback": {"backend": "host", "disable": "profile:hip-linux"},
}
RED: Final = {"no-driver", "hangs", "broken-fallback"}


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
    subprocess.run(command, check=True, timeout=200)
    return folder


def _driver(row: str) -> dict[str, str]:
    """The variables of a machine that has the row's driver, and no other."""
    if row == "amds-runtime":
        library = amd_library(Path(os.environ["SOURCES"]))
    elif row in ("cuda", "hip"):
        library = build(row)
    else:
        return {}
    # hip-python looks into ROCM_PATH first.
    paths = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "ROCM_PATH": str(library.parent / "none")}


@pytest.fixture(scope="module")
def ran(library: Path, index: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Done]]:
    """What each row's steps came to, on one machine, whose environment stays from row to row."""
    if not os.environ.get("SOURCES"):
        del ROWS["amds-runtime"]
    temporary = tmp_path_factory.mktemp("runner")
    workflow = read("library.yml")
    found = {}
    for name, row in ROWS.items():
        machine = {**variables(), "PIP_FIND_LINKS": str(index), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **_driver(name)}
        runner = Runner(library, temporary, machine)
        given = inputs(workflow, rows="", limit="10", lock=str(temporary / "lock"))
        if name == "hangs":
            (library / "tests" / "test_hangs.py").write_text(HANGS)
        if name == "broken-fallback":
            (library / "tests" / "test_hangs.py").unlink()
            file = library / "brighten.py"
            assert FALLBACK in file.read_text()
            file.write_text(file.read_text().replace(FALLBACK, "pass"))
        found[name] = runner.run(workflow["jobs"]["test"], inputs=given, matrix={"row": {"name": name, **row}})
    listed = json.dumps([{"name": name} for name in (*ROWS, "never-began")])
    runner = Runner(library, temporary, {**variables(), "PIP_FIND_LINKS": str(index)})
    found["matrix"] = runner.run(workflow["jobs"]["matrix"], inputs=inputs(workflow, rows=listed))
    found["summary"] = [Done("summary", 0, runner.file("GITHUB_STEP_SUMMARY").read_text())]
    return found


def test_nothing_is_green_that_should_be_red(ran: dict[str, list[Done]]) -> None:
    for name in ROWS:
        failed = [done.name for done in ran[name] if done.status]
        assert failed == (["test"] if name in RED else []), f"{name}\n{ran[name][-1].output}"


def test_what_a_maintainer_sees_in_the_log(ran: dict[str, list[Done]]) -> None:
    """The cause, and not its consequences."""
    output = {name: steps[-1].output for name, steps in ran.items()}
    assert re.search(r"'cuda' is not available. the NVIDIA driver is not installed", output["no-driver"])
    assert "1 failed" in output["no-driver"]
    assert "in test_a_frame_that_never_comes" in output["hangs"]
    assert "threading.Event().wait()" in output["hangs"]
    assert 'assert waited == ([] if on_device else ["on the host"])' in output["broken-fallback"]
    for name in ROWS.keys() - RED:
        assert re.search(r"\b[1-9]\d* passed", output[name]), output[name]
    assert "turned off by GPUINTEROP_DISABLE=profile:hip-linux" in output["host-as-amd"]


def test_the_table(ran: dict[str, list[Done]], library: Path) -> None:
    done = ran["matrix"][-1]
    assert (done.name, done.status) == ("one table", 1), done.output
    lines = done.output.splitlines()
    first: dict[str, Any] = {line.split("  ")[0]: line for line in reversed(lines[: lines.index("What failed")])}
    words = {"no-driver": "FAILED", "hangs": "ENDED EARLY", "broken-fallback": "FAILED", "never-began": "MISSING"}
    for name in (*ROWS, "never-began"):
        assert words.get(name, "passed") in first[name], first
    assert f"{len(ROWS) + 1} rows: {len(RED) + 1} red" in done.output
    assert "hangs: the run was ended in tests/test_hangs.py::test_a_frame_that_never_comes[host:0]" in done.output
    assert "Simulated GPU 0 (simulated)" in first["cuda"]
    for name in ROWS.keys() - {"no-driver", "hangs"}:
        report = json.loads((library / "reports" / f"{name}.json").read_text())
        assert report["tests"], name
        assert (library / "reports" / f"{name}.xml").is_file()
    assert "| never-began | MISSING |" in ran["summary"][0].output
    assert "<h1>gpuinterop matrix</h1>" in (library / "matrix.html").read_text()
