"""Mipmapped arrays: an exporter's optimally tiled images on the device under test, level by level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..._core.image import MipmappedArray
from ..._core.memory import Buffer
from ...capabilities import Operation
from ...errors import InvalidArgumentError, ResourceBusyError
from ...handles import OpaqueFd
from ..exporters.base import ExporterImage, ExporterMemory, ImageParameters
from ..requirements import requires, skip_declared
from .base import LIMIT, Gate, Harness, Suite, differ, end, held, leaves_nothing, pattern, raises

ARRAYS = ((Operation.IMPORT_MEMORY, OpaqueFd), (Operation.MAP_MIPMAPPED_ARRAY, OpaqueFd))
BUFFERS = (Operation.MAP_BUFFER, OpaqueFd)

FORMATS = pytest.mark.parametrize(
    "format",
    ["R8_UNORM", "R8G8B8A8_UNORM", "R16_UINT", "R16G16_SFLOAT", "R32_SFLOAT", "R16G16B16A16_SFLOAT",
     "R32G32B32A32_SFLOAT"],
)  # fmt: skip

_SHAPES: dict[str, dict[str, Any]] = {
    "2d": {"width": 64, "height": 32},
    "levels": {"width": 64, "height": 32, "levels": 7},
    "odd": {"width": 37, "height": 21, "levels": 4},
    "tall": {"width": 5, "height": 40, "levels": 3},
    "layers": {"width": 20, "height": 12, "layers": 3},
    "layers-levels": {"width": 37, "height": 21, "layers": 3, "levels": 3},
    "3d": {"width": 8, "height": 6, "depth": 4},
    "cube": {"width": 16, "height": 16, "layers": 6, "cube": True},
}
SHAPES = pytest.mark.parametrize("shape", list(_SHAPES))
PLAIN = ImageParameters(format="R8G8B8A8_UNORM", width=37, height=21, levels=4)


@requires(*ARRAYS)
class ArraySuite(Suite):
    """An exporter's images on the device under test."""

    @FORMATS
    @pytest.mark.parametrize("shape", ["2d", "odd"])
    def test_formats(self, harness: Harness, format: str, shape: str) -> None:
        """Texels of every format are read and written correctly, in images with and without levels."""
        self._both_ways(harness, ImageParameters(format=format, **_SHAPES[shape]))

    @SHAPES
    @pytest.mark.parametrize("format", ["R8_UNORM", "R32G32B32A32_SFLOAT"])
    def test_shapes(self, harness: Harness, format: str, shape: str) -> None:
        """Levels, layers, slices and faces are in the right place, with the smallest and the largest texels."""
        self._both_ways(harness, ImageParameters(format=format, **_SHAPES[shape]))

    @staticmethod
    def _both_ways(harness: Harness, parameters: ImageParameters) -> None:
        theirs, ours = _image(harness, parameters)
        stream = harness.stream()
        data = _levels(parameters, 1)
        for level, texels in enumerate(data):
            theirs.write(level, texels)
        assert not differ(_read(harness, ours, stream), data), "the device reads something else than the exporter wrote"
        data = _levels(parameters, 2)
        sources = [np.frombuffer(texels, np.uint8) for texels in data]
        for level, source in reversed(list(enumerate(sources))):
            ours.level(level).copy_from_host(source, stream=stream.ptr)  # as another library's
        stream.synchronize(LIMIT)
        found = [theirs.read(level) for level in range(parameters.levels)]
        assert not differ(found, data), "the exporter reads something else than the device wrote"

    @SHAPES
    @requires(BUFFERS)
    def test_buffers(self, harness: Harness, shape: str) -> None:
        """A level is copied to and from a buffer at an offset, tightly packed, without touching other bytes."""
        parameters = ImageParameters(format="R8G8B8A8_UNORM", **_SHAPES[shape])
        theirs, ours = _image(harness, parameters)
        memory, buffer = _buffer(harness, parameters)
        stream = harness.stream()
        data = _levels(parameters, 3)
        for level, texels in enumerate(data):
            theirs.write(level, texels)
        memory.write(0, b"\x5a" * memory.size)
        expected = bytearray(b"\x5a" * memory.size)
        offset = 64
        for level, texels in enumerate(data):
            ours.level(level).copy_to_buffer(buffer, offset=offset, stream=stream)
            expected[offset : offset + len(texels)] = texels
            offset += len(texels) + 64
        stream.synchronize(LIMIT)
        assert not differ(memory.read(0, memory.size), bytes(expected))
        data = _levels(parameters, 4)
        offset = 64
        for level, texels in enumerate(data):
            memory.write(offset, texels)
            ours.level(level).copy_from_buffer(buffer, offset=offset, stream=stream)
            stream.synchronize(LIMIT)
            offset += len(texels) + 64
        assert not differ([theirs.read(level) for level in range(parameters.levels)], data)

    def test_one_level_leaves_the_others(self, harness: Harness) -> None:
        """Writing one level leaves the others unchanged."""
        theirs, ours = _image(harness, PLAIN)
        stream = harness.stream()
        data = _levels(PLAIN, 5)
        for level, texels in enumerate(data):
            theirs.write(level, texels)
        for level in range(PLAIN.levels):
            data[level] = pattern(PLAIN.level_bytes(level), 50 + level)
            ours.level(level).copy_from_host(np.frombuffer(data[level], np.uint8), stream=stream)
            stream.synchronize(LIMIT)
            assert not differ([theirs.read(index) for index in range(PLAIN.levels)], data)

    def test_levels(self, harness: Harness) -> None:
        """A level has half the extent of the previous one, and the size that the exporter reports."""
        theirs, ours = _image(harness, PLAIN)
        for index in range(PLAIN.levels):
            level = ours.level(index)
            width, height, depth = theirs.parameters.level_extent(index)
            assert (level.index, level.extent) == (index, (width, height, depth))
            assert level.nbytes == theirs.parameters.level_bytes(index)
        for index in (-1, PLAIN.levels, 1 << 40):
            raises(InvalidArgumentError, lambda index=index: ours.level(index), argument="n")

    @requires(BUFFERS)
    def test_copies_wait_for_their_turn(self, harness: Harness) -> None:
        """A copy after a pending wait runs after the signal, and reads what was written until then."""
        theirs, ours = _image(harness, PLAIN)
        memory, buffer = _buffer(harness, PLAIN)
        gate, stream = Gate(harness), harness.stream()
        before, after = pattern(PLAIN.level_bytes(1), 6), pattern(PLAIN.level_bytes(1), 7)
        theirs.write(1, before)
        memory.write(0, bytes(len(before)))
        gate.block(stream)
        ours.level(1).copy_to_buffer(buffer, stream=stream)
        assert held(stream), "the wait did not hold the stream"
        assert not any(memory.read(0, len(before))), "the copy has run too early"
        theirs.write(1, after)
        gate.open()
        stream.synchronize(LIMIT)
        assert not differ(memory.read(0, len(after)), after)

    @requires(BUFFERS)
    def test_writes_wait_for_their_turn(self, harness: Harness) -> None:
        """Likewise for writes: the level changes after the signal, and not before."""
        theirs, ours = _image(harness, PLAIN)
        memory, buffer = _buffer(harness, PLAIN)
        gate, stream = Gate(harness), harness.stream()
        before, after = pattern(PLAIN.level_bytes(2), 8), pattern(PLAIN.level_bytes(2), 9)
        theirs.write(2, before)
        memory.write(0, after)
        gate.block(stream)
        ours.level(2).copy_from_buffer(buffer, stream=stream)
        assert held(stream), "the wait did not hold the stream"
        assert not differ(theirs.read(2), before), "the copy has run too early"
        gate.open()
        stream.synchronize(LIMIT)
        assert not differ(theirs.read(2), after)

    def test_pageable_copies_behind_a_wait(self, harness: Harness) -> None:
        """A copy of pageable memory after a pending wait waits, or is refused if it would block the caller."""
        theirs, ours = _image(harness, PLAIN)
        gate, stream = Gate(harness), harness.stream()
        data = pattern(PLAIN.level_bytes(0), 10)
        theirs.write(0, data)
        target, source = np.zeros(len(data), np.uint8), np.zeros(len(data), np.uint8)
        gate.block(stream)
        if harness.device.driver.pageable_copies_block:
            raises(ResourceBusyError, lambda: ours.level(0).copy_to_host(target, stream=stream))
            raises(ResourceBusyError, lambda: ours.level(0).copy_from_host(source, stream=stream))
        else:
            ours.level(0).copy_to_host(target, stream=stream)
        assert held(stream)
        assert not target.any()
        gate.open()
        stream.synchronize(LIMIT)
        assert target.tobytes() == (bytes(len(data)) if harness.device.driver.pageable_copies_block else data)
        assert not differ(theirs.read(0), data)

    def test_nothing_is_left_over(self, harness: Harness) -> None:
        """Repeated rounds of export, import, map, copy and close leave no descriptor and no mapping."""
        stream = harness.stream()
        parameters = ImageParameters(format="R32_SFLOAT", width=33, height=9, levels=2)
        if gap := harness.exporter.image_gap(parameters):
            skip_declared(gap)

        def round_trip(seed: int) -> None:
            with harness.exporter.create_image(parameters) as theirs:
                memory = harness.device.import_memory(theirs.export(), size=theirs.size)
                ours = memory.map_mipmapped_array(
                    parameters.format, parameters.extent, levels=parameters.levels, usage=theirs.array_usage
                )
                texels = pattern(parameters.level_bytes(1), seed)
                ours.level(1).copy_from_host(np.frombuffer(texels, np.uint8), stream=stream)
                stream.synchronize(LIMIT)
                assert not differ(theirs.read(1), texels)
                ours.close(timeout=LIMIT)
                memory.close(timeout=LIMIT)

        leaves_nothing(round_trip)


