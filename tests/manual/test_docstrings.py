"""Every public class and function has an example in its docstring, and every example runs."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import pytest

import gpuinterop as gi
from gpuinterop.testing import simulated
from tests.programs import printed

from .examples import Docstring, docstrings, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds, and libraries preloaded by name")

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = (
    "gpuinterop", *(f"gpuinterop.{name}" for name in gi._MODULES), "gpuinterop.testing.exporters", "gpuinterop.testing",
)  # fmt: skip
ALL: Final = {str(docstring): docstring for docstring in docstrings()}
SHOWN: Final = {name: docstring for name, docstring in ALL.items() if docstring.examples}
ON_THE_HOST: Final = {name: docstring for name, docstring in SHOWN.items() if docstring.mode == "host"}
EXCERPTS: Final = {name: docstring for name, docstring in ALL.items() if docstring.excerpts}


PUBLIC: Final = {
    f"{value.__module__}.{value.__qualname__}"
    for module in map(import_module, MODULES)
    for value in (getattr(module, name) for name in module.__all__)
    if isinstance(value, type | types.FunctionType) and value.__module__.startswith("gpuinterop")  # not an alias of int
}


def test_every_public_class_and_function_has_an_example() -> None:
    assert len(PUBLIC) > 150
    assert SHOWN.keys() | EXCERPTS.keys() >= PUBLIC


BRIDGED: Final = {name for name, docstring in ON_THE_HOST.items() if "bridge" in docstring.text.lower()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.signals_beside] * (name in BRIDGED)) for name in ON_THE_HOST]
)
def test_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUINTEROP_BACKEND", "host")
    assert run(ON_THE_HOST[name]) == ""


@pytest.mark.parametrize("name", EXCERPTS)
def test_an_excerpt_stands_in_its_program(name: str) -> None:
    for path, lines in EXCERPTS[name].excerpts:
        program = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
        wanted = [line.strip() for line in lines.splitlines()]
        assert any(program[at : at + len(wanted)] == wanted for at in range(len(program)))


def _child(mode: str, expected: int, **variables: str) -> None:
    """Run those of a mode in a process of its own, where warnings are errors."""
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        variables[name] = os.pathsep.join(filter(None, (variables.get(name), os.environ.get(name))))
    program = ("-X", "faulthandler", "-W", "error", "-m", "tests.manual.examples", mode)
    assert printed(*program, cwd=ROOT, **variables).count(": passed\n") == expected


def test_on_cuda() -> None:
    expected = [name for name, docstring in SHOWN.items() if docstring.mode == "cuda"]
    _child("cuda", len(expected), **simulated.environment("cuda", {"GPUINTEROP_SIM_DEVICES": "2"}))


@pytest.mark.parametrize("library", ["torch", "mpi4py"])
def test_with(library: str) -> None:
    """``make test-exchange`` installs it apart from the environment of the tests."""
    prefix = os.environ.get("GPUINTEROP_TEST_EXCHANGE")
    variables = {"base": prefix, "platbase": prefix} if prefix else {}
    place = sysconfig.get_path("platlib", sysconfig.get_preferred_scheme("prefix"), vars=variables)
    if PathFinder.find_spec(library, [place]) is None:
        pytest.skip(f"{library} is not there: make test-exchange installs it")
    expected = [name for name, docstring in SHOWN.items() if docstring.mode == library]
    _child(library, len(expected), GPUINTEROP_BACKEND="host", PYTHONPATH=place, LD_LIBRARY_PATH=f"{prefix}/lib")


@pytest.mark.parametrize(("text", "said"), [
    (">>> device.backend\n'metal'", "'host'"),
    (">>> gi.errors.warn_leak('lost')", "lost"),
    (">>> undefined", "NameError"),
])  # fmt: skip
def test_a_wrong_example_is_found(text: str, said: str) -> None:
    assert said in run(Docstring("here", "", text, __file__, 1))
