"""The command that measures. What it measures is looked at here, and no time is."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.cli.bench import calls, clock, command, floor, frames, page, processes, rig
from gpuinterop.exporters.vulkan import list_drivers
from gpuinterop.exporters.vulkan.device import Device
from gpuinterop.exporters.vulkan.drivers import Instance
from tests.programs import python

from .invoke import Done, invoke
from .parties import require_driver

KEYS = [
    "format", "date", "gpuinterop", "backend", "device", "stand_in", "versions", "vulkan", "python", "cpu", "cores",
    "figures",
]  # fmt: skip
CALLS = ("signal and wait", "batches", "timelines of our own", "views", "import")


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
        "signal, timeline of our own": ["gpuinterop"],
        "wait, timeline of our own": ["gpuinterop"],
        "import + map + close": ["gpuinterop"],
        "import + map + close, among 256 streams and 1,000 objects": ["gpuinterop", "gpuinterop, alone"],
        "view + np.from_dlpack": ["gpuinterop", "gpuinterop, one view", "NumPy's array to NumPy"],
        "import gpuinterop": ["gpuinterop", "import numpy"],
    }


@pytest.mark.parametrize(("driver", "mode"), [("swiftshader", ""), ("lavapipe", ", bridged")])
def test_frames(driver: str, mode: str, choose_driver: Callable[[str], None]) -> None:
    """A handoff may be bridged; a driver without a transfer queue is told."""
    choose_driver(driver)
    found = parsed("--only", "frames")
    where = f"compute queue{mode}"
    assert {name: contenders(figure) for name, figure in found["figures"].items()} == {
        "frames on a transfer queue": [],
        f"submit + acquire + release, {where}": ["gpuinterop", "vkQueueSubmit alone"],
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


class Bridged:
    """A yardstick whose timeline is a bridged one, over a Vulkan driver that exports none."""

    signalled = 1

    def __init__(self, device: gi.Device, shared: list[Any]) -> None:
        self.device, self.shared = device, shared
        self.waited: list[int] = []
        self.params = {signal: (ctypes.c_uint64 * 1)() for signal in (False, True)}
        pointer = ctypes.c_void_p
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(pointer), pointer, ctypes.c_uint, pointer)
        self.functions = {signal: prototype(self.function(signal)) for signal in (False, True)}

    def function(self, signal: bool) -> Callable[..., int]:
        def call(*given: Any) -> int:
            (self.signal if signal else self.wait)(self.params[signal][0])
            return 0

        return call

    def stream(self) -> Any:
        return self.device.create_stream()

    def synchronize(self, stream: Any) -> None:
        stream.synchronize(20)

    def timelines(self, fds: list[int], stream: Any) -> Any:
        assert fds == [77]
        self.used = stream
        self.signal(1)
        return self

    def signal(self, value: int) -> None:
        self.shared[0].semaphore.signal(self.used, value)

    def wait(self, value: int) -> None:
        self.waited.append(value)
        self.shared[0].semaphore.wait(self.used, value)

    def addresses(self, *, signal: bool) -> tuple[int, int, int, int, int]:
        where = ctypes.addressof(self.params[signal])
        return address(self.functions[signal]), 1, where, where, 1


def test_frames_by_hand_reach_their_last_value(
    choose_driver: Callable[[str], None], host: rig.Bench, monkeypatch: pytest.MonkeyPatch, compiled: Any
) -> None:
    """Vulkan's own counter tells: by the bindings and in C, frames go on where the ones before have ended."""
    choose_driver("lavapipe")
    shared: list[Any] = []
    with contextlib.ExitStack() as scope:
        bridge = scope.enter_context(gi.bridge.Bridge(host.device))

        def share_semaphore(vk: Any, device: gi.Device, kind: Any) -> Any:
            shared.append(gi.vulkan.share_semaphore(vk, device, kind, bridge=bridge))
            return shared[0]

        def call(self: Any, name: str, *given: Any) -> int:
            if name != "vkGetSemaphoreFdKHR":
                return int(of_context(self, name, *given))
            given[-1][0] = 77
            return 0

        of_context = gi.vulkan.VulkanContext._call
        monkeypatch.setattr(gi.vulkan.VulkanContext, "call", call)
        monkeypatch.setattr(frames, "share_semaphore", share_semaphore)
        host.by_hand = Bridged(host.device, shared)
        instance = scope.enter_context(Instance())
        physical = instance.physical_devices()[host.need_vulkan().index]
        by_hand = frames._ByHand(frames._Rig(host, scope, Device(instance, physical, 0)), scope, [])
        scope.enter_context(host.by_hand.used)
        by_hand.frames(3)
        assert system.until(lambda: shared[0].counter() >= 7, 20)
        assert shared[0].counter() == 7
        by_hand.ahead(2)
        assert shared[0].counter() == 11  # without a wait of ours
        by_hand.in_c(4)
        assert shared[0].counter() == 19
        assert host.by_hand.waited == [*range(2, 19, 2)]  # what Vulkan signals, each once
        monkeypatch.setattr(frames, "PATIENCE_S", 0.1)
        monkeypatch.setattr(host.by_hand, "signal", lambda value: None)
        with pytest.raises(gi.SemaphoreTimeoutError, match="expected the frames by hand to reach 21"):
            by_hand.ahead(1)
        host.by_hand.used.synchronize(20)


