"""The command that measures. What it measures is looked at here, and no time is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.cli.bench import calls, clock, command, frames, opengl, page, rig
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.programs import python

from .invoke import Done, invoke
from .parties import require_driver, require_opengl

KEYS = [
    "format", "date", "gpuinterop", "backend", "device", "stand_in", "versions", "vulkan", "python", "cpu", "cores",
    "figures",
]  # fmt: skip
CALLS = ("signal and wait", "batches", "gpuinterop timelines", "views", "import")


def bench(*arguments: str) -> Done:
    return invoke("bench", "--backend", "host", "--quick", *arguments)


def parsed(*arguments: str) -> dict[str, Any]:
    """The figures by name; each has times, or else says why."""
    done = bench("--json", *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert list(found) == KEYS
    for figure in found["figures"]:
        check_figure(figure)
    return {**found, "figures": {figure["name"]: figure for figure in found["figures"]}}


def check_figure(figure: dict[str, Any]) -> None:
    assert list(figure) == ["name", "unit", "judged_by", "problem", "times"]
    assert bool(figure["times"]) != bool(figure["problem"])
    for one in figure["times"]:
        assert list(one) == ["name", "median", "p10", "p90", "p99", "samples", "ratio"]
        assert 0 < one["p10"] <= one["median"] <= one["p90"] <= one["p99"]
        assert one["samples"] >= 3
        if one is figure["times"][0]:
            assert (one["name"], one["ratio"]) == ("gpuinterop", None)
        else:
            ours, theirs = figure["times"][0][figure["judged_by"]], one[figure["judged_by"]]
            assert one["ratio"] == pytest.approx(ours / theirs, abs=0.001)


def contenders(figure: dict[str, Any]) -> list[str]:
    return [one["name"] for one in figure["times"]]


@pytest.fixture
def host() -> Iterator[rig.Bench]:
    with rig.Bench("host", quick=True) as found:
        yield found


@pytest.fixture
def choose_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the bench find this Vulkan driver alone."""

    def choose(name: str) -> None:
        require_driver(name)
        word = name.replace("lavapipe", "llvmpipe")
        found = [one for one in list_drivers() if word in f"{one.name} {one.driver}".lower()]
        monkeypatch.setattr(rig, "list_drivers", lambda: found)

    return choose


def test_calls() -> None:
    found = parsed(*(word for name in CALLS for word in ("--only", name)))
    assert (found["format"], found["backend"], found["stand_in"]) == (1, "host", None)
    assert found["device"] == gi.get_backend("host").device().name
    assert {name: contenders(figure) for name, figure in found["figures"].items()} == {
        "signal": ["gpuinterop"],
        "wait": ["gpuinterop"],
        "signal, batch of 16": ["gpuinterop"],
        "wait, batch of 16": ["gpuinterop"],
        "signal, gpuinterop timeline": ["gpuinterop"],
        "wait, gpuinterop timeline": ["gpuinterop"],
        "import + map + close": ["gpuinterop"],
        "import + map + close, among 256 streams and 1,000 objects": ["gpuinterop", "gpuinterop, without them"],
        "view + np.from_dlpack": ["gpuinterop", "gpuinterop, one view", "NumPy's array to NumPy"],
        "import gpuinterop": ["gpuinterop", "import numpy"],
    }


def test_sharing() -> None:
    """In a process of its own: those that it starts have a tracker of their memory in common, which stays."""
    words = [
        part for name in ("tensors", "one array", "many arrays", "in order") for part in ("--only", f"sharing {name}")
    ]
    done = python("-m", "gpuinterop", "bench", "--backend", "host", "--quick", "--json", *words)
    assert (done.returncode, done.stderr) == (0, "")
    figures = {one["name"]: one for one in json.loads(done.stdout)["figures"]}
    beside = {}
    for name, figure in figures.items():
        assert figure["problem"] is None or " rounds, in " in figure["problem"] or not figure["times"]
        for one in figure["times"]:
            ours, theirs = figure["times"][0]["median"], one["median"]
            assert one["ratio"] == (None if one is figure["times"][0] else pytest.approx(ours / theirs, abs=0.001))
        beside[name] = contenders(figure)
    ours = ["gpuinterop"]
    by_name = [*ours, "shared_memory"]
    sizes = [
        {
            f"attach an array of another block, {size}": by_name,
            f"close an array of another block, {size}": by_name,
            f"attach an array of the same block, {size}": by_name,
            f"close an array of the same block, {size}": by_name,
        }
        for size in ("2 MiB", "1 GiB")
    ]
    many = [
        {
            f"share {arrays}": ours,
            f"attach {arrays}": by_name,
            f"all views of {arrays}": ours,
            f"share + attach + all views, {arrays}, each": [*ours, f"gpuinterop, {few} arrays"],
        }
        for few, arrays in ((25, "100 arrays in 100 blocks"), (500, "2,000 arrays in 4 blocks"))
    ]
    sides = [{f"acquire, the {side}": ours, f"release, the {side}": ours} for side in ("reader", "writer")]
    first = {"sharing tensors of torch": [], "attach the first array between two processes, 2 MiB": by_name}
    assert beside == {name: found for part in (first, *sizes, *many, *sides) for name, found in part.items()}
    assert "expected torch and a GPU" in figures["sharing tensors of torch"]["problem"]


