"""External memory: both sides see the same bytes in the right place, and nothing is left over."""

from __future__ import annotations

import numpy as np

from ...capabilities import Operation
from ...errors import ArgumentTypeError, InvalidArgumentError
from ...handles import OpaqueFd
from ..requirements import requires
from .base import LIMIT, Harness, Suite, differ, leaves_nothing, pattern, raises, read, write
from .libraries import libraries, read_capsule, read_interface

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

    def test_two_mappings(self, harness: Harness) -> None:
        """Ranges that do not overlap can be mapped at the same time; closing one leaves the other."""
        theirs, memory = harness.memory(4 * PAGE)
        data = pattern(theirs.size, 4)
        theirs.write(0, data)
        with memory.map_buffer(0, PAGE) as first, memory.map_buffer(2 * PAGE, PAGE) as second:
            assert read(first) == data[:PAGE]
            assert read(second) == data[2 * PAGE : 3 * PAGE]
            first.close(timeout=LIMIT)
            assert read(second) == data[2 * PAGE : 3 * PAGE]
            second.fill(0x5B)
            second.copy_from_host(b"\x11" * 13, offset=PAGE - 13)
            assert theirs.read(2 * PAGE, PAGE) == b"\x5b" * (PAGE - 13) + b"\x11" * 13

    def test_ranges_at_random(self, harness: Harness) -> None:
        """In 100 overlapping ranges of one import, each fill, copy and view affects only its own bytes."""
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
            interface, _ = read_interface(ours.view(1, offset=size - 1), harness.device)
            assert interface["data"][0] == whole.ptr + offset + size - 1

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

    def test_dedicated_is_taken_from_the_origin(self, harness: Harness) -> None:
        """The handle's origin contains whether the allocation is dedicated; a contradiction is refused."""
        theirs, memory = harness.memory(PAGE)
        assert memory.dedicated is theirs.dedicated
        with theirs.export() as handle:
            raises(
                InvalidArgumentError,
                lambda: harness.device.import_memory(handle, size=theirs.size, dedicated=not theirs.dedicated),
                argument="dedicated",
            )
            assert not handle.closed

    def test_views_describe_themselves(self, harness: Harness) -> None:
        """A view has address, shape, strides in bytes and type; it offers only its device's array interface."""
        _, ours = harness.buffer(4 * PAGE)
        info = harness.device.info
        view = ours.view((3, 5), "float32", offset=64, strides=(256, 4))
        assert (view.ptr, view.shape, view.strides) == (ours.ptr + 64, (3, 5), (256, 4))
        assert (view.dtype, view.ndim, view.nbytes) == ("float32", 2, 60)
        assert tuple(view.__dlpack_device__()) == tuple(info.dlpack)
        interface, _ = read_interface(view, harness.device)
        assert interface["data"][0] == view.ptr
        assert interface["shape"] == (3, 5)
        assert interface["strides"] == (256, 4)
        assert interface["typestr"] in ("<f4", "=f4")
        assert interface["data"][1] is False, "the memory is not read-only"
        assert interface["version"] == 3
        assert interface.get("stream") is None, "nothing is pending on it"
        if info.array_interface == "__array_interface__":
            assert not hasattr(view, "__cuda_array_interface__"), "a library would take it for GPU memory"
        else:
            raises(ArgumentTypeError, lambda: np.asarray(view), argument="view")

    def test_dlpack(self, harness: Harness) -> None:
        """A capsule has the view's address, shape, strides in elements, type and device."""
        _, ours = harness.buffer(4 * PAGE)
        view = ours.view((4, 8), "int16", offset=32, strides=(64, 4))
        for version in (None, (1, 0)):
            capsule = view.__dlpack__(max_version=version)
            found = read_capsule(capsule)
            assert not found.flags, "it is neither read-only nor a copy"
            assert version or found.flags is None, "a consumer that asks for no version gets no flags"
            assert found.data + found.byte_offset == view.ptr
            assert found.device == tuple(harness.device.info.dlpack)
            assert found.dtype == (0, 16, 1)
            assert (found.shape, found.strides) == ((4, 8), (32, 2))
            del capsule

    def test_dlpack_streams(self, harness: Harness) -> None:
        """The consumer's stream follows the array API's rules; a stream that is ambiguous here is refused."""
        _, ours = harness.buffer(PAGE)
        kind = harness.device.info.dlpack[0]
        view = ours.view(16)
        for value in {1: (0, 1, 2), 10: (1, 2)}.get(kind, (0,)):
            raises(InvalidArgumentError, lambda value=value: view.__dlpack__(stream=value), argument="stream")
        assert view.__dlpack__(stream=-1) is not None
        assert view.__dlpack__(stream=None) is not None

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

    def test_strided_views(self, harness: Harness) -> None:
        """Strides are in bytes: a linear image's rows follow its pitch."""
        theirs, ours = harness.buffer(4 * PAGE)
        data = pattern(4 * PAGE, 7)
        theirs.write(0, data)
        view = ours.view((10, 20), "uint16", offset=6, strides=(448, 4))
        interface, _ = read_interface(view, harness.device)
        for row, column in ((0, 0), (3, 7), (9, 19)):
            address = interface["data"][0] + row * interface["strides"][0] + column * interface["strides"][1]
            start = 6 + row * 448 + column * 4
            assert address == ours.ptr + start
            assert read(ours, address - ours.ptr, 2) == data[start : start + 2]
        backwards, _ = read_interface(ours.view((PAGE,), offset=PAGE - 1, strides=(-1,)), harness.device)
        assert (backwards["data"][0], backwards["strides"]) == (ours.ptr + PAGE - 1, (-1,))

    def test_libraries_on_strided_views(self, harness: Harness) -> None:
        """An array library finds a linear image's rows at its pitch."""
        theirs, ours = harness.buffer(4 * PAGE)
        data = pattern(4 * PAGE, 7)
        theirs.write(0, data)
        for library in libraries(harness.device, simulated=harness.simulated):
            array = library.from_interface(ours.view((10, 20), "int16", offset=6, strides=(448, 4)))
            rows = [data[6 + row * 448 + column * 4 :][:2] for row in range(10) for column in range(20)]
            assert library.bytes_of(array) == b"".join(rows)
        if harness.device.info.array_interface == "__array_interface__":  # not every GPU library supports this
            backwards = np.asarray(ours.view((PAGE,), offset=PAGE - 1, strides=(-1,)))
            assert backwards.tobytes() == data[PAGE - 1 :: -1]

    def test_view_outside_the_buffer_is_refused(self, harness: Harness) -> None:
        """A view that extends outside the buffer, by size, offset or strides, is refused."""
        _, memory = harness.memory(4 * PAGE)
        with memory.map_buffer(PAGE, PAGE) as ours:
            raises(InvalidArgumentError, lambda: ours.view(PAGE + 1), argument="shape")
            raises(InvalidArgumentError, lambda: ours.view(PAGE, offset=1), argument="offset")
            raises(InvalidArgumentError, lambda: ours.view((2, 2), strides=(-1, 1)), argument="offset")
            raises(InvalidArgumentError, lambda: ours.view(4, "float32", offset=2), argument="offset")
            raises(InvalidArgumentError, lambda: ours.view((2, 2), strides=(2,)), argument="strides")
            assert ours.view(PAGE).nbytes == PAGE

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