def _export(harness: Harness, parameters: ImageParameters) -> ExporterImage:
    """Make an image of the exporter's; skips if its driver shares no such image."""
    if gap := harness.exporter.image_gap(parameters):
        skip_declared(gap)
    return harness.scope.enter_context(harness.exporter.create_image(parameters))


def _image(harness: Harness, parameters: ImageParameters) -> tuple[ExporterImage, MipmappedArray]:
    """Make an image, and the device's array of it."""
    theirs = _export(harness, parameters)
    memory = harness.device.import_memory(theirs.export(), size=theirs.size)
    harness.scope.callback(end, memory)
    ours = memory.map_mipmapped_array(
        parameters.format,
        parameters.extent,
        levels=parameters.levels,
        layers=parameters.layers,
        usage=theirs.array_usage,
    )
    return theirs, harness.scope.enter_context(ours)


def _buffer(harness: Harness, parameters: ImageParameters) -> tuple[ExporterMemory, Buffer]:
    """Make a shared buffer for all levels, with 64 bytes before, between and after them."""
    room = sum(map(parameters.level_bytes, range(parameters.levels))) + 64 * (parameters.levels + 1)
    return harness.buffer(room)


def _levels(parameters: ImageParameters, seed: int) -> list[bytes]:
    """Different bytes for each level."""
    return [pattern(parameters.level_bytes(level), seed * 100 + level) for level in range(parameters.levels)]


def _read(harness: Harness, array: MipmappedArray, stream: Any) -> list[bytes]:
    """Let the device copy out every level."""
    targets = [np.zeros(array.level(index).nbytes, np.uint8) for index in range(array.layout.levels)]
    for index, target in enumerate(targets):
        array.level(index).copy_to_host(target, stream=stream)
    stream.synchronize(LIMIT)
    return [target.tobytes() for target in targets]
