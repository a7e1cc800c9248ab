"""Every command in a terminal of 80 and of 140 columns: no line is wider, and lines break at spaces alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuinterop.cli.console import table

from .parties import require_driver
from .test_matrix import GRAPH, MAP, _report, _test

WIDTHS = (80, 140)
QUICK = ("--size", "64x48", "--output", "wave.png")
COMMANDS = {
    "help": ["--help"],
    **{
        f"{name} --help": [*name.split(), "--help"]
        for name in ("info", "demo", "bench", "selftest", "selftest multicast", "matrix")
    },
    "info": ["info"],
    "info --all": ["info", "--all"],
    "demo": ["demo", "--exporter", "process", "--frames", "60", *QUICK],
    "a bridged demo": ["demo", "--driver", "lavapipe", "--frames", "3", *QUICK],
    "bench": ["bench", "--backend", "host", "--quick", "--only", "signal", "--only", "frames", "--only", "import of"],
    "matrix": ["matrix", "nvidia.json", "amd.json", "--expect", "host"],
    "an argument that is none": ["info", "--everything", "--at=once", "--and=whatever", "--else=there", "--is"],
    "a wrong choice": ["demo", "--exporter", "a party that does not exist"],
    "a wrong value": ["demo", "--output", "a/folder/which/is/not/there/and/has/a/long/name/wave.png"],
    "a gap": ["demo", "--driver", "lavapipe", "--sync", "native"],
    "a device that is not found": ["demo", "--driver", "a driver that does not exist"],
    "a backend that is not found": ["bench", "--backend", "a backend that does not exist"],
    "a wrong file": ["bench", "--page", "nowhere.md", "nowhere.json"],
}
PROGRAM = """
import json, sys
from gpuinterop.cli import main

for number, arguments in enumerate(json.loads(sys.argv[1])):
    print(f"\\x1e{number}\\x1f", end="", flush=True)
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit:
        pass
"""


def in_terminal(width: int, folder: Path) -> dict[str, str]:
    """What each command sends to a terminal."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, width))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps([*COMMANDS.values()])],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env={**variables, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    try:
        sent = b"".join(_chunks(ours)).decode()
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    found = dict(re.findall("\x1e(\\d+)\x1f([^\x1e]*)", sent))
    assert len(found) == len(COMMANDS), sent[-2000:]
    return {name: re.sub(r"\x1b\[\d+m", "", found[str(number)]) for number, name in enumerate(COMMANDS)}


def _chunks(terminal: int) -> Iterator[bytes]:
    try:
        while chunk := os.read(terminal, 65536):
            yield chunk
    except OSError:  # Linux says so when the last of those at the other end has gone
        return


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    for driver in ("swiftshader", "lavapipe"):
        require_driver(driver)
    folder = tmp_path_factory.mktemp("terminal")
    tests = [
        _test("test_maps", "passed", "a:0", MAP),
        _test("test_of_a_long_name_that_is_skipped", "gap", reason="why"),
    ]
    failed = [
        _test("test_that_fails_with_many_words", "failed", "a:0", GRAPH, reason="expected one thing, got another")
    ]
    _report(folder, "nvidia", tests)
    _report(folder, "amd", [*tests, *failed], status=1, python="3.14")
    with ThreadPoolExecutor() as pool:
        return dict(zip(WIDTHS, pool.map(in_terminal, WIDTHS, [folder] * len(WIDTHS)), strict=True))


ERASED = "\r\x1b[K"
"""Takes away what stands in the line: the progress before."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_too_wide_and_no_word_is_cut(name: str, screens: dict[int, dict[str, str]]) -> None:
    words = []
    for width, sent in ((width, screens[width][name]) for width in WIDTHS):
        lines = re.split(r"\r\n|\r\x1b\[K", sent)
        assert "Traceback" not in sent
        # A word that is longer than the terminal stands alone.
        assert [line for line in lines if len(line) > width and " " in line.strip()] == []
        last = [line.rpartition(ERASED)[2] for line in sent.split("\r\n")]
        # Two runs take different times, of which a demo says more or less.
        text = re.sub(r"^ *(shared|with copies)  .*", "", "\n".join(last), flags=re.MULTILINE)
        words.append({re.sub(r"\d[\d.,]*", "0", word) for word in text.split()})
    assert words[0] == words[1]
    assert len(words[0]) > 5


def test_the_demo_shows_how_far_it_is(screens: dict[int, dict[str, str]]) -> None:
    shown = screens[80]["demo"].split(ERASED)
    steps = [re.fullmatch(r"wave (█+) *(\d+) of 60 frames", one) for one in shown]
    bars = [(len(step[1]), int(step[2])) for step in steps if step]
    assert bars == sorted(set(bars))
    assert bars[0][1] <= 2
    assert bars[-1] == (40, 60)
    assert len(bars) == 40
    assert "wave █" not in shown[-1]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_figure_is_one_line(width: int, screens: dict[int, dict[str, str]]) -> None:
    shown = screens[width]["bench"].replace("\r", "")
    assert "import numpy" in shown
    assert not re.search(r"^ *[\d.,]+$", shown, re.MULTILINE)


@pytest.mark.parametrize(("width", "parts"), [(24, 4), (40, 2), (80, 1)])
def test_a_table_folds_its_texts_and_goes_on_below(width: int, parts: int) -> None:
    """Read by where its headings stand: each text is there, below its own, and the first column in each part."""
    heads = [f"head-{place}" for place in range(8)]
    second = ["next", *heads[1:]]
    texts = ["of some words, more than fit", "amd", "it passed, in the end", "✓", "x", "0 of 12", "", "last"]
    lines = list(table([heads, texts, second], width))
    assert max(map(len, lines)) <= width
    found: dict[str, list[str]] = {}
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) == parts
    for block in blocks:
        head, *below = block.split("\n")
        starts = [one.start() for one in re.finditer(r"\S+", head)]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            found[head[start:end].strip()] = " ".join(line[start:end] for line in below).split()
        assert head.startswith("head-0 ")
    assert found == {
        head: [*text.split(), *other.split()] for head, text, other in zip(heads, texts, second, strict=True)
    }


def test_the_help_tells_what_each_command_is_for(screens: dict[int, dict[str, str]]) -> None:
    for name in ("info", "demo", "bench", "selftest", "selftest multicast", "matrix"):
        assert re.search(rf"^    {name}\s+\w+ \w+ ", screens[80]["help"], re.MULTILINE)
