"""Find the examples in the library's docstrings, and run them.

``python -m tests.manual.examples cuda`` runs those on CUDA: on the simulated driver, which the process must find by its
usual name. ``torch`` or ``mpi4py`` in its place runs those with that.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gpuinterop as gi
from tests.missing_vulkan import give_up

from .names import common, context, graphics

LIBRARY: Final = Path(gi.__file__).parent
MARKS: Final = {"cuda": "On CUDA (here a simulated driver):", "torch": "With torch:", "mpi4py": "With mpi4py:"}
"""The lines in a docstring whose examples a process of their own runs."""
GRAPHICS: Final = {"instance", "physical_device", "vk_device", "queue", "vk", "record", "submit"}
EXCERPT: Final = re.compile(r"^( *)From ``(\S+)``::\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring of the library: of a module, a class, a function, or a name that is assigned."""

    module: str
    name: str
    """``Device.import_memory``; empty for the module's own."""
    text: str
    file: str
    line: int
    of_value: bool = False
    """Whether it is that of a property or of a name that is assigned."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def examples(self) -> list[doctest.Example]:
        return doctest.DocTestParser().get_examples(self.text, str(self))

    @property
    def excerpts(self) -> list[tuple[str, str]]:
        """What it quotes of a program: the program's path, and the lines."""
        found = EXCERPT.findall(self.text)
        return [(path, re.sub(rf"^{indent}    ", "", text, flags=re.MULTILINE).strip()) for indent, path, text in found]

    @property
    def mode(self) -> str:
        """``host``, or another process's: ``cuda``, ``torch``, ``mpi4py``."""
        return next((mode for mode, mark in MARKS.items() if mark in self.text), "host")


def docstrings() -> Iterator[Docstring]:
    """All of the library's, from its source, which has those of assigned names too."""
    for path in sorted(LIBRARY.rglob("*.py")):
        module = ".".join(("gpuinterop", *path.relative_to(LIBRARY).with_suffix("").parts)).removesuffix(".__init__")
        for name, found, of_value in _strings(ast.parse(path.read_text(encoding="utf-8")), ""):
            yield Docstring(module, name, str(found.value), str(path), found.lineno, of_value)


def _strings(
    owner: ast.Module | ast.ClassDef | ast.FunctionDef, prefix: str
) -> Iterator[tuple[str, ast.Constant, bool]]:
    named = prefix.removesuffix(".")
    of_value = any(getattr(one, "id", "") == "property" for one in getattr(owner, "decorator_list", ()))
    for node in owner.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield named, node.value, of_value
        named, of_value = "", True
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield from _strings(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name):
                named = prefix + target.id


def run(docstring: Docstring) -> str:
    """Run its examples in a namespace of their own; return what went wrong, and what was left open."""
    said: list[str] = []
    with ExitStack() as scope:
        scope.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = lambda one: said.append(f"left behind: {one.exc_value!r}\n")
        names = scope.enter_context(common("cuda" if docstring.mode == "cuda" else "host"))
        code = ast.parse("".join(example.source for example in docstring.examples))
        opengl = "gi.opengl" in ast.unparse(code)
        try:
            if opengl:
                names |= scope.enter_context(context())
            if GRAPHICS & {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}:
                names |= scope.enter_context(graphics(of_opengl=opengl))
        except Exception as error:
            give_up(f"there is no software driver: {error!r}")
        parse = doctest.DocTestParser().get_doctest
        test = parse(docstring.text, names, str(docstring), docstring.file, docstring.line - 1)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, out=said.append)
        test.globs.clear()
        vars(builtins)["_"] = None  # what was shown last
        gc.collect()  # what was left open warns now
    return "".join(said)


def main(mode: str) -> int:
    """Run those of a mode; the exit status is the number of those that failed."""
    from gpuinterop.testing.simulated import assert_simulated
    from tests.simulated.driver import Simulator

    if mode == "cuda":
        assert_simulated()
        simulator = Simulator.attach()
    failed = 0
    for docstring in docstrings():
        if docstring.mode == mode:
            with simulator.kept_rules("cuda") if mode == "cuda" else nullcontext():
                said = run(docstring)
            failed += bool(said)
            print(f"{docstring}: {said or 'passed'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
