"""The user's name of an object stands in all that is said of it, of whatever makes objects."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from tests.limits import LIMIT
from tests.programs import python

from .fake import FakeEverything, fake_team

NAME = 'the "mesh" of 3'
SIZE = 1 << 13


def memory(device: Device, **label: Any) -> Any:
    return device.import_memory(gi.OpaqueWin32(handle=8), size=SIZE, **label)


def graph(device: Device, **label: Any) -> Any:
    with device.create_stream() as stream, stream.capture(**label) as found:
        return found


def host() -> Device:
    return gi.get_backend("host").device()


MAKES: dict[str, Callable[..., Any]] = {
    "allocation": lambda device, **label: device.allocate(SIZE, **label),
    "buffer": lambda device, **label: memory(device).map_buffer(**label),
    "graph": graph,
    "multicast object": lambda device, **label: gi.create_multicast([device], SIZE, **label),
    "semaphore": lambda device, **label: device.import_semaphore(gi.TimelineWin32(handle=8), **label),
    "stream": lambda device, **label: device.create_stream(**label),
}


@pytest.fixture
def device() -> Iterator[Device]:
    backend = FakeEverything()
    (found, *_), _ = fake_team(backend=backend)
    yield found
    backend.pass_all()
    gc.collect()
    for one in (found, host()):
        one.drain(timeout=LIMIT)


@pytest.mark.parametrize("what", MAKES)
@pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning")  # of what it stands on
def test_a_label_is_in_all_that_is_said(what: str, device: Device) -> None:
    one = MAKES[what](device, label=NAME)
    noun = re.fullmatch(rf'<(.+ #\d+) "{re.escape(NAME)}">', repr(one))
    assert noun, repr(one)
    name = f'{noun[1]} "{NAME}"'
    with pytest.warns(gi.LeakedResourceWarning, match=r'^.+ #\d+ "dropped" was dropped without close\(\)$'):
        MAKES[what](device, label="dropped")
        gc.collect()
    one.close()
    assert repr(one) == f"<{name} closed>"
    with pytest.raises(gi.ResourceClosedError) as refused, one:
        pass
    assert str(refused.value).startswith(f"{name} is closed")
    with pytest.raises(gi.ArgumentTypeError, match=r"^label: expected a str, got int"):
        MAKES[what](device, label=3)


@pytest.mark.filterwarnings("ignore::gpuinterop.LeakedResourceWarning")
def test_without_one_it_says_what_it_is_made_of(device: Device) -> None:
    with memory(device, label="mesh") as named, memory(device) as plain, gi.bridge.Bridge(device) as bridge:
        told = {
            repr(plain): r"<ExternalMemory #\d+ \(8,192 bytes\)>",
            repr(plain.map_buffer(size=1000)): r"<Buffer #\d+ \(1,000 bytes of ExternalMemory #\d+\)>",
            repr(named.map_buffer()): r'<Buffer #\d+ \(8,192 bytes of ExternalMemory #\d+ "mesh"\)>',
            repr(named.map_mipmapped_array("R8_UNORM", (4, 4))): r'<Mip.+ #\d+ \(of ExternalMemory #\d+ "mesh"\)>',
            repr(bridge.import_semaphore(gi.EventFd(os.eventfd(0)))): r"<bridged eventfd \d+ #\d+ \(of Bridge #\d+\)>",
            repr(device.create_stream()): r"<Stream #\d+>",
        }
        assert [(said, form) for said, form in told.items() if not re.fullmatch(form, said)] == []


def test_a_stream_has_the_label_in_what_others_say_of_it(device: Device) -> None:
    semaphore = device.import_semaphore(gi.TimelineWin32(handle=8), label="frames")
    stream = device.wrap_stream(64, label="torch")
    semaphore.wait(stream, 3)
    with pytest.raises(gi.SemaphoreTimeoutError, match=r'Stream #\d+ "torch" .*semaphore #\d+ "frames" to reach 3'):
        device.synchronize(timeout=0)
    other = device.wrap_stream(64)  # as an array library does between; the user's name stays
    with pytest.raises(gi.SemaphoreTimeoutError, match=r'Stream #\d+ "torch"'):
        other.synchronize(timeout=0)
    semaphore.close()


LEAVING = """
import os, gpuinterop as gi
device = gi.get_backend("host").device()
allocation = device.allocate(4096, label="positions")
stream = device.create_stream()
buffer = allocation.buffer
shared = gi.share(buffer.view(4), label="weights")
shared.acquire(stream)
shared.release(stream)
with device.create_stream() as closed:
    pass
