"""Every block of the README and of docs runs, or ran on a GPU and has not changed since."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from gpuinterop.capabilities import read_verified
from gpuinterop.cli import app
from tests.cli.parties import require_driver
from tests.missing_vulkan import give_up
from tools import manual

ROOT = manual.ROOT
MARKS = {*manual.KINDS, "any", "output", "reader"}
RUN = {"python", "console"}
"""Languages of fences that are run."""
TEXT = {"text", "toml", "yaml", ""}
"""Languages of fences that nothing runs."""
WIDTH = 88
MATCHES_VULKAN = "gi.vulkan.identity("


def _code(page: str, kind: str) -> str:
    return "".join(block.code for block in manual.program(page, kind))


def _runs() -> Iterator[ParameterSet]:
    # hip-python has wheels for x86-64 only.
    for kind in ("host", "cuda", *["hip"] * (platform.machine() == "x86_64")):
        for page in manual.programs(kind):
            bridged = "bridge" in _code(page, kind).lower()
            yield pytest.param(kind, page, marks=[pytest.mark.signals_beside] * bridged)


# The host has waited for the last signal, so the queue is done with the handoff's semaphores. The layer takes them for
# pending until Vulkan itself waits.
@pytest.mark.unjustified("VUID-vkDestroySemaphore-semaphore-01137")
@pytest.mark.parametrize(("kind", "page"), list(_runs()))
def test_a_page_runs(kind: str, page: str) -> None:
    if "vulkan_application" in _code(page, kind):
        require_driver("swiftshader")
    done = manual.run(page, kind)
    if kind == "hip" and MATCHES_VULKAN in _code(page, kind):  # by a PCI address, which software Vulkan does not have
        assert "gpuinterop.errors.DeviceNotFoundError: identity: no device is" in done.stderr, done.stdout
    else:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.signals_beside
@pytest.mark.parametrize(
    ("driver", "kind", "said"),
    [
        ("lvp", "host", ""),
        ("swiftshader", "host", ""),
        ("lvp", "cuda", "DeviceNotFoundError: identity: no device is llvmpipe"),
        ("none", "host", r"BackendUnavailableError: .* software driver: (make -C \S+ vulkan; \. |sudo |install )"),
    ],
    ids=["lavapipe", "SwiftShader", "lavapipe on CUDA", "none"],
)
def test_the_readmes_frame_where_drivers_are_missing(
    monkeypatch: pytest.MonkeyPatch, driver: str, kind: str, said: str
) -> None:
    files = [file for file in os.environ.get("VK_DRIVER_FILES", "").split(os.pathsep) if driver in file]
    if not files and driver != "none":
        give_up(f"no driver in VK_DRIVER_FILES is {driver}")
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.setenv(name, os.pathsep.join(files) or "/none")
    done = manual.run("README.md", kind)
    assert (done.returncode == 0) == (not said), done.stderr
    assert re.search(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    "page", [page for page in manual.pages() if any("gpu" in block.marks for block in manual.blocks(page))]
)
def test_a_page_ran_on_a_gpu_as_it_stands(page: str) -> None:
    run = manual.recorded().get(page)
    assert run is not None, f"{page} has not run on a GPU: python -m tools.manual record OUT {page}"
    assert run["sha256"] == manual.digest(page), f"{page} has changed since {run['date']}: record it again"


def test_each_block_is_marked() -> None:
    unmarked = []
    for page in manual.pages():
        for block in manual.blocks(page):
            known = MARKS.issuperset(mark for mark in block.marks if "=" not in mark)
            runs = (manual.KINDS | {"any"}) & set(block.marks) and (block.file or block.language in RUN)
            excerpt = any(mark.startswith("in=") for mark in block.marks)
            reader = block.language == "sh" and block.marks == ("reader",)
            if not known or not (runs or excerpt or reader or block.language in TEXT):
                unmarked.append(f"{block}: {block.language} {' '.join(block.marks)}")
        unmarked += manual.indented(page)
    assert not unmarked, "say where each of these runs: " + ", ".join(unmarked)


def test_a_block_is_no_wider_than_a_page() -> None:
    blocks = (block for page in manual.pages() for block in manual.blocks(page))
    assert [str(block) for block in blocks if any(len(line) > WIDTH for line in block.code.splitlines())] == []


def test_what_a_reader_runs_is_there() -> None:
    """CI does not run these commands; make has their targets, the package its extras, gpuinterop its commands."""
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    seen = set()
    for page in manual.pages():
        for block in (one for one in manual.blocks(page) if one.language == "sh" and "reader" in one.marks):
            lines = block.code.replace("\\\n", " ").splitlines()
            for line in (line for line in lines if not line.startswith("#")):
                words = shlex.split(line, comments=True)
                seen.add(words[0])
                if words[0] == "make":
                    assert words[1] in targets, block
                elif words[:2] == ["pip", "install"]:
                    assert {one for text in re.findall(r"\[(.*)\]", line) for one in text.split(",")} <= extras, block
                elif "gpuinterop" in words:
                    with pytest.raises(SystemExit) as ended:
                        app.run([*words[words.index("gpuinterop") + 1 :], "--help"])
                    assert ended.value.code == 0, block
    assert {"make", "pip", "gpuinterop"} <= seen


def test_an_excerpt_stands_in_its_file() -> None:
    found = 0
    for page in manual.pages():
        for block in manual.blocks(page):
            for mark in block.marks:
                if mark.startswith("in="):
                    found += 1
                    assert block.code in (ROOT / mark.removeprefix("in=")).read_text(encoding="utf-8"), block
    assert found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python host\nprint(1)\n```\n\n```text output\n2\n```\n", "expected"),
        ("```console host\n$ false\n```\n", "ended with status 1"),
        (
            "```python host\nimport gpuinterop as gi\ngi.device().allocate(4096).export()\n```\n",
            "LeakedResourceWarning",
        ),
    ],
    ids=["another output", "a command's status", "a leak"],
)
def test_a_wrong_page_fails(tmp_path: Path, text: str, said: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    done = manual.run(str(page), "host")
    assert done.returncode != 0
    assert re.search(said, done.stderr)


def test_every_page_is_in_the_navigation() -> None:
    named: set[Path] = set()
    for page in manual.pages():
        folder = (ROOT / page).parent
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL):
            entries = [line for line in tree.split() if not line.startswith(":")]
            named |= {folder / f"{entry}.md" for entry in entries}
    missing = [page for page in manual.pages() if ROOT / page not in named]
    assert missing == ["README.md", "docs/index.md"]


def test_the_diagram_of_the_layers_is_what_the_linter_checks() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (one["layers"] for one in linter["contracts"] if one["type"] == "layers")
    (block,) = (one for one in manual.blocks("CONTRIBUTING.md") if "layers" in one.marks)
    drawn = [line.split("  ")[0] for line in block.code.splitlines()]
    assert drawn == [layer.replace("(", "").replace(")", "") for layer in layers]


def _public() -> set[str]:
    """Every name of a module's ``__all__``, by the shortest way to it."""
    import gpuinterop as gi

    names = {f"gpuinterop.{name}" for name in gi.__all__ if name not in gi._MODULES}
    for module in (*gi._MODULES, "testing.exporters", "testing"):
        here = (f"gpuinterop.{module}.{name}" for name in importlib.import_module(f"gpuinterop.{module}").__all__)
        names |= {name for name in here if f"gpuinterop.{name.rpartition('.')[2]}" not in names}
    return names


