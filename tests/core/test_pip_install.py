"""The command in a message adds an extra to the gpuinterop that is there, says pip, though no index has gpuinterop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuinterop
from tests.programs import printed

ROOT = Path(gpuinterop.__file__).parents[1]

_PROJECT = """
[build-system]
requires = []
build-backend = "builder"
backend-path = ["."]
"""

# As little as pip asks for: no tool that builds has to be installed.
_BUILDER = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    stem = NAME.replace("-", "_") + "-" + VERSION
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{wheel}", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", METADATA)
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel

build_editable = build_wheel
"""


def _project(folder: Path, name: str, version: str, *lines: str) -> Path:
    metadata = "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""))
    folder.mkdir()
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "builder.py").write_text(f"NAME, VERSION, METADATA = {name!r}, {version!r}, {metadata!r}\n{_BUILDER}")
    return folder


class Machine:
    """An environment; an index that has the bindings alone; a checkout, with the real code, at a hostile path."""

    def __init__(self, root: Path) -> None:
        self._folder = root
        venv.create(root / "venv", with_pip=False)
        self._python = root / "venv" / "bin" / "python"
        self._index = root / "index"
        self.checkout = _project(
            root / "user's $HOME",
            "gpuinterop",
            "0.1",
            "Provides-Extra: cuda",
            "Requires-Dist: cuda-bindings>=12.9.1; extra == 'cuda'",
        )
        (self.checkout / "gpuinterop").symlink_to(ROOT / "gpuinterop")
        self.shell('pip wheel --wheel-dir "$1" "$2"', self._index, _project(root / "bindings", "cuda-bindings", "13.0"))

    def shell(self, line: str, *arguments: object) -> str:
        """What a line prints, with its pip that environment's, and no network."""
        pip = f'pip() {{ "{sys.executable}" -m pip --python "{self._python}" "$@"; }}'
        done = subprocess.run(
            ["sh", "-euc", f"{pip}\n{line}", "sh", *map(str, arguments)],
            cwd=self._folder,
            env=os.environ
            | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self._index.as_uri()}
            | {"PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def python(self, program: str) -> str:
        """What a program prints that takes gpuinterop from the checkout, whatever is installed."""
        return self.shell('PYTHONPATH=$3 "$1" -c "$2"', self._python, program, self.checkout).strip()

    def advice(self) -> str:
        return self.python("from gpuinterop import system; print(system.pip_install('cuda'))")


@pytest.fixture(scope="module")
def _machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def machine(_machine: Machine) -> Iterator[Machine]:
    yield _machine
    _machine.shell("pip uninstall --yes gpuinterop")


_AS_GIT = "git init -q . && git add . && git -c user.name=a -c user.email=a@a commit -qm all"


@pytest.mark.parametrize(
    "install",
    [
        'pip wheel -w wheels "$1" && pip install --find-links wheels gpuinterop',
        'pip wheel -w lost "$1" && pip install lost/*.whl && rm -r lost',
        'pip install "$1"',
        'pip install -e "$1"',
        f'cp -r "$1" repository && cd repository && {_AS_GIT} && pip install "git+file://$PWD"',
    ],
    ids=["an index", "a wheel that is gone", "a folder", "an editable folder", "a repository"],
)
def test_an_installation_stays_and_gets_what_the_extra_brings(machine: Machine, install: str) -> None:
    machine.shell(install, machine.checkout)
    advice = machine.advice()
    assert advice == "pip install 'gpuinterop[cuda]'"
    done = machine.shell(f"{advice} --dry-run")
    assert re.findall("Would install (.*)", done) == ["cuda-bindings-13.0"], done


def test_a_checkout_that_was_not_installed_is(machine: Machine) -> None:
    done = machine.shell(f"{machine.advice()} --dry-run")
    assert re.findall("Would install (.*)", done) == ["cuda-bindings-13.0 gpuinterop-0.1"], done


@pytest.mark.parametrize("call", ["device()", "get_backend('host')"])
def test_without_an_installation_the_first_call_says_so(machine: Machine, call: str) -> None:
    program = f"import gpuinterop as gi\ntry: gi.{call}\nexcept gi.GpuInteropError as error: print(error)"
    (command,) = re.findall(r"none is installed; .* \((pip install .*)\)", machine.python(program))
    assert "Would install" in machine.shell(f"{command} --dry-run")


def test_on_windows_the_quotes_are_double() -> None:
    """Of its shells, cmd.exe would pass single quotes to pip."""
    # What it needs of the library is imported before: it would look for what Windows has.
    program = "import sys, importlib.metadata; from gpuinterop import system; sys.platform = 'win32'"
    assert printed("-c", f"{program}; print(system.pip_install('cuda'))") == 'pip install "gpuinterop[cuda]"\n'


def test_the_extras_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    code = "\n".join(
        path.read_text(encoding="utf-8") for top in ("gpuinterop", "backends") for path in (ROOT / top).rglob("*.py")
    )
    named = re.findall(r"""pip_install\(["'](\w+)["']\)|need\(.*"(\w+)"\)""", code)
    found = {first or second for first, second in named}
    assert {"cuda", "hip", "vulkan", "cli"} <= found <= set(extras)
