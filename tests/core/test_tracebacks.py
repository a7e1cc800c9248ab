"""The traceback of a mistake ends at the user's line, or at most two calls further in."""

from __future__ import annotations

import copy
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.programs import python
from tests.tracebacks import MOST, functions, ours

from .fake import FakeEverything, FakeGraphs, fake_device

SIZE = 65536


@pytest.fixture
def world(scope: ExitStack, tmp_path: Path) -> Any:
    """Objects of the host, open and closed, idle and busy."""
    device = gi.get_backend("host").device()
    fd = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    scope.callback(os.close, fd)
    os.ftruncate(fd, SIZE)
    w = SimpleNamespace(device=device, fd=fd)
    w.handle = scope.enter_context(gi.OpaqueFd.adopt_duplicate(fd))
    w.memory = scope.enter_context(device.import_memory(gi.OpaqueFd.adopt_duplicate(fd), size=SIZE))
    w.buffer = w.memory.map_buffer()
    w.allocation = scope.enter_context(device.allocate(4096))
    w.exported = scope.enter_context(w.allocation.export())
    w.timeline = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    w.binary = scope.enter_context(device.create_semaphore(gi.OpaqueFd))
    w.stream = scope.enter_context(device.create_stream())
    w.closed = SimpleNamespace(
        memory=device.import_memory(gi.OpaqueFd.adopt_duplicate(fd), size=SIZE),
        semaphore=device.create_semaphore(gi.TimelineFd),
        stream=device.create_stream(),
        handle=gi.OpaqueFd.adopt_duplicate(fd),
        allocation=device.allocate(4096),
    )
    w.closed.buffer = w.closed.memory.map_buffer()
    view = w.closed.buffer.view(4)
    for one in vars(w.closed).values():
        one.close()
    w.closed.view = view
    w.gate = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    w.stuck = scope.enter_context(device.create_stream())
    w.gate.wait(w.stuck, 5)
    scope.callback(w.gate.host_signal, 5)
    w.batch = gi.SemaphoreBatch(w.timeline, w.binary)
    w.handoff = gi.Handoff(scope.enter_context(device.create_semaphore(gi.TimelineFd)))
    w.bridge = scope.enter_context(gi.bridge.Bridge(device))
    w.socket, gone = socket.socketpair()
    scope.callback(w.socket.close)
    gone.close()
    w.share = scope.enter_context(gi.share(w.allocation.buffer.view(4)))
    w.attached = scope.enter_context(gi.attach(bytes(w.share)))
    transport = scope.enter_context(gi.exchange.SocketTransport(tmp_path, rank=0, size=1))
    w.team = gi.exchange.Team(transport)
    w.closed.graphs = fake_device(backend=FakeGraphs())[0].create_stream()
    with w.closed.graphs, w.closed.graphs.capture() as w.graph:
        pass
    scope.callback(w.graph.close)
    images, _ = fake_device(backend=FakeEverything())
    w.images = scope.enter_context(images.import_memory(gi.OpaqueWin32(handle=8), size=SIZE))
    w.level = w.images.map_mipmapped_array("R8_UNORM", (4, 4)).level(0)
    w.multicast = scope.enter_context(gi.create_multicast([images], SIZE))
    return w


def signal_twice(w: Any) -> None:
    w.timeline.signal(w.stream, 5)
    w.timeline.signal(w.stream, 4)


def acquire_twice(w: Any, acquire: Callable[[gi.ArrayShare], None]) -> None:
    w.share.acquire()
    try:
        acquire(w.share)
    finally:
        w.share.release()


def close_with_an_array(w: Any) -> None:
    with w.device.allocate(4096) as allocation:
        _array = np.asarray(allocation.buffer.view(4096))
        allocation.close(timeout=0.01)


def attach_what_is_closed(w: Any) -> None:
    with gi.share(w.allocation.buffer.view(4)) as shared:
        descriptor = bytes(shared)
    gi.attach(descriptor)


TYPE, VALUE, HANDLE = gi.ArgumentTypeError, gi.InvalidArgumentError, gi.HandleError
CLOSED, LATE, GAP = gi.ResourceClosedError, gi.SemaphoreTimeoutError, gi.UnsupportedError

