"""The command that runs the kit; the kit itself is tested elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop
from tests.cli.invoke import invoke
from tests.programs import printed


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; it ends with status 5."""
    found: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        found.append(command)
        assert f"--gpuinterop-require={options['env']['GPUINTEROP_BACKEND']}" in command, "the two must agree"
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_it_runs_the_kit(commands: list[list[str]]) -> None:
    result = invoke("selftest", "--backend", "host", "-k", "memory")
    assert result.exit_code == 5  # pytest's own
    assert commands[0][-5:] == ["--pyargs", "gpuinterop.testing", "--gpuinterop-require=host", "-k", "memory"]


def test_the_folder_that_it_is_started_in_takes_no_part(tmp_path: Path) -> None:
    """It may be a project, with tests of its own; and the shell may have been set up for them."""
    for name in ("conftest.py", "tests/conftest.py", "pytest.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError(__file__)")
    words = ("-m", "gpuinterop", "selftest", "--backend", "host", "-k", "test_device_is_described")
    output = printed(*words, cwd=tmp_path, PYTEST_ADDOPTS="--nowhere", PYTEST_PLUGINS="nowhere")
    assert "1 passed" in output
    assert f"rootdir: {Path(gpuinterop.__file__).parents[1]}\n" in output, "from there tests have their names"


def test_the_report_is_one_file(commands: list[list[str]], tmp_path: Path) -> None:
    """It is empty until the run has ended: what was there may be another run's."""
    report = tmp_path / "run.xml"
    report.write_text("of another run")
    invoke("selftest", "--backend", "host", "--report", str(report))
    assert f"--junitxml={report}" in commands[0]
    assert report.read_bytes() == b""
    result = invoke("selftest", "--backend", "host", "--report", str(tmp_path / "nowhere" / "run.xml"))
    assert result.exit_code == 2
    assert "--report: expected a file that can be written" in result.output
    assert len(commands) == 1


def test_multicast_is_a_command_of_its_own(commands: list[list[str]]) -> None:
    """It runs nothing where it cannot; behind an option the word is pytest's, or a mistake that is explained."""
    result = invoke("selftest", "multicast", "--backend", "host")
    assert result.exit_code == 2
    assert "create_multicast is unsupported" in result.output
    result = invoke("selftest", "--backend", "host", "multicast")
    assert result.exit_code == 2
    assert "gpuinterop selftest multicast" in result.output
    assert not commands
    invoke("selftest", "--backend", "host", "-k", "multicast")
    assert commands[0][-2:] == ["-k", "multicast"]


def test_python_m() -> None:
    assert gpuinterop.__version__ in printed("-m", "gpuinterop", "--version")
