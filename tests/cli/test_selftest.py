"""The command that runs the kit; the kit itself is tested elsewhere."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop
from gpuinterop.cli.records import verified_file
from tests.cli.invoke import invoke
from tests.programs import printed

HARDWARE = Path(__file__).parents[2] / "docs" / "reference" / "runs.md"


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


def test_the_report_goes_to_the_backends_package(commands: list[list[str]]) -> None:
    invoke("selftest", "--backend", "host", "--report")
    gpuinterop_host = importlib.util.find_spec("gpuinterop_host")
    assert gpuinterop_host is not None
    assert gpuinterop_host.submodule_search_locations is not None
    expected = f"{gpuinterop_host.submodule_search_locations[0]}/verified.toml"
    assert str(verified_file("host")) == expected
    assert f"--gpuinterop-report={expected}" in commands[0]


def test_the_document_shows_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, commands: list[list[str]]
) -> None:
    document = tmp_path / "hardware.md"
    shutil.copy(HARDWARE, document)
    before = document.read_text(encoding="utf-8")
    arguments = ["selftest", "--backend", "host", "--report", "--document", str(document)]
    invoke(*arguments)  # its run has failed: nothing is written
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: SimpleNamespace(returncode=0))
    document.write_text(before.replace("import_memory", "nonsense"), encoding="utf-8")
    assert invoke(*arguments).exit_code == 0
    assert document.read_text(encoding="utf-8") == before, "docs/reference/runs.md is not what is recorded"
    document.write_text("no marks\n", encoding="utf-8")
    assert "lacks the lines" in invoke(*arguments).output
    assert invoke("selftest", "--document", str(document)).exit_code == 2


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