def test_frames_between_processes() -> None:
    done = python("-m", "gpuinterop", "bench", "--backend", "host", "--quick", "--json", "--only", "sharing frames")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["figures"]
    assert {one["name"]: contenders(one) for one in found} == {
        "a frame of 1 KiB, until another process has read it": ["gpuinterop", "shared memory, sequence lock"],
        "a frame of 1 KiB, from its release until a reader that waits has it": ["gpuinterop", "a byte in a pipe"],
        "all calls for a frame, of the writer and the reader": ["gpuinterop"],
        "1080p at 60 a second, beside a reader that takes 1 s for each": ["gpuinterop"],
    }
    assert all(one["problem"] is None or " rounds, in " in one["problem"] for one in found[:3])
    assert re.fullmatch(r"[\d.]+ a second; of 6 the fast reader missed \d, the slow one \d", found[3]["problem"])
    assert all(one["median"] > 0 for figure in found for one in figure["times"])


def test_a_process_that_takes_too_long_ends_with_its_stacks() -> None:
    program = """\
from gpuinterop.cli.bench.clock import OURS, Times
from gpuinterop.cli.bench.party import Party

if __name__ == "__main__":
    times = Times()
    with Party("host") as party:
        with times.measuring("slow"):
            party("make", 1, 1, 4096)
            party("shares", 1_000_000, seconds=0.2)
        with times.measuring(OURS):
            party("handles")
    print(times.figure("share", "share").problem)
"""
    done = python("-c", program)
    assert "it failed: its process ended; 'shares' may take 0.2 s" in done.stdout
    assert "(most recent call first)" in done.stderr  # faulthandler may cut the stack of a thread that runs


@pytest.mark.parametrize(("driver", "mode"), [("swiftshader", ""), ("lavapipe", ", bridged")])
def test_frames(driver: str, mode: str, choose_driver: Callable[[str], None]) -> None:
    """A handoff may be bridged; a driver without a transfer queue is told."""
    choose_driver(driver)
    found = parsed("--only", "frames on")
    where = f"compute queue{mode}"
    assert {name: contenders(figure) for name, figure in found["figures"].items()} == {
        "frames on a transfer queue": [],
        f"submit + acquire + release, {where}": ["gpuinterop", "only vkQueueSubmit"],
        f"frame, queued ahead, {where}, no work": ["gpuinterop"],
        f"frame, wait_host each, {where}, no work": ["gpuinterop"],
        f"frame, queued ahead, {where}, 1 MiB": ["gpuinterop"],
        f"frame, wait_host each, {where}, 1 MiB": ["gpuinterop", "copies through the host"],
    }
    assert "to have a transfer queue" in found["figures"]["frames on a transfer queue"]["problem"]
    assert found["vulkan"] is not None


