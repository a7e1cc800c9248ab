"""The command that runs the kit; the kit itself is tested elsewhere."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import gpuinterop
from gpuinterop.cli.app import app
from gpuinterop.cli.selftest import verified_file


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; it ends with status 5."""
    found: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        found.append(command)
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_it_runs_the_kit(commands: list[list[str]]) -> None:
    result = CliRunner().invoke(app, ["selftest", "--backend", "host", "-k", "memory"])
    assert result.exit_code == 5  # pytest's own
    assert commands == [
        [
            sys.executable, "-m", "pytest", "--pyargs", "gpuinterop.testing", "--gpuinterop-require=host",
            "-k", "memory",
        ]
    ]  # fmt: skip


def test_the_report_goes_to_the_backends_package(commands: list[list[str]]) -> None:
    CliRunner().invoke(app, ["selftest", "--backend", "host", "--report"])
    gpuinterop_host = importlib.util.find_spec("gpuinterop_host")
    assert gpuinterop_host is not None
    assert gpuinterop_host.submodule_search_locations is not None
    expected = f"{gpuinterop_host.submodule_search_locations[0]}/verified.toml"
    assert str(verified_file("host")) == expected
    assert f"--gpuinterop-report={expected}" in commands[0]


def test_without_pytest(monkeypatch: pytest.MonkeyPatch, commands: list[list[str]]) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pytest" else found(name))
    result = CliRunner().invoke(app, ["selftest", "--backend", "host"])
    assert result.exit_code == 2
    assert "with its extra 'test'" in result.output
    assert not commands


def test_a_wrong_backend(commands: list[list[str]]) -> None:
    result = CliRunner().invoke(app, ["selftest", "--backend", "nowhere"])
    assert result.exit_code == 2
    assert "no backend 'nowhere'" in result.output
    assert not commands


@pytest.mark.parametrize("command", [[], ["info"], ["demo"], ["selftest"]])
def test_help(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_help_has_examples() -> None:
    assert "gpuinterop demo --driver lavapipe" in CliRunner().invoke(app, ["--help"]).output


def test_version() -> None:
    assert gpuinterop.__version__ in CliRunner().invoke(app, ["--version"]).output


def test_python_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuinterop", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert gpuinterop.__version__ in done.stdout
