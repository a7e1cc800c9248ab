"""The independent parties themselves: who watches the watchmen."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpuinterop import system
from gpuinterop.errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    DeviceNotFoundError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    UnsupportedError,
)
from gpuinterop.handles import Binary, Timeline
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.base import Exporter, Fill
from gpuinterop.testing.exporters.process import ProcessExporter
from gpuinterop.testing.kit import Kit
from gpuinterop.testing.participants import ExporterSpec
from tests.limits import LIMIT
from tests.programs import runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")
KINDS = pytest.mark.parametrize("kind", [Binary, Timeline], ids=["binary", "timeline"])


@pytest.fixture(params=[False, True], ids=["here", "process"])
def exporter(request: pytest.FixtureRequest) -> Iterator[Exporter]:
    with open_exporter("memfd", process=request.param) as opened:
        yield opened


@KINDS
def test_fills_run_after_the_wait_and_before_the_signal(exporter: Exporter, kind: type) -> None:
    with (
        exporter.create_memory(4096) as memory,
        exporter.create_semaphore(kind) as before,
        exporter.create_semaphore(kind) as after,
    ):
        fills = [
            Fill(memory=memory, offset=offset, size=size, word=word)
            for offset, size, word in ((0, 8, 0x01010101), (4, 4, 0x02020202), (4092, 4, 0x04030201))
        ]
        work = exporter.submit(wait=[(before, 1)], fill=fills, signal=[(after, 1)])
        assert not work.done(0.0)
        assert memory.read(0, 4096) == bytes(4096)
        before.signal(1)
        assert after.wait(1, timeout=LIMIT)
        assert memory.read(0, 4096) == b"\1\1\1\1\2\2\2\2" + bytes(4084) + b"\1\2\3\4"
        assert work.done(LIMIT)


def test_errors_are_ours(exporter: Exporter) -> None:
    """The exporter works on after each."""
    with exporter.create_memory(4096) as memory, open_exporter("memfd") as other, other.create_memory(4096) as theirs:
        calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (InvalidArgumentError, "^offset: ", lambda: memory.read(4095, 2)),
            (ArgumentTypeError, "", lambda: exporter.submit(fill=[Fill(memory=theirs, offset=0, size=4, word=0)])),
            (ArgumentTypeError, "", lambda: exporter.create_semaphore(int)),
        ]
        for kind, words, call in calls:
            with pytest.raises(kind) as caught:
                call()
            assert re.match(words, str(caught.value))
        assert exporter.submit(fill=[Fill(memory=memory, offset=0, size=4, word=1)]).done(LIMIT)
    with pytest.raises(ResourceClosedError):
        memory.read(0, 1)


def test_closing_releases_what_waits(exporter: Exporter) -> None:
    memory, semaphore = exporter.create_memory(4096), exporter.create_semaphore(Timeline)
    work = exporter.submit(wait=[(semaphore, 1)], fill=[Fill(memory=memory, offset=0, size=4, word=7)])
    semaphore.close()
    memory.close()
    assert work.done(LIMIT)


def test_errors_cross_processes() -> None:
    """Attributes and all; also one of a driver's."""
    there_is_none = () if os.environ.get("GPUINTEROP_REQUIRE_VULKAN") else (BackendUnavailableError,)
    with pytest.raises((DeviceNotFoundError, *there_is_none)):
        open_exporter("vulkan", driver="no such driver", process=True)
    with open_exporter("memfd", process=True) as exporter:
        gap = next(found for found in exporter.capabilities.values() if not found.usable)
        with pytest.raises(UnsupportedError) as caught:
            exporter.capabilities.require(gap.cell)
        assert caught.value.capability == gap