def test_every_public_name_stands_in_the_reference() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in (manual.DOCS / "reference" / "api").glob("*.md")}
    listed = set(re.findall(r"^\.\. (?:auto\w+|py:data):: ([\w.]+)", "\n".join(pages.values()), re.MULTILINE))
    suites = {"gpuinterop.testing.suites.Suite", "gpuinterop.testing.suites.base.Harness"}
    assert sorted((_public() | suites) - listed) == []
    assert "_generated/suites.md" in pages["testing.md"], "the other suites"


def test_a_link_to_a_name_leads_to_its_entry() -> None:
    import gpuinterop as gi

    found = 0
    for page in manual.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, target in re.findall(r"\[`gi\.([\w.]+)(?:\(\))?`\]\((\S*\bapi/\w+\.md)\)", text):
            found += 1
            reduce(getattr, name.split("."), gi)
            entries = ((ROOT / page).parent / target).read_text(encoding="utf-8")
            assert re.search(rf":: gpuinterop\.({name}|{name.rpartition('.')[0]})$", entries, re.MULTILINE), name
    assert found


def test_a_stand_in_device_is_never_shown_as_a_run() -> None:
    sys.path.insert(0, str(manual.DOCS / "_extensions"))
    try:
        pages = importlib.import_module("manual_pages")
    finally:
        sys.path.pop(0)
    assert read_verified(pages.STAND_IN) == []
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in pages.matrix().splitlines())
    said = {title: {row[0].strip("`"): row[column] for row in rows[1:]} for column, title in enumerate(head)}
    (ours,) = (title for title in head if "stand-in" in title)
    shown = tomllib.loads(pages.STAND_IN.read_text(encoding="utf-8"))["cells"]
    assert {cell for cell, word in said[ours].items() if word} == set(shown)
    for title, column in said.items():
        assert set(column.values()) <= {"", "stand-in" if title == ours else "yes"} or title == ""