MISTAKES: dict[str, tuple[type[gi.GpuInteropError], Callable[[Any], object]]] = {
    "a number as memory": (TYPE, lambda w: w.device.import_memory(w.fd, size=SIZE)),
    "an array as memory": (TYPE, lambda w: w.device.import_memory(np.zeros(4), size=SIZE)),
    "memory of no bytes": (VALUE, lambda w: w.device.import_memory(w.handle, size=0)),
    "a size that is a str": (TYPE, lambda w: w.device.import_memory(w.handle, size="4")),
    "a size beyond the object": (VALUE, lambda w: w.device.import_memory(w.handle, size=1 << 30)),
    "a closed handle": (HANDLE, lambda w: w.device.import_memory(w.closed.handle, size=SIZE)),
    "another kind of handle": (TYPE, lambda w: w.device.import_memory(gi.TimelineFd(w.fd), size=SIZE)),
    "an unsupported handle": (GAP, lambda w: w.device.import_memory(gi.D3D12Heap(handle=8), size=SIZE)),
    "a label that is a number": (TYPE, lambda w: w.device.import_memory(w.handle, size=SIZE, label=3)),
    "a descriptor that is not open": (HANDLE, lambda _: gi.OpaqueFd(1 << 20)),
    "a descriptor that is a str": (TYPE, lambda _: gi.OpaqueFd("3")),  # type: ignore[arg-type]
    "a str to adopt": (TYPE, lambda _: gi.OpaqueFd.adopt("3")),  # type: ignore[arg-type]
    "memory as a semaphore": (HANDLE, lambda w: w.device.import_semaphore(w.handle)),
    "a size without the granularity": (VALUE, lambda w: w.device.import_allocation(w.exported, 100)),
    "an allocation of -1 bytes": (VALUE, lambda w: w.device.allocate(-1)),
    "access for a number": (TYPE, lambda w: w.device.allocate(4096, access=[3])),
    "an unsupported semaphore": (GAP, lambda w: w.device.create_semaphore(gi.D3D12Fence)),
    "a buffer too big": (VALUE, lambda w: w.memory.map_buffer(size=1 << 20)),
    "a buffer of closed memory": (CLOSED, lambda w: w.closed.memory.map_buffer()),
    "an unsupported image": (GAP, lambda w: w.memory.map_mipmapped_array("R8_UNORM", (4, 4))),
    "a view too big": (VALUE, lambda w: w.buffer.view(1 << 20, "float32")),
    "a view of another type": (TYPE, lambda w: w.buffer.view(4, "float33")),
    "a view of -1 elements": (VALUE, lambda w: w.buffer.view((4, -1))),
    "a view that is not aligned": (VALUE, lambda w: w.buffer.view(4, "float32", offset=1)),
    "a view of what is closed": (CLOSED, lambda w: w.closed.buffer.view(4)),
    "the address of what is closed": (CLOSED, lambda w: w.closed.buffer.ptr),
    "an array of what is closed": (CLOSED, lambda w: np.asarray(w.closed.view)),
    "a tensor of what is closed": (CLOSED, lambda w: np.from_dlpack(w.closed.view)),
    "a view of a closed allocation": (CLOSED, lambda w: w.closed.allocation.view(4)),
    "an export of what is closed": (CLOSED, lambda w: w.closed.allocation.export()),
    "an array of a buffer": (TYPE, lambda w: np.asarray(w.buffer)),
    "a copy too big": (VALUE, lambda w: w.buffer.copy_from_host(np.zeros(1 << 20))),
    "a copy to what is read-only": (VALUE, lambda w: w.buffer.copy_to_host(b"abc")),
    "a byte of 256": (VALUE, lambda w: w.buffer.fill(256)),
    "a number as a stream": (TYPE, lambda w: w.buffer.fill(0, stream=3)),
    "a closed stream": (CLOSED, lambda w: w.buffer.fill(0, stream=w.closed.stream)),
    "a wait without a value": (VALUE, lambda w: w.timeline.wait(w.stream)),
    "a value of a binary semaphore": (VALUE, lambda w: w.binary.wait(w.stream, 3)),
    "a value that is a str": (TYPE, lambda w: w.timeline.wait(w.stream, "1")),
    "a wait of a number": (TYPE, lambda w: w.timeline.wait(3, 1)),
    "a wait for what is closed": (CLOSED, lambda w: w.closed.semaphore.wait(w.stream, 1)),
    "a wait of a closed stream": (CLOSED, lambda w: w.timeline.wait(w.closed.stream, 1)),
    "a time-out that is a str": (TYPE, lambda w: w.timeline.wait(w.stream, 1, timeout="x")),
    "a wait that blocks too long": (LATE, lambda w: w.timeline.wait(w.device.wrap_stream(0), 9, timeout=0.01)),
    "a signal by the host of a str": (TYPE, lambda w: w.timeline.host_signal("1")),
    "a signal that goes back": (VALUE, signal_twice),
    "a wait on the host": (LATE, lambda w: w.timeline.host_wait(9, timeout=0.01)),
    "a time-out of a semaphore": (VALUE, lambda w: w.timeline.close(-1)),
    "the value of a binary semaphore": (VALUE, lambda w: w.binary.value),
    "a batch of too few values": (VALUE, lambda w: w.batch.signal(w.stream, (1,))),
    "a batch of a wrong value": (VALUE, lambda w: w.batch.wait(w.stream, (1, 2))),
    "a stream that hangs": (LATE, lambda w: w.stuck.synchronize(0.01)),
    "an event that hangs": (LATE, lambda w: w.stuck.record().wait(0.01)),
    "a device that hangs": (LATE, lambda w: w.device.synchronize(0.01)),
    "memory in use": (gi.ResourceBusyError, close_with_an_array),
    "a time-out of -1": (VALUE, lambda w: w.allocation.close(-1)),
    "an unsupported capture": (GAP, lambda w: w.stream.capture().__enter__()),
    "a launch on a closed stream": (CLOSED, lambda w: w.graph.launch(w.closed.graphs)),
    "another image format": (VALUE, lambda w: w.images.map_mipmapped_array("R3G3", (4, 4))),
    "a level's stream that is a number": (TYPE, lambda w: w.level.copy_from_host(np.zeros(16, "u1"), stream=3)),
    "multicast of a number": (TYPE, lambda w: w.multicast.bind_memory(3, 3)),
    "an import of unsupported multicast": (GAP, lambda w: gi.import_multicast(gi.VmmFd(w.fd), [w.device], SIZE)),
    "a requirement that is a number": (TYPE, lambda w: w.device.capabilities.missing(3)),
    "a device that no backend has": (
        gi.DeviceNotFoundError,
        lambda _: gi.match_device(gi.DeviceIdentity(uuid=b"no device's uuid")),
    ),
    "an acquire out of turn": (VALUE, lambda w: w.handoff.acquire(w.stream)),
    "a handoff of a number": (TYPE, lambda _: gi.Handoff(3)),  # type: ignore[arg-type]
    "another library's stream": (TYPE, lambda w: w.device.wrap_stream("x")),
    "a device that there is not": (gi.DeviceNotFoundError, lambda _: gi.get_backend("host").device(99)),
    "a backend that there is not": (gi.BackendNotFoundError, lambda _: gi.get_backend("metal")),
    "memory of NumPy to share": (GAP, lambda _: gi.share(np.zeros(4))),
    "a str to share": (TYPE, lambda _: gi.share("x")),
    "a share that is closed": (CLOSED, attach_what_is_closed),
    "a share acquired twice": (VALUE, lambda w: acquire_twice(w, gi.ArrayShare.acquire)),
    "a release of an attachment out of turn": (VALUE, lambda w: w.attached.release()),
    "shares acquired twice": (VALUE, lambda w: acquire_twice(w, lambda share: gi.sharing.acquire([share]))),
    "a share in place of its view": (TYPE, lambda w: np.asarray(w.share)),
    "a time-out of a share": (VALUE, lambda w: w.share.close(-1)),
    "a time-out of an attachment": (VALUE, lambda w: w.attached.close(-1)),
    "a device to attach to that is a number": (TYPE, lambda w: gi.attach(bytes(w.share), device=3)),  # type: ignore[arg-type]
    "bytes of something else": (VALUE, lambda _: gi.attach(b"x")),
    "memory as an eventfd to bridge": (HANDLE, lambda w: w.bridge.import_semaphore(gi.EventFd(w.fd))),
    "a number to bridge": (TYPE, lambda w: w.bridge.import_semaphore(3)),
    "a node that there is not": (
        VALUE,
        lambda w: gi.bridge.SyncobjEndpoint(gi.DrmSyncobjFd(w.fd), node="/dev/dri/renderD999"),
    ),
    "a vote for a number": (TYPE, lambda w: w.team.vote(3)),
    "a bridge of a number": (TYPE, lambda _: gi.bridge.Bridge(3)),  # type: ignore[arg-type]
    "unsupported multicast": (GAP, lambda w: gi.create_multicast([w.device], SIZE)),
    "a context that is a number": (TYPE, lambda w: gi.vulkan.share_buffer(3, w.device, 4096)),  # type: ignore[arg-type]
    "a closed handle to send": (HANDLE, lambda w: gi.ipc.send_handle(w.socket, w.closed.handle)),
    "a number to send": (TYPE, lambda w: gi.ipc.send_handle(w.socket, 3)),  # type: ignore[arg-type]
    "a receiver whose peer has gone": (gi.PeerError, lambda w: gi.ipc.receive_handle(w.socket, gi.OpaqueFd)),
    "a duplicate of what is closed": (HANDLE, lambda w: w.closed.handle.duplicate()),
    "a copy of a buffer": (TYPE, lambda w: copy.copy(w.buffer)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_ends_near_the_users_line(world: Any, mistake: str) -> None:
    kind, make = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        make(world)
    assert len(found := ours(caught.tb)) <= MOST, found
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


class Users(gi.bridge.Endpoint):
    """What users pass, whose code the library calls."""

    kind = gi.Timeline

    def __init__(self, raised: gi.GpuInteropError) -> None:
        self.raised = raised

    @property
    def label(self) -> Any:
        return self.fail()

    @label.setter
    def label(self, label: str) -> None:
        pass

    def __cuda_stream__(self) -> Any:
        return self.fail()

    def __index__(self) -> Any:
        return self.fail()

    @property
    def __array_interface__(self) -> Any:
        return self.fail()

    def wait(self, value: int, timeout: float) -> Any:
        raise NotImplementedError

    def signal(self, value: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def fail(self) -> Any:
        raise self.raised


CALLED: dict[str, Callable[[Any, Any], object]] = {
    "label": lambda w, users: w.bridge.from_endpoint(users),
    "__cuda_stream__": lambda w, users: w.device.wrap_stream(users),
    "__index__": lambda w, users: w.device.allocate(users),
    "__array_interface__": lambda w, users: w.buffer.copy_from_host(users),
}


@pytest.mark.parametrize("method", CALLED)
def test_the_users_own_frames_stay(world: Any, method: str) -> None:
    """Code of the user's that the library calls is where the user has to look."""
    with pytest.raises(gi.InvalidArgumentError) as caught:
        CALLED[method](world, Users(gi.InvalidArgumentError("mine", "is wrong.")))
    assert functions(caught.tb)[-2:] == [f"Users.{method}", "Users.fail"]
    assert ours(caught.tb) == []


@pytest.mark.parametrize("enqueues", [False, True], ids=["made", "enqueued"])
def test_a_drivers_error_keeps_all_frames(world: Any, monkeypatch: pytest.MonkeyPatch, enqueues: bool) -> None:
    """It may be rare: what a bug report has is all that there is."""
    users = Users(gi.DriverError("cuMemCreate", 999, "CUDA_ERROR_UNKNOWN"))
    monkeypatch.setattr(world.device.driver, "allocate", lambda *_: users.fail())
    monkeypatch.setattr(world.timeline, "_give_signal", lambda *_: users.fail())
    with pytest.raises(gi.DriverError) as caught:
        _ = world.timeline.signal(world.stream, 1) if enqueues else world.device.allocate(4096)
    found = functions(caught.tb)
    assert found[-1] == "Users.fail"
    assert ("Enqueues._enqueue" if enqueues else "Device.allocate") in found


USERS_TEST = """
import gpuinterop as gi


def test_mine():
    device = gi.get_backend("host").device()
    with device.allocate(4096) as allocation:
        allocation.buffer.view((4, -1))
"""


@pytest.mark.parametrize("options", [(), ("-X", "dev")], ids=["usual", "development mode"])
def test_pytest_shows_the_users_line_last(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_users.py").write_text(USERS_TEST)
    command = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "test_users.py")
    done = python(*options, *command, cwd=tmp_path, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    assert done.returncode == 1, done.stdout + done.stderr
    places = [line.split(":")[0] for line in done.stdout.splitlines() if ": in " in line]
    assert places[0] == "test_users.py"
    assert (len(places) > 1 + MOST) == bool(options), done.stdout
