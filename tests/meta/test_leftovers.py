"""`tests.leftovers` in a run of its own: each test that leaves something fails for it, and no other does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFTEST = """
from tests import leftovers

leftovers.LIMIT = 1.0
threads = leftovers.threads
ended = set()  # threads that end while they are looked at
leftovers.threads = lambda: threads() | ended
"""

TESTS = """
import gc
import os
import threading

import pytest

import gpuinterop as gi
from conftest import ended

device = gi.get_backend("host").device()
kept = []


@pytest.fixture(scope="module")
def stream():
    with device.create_stream() as stream:
        yield stream


@pytest.fixture(scope="module")
def lost():
    return os.open(os.devnull, os.O_WRONLY)


def test_of_a_fixture_of_the_module(stream):
    pass


def test_a_native():
    kept.append(device.wrap_stream(0))


def test_behind_a_native():
    with device.allocate(4096) as allocation:  # and copies on a stream that the device keeps
        allocation.buffer.copy_from_host(bytes(4096))


def test_a_thread():
    ended.add("0")
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="forgotten", daemon=True).start()


def test_a_descriptor():
    kept.append(os.pipe())


def test_a_mark(stream):
    stream.lifetime.calls.append(None)


def test_a_gate():
    device.gate.shut.append(None)


def test_a_warning():
    gc.disable()
    handle = gi.OpaqueFd.adopt(os.memfd_create("dropped"))
    handle.itself = handle


def test_behind_a_warning():
    gc.enable()


@pytest.mark.leaves("Stream #", r"descriptor \\d+ of /dev/null")
def test_names_what_it_leaves():
    kept.append(device.wrap_stream(0))
    kept.append(os.open(os.devnull, os.O_RDONLY))


@pytest.mark.leaves("ExternalMemory")
def test_names_what_it_does_not_leave():
    pass


@pytest.mark.leaves("Stream #")
def test_names_less_than_it_leaves():
    kept.append(device.wrap_stream(0))
    kept.append(os.open(os.devnull, os.O_RDONLY))


def test_fails_anyway():
    kept.append(device.wrap_stream(0))
    raise ValueError


def test_at_the_end_of_a_module(lost):
    pass
"""


def test_a_test_fails_for_what_it_leaves_behind(run_pytest: Callable[..., Any]) -> None:
    done = run_pytest(
        "-p", "tests.leftovers", "-W", "error", "-W", "ignore::pytest.PytestAssertRewriteWarning",
        toy=None, kit=False, files={"conftest.py": CONFTEST, "test_leaving.py": TESTS},
        environment={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    error = re.compile(r"^_+ ERROR at teardown of (\w+) _+\nit leaves behind:\n((?:    .*\n)+)", re.MULTILINE)
    left = {name: [line.strip() for line in lines.splitlines()] for name, lines in error.findall(done.output)}
    wanted = {
        "test_a_native": [r"<Stream #\d+ open>"] * 2,  # and the wrapper
        "test_a_thread": ["thread forgotten"],
        "test_a_descriptor": [r"descriptor \d+ of pipe:.*"] * 2,
        "test_a_mark": [r"a mark of a call with <Stream #\d+ open>"],
        "test_a_gate": ["a mark at the gate of <Device host:0 .*>"],
        "test_a_warning": ["LeakedResourceWarning: OpaqueFd.* was dropped without close.*"],
        "test_names_what_it_does_not_leave": ["not 'ExternalMemory'"],
        "test_names_less_than_it_leaves": [r"descriptor \d+ of /dev/null"],
        "test_at_the_end_of_a_module": [r"descriptor \d+ of /dev/null"],
    }  # fmt: skip
    assert left.keys() == wanted.keys(), done.output
    for name, lines in wanted.items():
        assert len(left[name]) == len(lines), left
        assert all(map(re.fullmatch, lines, left[name])), left
    assert done.counts == {"failed": 1, "passed": 13, "error": 9}, done.output
    assert "FAILED test_leaving.py::test_fails_anyway" in done.output
