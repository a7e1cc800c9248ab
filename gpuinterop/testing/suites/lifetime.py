"""Lifetime: close ends use at once, the release follows when all work is done, and leaks are reported."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest

from ...capabilities import Operation
from ...errors import LeakedResourceWarning, ResourceBusyError, ResourceClosedError
from ...handles import OpaqueFd
from ..requirements import requires
from .base import LIMIT, Gate, Harness, Suite, held, mappings, raises, read
from .libraries import libraries, read_capsule, read_interface
from .streams import in_this_process


@requires((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
class LifetimeSuite(Suite):
    """What can be closed when, and what happens to the rest."""

    exporter_filter: ClassVar = staticmethod(in_this_process)

    def test_close_is_idempotent(self, harness: Harness) -> None:
        """Closing again does nothing; `with` closes; a closed object shows it."""
        _, memory = harness.memory()
        with memory.map_buffer() as buffer:
            buffer.fill(1)
        assert buffer.closed
        buffer.close()
        memory.close()
        memory.close(timeout=LIMIT)
        assert memory.closed
        assert "closed" in repr(memory)

    def test_errors_after_close(self, harness: Harness) -> None:
        """Every call on a closed object raises `ResourceClosedError`."""
        _, memory = harness.memory()
        buffer = memory.map_buffer()
        view = buffer.view(16)
        buffer.close()
        target = np.zeros(16, np.uint8)
        for call in (
            lambda: buffer.ptr,
            lambda: buffer.view(16),
            buffer.fill,
            lambda: buffer.copy_from_host(target),
            lambda: buffer.copy_to_host(target),
            lambda: view.ptr,
            view.__dlpack__,
            lambda: read_interface(view, harness.device),
            buffer.__enter__,
        ):
            raises(ResourceClosedError, call)
        memory.close()
        raises(ResourceClosedError, memory.map_buffer)
        raises(ResourceClosedError, lambda: memory.map_mipmapped_array("R8_UNORM", (4, 4)))

    def test_child_keeps_parent(self, harness: Harness) -> None:
        """A buffer keeps its memory when the caller drops its reference."""
        theirs = harness.export()
        buffer = harness.device.import_memory(theirs.export(), size=theirs.size).map_buffer()
        gc.collect()
        buffer.fill(0x21)
        assert theirs.read(0, 4) == b"\x21" * 4
        buffer._parents[0].close()
        assert buffer.closed

    def test_close_while_pending(self, harness: Harness) -> None:
        """Closing does not affect enqueued work: the memory is released after it."""
        theirs, memory = harness.memory()
        gate, stream = Gate(harness), harness.stream()
        buffer = memory.map_buffer()
        released: list[str] = []
        gate.block(stream)
        buffer.fill(0x42, stream=stream)
        memory.on_released(lambda: released.append("memory"))
        buffer.on_released(lambda: released.append("mapping"))
        memory.close()
        assert buffer.closed
        assert released == [], "released under pending work"
        gate.open()
        stream.synchronize(LIMIT)
        memory.close(timeout=LIMIT)
        assert released == ["mapping", "memory"]
        assert theirs.read(0, theirs.size) == b"\x42" * theirs.size

    def test_close_with_timeout(self, harness: Harness) -> None:
        """``close(timeout=...)`` reports that the object is busy, and why; it is still released later."""
        _, memory = harness.memory()
        gate, stream = Gate(harness), harness.stream()
        buffer = memory.map_buffer()
        gate.block(stream)
        buffer.fill(1, stream=stream)
        error = raises(ResourceBusyError, lambda: memory.close(timeout=0.0))
        assert "pending" in str(error) or "in use" in str(error)
        assert memory.closed
        gate.open()
        memory.close(timeout=LIMIT)
        stream.synchronize(LIMIT)

    def test_exports_keep_the_mapping(self, harness: Harness) -> None:
        """A capsule, and an object whose array interface was read, keep the mapping until they are dropped."""
        theirs, memory = harness.memory()
        buffer = memory.map_buffer()
        theirs.write(0, b"there")
        view = buffer.view(64)
        taken, owner = read_interface(view, harness.device)
        capsule = buffer.view(64, offset=64).__dlpack__(max_version=(1, 0))
        memory.close()
        raises(ResourceBusyError, lambda: memory.close(timeout=0.0), match="array")
        # Still mapped at that address: another import of the object gets a different one.
        assert taken["data"][0] + 64 == read_capsule(capsule).data
        with harness.device.import_memory(theirs.export(), size=theirs.size) as again, again.map_buffer() as other:
            assert other.ptr != taken["data"][0]
        del view, owner
        raises(ResourceBusyError, lambda: memory.close(timeout=0.0), match="array")
        del capsule
        gc.collect()
        memory.close(timeout=LIMIT)

    def test_arrays_keep_the_mapping(self, harness: Harness) -> None:
        """An array that others hold keeps the mapping, even after everything here is closed."""
        for library in libraries(harness.device, simulated=harness.simulated):
            theirs, memory = harness.memory()
            buffer = memory.map_buffer()
            by_interface: Any = library.from_interface(buffer.view(64))
            by_dlpack: Any = library.from_dlpack(buffer.view(64, offset=64))
            memory.close()
            raises(ResourceBusyError, lambda memory=memory: memory.close(timeout=0.0), match="array")
            library.set(by_interface, 0, 0x31)
            library.finish()
            assert theirs.read(0, 1) == b"\x31"
            del by_interface
            raises(ResourceBusyError, lambda memory=memory: memory.close(timeout=0.0), match="array")
            library.set(by_dlpack, 0, 0x32)
            library.finish()
            assert theirs.read(64, 1) == b"\x32"
            del by_dlpack
            gc.collect()
            memory.close(timeout=LIMIT)

    def test_released_means_unmapped(self, harness: Harness) -> None:
        """After the release, nothing of the memory is mapped."""
        theirs = harness.export(1 << 16)
        first = harness.device.import_memory(theirs.export(), size=theirs.size)
        with first.map_buffer() as buffer:
            buffer.fill(1)
        first.close(timeout=LIMIT)  # on first use, a driver may map something that stays
        harness.device.synchronize(LIMIT)
        before = mappings()
        memory = harness.device.import_memory(theirs.export(), size=theirs.size)
        buffer = memory.map_buffer()
        buffer.fill(1)
        released: list[bool] = []
        memory.on_released(lambda: released.append(True))
        memory.close(timeout=LIMIT)
        assert released == [True]
        assert mappings() <= before

    def test_last_buffer_unmaps(self, harness: Harness) -> None:
        """A range is unmapped with the last of its buffers, not with the first."""
        theirs, memory = harness.memory()
        whole, part = memory.map_buffer(), memory.map_buffer(16, 16)
        whole.close(timeout=LIMIT)
        part.fill(0x55)
        assert theirs.read(16, 16) == b"\x55" * 16
        assert read(part) == b"\x55" * 16
        part.close(timeout=LIMIT)

    def test_semaphore_closed_while_pending(self, harness: Harness) -> None:
        """A pending wait for a closed semaphore still waits for its signal, and ends with it."""
        gate, stream = Gate(harness), harness.stream()
        gate.block(stream)
        gate.ours.close()
        assert held(stream), "closing a semaphore let its waits pass"
        gate.open()
        stream.synchronize(LIMIT)
        gate.ours.close(timeout=LIMIT)

    def test_busy_semaphore(self, harness: Harness) -> None:
        """``close(timeout=...)`` reports that a semaphore is busy; its stream does not wait for ever."""
        gate = Gate(harness)
        stream = harness.device.create_stream()
        gate.block(stream)
        raises(ResourceBusyError, lambda: gate.ours.close(timeout=0.0))
        gate.open()  # ends the wait if the driver cannot cancel it
        with contextlib.suppress(ResourceClosedError):  # if the driver cancelled it, the stream has failed
            stream.synchronize(LIMIT)
        stream.close()

    def test_stream_closed_while_pending(self, harness: Harness) -> None:
        """A closed stream finishes its work."""
        theirs, buffer = harness.buffer()
        stream = harness.device.create_stream()
        for byte in range(1, 30):
            buffer.fill(byte, stream=stream)
        stream.close(timeout=LIMIT)
        assert theirs.read(0, 8) == b"\x1d" * 8

    def test_dropped_without_close(self, harness: Harness) -> None:
        """An object that is dropped without `close` warns, and is still released."""
        theirs, memory = harness.memory()
        makers: dict[str, Any] = {
            "ExternalMemory": lambda: harness.device.import_memory(theirs.export(), size=theirs.size),
            "Buffer": memory.map_buffer,
            "Stream": harness.device.create_stream,
        }
        for noun, make in makers.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                thing = make()
                del thing
                gc.collect()
            texts = [str(warning.message) for warning in caught if warning.category is LeakedResourceWarning]
            assert any(noun in text for text in texts), (noun, texts)
        memory.close(timeout=LIMIT)

    def test_exit_does_not_mask_errors(self, harness: Harness) -> None:
        """An exception in a `with` block is raised unchanged, whatever is pending."""
        _, memory = harness.memory()
        gate, stream = Gate(harness), harness.stream()

        def body() -> None:
            with memory.map_buffer() as buffer:
                gate.block(stream)
                buffer.fill(1, stream=stream)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            body()
        gate.open()
        stream.synchronize(LIMIT)
