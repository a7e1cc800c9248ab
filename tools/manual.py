"""Find and run the code blocks of README.md and docs.

A page is a program. After the language, a fence has marks for where its block runs:

    ```python any                  everywhere: each of these four
    ```python host                 in CI, on the host backend and real software Vulkan
    ```python cuda hip             in CI, on the simulated drivers, with two devices
    ```python gpu                  on a GPU; docs/recorded.toml has the date and a hash of what ran
    ```python any file=peer.py     not run: appended to that file beside the program
    ```console any                 each line that begins with "$ " is a command; its output follows
    ```text output                 the output of the block before it; "..." stands for anything
    ```toml in=docs/x.toml         an exact excerpt of that file of the checkout
    ```sh reader                   for the reader to run: it installs, needs the checkout, or the reader's hardware

All Python of a page of one kind is one program, page.py, as if a reader pasted the blocks into a file in order. It runs
in a separate folder with the page's files, and must print exactly the outputs. The commands run after it.

Usage:
    python -m tools.manual run KIND [PAGE...]       run the programs of that kind, of all or these pages: a table
    python -m tools.manual record OUT [PAGE...]     run those of kind gpu on this machine; write OUT, and pictures
    python -m tools.manual recorded OUT             merge what `record` wrote on another machine
"""

from __future__ import annotations

import datetime
import doctest
import hashlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinterop.testing import simulated
from tools.count_lines import code_lines

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
EXAMPLES = DOCS / "examples"
RECORD = DOCS / "recorded.toml"
KINDS = {"host", "cuda", "hip", "gpu"}
"""Where a block runs. ``any`` means each of them."""
LIMIT_S = 300
SOURCES = (".py", ".comp", ".spv")
FRAMEWORKS = ("cupy", "jax", "numba", "numpy", "torch", "warp")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    marks: tuple[str, ...]
    """Kinds, or ``output``, or ``reader``, or ``in=FILE``, or nothing."""
    file: str
    """The file to write the code to."""
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """The README and the pages of docs, as paths in the checkout."""
    found = (path for path in DOCS.rglob("*.md") if not {"_build", "_generated"} & set(path.parts))
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in found)]


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 2  # the first line of the code
        language, *marks = found["info"].split() or [""]
        file = next((mark.removeprefix("file=") for mark in marks if mark.startswith("file=")), "")
        if language.startswith("{"):  # a directive of MyST
            continue
        indent = len(found["indent"])
        code = "".join(text[indent:] for text in found["code"].splitlines(keepends=True))
        yield Block(page, line, language, tuple(marks), file, code)


def indented(page: str) -> Iterator[str]:
    """Find code that is indented instead of fenced, so that it cannot be marked: page and line."""
    gone = re.compile(rf"{_FENCE.pattern}|^ *```.*?^ *```$|<!--.*?-->", _FENCE.flags)
    text = (ROOT / page).read_text(encoding="utf-8")
    text = gone.sub(lambda found: re.sub(r"[^\n]+", "", found[0]), text)
    in_list, before = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"( {4}|\t)\s*\S", line) and not before and not in_list:
            yield f"{page}:{number}"
        elif line.strip() and not line.startswith(" "):
            in_list = re.match(r"([-*+]|\d+[.)]) ", line) is not None
        before = line.strip()


def program(page: str, kind: str) -> list[Block]:
    """The page's blocks of this kind, with the outputs that follow them."""
    found: list[Block] = []
    taken = False
    for block in blocks(page):
        if "output" not in block.marks:
            taken = not {kind, "any"}.isdisjoint(block.marks)
        if taken:
            found.append(block)
    return found


def programs(kind: str) -> list[str]:
    """Pages with blocks of this kind."""
    return [page for page in pages() if program(page, kind)]


def source_of(page: str) -> bytes:
    """What runs on a GPU: its code, the outputs that it promises, and the examples that it or they name."""
    blocks = program(page, "gpu")
    source = "".join(bare(one.code) if one.language == "python" else one.code for one in blocks).encode()
    texts = {path: _read(path) for path in sorted(EXAMPLES.glob("*.*")) if path.suffix in SOURCES}
    folders = (EXAMPLES / name.decode() for name in set(re.findall(rb"\bcd (\w+)", source)))
    used = {path: _read(path) for folder in folders for path in sorted(folder.rglob("*.py"))}
    todo = [source, *used.values()]
    while todo:
        text = todo.pop()
        new = {
            path: texts[path] for path in texts.keys() - used.keys() if re.search(rf"\b{path.stem}\b".encode(), text)
        }
        used |= new
        todo += new.values()
    return b"".join((source, *(used[path] for path in sorted(used))))


def bare(code: str) -> str:
    """Python code without what can change after a run: comments, docstrings and blank lines."""
    return "".join(f"{line}\n" for line in code_lines(code))


def _read(path: Path) -> bytes:
    return bare(path.read_text(encoding="utf-8")).encode() if path.suffix == ".py" else path.read_bytes()


def digest(page: str) -> str:
    """A hash of the code and the outputs of what runs on a GPU."""
    return hashlib.sha256(source_of(page)).hexdigest()


def recorded() -> dict[str, dict[str, Any]]:
    """What ran on a GPU, by page."""
    if not RECORD.exists():
        return {}
    return {run["page"]: run for run in tomllib.loads(RECORD.read_text(encoding="utf-8"))["run"]}


