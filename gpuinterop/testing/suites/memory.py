"""External memory: both sides see the same bytes in the right place, and nothing is left over."""

from __future__ import annotations

import numpy as np

from ...capabilities import Operation
from ...handles import OpaqueFd
from ..requirements import requires
from .base import LIMIT, Harness, Suite, differ, leaves_nothing, pattern, read, write
from .libraries import libraries

PAGE = 4096


@requires((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_BUFFER, OpaqueFd))
class MemorySuite(Suite):
    """An exporter's memory on the device under test."""

    def test_exporter_writes_device_reads(self, harness: Harness) -> None:
        """The device reads what the exporter writes, from the first byte to the last."""
        theirs, ours = harness.buffer(3 * PAGE)
        data = pattern(theirs.size)
        theirs.write(0, data)
        assert ours.size == theirs.size
        assert read(ours) == data

    def test_device_writes_exporter_reads(self, harness: Harness) -> None:
        """The exporter reads what the device writes, from the first byte to the last."""
        theirs, ours = harness.buffer(3 * PAGE)
        data = pattern(theirs.size, 1)
        write(ours, data)
        assert theirs.read(0, theirs.size) == data

    def test_fill(self, harness: Harness) -> None:
        """A fill sets exactly its bytes to exactly its value."""
        theirs, ours = harness.buffer(2 * PAGE)
        data = pattern(theirs.size, 2)
        theirs.write(0, data)
        ours.fill(0xA5, offset=17, size=101)
        expected = bytearray(data)
        expected[17:118] = b"\xa5" * 101
        assert theirs.read(0, theirs.size) == bytes(expected)
        ours.fill(0)
        assert theirs.read(0, theirs.size) == bytes(theirs.size)

    def test_asynchronous_copies(self, harness: Harness) -> None:
        """Copies on a stream run in order; the caller can drop its arrays at once."""
        theirs, ours = harness.buffer(1 << 20)
        stream = harness.stream()
        for seed in range(8):
            ours.copy_from_host(np.frombuffer(pattern(1 << 20, seed), np.uint8), stream=stream)
        target = np.zeros(1 << 20, np.uint8)
        ours.copy_to_host(target, stream=stream)
        stream.synchronize(LIMIT)
        assert target.tobytes() == pattern(1 << 20, 7) == theirs.read(0, 1 << 20)

    def test_ranges_at_random(self, harness: Harness) -> None:
        """In 100 overlapping ranges of one import, each fill and copy affects only its own bytes."""
        theirs, memory = harness.memory(4 * PAGE)
        model = bytearray(pattern(theirs.size, 4))
        theirs.write(0, bytes(model))
        whole = harness.scope.enter_context(memory.map_buffer())
        random = np.random.default_rng(5)
        for turn in range(100):
            offset = int(random.integers(0, 4 * PAGE))
            size = int(random.integers(1, 4 * PAGE - offset + 1))
            ours = harness.scope.enter_context(memory.map_buffer(offset, size))
            assert ours.ptr == whole.ptr + offset
            if turn % 3:
                model[offset : offset + size] = data = pattern(size, turn)
                write(ours, data)
            else:
                model[offset : offset + size] = bytes([turn]) * size
                ours.fill(turn)
            assert not differ(read(ours), bytes(model[offset : offset + size]))
            assert not differ(theirs.read(0, len(model)), bytes(model)), f"round {turn}: {size} bytes at {offset}"

    def test_map_again(self, harness: Harness) -> None:
        """A closed range can be mapped again, also as part of a larger one."""
        theirs, memory = harness.memory(4 * PAGE)
        memory.map_buffer(PAGE, PAGE).close(timeout=LIMIT)
        theirs.write(0, pattern(theirs.size, 5))
        with memory.map_buffer(0, 4 * PAGE) as ours:
            assert read(ours) == pattern(theirs.size, 5)[: 4 * PAGE]

    def test_imported_twice(self, harness: Harness) -> None:
        """Two imports of one object through a duplicated handle are the same memory."""
        theirs = harness.export(PAGE)
        handle = theirs.export()
        assert isinstance(handle, OpaqueFd)
        with (
            harness.device.import_memory(handle.duplicate(), size=theirs.size) as first,
            harness.device.import_memory(handle, size=theirs.size) as second,
            first.map_buffer() as here,
            second.map_buffer() as there,
        ):
            here.fill(0x11)
            assert read(there, 0, 8) == b"\x11" * 8 == theirs.read(0, 8)

    def test_libraries_by_dlpack(self, harness: Harness) -> None:
        """An array library's array of a capsule is the shared memory itself, in both directions."""
        theirs, ours = harness.buffer(4 * PAGE)
        for library in libraries(harness.device, simulated=harness.simulated):
            data = pattern(4 * PAGE, 6)
            theirs.write(0, data)
            array = library.from_dlpack(ours.view((4, 8), "int16", offset=32, strides=(64, 4)))
            assert tuple(array.shape) == (4, 8)
            raw = np.frombuffer(data, np.uint8)
            expected = b"".join(raw[32 + r * 64 + c * 4 :][:2].tobytes() for r in range(4) for c in range(8))
            assert library.bytes_of(array) == expected
            library.set(array, (3, 7), -2)
            library.finish()
            assert theirs.read(32 + 3 * 64 + 7 * 4, 2) == (-2).to_bytes(2, "little", signed=True)
            assert theirs.read(32 + 3 * 64 + 7 * 4 + 2, 2) == data[32 + 3 * 64 + 7 * 4 + 2 :][:2]

    def test_libraries_by_interface(self, harness: Harness) -> None:
        """An array library's array of the array interface is the shared memory itself, in both directions."""
        theirs, ours = harness.buffer(4 * PAGE)
        for library in libraries(harness.device, simulated=harness.simulated):
            array = library.from_interface(ours.view((PAGE,), "int32"))
            theirs.write(0, pattern(4 * PAGE, 6))
            assert library.bytes_of(array) == pattern(4 * PAGE, 6)
            library.set(array, 1, -559038737)
            library.finish()
            assert theirs.read(4, 4) == (0xDEADBEEF).to_bytes(4, "little")

    def test_nothing_is_left_over(self, harness: Harness) -> None:
        """Repeated rounds of export, import, map, use and close leave no descriptor and no mapping."""

        def round_trip(seed: int) -> None:
            with harness.exporter.create_memory(4 * PAGE) as theirs:
                memory = harness.device.import_memory(theirs.export(), size=theirs.size)
                ours = memory.map_buffer()
                ours.fill(seed)
                assert theirs.read(0, 1) == bytes([seed])
                ours.close(timeout=LIMIT)
                memory.close(timeout=LIMIT)

        leaves_nothing(round_trip, rounds=12)
