"""The independent parties themselves: who watches the watchmen."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gpuinterop.errors import (
    ArgumentTypeError,
    BackendUnavailableError,
    DeviceNotFoundError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
    UnsupportedError,
)
from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.base import (
    Exporter,
    ExporterMemory,
    ExporterSemaphore,
    Fill,
    ImageParameters,
    Kernel,
)
from gpuinterop.exporters.memfd import MemfdSemaphore
from gpuinterop.exporters.process import ProcessExporter, ProcessSemaphore
from gpuinterop.handles import Binary, OriginKind, Timeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")
LIMIT = 20.0
KINDS = pytest.mark.parametrize("kind", [Binary, Timeline], ids=["binary", "timeline"])


@pytest.fixture(params=[False, True], ids=["here", "process"])
def exporter(request: pytest.FixtureRequest) -> Iterator[Exporter]:
    with open_exporter("memfd", process=request.param) as opened:
        yield opened


def store(memory: ExporterMemory, index: int, byte: int) -> Kernel:
    return Kernel(memory=memory, function="operator:setitem", arguments=(index, byte))


@KINDS
def test_kernels_run_where_the_memory_is(exporter: Exporter, kind: type) -> None:
    """Behind the wait and the fills, in their order, and before the signal."""
    with (
        exporter.create_memory(4096) as memory,
        exporter.create_semaphore(kind) as before,
        exporter.create_semaphore(kind) as after,
    ):
        work = exporter.submit(
            wait=[(before, 1)],
            fill=[Fill(memory=memory, offset=0, size=4, word=0x01010101)],
            run=[store(memory, 0, 2), store(memory, 0, 3), store(memory, 4095, 4)],
            signal=[(after, 1)],
        )
        assert not work.done(0.0)
        assert memory.read(0, 4096) == bytes(4096)
        before.signal(1)
        assert after.wait(1, timeout=LIMIT)
        assert memory.read(0, 4096) == b"\3\1\1\1" + bytes(4091) + b"\4"
        assert work.done(LIMIT)


def test_a_kernel_that_fails_is_told(exporter: Exporter) -> None:
    with exporter.create_memory(4096) as memory, open_exporter("memfd") as other, other.create_memory(4096) as theirs:
        with pytest.raises((IndexError, PeerError), match="index out of bounds"):
            exporter.submit(run=[store(memory, memory.size, 1)]).done(LIMIT)
        for name in ("no_such_module:function", "operator:no_such_function"):
            with pytest.raises(InvalidArgumentError, match=f"^function: .*{name}"):
                exporter.submit(run=[Kernel(memory=memory, function=name)])
        with pytest.raises(InvalidArgumentError, match=r"^run: expected a kernel with a function"):
            exporter.submit(run=[Kernel(memory=memory, shader="gpuinterop.cli.demo:wave.spv")])
        with pytest.raises(ArgumentTypeError):
            exporter.submit(run=[store(theirs, 0, 1)])
        assert exporter.submit(run=[store(memory, 0, 1)]).done(LIMIT)


def test_numpys_ints_become_pythons() -> None:
    numbers: Any = {"width": np.int64(8), "height": np.uint16(4), "levels": np.int8(2)}
    parameters = ImageParameters(format="R8_UNORM", **numbers)
    assert parameters == ImageParameters(format="R8_UNORM", width=8, height=4, levels=2)
    assert {type(edge) for edge in parameters.extent} == {int}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("function", "setitem"),
        ("function", "operator:"),
        ("shader", "wave.spv"),
        ("groups", (1, 1)),
        ("groups", (1, 0, 1)),
        ("arguments", range(33)),
        ("arguments", (-1,)),
        ("arguments", (1 << 32,)),
        ("arguments", ("1",)),
    ],
)
def test_a_bad_kernel_is_refused(argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Kernel(memory=None, **{argument: value})
    assert caught.value.argument == argument


def test_closing_releases_what_waits(exporter: Exporter) -> None:
    memory, semaphore = exporter.create_memory(4096), exporter.create_semaphore(Timeline)
    work = exporter.submit(wait=[(semaphore, 1)], fill=[Fill(memory=memory, offset=0, size=4, word=7)])
    semaphore.close()
    memory.close()
    assert work.done(LIMIT)


def test_errors_are_ours(exporter: Exporter) -> None:
    with exporter.create_memory(4096) as memory, open_exporter("memfd") as other, other.create_memory(4096) as theirs:
        with pytest.raises(InvalidArgumentError) as caught:
            memory.read(4095, 2)
        assert caught.value.argument == "offset"
        with pytest.raises(ArgumentTypeError):
            exporter.submit(fill=[Fill(memory=theirs, offset=0, size=4, word=0)])
        with pytest.raises(ArgumentTypeError):
            exporter.create_semaphore(int)
    with pytest.raises(ResourceClosedError):
        memory.read(0, 1)


def test_handles_say_where_they_come_from(exporter: Exporter) -> None:
    with exporter.create_memory(5000) as memory, memory.export() as handle:
        assert handle.origin is not None
        assert handle.origin.kind is OriginKind.MEMORY
        assert handle.origin.size == memory.size == 8192
        assert handle.origin.trusted is (exporter.name == "memfd")


def test_images_are_a_declared_gap(exporter: Exporter) -> None:
    """Plain memfds have none, and say so."""
    parameters = ImageParameters(format="R8_UNORM", width=4, height=4)
    assert "no images" in exporter.image_gap(parameters)
    with pytest.raises(UnsupportedError, match="map_mipmapped_array:opaque_fd"):
        exporter.create_image(parameters)


def test_image_parameters() -> None:
    """What cannot be is refused at once, by the argument's name."""
    for wrong, argument in (
        ({"format": "R5G6B5_UNORM_PACK16"}, "format"),
        ({"width": 0}, "width"),
        ({"height": -1}, "height"),
        ({"depth": -1}, "depth"),
        ({"levels": 0}, "levels"),
        ({"levels": 7}, "levels"),
        ({"layers": -1}, "layers"),
        ({"depth": 2, "layers": 2}, "layers"),
        ({"cube": True, "layers": 5}, "cube"),
        ({"cube": True, "layers": 6}, "cube"),
        ({"width": 2.5}, "width"),
        ({"cube": 1}, "cube"),
    ):
        arguments: dict[str, Any] = {"format": "R8_UNORM", "width": 37, "height": 21, **wrong}
        with pytest.raises((InvalidArgumentError, ArgumentTypeError)) as caught:
            ImageParameters(**arguments)
        assert caught.value.argument == argument
    image = ImageParameters(format="R16G16_SFLOAT", width=37, height=21, levels=6, layers=3)
    assert [image.level_extent(level) for level in (0, 1, 5)] == [(37, 21, 0), (18, 10, 0), (1, 1, 0)]
    assert image.level_bytes(1) == 18 * 10 * 3 * 4
    with pytest.raises(InvalidArgumentError):
        image.level_bytes(6)
    assert ImageParameters(format="R8_UNORM", width=8, height=6, depth=4, levels=3).level_bytes(1) == 4 * 3 * 2


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