def test_without_vulkan_frames_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VK_DRIVER_FILES", "/nowhere.json")
    monkeypatch.setenv("VK_ICD_FILENAMES", "/nowhere.json")
    found = parsed("--only", "frames", "--only", "views")
    assert found["vulkan"] is None
    for name in ("frames on a transfer queue", "frames on a compute queue"):
        assert "expected a Vulkan driver" in found["figures"][name]["problem"]
    assert found["figures"]["view + np.from_dlpack"]["times"]


def test_what_the_device_cannot_do_is_left_out_with_the_reason() -> None:
    """A process of its own: a device keeps the table that it begins with."""
    names = ["signal and wait", "batches", "timelines of our own", "threads", "views", "wakes between two processes"]
    words = [part for name in names for part in ("--only", name)]
    command = ("-W", "error", "-m", "gpuinterop", "bench", "--backend", "host", "--quick", "--json", *words)
    done = python(*command, GPUINTEROP_DISABLE="*_semaphore:timeline_fd")
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)["figures"]
    assert [one["name"] for one in figures] == [*names[:4], "view + np.from_dlpack", names[5]]
    for figure in figures:
        check_figure(figure)
        if not figure["name"].startswith("view"):
            assert "semaphore TimelineFd: turned off by GPUINTEROP_DISABLE" in figure["problem"]


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


def test_for_people() -> None:
    done = bench("--only", "views", "--only", "transfer")
    assert (done.exit_code, done.stderr) == (0, "")
    for word in (
        "(host)",
        "median",
        "10 to 90 %",
        "99 %",
        "ratio",
        "view + np.from_dlpack, per array",
        "transfer queue: ",
    ):
        assert word in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("  ") and "microseconds" not in line]
    assert [row[:31].strip() for row in rows] == ["gpuinterop", "gpuinterop, one view", "NumPy's array to NumPy"]
    assert [len(row.split()) - len(row[:31].split()) for row in rows] == [5, 6, 6]  # ours has no ratio


def test_help_names_the_parts() -> None:
    done = invoke("bench", "--help")
    assert done.exit_code == 0
    for word in (*command._PARTS, "--only WORD", "--page FILE", "yardsticks"):
        assert word in " ".join(done.stdout.split())