def test_frames_do_their_work(
    choose_driver: Callable[[str], None], host: rig.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compute side's fill is what Vulkan's memory holds; and what is copied through the host comes back."""
    choose_driver("swiftshader")
    seen: list[tuple[str, bytes]] = []
    made: list[Any] = []
    rigs: list[frames._Rig] = []
    create, enter = host.graphics.create_memory, frames._Rig.__init__

    def create_memory(size: int) -> Any:
        made.append(create(size))
        return made[-1]

    def init(self: frames._Rig, *more: Any) -> None:
        rigs.append(self)
        enter(self, *more)

    monkeypatch.setattr(host.graphics, "create_memory", create_memory)
    monkeypatch.setattr(frames._Rig, "__init__", init)

    def in_turns(contenders: dict[str, Any], *, calls: int, rounds: int, settle: Any) -> dict[str, Any]:
        for name, run in contenders.items():
            rigs[0].buffer.fill(0)
            run(3)
            settle()
            where = made[-1] if name == frames.STAGED else None
            seen.append((name, where.read(0, 4) if where else np.asarray(rigs[0].buffer.view((4,), "uint8")).tobytes()))
        return {name: clock.Spread.of([1.0]) for name in contenders}

    monkeypatch.setattr(frames, "in_turns", in_turns)
    names = [figure.name for figure in frames.on_compute_queue(host)]
    nothing, filled = bytes(4), b"\7" * 4
    assert len(names) == 5
    assert seen == [
        *(("gpuinterop", nothing), (frames.BARE, nothing)),
        *[("gpuinterop", nothing)] * 2,
        *[("gpuinterop", filled)] * 2,
        (frames.STAGED, filled),
    ]


def test_opengl() -> None:
    require_opengl()
    found = parsed("--only", "opengl")
    assert {name: contenders(figure) for name, figure in found["figures"].items()} == {
        "acquire + release + gl, OpenGL, bridged": ["gpuinterop"],
        "1 MiB to the screen, bridged, finished each": ["gpuinterop", "copies through the host"],
        "1 MiB to the screen, bridged, queued ahead": ["gpuinterop", "copies through the host"],
    }


def test_a_way_to_opengl_that_carries_nothing_has_no_time(host: rig.Bench) -> None:
    require_opengl()
    host.by_hand = SimpleNamespace(stream=lambda: None, registered=lambda *given: nullcontext(lambda byte: None))
    _, each, ahead = opengl.frames(host)
    for figure in (each, ahead):
        assert list(figure.times) == ["gpuinterop", "copies through the host"]
        assert figure.problem == "registered and mapped: expected 1048576 bytes of 1 in OpenGL, got others"
        assert figure.failed


def test_what_the_device_cannot_do_is_left_out_with_the_reason() -> None:
    """A process of its own: a device keeps the table that it begins with."""
    names = ["signal and wait", "views", "threads"]
    words = [part for name in names for part in ("--only", name)]
    command = ("-W", "error", "-m", "gpuinterop", "bench", "--backend", "host", "--quick", "--json", *words)
    done = python(*command, GPUINTEROP_DISABLE="*_semaphore:timeline_fd")
    assert (done.returncode, done.stderr) == (0, "")
    figures = {one["name"]: one for one in json.loads(done.stdout)["figures"]}
    assert list(figures) == [names[0], names[2], "view + np.from_dlpack"]
    for name in (names[0], names[2]):
        assert "semaphore TimelineFd: turned off by GPUINTEROP_DISABLE" in figures[name]["problem"]


def test_a_failure_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: rig.Bench) -> Iterator[clock.Figure]:
        yield clock.Figure("the first half", times={"gpuinterop": clock.Spread.of([1.0])})
        raise gi.DriverError("vkQueueSubmit", -4, "VK_ERROR_DEVICE_LOST")

    monkeypatch.setattr(command, "_PARTS", {"broken": broken, "views": calls.views})
    done = bench("--json")
    assert done.exit_code == 1
    figures = json.loads(done.stdout)["figures"]
    assert [one["name"] for one in figures] == ["the first half", "broken", "view + np.from_dlpack"]
    assert figures[1]["problem"] == "it failed: vkQueueSubmit failed with VK_ERROR_DEVICE_LOST (-4)"
    done = bench()
    assert done.exit_code == 1
    assert "broken: it failed: vkQueueSubmit" in done.stdout


# -- pages ---------------------------------------------------------------------------------------------------------


def test_the_manuals_page_has_its_recorded_runs(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    places = {"README.md": [page.SPEEDS], "docs/performance.md": [page.SPEEDS, page.FIGURES]}
    (tmp_path / "docs").mkdir()
    for name, marks in places.items():
        text = (root / name).read_text(encoding="utf-8")
        for begin, end in marks:
            text = f"{text[: text.index(begin) + len(begin)]}\nwhat was there\n{text[text.index(end) :]}"
        (tmp_path / name).write_text(text, encoding="utf-8")
    runs = (
        str(root / "docs" / "performance" / f"{name}.json")
        for name in ("h200", "h200-sharing", "h200-opengl", "two-cores", "two-cores-sharing")
    )
    done = invoke("bench", *(word for name in places for word in ("--page", str(tmp_path / name))), *runs)
    assert (done.exit_code, done.output) == (0, "")
    for name in (*places, "docs/performance.svg"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (root / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("gone", [*page.FIGURES, *page.SPEEDS, "submit + acquire + release, compute queue"])
def test_a_page_or_a_run_that_lacks_a_part_is_left_as_it_was(tmp_path: Path, gone: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    copies = [tmp_path / "performance.md", tmp_path / "h200.json"]
    for copy, file in zip(copies, (docs / "performance.md", docs / "performance" / "h200.json"), strict=True):
        copy.write_text(file.read_text(encoding="utf-8").replace(gone, "gone"), encoding="utf-8")
    before = copies[0].read_text(encoding="utf-8")
    done = invoke("bench", "--page", str(copies[0]), str(copies[1]))
    assert done.exit_code != 0
    assert "expected" in done.stderr
    assert copies[0].read_text(encoding="utf-8") == before
