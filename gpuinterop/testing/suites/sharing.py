"""Existing arrays, shared with another process in place: with each transport that their memory allows."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest

from ..._core.device import Device
from ..._core.memory import Buffer
from ..._core.stream import Stream
from ...capabilities import Operation
from ...errors import ResourceClosedError
from ...handles import Handle, IpcMemHandle, OpaqueFd, TimelineFd, VmmFd
from ...sharing import ArrayShare, attach, share
from ..exporters.base import ExporterMemory, Fill
from ..peer import BackendPeer
from ..requirements import requires, skip_declared
from .base import LIMIT, Harness, Suite, held, leaves_nothing, pattern, raises, read, word, write
from .libraries import legacy_array

SIZE = 5000
ORDER = (Operation.CREATE_SEMAPHORE, TimelineFd)


class SharedArrays(Suite):
    """Tests of one transport, which a subclass names."""

    transport: ClassVar[type[Handle]]

    @pytest.fixture
    def array(self, device: Device, scope: ExitStack) -> Any:
        """An array of `SIZE` bytes, which is part of a larger allocation."""
        return scope.enter_context(device.allocate(1 << 16)).buffer.view(SIZE, "uint8", offset=512)

    @pytest.fixture
    def shared(self, array: Any, scope: ExitStack) -> ArrayShare:
        """The array, shared, filled with a pattern."""
        found = scope.enter_context(share({"array": array}))
        buffer, start = found._place("array")
        buffer.copy_from_host(np.frombuffer(pattern(SIZE), np.uint8), offset=start)
        return found

    def test_elsewhere(self, device: Device, shared: ArrayShare, scope: ExitStack) -> None:
        """Another process reads and changes the bytes in place."""
        assert shared.transport == self.transport.__name__
        peer = scope.enter_context(BackendPeer(device))
        peer.attach(bytes(shared), "array")
        assert peer.read(0, SIZE) == pattern(SIZE)
        peer.fill(0x51, 8, 16)
        assert peer.read(0, 1) == pattern(SIZE)[:1]  # the peer has synchronized
        buffer, start = shared._place("array")
        assert read(buffer, start, 32) == pattern(SIZE)[:8] + b"\x51" * 16 + pattern(SIZE)[24:32]

    def test_here(self, shared: ArrayShare, device: Device) -> None:
        """The sharing process can attach to the same memory."""
        with attach(bytes(shared), device=device) as again:
            (mine, start), (theirs, offset) = shared._place("array"), again._place("array")
            assert mine.ptr + start == theirs.ptr + offset

    def test_what_is_attached_stays(self, device: Device, shared: ArrayShare, scope: ExitStack) -> None:
        """A closed share refuses new readers; attached arrays stay valid."""
        peer, late = scope.enter_context(BackendPeer(device)), scope.enter_context(BackendPeer(device))
        peer.attach(bytes(shared), "array")
        descriptor = bytes(shared)
        shared.close()
        assert peer.read(0, SIZE) == pattern(SIZE)
        raises(ResourceClosedError, lambda: late.attach(descriptor, "array"))

    @requires(ORDER)
    def test_order(self, device: Device, shared: ArrayShare, stream: Stream, scope: ExitStack) -> None:
        """A reader waits for the version that is being written, and the writer for current readers."""
        peer = scope.enter_context(BackendPeer(device))
        peer.attach(bytes(shared), "array")
        buffer, start = shared._place("array")
        gate = scope.enter_context(device.create_semaphore(TimelineFd))
        for turn in range(1, 4):
            shared.acquire(stream.ptr)
            gate.wait(stream, turn)
            buffer.fill(turn, offset=start, size=SIZE, stream=stream)
            peer.acquire()  # the next version, which is not written yet
            shared.release(stream.ptr)
            shared.acquire(stream.ptr)  # after the reader
            buffer.fill(0xEE, offset=start, size=SIZE, stream=stream)
            shared.release(stream.ptr)
            assert not peer.idle(0.01)
            gate.host_signal(turn)
            assert peer.read(0, SIZE) == bytes([turn]) * SIZE
            assert held(stream)
            peer.release()
            stream.synchronize(LIMIT)
            assert read(buffer, start, SIZE) == b"\xee" * SIZE

    def test_nothing_is_left_over(self, device: Device, array: Any, scope: ExitStack) -> None:
        """Rounds of sharing, attaching and detaching leave no descriptor and no mapping here."""
        peer, _open = scope.enter_context(BackendPeer(device)), scope.enter_context(share(array))

        def round_trip(_turn: int) -> None:
            with share({"array": array}) as found:
                peer.attach(bytes(found), "array")
                peer.detach()
                found.close(timeout=LIMIT)
            gc.collect()

        leaves_nothing(round_trip)


class ArraysInVulkan(Suite):
    """Arrays that a Vulkan driver imports in place; a subclass names the kind of memory."""

    exporter_filter: ClassVar = staticmethod(lambda spec: spec.name == "vulkan" and not spec.process)

    @pytest.fixture
    def pair(self, harness: Harness) -> tuple[ExporterMemory, Buffer]:
        """The middle of an allocation as Vulkan's memory, and all of it as the device's."""
        ours = harness.scope.enter_context(harness.device.allocate(1 << 16)).buffer
        exporter: Any = harness.exporter
        return harness.scope.enter_context(exporter.import_array(ours.view(SIZE, "uint8", offset=512))), ours

    def test_bytes(self, pair: tuple[ExporterMemory, Buffer]) -> None:
        """Each side reads what the other wrote, from the first byte to the last; neighbouring bytes stay unchanged."""
        theirs, ours = pair
        write(ours, pattern(ours.size, 1))
        assert theirs.read(0, SIZE) == pattern(ours.size, 1)[512 : 512 + SIZE]
        theirs.write(0, pattern(SIZE, 2))
        assert read(ours, 512, SIZE) == pattern(SIZE, 2)
        assert read(ours, 0, 512) == pattern(ours.size, 1)[:512]
        assert read(ours, 512 + SIZE) == pattern(ours.size, 1)[512 + SIZE :]

    def test_work(self, harness: Harness, pair: tuple[ExporterMemory, Buffer]) -> None:
        """Vulkan's own work writes the requested bytes."""
        theirs, ours = pair
        ours.fill(0x11)
        assert harness.exporter.submit(fill=[Fill(memory=theirs, offset=8, size=64, word=word(0x22))]).done(LIMIT)
        assert read(ours, 0, 1024) == b"\x11" * 520 + b"\x22" * 64 + b"\x11" * 440

    def test_the_array_is_kept(self, harness: Harness) -> None:
        """The array's memory stays valid while Vulkan holds it."""
        exporter: Any = harness.exporter
        ours = harness.device.allocate(1 << 16)
        write(ours.buffer, pattern(ours.size, 3))
        with exporter.import_array(ours.buffer.view(SIZE)) as theirs:
            ours.close()
            gc.collect()
            assert theirs.read(0, SIZE) == pattern(SIZE, 3)
        ours.close(timeout=LIMIT)

    def test_nothing_is_left_over(self, harness: Harness) -> None:
        exporter: Any = harness.exporter
        view = harness.scope.enter_context(harness.device.allocate(1 << 16)).buffer.view(SIZE)

        def round_trip(_turn: int) -> None:
            with exporter.import_array(view) as theirs:
                theirs.read(0, 1)

        leaves_nothing(round_trip)