def refused(*arguments: str) -> str:
    done = invoke("bench", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def test_a_word_of_no_part_is_refused() -> None:
    for words in (["nonsense"], ["views", "nonsense"]):
        line = refused(*(part for word in words for part in ("--only", word)))
        assert "expected a word of signal and wait, batches," in line
        assert "got 'nonsense'" in line


def test_a_file_without_a_page_is_refused() -> None:
    assert "expected no file without --page, got run.json" in refused("run.json")


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    file.write_text(bench("--json", "--only", "views", "--only", "transfer").stdout, encoding="utf-8")
    return file


def test_a_page_is_written_again(run_file: Path, tmp_path: Path) -> None:
    """Two runs are two tables, one plot; what is round them stays; and what names contain is text."""
    require_driver("lavapipe")  # else no row says why there is none of a transfer queue
    other = json.loads(run_file.read_text())
    other["device"] = other["figures"][0]["times"][0]["name"] = "<b> & | more"
    one = other["figures"][0]["times"][1]
    ours, theirs = {**one, "name": "gpuinterop", "median": 150.0}, {**one, "name": frames.STAGED, "median": 1500.0}
    other["figures"].append({**other["figures"][0], "name": "<i>frame", "times": [ours, theirs]})
    (tmp_path / "other.json").write_text(json.dumps(other))
    written = tmp_path / "page.md"
    written.write_text(f"# Before\n\n{page.BEGIN}\nwhat was there\n{page.END}\n\nafter\n")
    for _ in range(2):  # the second time finds what the first has written
        done = invoke("bench", "--page", str(written), str(run_file), str(tmp_path / "other.json"))
        assert (done.exit_code, done.output) == (0, "")
    text = written.read_text()
    assert text.startswith(f"# Before\n\n{page.BEGIN}\n\n")
    assert text.endswith(f"\n\n{page.END}\n\nafter\n")
    assert "what was there" not in text
    for word in ("np.from", "one view", "to have a transfer queue"):
        assert text.count(word) == 2
    run = json.loads(run_file.read_text())
    assert f"{run['device']}, {run['cores']} CPU cores" in text
    for time in run["figures"][0]["times"]:
        assert text.count(f"{time['median']:.2f}" if time["median"] < 100 else f"{time['median']:,.0f}") >= 2
    svg = ElementTree.parse(written.with_suffix(".svg")).getroot()
    texts = ["".join(one.itertext()) for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "<b> & | more: time of a frame", "<i>frame", "gpuinterop: 0.15 ms", "copies through the host: 1.5 ms",
    ]  # fmt: skip
    _, *bars = svg.iter("{http://www.w3.org/2000/svg}rect")  # the first is the background
    width, tenfold = (float(one.get("width", "")) for one in bars)
    assert tenfold == pytest.approx(10 * width)


def test_runs_without_frames_have_no_plot(run_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text(f"{page.BEGIN}\n{page.END}\n")
    assert "expected a run that measured frames, got none" in refused("--page", str(written), str(run_file))
    assert not written.with_suffix(".svg").exists()


def test_the_manuals_page_has_its_recorded_runs(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    copy = tmp_path / "performance.md"
    copy.write_text((docs / copy.name).read_text(encoding="utf-8"), encoding="utf-8")
    runs = (str(docs / "performance" / f"{name}.json") for name in ("h200", "two-cores"))
    done = invoke("bench", "--page", str(copy), *runs)
    assert (done.exit_code, done.output) == (0, "")
    for name in ("performance.md", "performance.svg"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (docs / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["# no comments\n", f"{page.BEGIN}\n", f"{page.END}\n" * 2 + page.BEGIN])
def test_a_page_without_the_two_comments_is_refused(text: str, run_file: Path, tmp_path: Path) -> None:
    written = tmp_path / "page.md"
    written.write_text(text)
    line = refused("--page", str(written), str(run_file))
    assert page.BEGIN in line
    assert page.END in line
    assert written.read_text() == text
    assert not written.with_suffix(".svg").exists()


def test_a_page_that_is_missing_is_refused(run_file: Path, tmp_path: Path) -> None:
    assert "expected a page in UTF-8" in refused("--page", str(tmp_path / "page.md"), str(run_file))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1, "figures": 3}',
        '{"format": 1, "figures": [{"name": "a"}]}',
        "\udcff",
    ],
)
def test_a_file_that_is_not_a_run_is_refused(text: str, tmp_path: Path) -> None:
    written, file = tmp_path / "page.md", tmp_path / "run.json"
    before = f"{page.BEGIN}\n{page.END}\n"
    written.write_text(before)
    file.write_text(text, errors="surrogateescape")
    assert f"expected what gpuinterop bench --json has printed, got {file}" in refused(
        "--page", str(written), str(file)
    )
    assert "got no file" in refused("--page", str(written))
    assert written.read_text() == before


# -- progress ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_progress_is_shown_on_a_terminal_alone(term: str) -> None:
    ours, theirs = os.openpty()
    words = [sys.executable, "-W", "error", "-m", "gpuinterop", "bench", "--backend", "host", "--quick", "--json"]
    try:
        done = subprocess.run(
            [*words, "--only", "views"], env={**os.environ, "TERM": term}, stdout=subprocess.PIPE, stderr=theirs,
            timeout=60, check=True,
        )  # fmt: skip
        shown = os.read(ours, 4096) if select.select([ours], [], [], 0)[0] else b""
    finally:
        os.close(ours)
        os.close(theirs)
    assert json.loads(done.stdout)["figures"]
    if term == "dumb":
        assert shown == b""
    else:
        assert b"measures views (1 of 1)" in shown
        assert shown.endswith(b"\r\x1b[K")  # and it is gone


# -- two processes -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="memfds and futexes are Linux's")
def test_two_processes_exchange_every_value(host: rig.Bench) -> None:
    """By each means: what lies in the memory that both share is the last value, there and back."""
    shared = os.memfd_create("page")
    os.ftruncate(shared, system.PAGE)
    try:
        with processes.players(host, shared) as (game, means):
            assert list(means) == ["gpuinterop", processes.PTHREAD, processes.FUTEX]
            for count, (name, (there, back)) in enumerate(means.items(), 5):
                game.play(name, there, back, count)
                assert game.play_late(name, there, back) > 0
            ours: Any = means["gpuinterop"]
            for one in ours:
                with one._semaphore.export() as handle:
                    assert struct.unpack("=Q", os.pread(handle.fd, 8, 16)) == (6,)
        assert [struct.unpack("=Q", os.pread(shared, 8, place))[0] for place in (0, 128)] == [7, 7]
        assert [struct.unpack("=I", os.pread(shared, 4, place))[0] for place in (256, 384)] == [8, 8]
    finally:
        os.close(shared)


@pytest.mark.skipif(sys.platform != "linux", reason="memfds and futexes are Linux's")
def test_a_process_that_is_gone_is_told(host: rig.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer, neither at the beginning of a set nor within one."""
    monkeypatch.setattr(processes, "PATIENCE_S", 1)
    with processes.players(host) as (game, means):
        game.peer.kill()
        game.peer.wait(20)
        for name, (there, back) in means.items():
            with pytest.raises(gi.PeerError, match="expected the other process to say 'go', got ''"):
                game.play(name, there, back, 1)
            with pytest.raises((gi.PeerError, gi.SemaphoreTimeoutError)):
                back.wait(1)
            there.signal(1)
            there.wait(1)


def test_wakes() -> None:
    found = parsed("--only", "wakes")["figures"]
    assert list(found) == ["a wake in another process, at once", "a wake in another process, which sleeps"]
    for figure in found.values():
        assert contenders(figure) == ["gpuinterop", processes.PTHREAD, processes.FUTEX]


# -- yardsticks in C -----------------------------------------------------------------------------------------------


@pytest.fixture
def compiled() -> Any:
    floor.load.cache_clear()
    found = floor.load()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@pytest.mark.parametrize("case", ["no such compiler", "no compiler", "no source", "it fails"])
def test_without_a_compiler_it_is_told(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    if case == "no such compiler":
        monkeypatch.setenv("CC", "/nonexistent -m64")
    elif case == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setitem(sys.modules, "ziglang", None)
    elif case == "it fails":
        monkeypatch.setenv("CC", "false")
    else:
        monkeypatch.setattr(floor, "_SOURCE", tmp_path / "floor.c")
    floor.load.cache_clear()
    try:
        assert floor.load() is None
        assert floor.load() is None
    finally:
        floor.load.cache_clear()
    assert capsys.readouterr().err.count("note: the same in C is left out: ") == 1


def test_a_yardstick_in_c_that_fails_is_not_measured() -> None:
    calls.done(0)
    with pytest.raises(gi.DriverError, match="C"):
        calls.done(3)


# -- the clock -----------------------------------------------------------------------------------------------------


def test_each_contender_is_the_first_in_turn_and_settles_outside_of_its_time() -> None:
    log: list[tuple[str, int]] = []

    def contender(name: str) -> clock.Contender:
        return lambda count: log.append((name, count))

    found = clock.in_turns(
        {name: contender(name) for name in "abc"}, calls=7, rounds=6, settle=lambda: log.append(("settle", 0))
    )
    assert {name: spread.samples for name, spread in found.items()} == {"a": 6, "b": 6, "c": 6}
    assert log[1::2] == [("settle", 0)] * 21  # of 6 rounds, and of one before that does not count
    order = "".join(name for name, count in log[::2] if count == 7)
    assert order == "abcbcacababcbcacababc"


def test_a_spread() -> None:
    spread = clock.Spread.of([float(number) for number in range(101)])
    assert spread == clock.Spread(50, 10, 90, 99, 101)
    assert clock.Spread.of([5.0]) == clock.Spread(5, 5, 5, 5, 1)