def stop(pid: int) -> None:
    """Stop a process; returns when every thread of it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    files = [*Path(f"/proc/{pid}/task").glob("*/stat")]
    assert system.until(lambda: all(file.read_text().rpartition(")")[2].split()[0] == "T" for file in files), LIMIT)


def test_a_stopped_child_holds_nobody_up_and_goes_on_later() -> None:
    with open_exporter("memfd", process=True) as exporter, exporter.create_memory(8 << 20) as memory:
        assert isinstance(exporter, ProcessExporter)
        limit, exporter.child.limit = exporter.child.limit, 1.0
        stop(exporter.pid)
        with pytest.raises(PeerError, match="did not answer 'read'"):
            memory.read(0, 4)
        with pytest.raises(PeerError, match="did not answer 'write'"):  # more than the socket holds
            memory.write(0, bytes(memory.size))
        os.kill(exporter.pid, signal.SIGCONT)
        exporter.child.limit = limit
        memory.write(0, b"on")  # half of the message before it was discarded
        assert memory.read(0, 4) == b"on\0\0"


def test_a_stopped_child_is_killed_and_its_death_is_told() -> None:
    exporter = open_exporter("memfd", process=True)
    assert isinstance(exporter, ProcessExporter)
    memory = exporter.create_memory(4096)
    exporter.child.limit = 0.5
    stop(exporter.pid)
    exporter.close()
    exporter.close()
    assert exporter.child.process.returncode == -signal.SIGKILL
    with pytest.raises(ResourceClosedError):
        memory.read(0, 1)
    memory.close()


def test_a_dead_child_is_told() -> None:
    """With its status, for calls that are under way and for later ones."""
    with open_exporter("memfd", process=True) as exporter, exporter.create_memory(4096) as memory:
        assert isinstance(exporter, ProcessExporter)
        semaphore = exporter.create_semaphore(Timeline)
        with ThreadPoolExecutor(1) as threads:
            wait = threads.submit(semaphore.wait, 1, timeout=LIMIT)
            assert not semaphore.wait(1, timeout=0.05)
            exporter.kill()
            with pytest.raises(PeerError, match="SIGKILL"):
                wait.result(LIMIT)
        with pytest.raises(PeerError, match="SIGKILL"):
            memory.read(0, 1)


def test_the_child_keeps_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """No object that is dropped here, and no handle that it has sent or received, which it closes by itself."""
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    with open_exporter("memfd", process=True) as exporter, exporter.create_memory(4096) as memory:
        assert isinstance(exporter, ProcessExporter)

        def counts() -> tuple[int, int]:
            """Objects and descriptors of the child, which has closed those that it sent before its next call."""
            gc.collect()
            return exporter.child.run("gpuinterop.testing.child:_objects.__len__"), len(os.listdir(descriptors))

        descriptors = f"/proc/{exporter.pid}/fd"
        before = counts()
        for _ in range(20):
            assert exporter.submit(fill=[Fill(memory=memory, offset=0, size=4, word=1)]).done(LIMIT)
            with memory.export() as handle:
                exporter.child.run("builtins:bool", handle)
        assert counts() == before
        assert before[0] == 2  # the exporter and the memory
    assert capfd.readouterr().err == ""


def test_the_kit_opens_an_exporter_again_whose_process_has_ended(pytestconfig: pytest.Config) -> None:
    """It ends with the thread of a test that opened it, and later tests share the exporter."""
    kit, spec = Kit(pytestconfig), ExporterSpec("memfd", process=True)
    with ThreadPoolExecutor(1) as threads:
        first: Any = threads.submit(kit.exporter, spec).result(LIMIT)
        again: Any = kit.exporter(spec)
        assert again is first
    assert system.until(lambda: first.child.process.poll() is not None, LIMIT)
    with kit.exporter(spec) as exporter:
        assert exporter.create_semaphore(Timeline).kind is Timeline


def test_what_is_too_large_for_a_message_is_refused_and_the_rest_goes_on() -> None:
    with open_exporter("memfd", process=True) as exporter, exporter.create_memory((64 << 20) + 1) as memory:
        with pytest.raises(InvalidArgumentError, match="67108864"):
            memory.write(0, bytes(memory.size))
        with pytest.raises(PeerError, match="67108864"):
            memory.read(0, memory.size)
        memory.write(0, b"fits")
        assert memory.read(0, 4) == b"fits"


def test_a_wait_on_what_is_closed(exporter: Exporter) -> None:
    semaphore = exporter.create_semaphore(Timeline)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(semaphore.wait, 1, timeout=LIMIT)
        assert not semaphore.wait(1, timeout=0.05)  # by then the other is under way, or finds it closed
        semaphore.close()
        with pytest.raises(ResourceClosedError):
            wait.result(LIMIT)


def test_an_interrupt_is_for_the_parent() -> None:
    """A terminal sends it to the parent's process group."""
    with open_exporter("memfd", process=True) as exporter:
        assert isinstance(exporter, ProcessExporter)
        assert os.getpgid(exporter.pid) != os.getpgid(0)


@pytest.mark.parametrize("forks", [False, True])
def test_child_ends_with_its_parent(forks: bool) -> None:
    """Also if a fork of the parent goes on, which has the connections too."""
    code = (
        "import os, sys; from gpuinterop.testing.exporters import open_exporter\n"
        "exporter = open_exporter('memfd', process=True)\n"
        "print(exporter.pid, flush=True)\n"
        f"if {forks} and not os.fork(): sys.stdin.read()\n"
        "os._exit(9)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait(LIMIT) == 9
        assert system.until(lambda: not runs(child), LIMIT), "the child outlived its parent"
