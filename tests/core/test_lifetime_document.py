"""docs/concepts/lifetime.md: its samples do what they say, and what it names is there."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import drain, gate, lifetime
from gpuinterop._core.monitor import locked

from .fake import FakeEverything, fake_device

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "concepts" / "lifetime.md"
TEXT = PAGE.read_text(encoding="utf-8")
INSIDE = (ROOT / "docs" / "inside" / "lifetime.md").read_text(encoding="utf-8")
LIMIT = 20.0


def sample(word: str) -> str:
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", TEXT + INSIDE, re.MULTILINE | re.DOTALL)
    (found,) = (text for text in blocks if word in text)
    return str(found)


@contextlib.contextmanager
def memory_of(device: gi.Device) -> Iterator[gi.ExternalMemory]:
    fd = os.memfd_create("memory", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    with device.import_memory(gi.OpaqueFd.adopt(fd), size=4096) as memory:
        yield memory


def test_a_close(host: gi.Device) -> None:
    freed: list[bool] = []
    with host.create_stream() as stream, memory_of(host) as memory:
        names: dict[str, Any] = {
            "gi": gi, "stream": stream, "memory": memory, "buffer": memory.map_buffer(),
            "free_theirs": lambda: freed.append(True),
        }  # fmt: skip
        exec(sample("free_theirs"), names)
        assert names["buffer"].closed
    assert freed == [True]


def test_a_close_that_times_out(host: gi.Device, capsys: pytest.CaptureFixture[str]) -> None:
    freed: list[bool] = []
    with (
        host.create_stream() as stream,
        host.create_semaphore(gi.TimelineFd) as semaphore,
        memory_of(host) as memory,
    ):
        semaphore.wait(stream, 1)
        names: dict[str, Any] = {
            "gi": gi, "stream": stream, "memory": memory, "buffer": memory.map_buffer(),
            "free_theirs": lambda: freed.append(True),
        }  # fmt: skip
        exec(sample("free_theirs").replace("timeout=5", "timeout=0.01"), names)
        assert "still pending" in capsys.readouterr().out
        assert not freed
        semaphore.host_signal(1)
        stream.synchronize(LIMIT)
    assert freed == [True]


@pytest.mark.parametrize("instead", ["device.synchronize()", "device.drain(timeout=1.0)"])
@pytest.mark.filterwarnings("ignore:256 closed objects cannot be released")
def test_a_pipeline_that_is_never_idle(instead: str) -> None:
    """Two frames are always in flight, so what each closes is held, until the pipeline runs dry."""
    code = sample("% 500")
    assert instead in code
    backend = FakeEverything()
    device, _ = fake_device(backend=backend)
    held: list[int] = []
    with device.create_stream() as stream, device.import_semaphore(gi.TimelineWin32(handle=8)) as semaphore:

        def render(frame: int) -> None:
            semaphore.wait(stream, frame)
            device.import_semaphore(gi.TimelineWin32(handle=8)).close()
            backend.arrive(semaphore.handle, frame - 2 if frame < 500 else frame)
            held.append(backend.count("semaphore"))

        exec(
            code.replace("device.synchronize()", instead), {"frames": range(1, 501), "render": render, "device": device}
        )
        assert len(held) == 500
        assert max(held) > 256
        assert backend.count("semaphore") == 1


def test_a_hold(host: gi.Device) -> None:
    with memory_of(host) as memory:
        buffer = memory.map_buffer()
        launched: list[int] = []

        def wait_for(_kernel: object) -> None:
            assert memory.closed
            with pytest.raises(gi.ResourceBusyError):
                memory.close(timeout=0)

        names: dict[str, Any] = {
            "buffer": buffer, "memory": memory, "kernel": None, "wait_for": wait_for,
            "launch": lambda kernel, address: launched.append(address),
        }  # fmt: skip
        exec(sample("buffer.hold()"), names)
        assert launched
        memory.close(timeout=LIMIT)


_FORK = """
import os, sys
import gpuinterop as gi
device = gi.get_backend("host").device()
stream = device.create_stream()
parent = os.getpid()
exec(sys.argv[1])
if os.getpid() != parent:
    print("fresh", fresh.query(), "closed", stream.closed, stream.close(), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
assert stream.query()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _FORK, sample("os.fork()")], capture_output=True, text=True, timeout=60, check=False,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said, fresh = result.stdout.splitlines()
    assert said.startswith("expected an object of this process, got Stream #1 of its parent")
    assert fresh == "fresh True closed True None"


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
@pytest.mark.parametrize("inside", [False, True], ids=["between", "in the middle of a transition"])
def test_a_signal_handler(host: gi.Device, inside: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    semaphore = host.create_semaphore(gi.TimelineFd)
    names: dict[str, Any] = {"signal": signal, "semaphore": semaphore}
    try:
        exec(sample("signal.SIGINT"), names)
        strike = locked(signal.raise_signal) if inside else signal.raise_signal
        strike(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert names["stopping"] is True
    assert semaphore.closed is not inside
    host.drain()
    assert semaphore.closed


def test_a_call_as_it_is_written() -> None:
    """Marked while it is made, noted, and refused of what is closed."""
    made = FakeEverything()
    device, _ = fake_device(backend=made)
    semaphore, on = device.import_semaphore(gi.TimelineWin32(handle=8)), device.create_stream()
    one, two = semaphore.lifetime, on.known
    seen: list[Any] = []

    class _Backend:
        @staticmethod
        def call(*handles: object) -> None:
            assert two is not None
            seen.append((handles, len(one.calls), len(two.calls)))

    names = {
        "MARK": lifetime.MARK, "LIVE": lifetime.LIVE, "note_use": lifetime.note_use, "lifetime": one, "stream": two,
        "backend": _Backend,
    }  # fmt: skip
    code = sample("note_use(")
    exec(code, names)
    assert two is not None
    assert seen == [((one.handle, two.handle), 1, 1)]
    assert two in one.uses
    semaphore.close()
    with pytest.raises(gi.ResourceClosedError):
        exec(code, names)
    assert len(seen) == 1
    assert not one.calls
    assert not two.calls
    on.close()


def test_its_numbers_are_the_librarys() -> None:
    said = TEXT
    assert f"From {gate.MANY} held releases on" in said
    assert f"At {gate.TOO_MANY} a warning" in said
    assert f"up to {gate.MOMENT_S * 1000:g} ms" in said
    assert "takes two seconds at most" in said
    assert system.EXIT_S == 2.0
    assert f"more than {drain._MANY_DROPPED} objects" in said


def test_what_it_names_is_there() -> None:
    core = ROOT / "gpuinterop" / "_core"
    nouns = INSIDE.split("## The nouns")[1].split("## The invariants")[0]
    modules = {name for row in nouns.splitlines() for name in re.findall(r"`(\w+\.py)`", row)}
    assert len(modules) >= 10
    assert [name for name in modules if not (core / name).is_file()] == []
    files = set(re.findall(r"`((?:tests|gpuinterop)/[\w/]+\.py)`", INSIDE))
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert set(re.findall(r"^(\d)\. ", INSIDE.split("## The invariants")[1].split("##")[0], re.MULTILINE)) == set(
        "123456789"
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^    make ([\w-]+)", INSIDE, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