@requires((Operation.EXPORT_ARRAY, VmmFd))
class VmmArraysInVulkanSuite(ArraysInVulkan):
    """Memory of VMM handles."""


@requires((Operation.EXPORT_ARRAY, OpaqueFd))
class HostArraysInVulkanSuite(ArraysInVulkan):
    """Memory of the host."""


@requires((Operation.EXPORT_ARRAY, VmmFd), (Operation.IMPORT_ARRAY, VmmFd))
class SharedVmmSuite(SharedArrays):
    """Memory of VMM handles, as `Device.allocate` makes it."""

    transport = VmmFd


@requires((Operation.EXPORT_ARRAY, OpaqueFd), (Operation.IMPORT_ARRAY, OpaqueFd))
class SharedFileSuite(SharedArrays):
    """Memory in memfds."""

    transport = OpaqueFd


@requires((Operation.EXPORT_ARRAY, IpcMemHandle), (Operation.IMPORT_ARRAY, IpcMemHandle))
class SharedLegacySuite(SharedArrays):
    """Memory of ``cudaMalloc`` or ``hipMalloc``, as torch and CuPy make it by default."""

    transport = IpcMemHandle

    @pytest.fixture
    def array(self, device: Device) -> Any:
        found = legacy_array(device, SIZE)
        if found is None:
            skip_declared("neither torch nor CuPy, whose memory this needs, is installed with its GPU")
        return found
