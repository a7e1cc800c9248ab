"""``tools/bench``: figures have their yardsticks, who does not do the work has no time, and the manual has the runs."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

import pytest

from gpuinterop.testing import simulated
from tests.cli.parties import require_driver
from tests.programs import python
from tools.bench import clock, page
from tools.manual import ROOT

FETCHED: Final = [path for path in os.environ.get("GPUINTEROP_TEST_FRAMEWORKS", "").split(os.pathsep) if path]
"""Where ``make test-manual`` has torch, and on x86-64 iceoryx2 and hip-python."""
OURS: Final = "gpuinterop"
FRAME: Final = "frame of 1,024 bytes to another process and back"
NO_VULKAN: Final = dict.fromkeys(
    ("frames on a transfer queue", "frames on a compute queue"), "expected a Vulkan driver of Simulated"
)
TIMES: Final = {
    "host": {
        "signal": [OURS],
        "wait": [OURS],
        "import + map + close": [OURS],
        "submit + acquire + release, compute queue": [OURS, "only vkQueueSubmit"],
        "frame, queued ahead, compute queue, no work": [OURS],
        "frame, wait_host each, compute queue, 1 MiB": [OURS, "copies through the host"],
        "torch: dump 40 tensors of 16 KiB": [OURS, "torch"],
        "torch: load 40 tensors of 16 KiB": [OURS, "torch"],
        FRAME: [OURS, "iceoryx2"],
    },
    "cuda": {
        "signal": [OURS, "by hand, reused structs", "C"],
        "wait": [OURS, "by hand, reused structs", "C"],
        "import + map + close": [OURS, "by hand", "C"],
        FRAME: [OURS, "iceoryx2"],
    },
    "hip": {"import + map + close": [OURS, "by hand"], FRAME: [OURS, "iceoryx2"]},
}
PAGES: Final = {"README.md": [page.SPEEDS], "docs/performance.md": [page.FIGURES, page.SPEEDS]}
TENSORS: Final = "sharing tensors of torch"
PROBLEMS: Final = {
    "host": {"frames on a transfer queue": "expected SwiftShader .* to have a transfer queue"},
    "cuda": {**NO_VULKAN, TENSORS: "expected torch on a GPU"},
    "hip": {
        **NO_VULKAN,
        TENSORS: "expected torch on a GPU",
        "signal and wait": "HIP cannot import semaphores on Linux",
    },
}


def has(package: str) -> bool:
    found = PathFinder.find_spec(package, FETCHED) is not None
    assert found or not FETCHED or platform.machine() != "x86_64", f"expected {package} in {FETCHED}"
    return found


def environment(kind: str, **variables: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *FETCHED, *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {**os.environ, "PYTHONPATH": paths, **variables}
    return common if kind == "host" else simulated.environment(kind, common)


def bench(kind: str, *arguments: str, folder: Path, patch: str = "", **variables: str) -> tuple[int, dict[str, Any]]:
    """Run the bench after these lines of Python; return its exit status and its figures by name."""
    file = folder / "figures.json"
    words = ["bench", "--backend", kind, "--quick", "--json", str(file), *arguments]
    program = f"""\
import sys
from tools.bench import __main__, by_hand, calls, messages, vulkan
if __name__ == "__main__":
    {patch or "pass"}
    sys.argv = {words}
    sys.exit(__main__.main())
