"""What the workflows run is what is run here; and what they may do is little."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.limits import LIMIT

from .steps import ROOT, WORKFLOWS, Runner, read, variables

FILES = sorted(file.name for file in WORKFLOWS.glob("*.yml"))


def _jobs(name: str) -> list[tuple[str, dict[str, Any]]]:
    return [(job, content) for job, content in read(name)["jobs"].items() if "steps" in content]


@pytest.mark.parametrize("name", FILES)
def test_what_they_use_is_pinned(name: str) -> None:
    """By a commit, with the version beside it."""
    lines = (WORKFLOWS / name).read_text(encoding="utf-8").splitlines()
    used = [line for line in lines if re.match(r"\s*(- )?uses: ", line)]
    assert used
    for line in used:
        assert re.search(r"uses: (\./\S+|[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$)", line), line


@pytest.mark.parametrize("name", FILES)
def test_no_script_has_an_expression(name: str) -> None:
    """A branch's name or an input would be a part of the script: it comes by a variable."""
    assert read(name)["defaults"] == {"run": {"shell": "bash"}}, "else a pipe hides what failed on its left"
    for job, content in _jobs(name):
        for step in content["steps"]:
            assert "${{" not in step.get("run", ""), job
        assert "timeout-minutes" in content


def _targets(name: str) -> set[str]:
    """What a target of the Makefile runs."""
    printed = subprocess.run(
        ["make", "--print-data-base", "--question"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    ).stdout
    (targets,) = re.findall(rf"^{name}: (.*)$", printed, re.MULTILINE)
    return set(targets.split())


def test_ours_run_what_is_run_here() -> None:
    """Each step is a make target that .ci/run runs, is run by a test below, or says that only a host shows it."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (together,) = re.findall(r"--keep-going (test-all [a-z -]+) [A-Z]+=", ci)
    here = _targets("test-all") | set(re.findall(r"\bmake ([\w-]+)", ci)) | {*together.split(), *_targets("soak")}
    for job, content in _jobs("ci.yml"):
        for step in content["steps"]:
            run = step.get("run")
            if run is None or "(hosted only" in step.get("name", "") or job == "rows":
                continue
            assert re.fullmatch(r"make (\$TARGETS PYTHON=python|test-hip-amd SOURCES=rocm)", run), run
    required = dict(re.findall(r"\b(GPUINTEROP_REQUIRE_\w+)=(\w+)", ci))
    assert required.items() <= read("ci.yml")["env"].items(), "what .ci/run requires, the workflow requires"
    matrix = read("ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    targets = [*matrix["targets"], *(row["targets"] for row in matrix["include"])]
    run_there = {word for target in targets for word in target.split()}
    assert run_there <= here
    assert _targets("test-all") <= run_there, "what test-all has, the workflow has too"


def test_the_rows_of_this_project(tmp_path: Path) -> None:
    """Those without a GPU always; the self-hosted ones where somebody has said that they are there."""
    job = read("ci.yml")["jobs"]["rows"]
    runner = Runner(ROOT, tmp_path, variables())
    (done,) = runner.run(job, vars={"GPU_RUNNERS": "amd,nvidai"})
    assert (done.status, "nvidai" in done.output) == (1, True), done.output
    hosted = ["host", "host-as-amd", "cuda-simulated", "hip-simulated"]
    for given, names in (("", hosted), ("amd, nvidia", [*hosted, "nvidia", "amd"])):
        runner.file("GITHUB_OUTPUT").write_text("")
        (done,) = runner.run(job, vars={"GPU_RUNNERS": given})
        assert done.status == 0, done.output
        rows = json.loads(runner.file("GITHUB_OUTPUT").read_text().removeprefix("rows="))
        assert [row["name"] for row in rows] == names
        assert all(row["backend"] and row["runs-on"] for row in rows)