def test_death_is_told() -> None:
    exporter = open_exporter("memfd", process=True)
    assert isinstance(exporter, ProcessExporter)
    memory = exporter.create_memory(4096)
    os.kill(exporter.pid, signal.SIGSTOP)
    os.kill(exporter.pid, signal.SIGKILL)
    with pytest.raises(PeerError, match="SIGKILL"):
        memory.read(0, 1)
    memory.close()
    exporter.close()
    exporter.close()
    with pytest.raises(ResourceClosedError):
        exporter.create_memory(4096)


def test_a_stopped_child_holds_nobody_up() -> None:
    exporter = open_exporter("memfd", process=True)
    assert isinstance(exporter, ProcessExporter)
    memory = exporter.create_memory(8 << 20)
    os.kill(exporter.pid, signal.SIGSTOP)
    with pytest.raises(PeerError, match="did not answer"):
        memory._remote.call("read", timeout=0.3, offset=0, size=4)
    with pytest.raises(PeerError, match="did not take"):  # more than the socket holds
        memory._remote.call("write", timeout=0.3, data=bytes(memory.size), offset=0)
    # The rest of that message can never be sent: nothing else may follow it, and nobody waits for an answer.
    with pytest.raises(PeerError, match="not taken to its end"):
        memory.read(0, 4)
    memory.close()
    exporter.close()
    assert exporter._child.process.returncode == -signal.SIGKILL


def test_a_message_behind_one_that_is_stuck_is_bounded_too() -> None:
    with open_exporter("memfd", process=True) as exporter:
        assert isinstance(exporter, ProcessExporter)
        memory = exporter.create_memory(8 << 20)
        os.kill(exporter.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            write = threads.submit(memory._remote.call, "write", timeout=LIMIT, data=b"\1" * memory.size, offset=0)
            while not exporter._child._wire.broken:  # it is under way
                time.sleep(0.001)
            with pytest.raises(PeerError, match="still being sent"):
                memory._remote.call("read", timeout=0.2, offset=0, size=4)
            os.kill(exporter.pid, signal.SIGCONT)
            write.result(LIMIT)
        assert memory.read(memory.size - 4, 4) == b"\1" * 4  # all of it came, and the wire is whole again


def under_way(semaphore: ExporterSemaphore) -> bool:
    """Whether a wait is going on: here by its use of the page, elsewhere by the answer that is missing."""
    if isinstance(semaphore, MemfdSemaphore):
        return bool(semaphore.object._users)
    assert isinstance(semaphore, ProcessSemaphore)
    return bool(semaphore._remote.child._waiting)


def test_a_wait_on_what_is_closed(exporter: Exporter) -> None:
    semaphore = exporter.create_semaphore(Timeline)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(semaphore.wait, 1, timeout=LIMIT)
        while not under_way(semaphore):
            os.sched_yield()
        semaphore.close()
        with pytest.raises(ResourceClosedError):
            wait.result(LIMIT)


def test_what_is_done_is_done(exporter: Exporter) -> None:
    with exporter.create_memory(4096) as memory:
        submission = exporter.submit(run=[store(memory, 0, 1)])
        with ThreadPoolExecutor(8) as threads:  # all of them are told, whoever is the first
            asked = [threads.submit(submission.done, LIMIT) for _ in range(32)]
            assert all(found.result(LIMIT) for found in asked)
        assert submission.done(0.0)
        submission.close()
        assert submission.done(0.0)


def test_an_interrupt_is_for_the_parent() -> None:
    """A terminal sends it to both."""
    with open_exporter("memfd", process=True) as exporter:
        assert isinstance(exporter, ProcessExporter)
        os.kill(exporter.pid, signal.SIGINT)
        with exporter.create_memory(4096) as memory:
            assert memory.read(0, 1) == b"\0"
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_child_ends_with_its_parent() -> None:
    code = (
        "import os, sys; from gpuinterop.exporters import open_exporter\n"
        "exporter = open_exporter('memfd', process=True)\n"
        "print(exporter.pid, flush=True)\n"
        "sys.stdin.read(1)\n"
        "os._exit(9)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.stdin.close()
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(child, select.POLLIN)
        assert poll.poll(LIMIT * 1000), "the child outlived its parent"
        os.close(child)