device.allocate(4096).close()
fd = os.memfd_create("mesh", os.MFD_ALLOW_SEALING)
os.truncate(fd, 4096)
mesh = device.import_memory(gi.OpaqueFd.adopt(fd), size=4096)
parts = [mesh.map_buffer(16 * part, 16) for part in range(100)]  # which the end of the memory closes
many = [device.allocate(4096) for _ in range(1206)]
"""


@pytest.mark.parametrize("options", [(), ("-X", "dev")], ids=["hidden", "development mode"])
def test_what_is_open_at_the_exit_is_told_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    program = tmp_path / "leaving.py"
    program.write_text(LEAVING)
    done = python(*options, str(program), PYTHONPATH=os.pathsep.join(sys.path))
    if not options:
        assert (done.returncode, done.stderr) == (0, "")
        return
    lines = [(4, r'Allocation #\d+ "positions"'), (5, r"Stream #\d+"), (7, r'ArrayShare #\d+ "weights"')]
    lines += [(15, r"ExternalMemory #\d+ \(4,096 bytes\)")] + 6 * [(17, r"Allocation #\d+ \(4,096 bytes\)")]
    told = ", ".join(rf"{name} \[made at {program}:{line}\]" for line, name in lines)
    assert done.stderr.count("Leaked") == 1
    assert re.search(rf"open at the exit: {told} and 1,200 more; close\(\) each", done.stderr), done.stderr


def test_what_an_exit_handler_closes_is_not_told(tmp_path: Path) -> None:
    """Also where the program registers the handler before its first device."""
    program = tmp_path / "closing.py"
    program.write_text(
        "import atexit\n"
        "import gpuinterop as gi\n"
        "atexit.register(lambda: (memory.close(), print(memory.closed)))\n"
        "memory = gi.get_backend('host').device().allocate(4096)\n"
    )
    done = python("-X", "dev", str(program), PYTHONPATH=os.pathsep.join(sys.path))
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("module", ["studio", "gpuinterop_studio", None])
def test_the_place_is_the_users_line(device: Device, monkeypatch: pytest.MonkeyPatch, module: str | None) -> None:
    """Whatever the module is called, and with frames of `contextlib` in between."""
    monkeypatch.setattr("gpuinterop._core.lifetime.DEV_MODE", True)
    program = "with device.create_stream() as stream:\n    with stream.capture() as graph:\n        pass"
    names = {"__name__": module, "device": device}
    exec(compile(program, "studio.py", "exec"), names)
    made: Any = names["graph"]
    with made:
        assert made.lifetime.made_at == " [made at studio.py:2]"


def test_development_mode_tells_where_the_dropped_was_made(tmp_path: Path) -> None:
    program = tmp_path / "dropping.py"
    program.write_text(
        "import gpuinterop as gi\n"
        "def made(device):\n"
        "    return device.allocate(4096)\n"
        "allocation = made(gi.get_backend('host').device())\n"
        "handle = allocation.export()\n"
        "del handle\n"
        "del allocation\n"
    )
    done = python("-X", "dev", str(program), PYTHONPATH=os.pathsep.join(sys.path))
    assert re.search(rf"VmmFd\(fd=\d+\) \[made at {program}:5\] was dropped", done.stderr), done.stderr
    assert re.search(rf"Allocation #1 .* \[made at {program}:3\] was dropped", done.stderr), done.stderr
    assert "tracemalloc" not in done.stderr