# -- running -----------------------------------------------------------------------------------------------------------


def run(page: str, kind: str, *, pictures: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a page's program, then its commands, in an empty folder; the examples' commands in a copy of their folder.

    It stops at the first that fails, prints something else, or leaves an object open. Pictures go into `pictures`.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment.pop("GPUINTEROP_BACKEND", None)  # on a GPU a page must find it
    if kind == "host":
        environment["GPUINTEROP_BACKEND"] = kind
    elif kind != "gpu":
        environment = simulated.environment(kind, environment | {"GPUINTEROP_SIM_DEVICES": "2"})
    warnings = (os.environ.get("PYTHONWARNINGS"), "error::ResourceWarning")  # also in its children
    environment["PYTHONWARNINGS"] = ",".join(filter(None, warnings))
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    extra = [str(EXAMPLES), os.environ.get("GPUINTEROP_TEST_FRAMEWORKS", ""), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, extra))
    done = subprocess.CompletedProcess(page, 0, "", "")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "here"
        if page.startswith("docs/examples/"):
            shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir()
        for command, promised in _commands(page, kind, folder):
            step = subprocess.run(
                ["bash", "-euc", command],
                cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=LIMIT_S,
            )  # fmt: skip
            # Newer validation layers print where they log.
            step.stdout = re.sub(r"^Validation Layer Info - .*\n", "", step.stdout, flags=re.MULTILINE)
            done.stdout += step.stdout
            done.stderr += step.stderr
            if step.returncode:
                wrong = f"ended with status {step.returncode}"
            elif "LeakedResourceWarning" in step.stderr:  # from a finalizer or a child, without an exit status
                wrong = "left an object open"
            elif promised is not None and not doctest.OutputChecker().check_output(promised, step.stdout, _LIKE):
                wrong = f"expected\n{promised}\ngot\n{step.stdout}"
            else:
                continue
            done.returncode = 1
            done.stderr += f"{page}: `{command}`: {wrong}"
            break
        if pictures is not None:
            for picture in (*folder.glob("*.png"), *folder.glob("*.gif")):
                shutil.copy(picture, pictures)
    return done


def _commands(page: str, kind: str, folder: Path) -> list[tuple[str, str | None]]:
    """Write the page's files into the folder; return its commands, and each one's output if the page has it."""
    lines: list[str] = []  # of page.py, with the page's line numbers
    printed = ""
    found: list[tuple[str, str | None]] = []
    for block in program(page, kind):
        if "output" in block.marks:
            printed += block.code
        elif block.file:
            with (folder / block.file).open("a", encoding="utf-8") as file:
                file.write(block.code)
        elif block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
        else:
            said = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.code, re.MULTILINE)
            found += [(command, promised or None) for command, promised in said]
    if lines:
        (folder / "page.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
        found.insert(0, ("python page.py", printed))
    return found


# -- recording ---------------------------------------------------------------------------------------------------------


def _machine(page: str) -> dict[str, str]:
    """The device, and the versions of what the page's program uses."""
    import gpuinterop as gi

    backend = gi.get_backend("cuda")
    versions = {**backend.versions, "Python": platform.python_version()}
    for name in sorted(
        set(re.findall(r"^\s*(?:import|from) (\w+)", source_of(page).decode(errors="replace"), re.MULTILINE))
    ):
        if name in FRAMEWORKS:
            versions[name] = str(importlib.import_module(name).__version__)
    return {"device": backend.device().name, "software": ", ".join(f"{name} {text}" for name, text in versions.items())}


def _write(file: Path, runs: Sequence[dict[str, Any]]) -> None:
    import tomli_w

    text = tomli_w.dumps({"run": runs}, multiline_strings=True)
    note = "# What ran on a GPU, and a hash of its source; `python -m tools.manual record` writes it. Do not edit.\n\n"
    file.write_text(note + text, encoding="utf-8")


def _run(kind: str, only: Sequence[str], out: Path | None = None) -> int:
    """Run the programs and print a table; with `out`, record those that passed on a GPU."""
    runs, wanted = [], only or programs(kind)
    for page in wanted:
        done = run(page, kind, pictures=out and out.parent)
        print("FAILED" if done.returncode else "passed", page, flush=True)
        if done.returncode or only:
            print(done.stdout[-4000:], done.stderr[-4000:])
        if not done.returncode:
            what = {"page": page, "sha256": digest(page), "date": datetime.date.today()}
            machine = _machine(page) if kind == "gpu" else {}  # raises without a GPU: then the pages ran on the host
            runs.append({**what, **machine, "output": done.stdout})
    if out is not None:
        _write(out, runs)
    return int(len(runs) < len(wanted))


def _take_over(out: Path) -> int:
    """Merge another machine's record into this one; remove programs that no longer exist."""
    runs = recorded() | {run["page"]: run for run in tomllib.loads(out.read_text(encoding="utf-8"))["run"]}
    _write(RECORD, [runs[page] for page in programs("gpu") if page in runs])
    return 0


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["run", kind, *only] if kind in KINDS:
            return _run(kind, only)
        case ["record", out, *only]:
            return _run("gpu", only, Path(out))
        case ["recorded", out]:
            return _take_over(Path(out))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
