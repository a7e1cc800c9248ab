from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.limits import LIMIT

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, Party


@pytest.fixture
def core() -> Any:
    core: Any = load("cuda.core", "cuda-core")
    return getattr(core, "experimental", core) if not hasattr(core, "Device") else core


@pytest.fixture
def gpu(core: Any) -> Any:
    gpu = core.Device(0)
    gpu.set_current()
    return gpu


def buffer_of(core: Any, party: Party, offset: int = 0, size: int = 4 * COUNT) -> Any:
    """Our bytes as a buffer of cuda.core, which keeps them mapped."""
    return core.Buffer.from_handle(party.buffer.ptr + offset, size, owner=party.buffer.hold())


@claim("cuda.core", "cuda.core.Buffer.from_handle(buffer.ptr, buffer.size, owner=buffer.hold())", memory=("CUDA",),
       access="reads and writes", note="copies to and from gpuinterop's buffers work; "
            "a cuda.core buffer cannot become a gpuinterop buffer")  # fmt: skip
def test_buffer(party: Party, core: Any, gpu: Any) -> None:
    stream = gpu.create_stream()
    theirs = gpu.memory_resource.allocate(4 * COUNT, stream=stream)
    ones = np.arange(1, COUNT + 1, dtype=np.int32)

    def read(ours: Any) -> Any:
        ours.copy_to(theirs, stream=stream)
        back = buffer_of(core, party, offset=1 << 15)
        back.copy_from(theirs, stream=stream)
        stream.sync()
        return np.frombuffer(party.read(4 * COUNT, 1 << 15), np.int32)

    party.write(ones.tobytes())
    ours = buffer_of(core, party)
    assert (read(ours) == ones).all()
    party.write((ones + 1).tobytes())
    assert (read(ours) == ones + 1).all()
    ours.copy_from(theirs, stream=stream)
    stream.sync()
    assert party.read(4 * COUNT) == (ones + 1).tobytes()
    theirs.close()
    ours.close()


@claim("cuda.core", "cuda.core.utils.StridedMemoryView.from_any_interface(view, stream_ptr=...)", memory=("CUDA",),
       access="describes", note="the stream in stream_ptr waits for the streams that used the bytes")  # fmt: skip
def test_strided_view(party: Party, core: Any, gpu: Any) -> None:
    from importlib import import_module

    utils = import_module(f"{core.__name__}.utils")
    stream = gpu.create_stream()

    def make(view: Any) -> Any:
        seen = utils.StridedMemoryView.from_any_interface(view, stream_ptr=int(stream.handle))
        assert (seen.ptr, tuple(seen.shape), seen.readonly) == (party.buffer.ptr, (16, COUNT // 16), False)
        return seen

    check_in_place(party, make, read=lambda seen: np.frombuffer(party.read(4 * COUNT), np.int32))


def copies(party: Party, core: Any, stream: Any) -> Callable[[], None]:
    """Work on the stream that adds one: it copies ones, then twos, over the elements."""
    ours = buffer_of(core, party)
    sources = []
    for value in (1, 2):
        party.write(value.to_bytes(4, "little") * COUNT, offset=value << 13)
        sources.append(buffer_of(core, party, offset=value << 13))
    return lambda: ours.copy_from(sources.pop(0), stream=stream)


@claim("cuda.core", "device.wrap_stream(stream_of_cuda_core)", memory=("CUDA",), access="stream")
def test_stream_of_theirs(party: Party, core: Any, gpu: Any) -> None:
    stream = gpu.create_stream()
    party.check_stream(stream, copies(party, core, stream))
    stream.sync()


@claim("cuda.core", "cuda.core.Device().create_stream(stream_of_gpuinterop)", memory=("CUDA",), access="stream",
       note="the other direction: gpuinterop's Stream has __cuda_stream__")  # fmt: skip
def test_stream_of_ours(party: Party, core: Any, gpu: Any) -> None:
    with party.device.create_stream() as ours:
        theirs = gpu.create_stream(ours)
        assert int(theirs.handle) == ours.ptr
        party.check_stream(ours, copies(party, core, theirs))
        ours.synchronize(LIMIT)