"""
    (folder / "run.py").write_text(program)
    done = python("-W", "error", str(folder / "run.py"), cwd=ROOT, env=environment(kind, **variables))
    assert file.exists(), done.stdout + done.stderr
    run = json.loads(file.read_text())
    assert (run["format"], run["backend"], bool(run["stand_in"])) == (1, kind, kind != "host")
    return done.returncode, {figure["name"]: figure for figure in run["figures"]}


def contenders(figure: dict[str, Any]) -> list[str]:
    return [time["name"] for time in figure["times"]]


@pytest.mark.parametrize("kind", ["host", "cuda", "hip"])
def test_every_figure_has_its_yardsticks(kind: str, tmp_path: Path) -> None:
    """What has no times says why, and nothing else has none."""
    require_driver("swiftshader")
    if kind == "hip" and not has("rocm"):
        pytest.skip("make test-manual has hip-python")
    times, problems = TIMES[kind], dict(PROBLEMS[kind])
    if not has("iceoryx2"):
        times = {**times, FRAME: [OURS]}
        problems[FRAME] = "iceoryx2: expected iceoryx2, which is not installed"
    if not has("torch"):
        times = {name: who for name, who in times.items() if "torch" not in who}
        problems[TENSORS] = "expected torch, which is not installed"
    status, figures = bench(kind, folder=tmp_path)
    assert {name: contenders(figure) for name, figure in figures.items() if figure["times"]} == times
    assert {name for name, figure in figures.items() if figure["problem"]} == problems.keys()
    for name, problem in problems.items():
        assert re.search(problem, figures[name]["problem"]), name
    assert status == 0
    for figure in figures.values():
        for time in figure["times"]:
            assert 0 < time["p10"] <= time["median"] <= time["p90"] <= time["p99"]
            assert time["samples"] >= 3


@pytest.mark.parametrize(
    ("kind", "part", "patch", "failed"),
    [
        (
            "cuda",
            "signal",
            "by_hand.CudaTimeline._call = lambda *given: lambda value: (0,)",
            ["by hand, reused structs"],
        ),
        ("cuda", "signal", "calls.in_c = lambda *given: lambda *numbers: None", ["C"]),
        ("host", "compute", "vulkan.gi.Buffer.fill = lambda *given, **more: None", [OURS, "copies through the host"]),
        (
            "host",
            "sharing frames",
            "receive = messages._Ours.receive; messages._Ours.receive = lambda end: receive(end)[:1]",
            [OURS],
        ),
    ],
    ids=["a signal by hand", "a signal in C", "a frame's work", "a frame's bytes"],
)
def test_who_does_not_do_its_work_has_no_time(
    kind: str, part: str, patch: str, failed: list[str], tmp_path: Path
) -> None:
    require_driver("swiftshader")
    status, figures = bench(kind, "--only", part, folder=tmp_path, patch=f"calls.PATIENCE_S = 0.5; {patch}")
    assert status == 1
    judged = [figure for figure in figures.values() if "it failed: expected" in figure["problem"]]
    assert judged
    for figure in judged:
        assert set(contenders(figure)) == set(TIMES[kind][figure["name"]]) - set(failed)


def test_a_driver_that_does_nothing_is_measured(tmp_path: Path) -> None:
    """What it was told to do is then not looked at."""
    status, figures = bench("cuda", folder=tmp_path, GPUINTEROP_SIM_DOES_NOTHING="1", CC="/nonexistent")
    assert status == 0
    for name in ("signal", "wait"):
        assert contenders(figures[name]) == [OURS, "by hand, reused structs"]
        assert "C: expected a C compiler" in figures[name]["problem"]
    assert "which does nothing" in figures["sharing frames"]["problem"]


def test_contenders_alternate() -> None:
    """Each is the first once in a while; one that fails is left out, and the others go on."""
    turns: list[str] = []

    def turn(name: str) -> dict[str, float]:
        turns.append(name)
        if name == "three":
            raise ValueError("lost")
        return {"": 2.0}

    comparison = clock.Comparison(3, checks=True)
    for name in ("one", "two", "three"):
        comparison.add(name, partial(turn, name))
    figure = comparison.measure().figure("figure")
    assert turns == ["one", "two", "three", "two", "one", "one", "two", "two", "one"]
    assert [(time["name"], time["median"], time["samples"]) for time in figure.times] == [
        ("one", 2.0, 3),
        ("two", 2.0, 3),
    ]
    assert (figure.problem, figure.failed) == ("three: it failed: lost", True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the page writer reads and writes, without the figures."""
    shutil.copytree(ROOT / "docs" / "performance", tmp_path / "docs" / "performance")
    for name, marks in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for begin, end in marks:
            text = f"{text[: text.index(begin) + len(begin)]}\nwhat was there\n{text[text.index(end) :]}"
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_manual_has_the_recorded_runs(copy: Path) -> None:
    page.write(copy)
    for name in (*PAGES, "docs/performance.svg"):
        assert (copy / name).read_text(encoding="utf-8") == (ROOT / name).read_text(encoding="utf-8")
    runs = [json.loads(file.read_text()) for file in (ROOT / "docs" / "performance").glob("*.json")]
    recorded = {
        (run["device"], figure["name"], time["name"]): f"{time['median']:,.{0 if time['median'] >= 100 else 2}f}"
        for run in sorted(runs, key=lambda run: str(run["date"]))
        for figure in run["figures"]
        for time in figure["times"]
    }
    shown, machine, row = 0, "", ""
    for line in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").replace("\\_", "_").splitlines():
        if line.startswith("### "):
            machine = line.removeprefix("### ").partition(",")[0]
        elif cells := re.fullmatch(r"\| (.*) \| (.+) \| ([\d.,]+) \| .* to .* \| .* \| .* \|", line):
            row = cells[1] or row
            assert recorded[machine, row, cells[2]] == cells[3]
            shown += 1
    assert shown > 20


@pytest.mark.parametrize(("name", "mark"), [(name, mark) for name in PAGES for marks in PAGES[name] for mark in marks])
def test_a_page_without_a_place_is_left_as_it_was(copy: Path, name: str, mark: str) -> None:
    text = (copy / name).read_text(encoding="utf-8").replace(mark, "gone")
    (copy / name).write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"expected a page to have <!-- .* -->, once"):
        page.write(copy)
    assert (copy / name).read_text(encoding="utf-8") == text
