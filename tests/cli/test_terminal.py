"""Every command in a terminal of 80 columns: no line is wider."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from .parties import require_driver
from .test_matrix import _report, _test

WIDTH = 80
QUICK = ("--size", "64x48", "--output", "wave.png")
COMMANDS = {
    "help": ["--help"],
    **{
        f"{name} --help": [*name.split(), "--help"]
        for name in ("info", "demo", "selftest", "selftest multicast", "matrix")
    },
    "info": ["info"],
    "info --all": ["info", "--all"],
    "demo": ["demo", "--exporter", "process", "--frames", "60", *QUICK],
    "a bridged demo": ["demo", "--driver", "lavapipe", "--frames", "3", *QUICK],
    "matrix": ["matrix", "nvidia.xml", "amd.xml", "--expect", "host"],
    "an argument that is none": ["info", "--everything", "--at=once", "--and=whatever", "--else=there", "--is"],
    "a gap": ["demo", "--driver", "lavapipe", "--sync", "native"],
    "a device that is not found": ["demo", "--driver", "a driver that does not exist"],
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


def in_terminal(folder: Path) -> dict[str, str]:
    """What each command sends to a terminal."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, WIDTH))
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
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    for driver in ("swiftshader", "lavapipe"):
        require_driver(driver)
    folder = tmp_path_factory.mktemp("terminal")
    tests = [_test("test_maps"), _test("test_of_a_long_name", "gap", "why")]
    failed = _test("test_with_many_words", "failure", "expected one thing, got another")
    _report(folder, "nvidia", tests)
    _report(folder, "amd", [*tests, failed], status="1")
    return in_terminal(folder)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_too_wide(name: str, screens: dict[str, str]) -> None:
    lines = re.split(r"\r\n|\r\x1b\[K", screens[name])
    assert "Traceback" not in screens[name]
    assert len(screens[name].split()) > 5
    # A word that is longer than the terminal is in a line by itself.
    assert [line for line in lines if len(line) > WIDTH and " " in line.strip()] == []
