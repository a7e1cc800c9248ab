"""The command in a message installs what an extra brings, beside the gpuinterop that is there."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import gpuinterop
from tests.programs import printed

ROOT = Path(gpuinterop.__file__).parents[1]
ADVICE = "from gpuinterop.installing import pip_install; print(pip_install('cuda'))"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One that was not installed, at a path that a shell takes apart."""
    folder = tmp_path / "user's $HOME"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    (folder / "gpuinterop").symlink_to(ROOT / "gpuinterop")
    return folder


def words(command: str) -> list[str]:
    """What a shell makes of it."""
    done = subprocess.run(["sh", "-euc", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_checkout_that_was_not_installed_is_named_by_its_path(checkout: Path) -> None:
    command = printed("-S", "-c", ADVICE, cwd=checkout, PYTHONPATH=str(checkout))  # -S: no site-packages
    assert words(command) == ["pip", "install", "-e", f"{checkout}[cuda]"]


def test_of_an_installation_the_name_will_do(checkout: Path) -> None:
    """pip keeps an installation that satisfies it, and adds what the extra brings."""
    metadata = checkout / "gpuinterop-1.2.3.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: gpuinterop\nVersion: 1.2.3\n")
    command = printed("-S", "-c", ADVICE, cwd=checkout, PYTHONPATH=str(checkout))
    assert words(command) == ["pip", "install", "gpuinterop[cuda]"]


def test_without_an_installation_the_first_call_says_so(checkout: Path) -> None:
    program = "import gpuinterop as gi\ntry: gi.device()\nexcept gi.GpuInteropError as error: print(error)"
    told = printed("-S", "-c", program, cwd=checkout, PYTHONPATH=str(checkout))
    (command,) = re.findall(r"none is installed; .* \((pip install .*)\)", told)
    assert words(command) == ["pip", "install", "-e", str(checkout)]


def test_on_windows_the_quotes_are_double() -> None:
    """Of its shells, cmd.exe would pass single quotes to pip."""
    # What it needs of the library is imported before: it would look for what Windows has.
    program = f"import sys, importlib.metadata; from gpuinterop import system; sys.platform = 'win32'; {ADVICE}"
    assert printed("-c", program) == 'pip install "gpuinterop[cuda]"\n'


def test_the_extras_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert {"cuda", "hip", "vulkan", "cli"} <= set(extras)
