"""Shareable allocations of CUDA's that Vulkan and another process have, too; and a GPU that is hidden."""

from __future__ import annotations

import struct
from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.peer import BackendPeer
from gpuinterop_cuda.backend import CudaBackend

from ..parties import PARTIES, open_party
from ..test_allocations import MIB, content, exported


@pytest.mark.parametrize("party", PARTIES)
def test_two_devices_two_processes_and_vulkan(peers: list[gi.Device], scope: ExitStack, party: str) -> None:
    """One process allocates on its GPU, another maps that on the other GPU, and the first's Vulkan has it, too."""
    for first, second in (peers, peers[::-1]):
        peer = scope.enter_context(BackendPeer(second))
        exporter = scope.enter_context(open_party(party, first))
        ours = scope.enter_context(first.allocate(4 * MIB))
        ours.buffer.fill(0x41)
        peer.import_allocation(exported(ours), ours.size)
        theirs = scope.enter_context(exporter.import_memory(exported(ours), ours.size))
        assert theirs.read(0, ours.size) == b"\x41" * ours.size == peer.read(0, ours.size)
        peer.fill(0x42, MIB, MIB)
        assert theirs.read(MIB - 1, MIB + 2) == b"\x41" + b"\x42" * MIB + b"\x41"
        assert content(ours.buffer, MIB + 1)[-2:] == b"\x41\x42"
        theirs.write(3 * MIB, b"vulkan")
        assert peer.read(3 * MIB - 1, 8) == b"\x41vulkan\x41"


def test_a_gpu_that_is_hidden_from_the_importer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver then says -2 of where the memory is (measured); nobody is refused for it, as a mapping works."""
    device = gi.get_backend("cuda").device(0)
    backend = device.driver
    assert isinstance(backend, CudaBackend)
    tell = backend._driver.function("MemGetAllocationPropertiesFromHandle")

    def hidden(place: Any, *handle: Any) -> int:
        code = int(tell(place, *handle))
        assert struct.unpack_from("=ii", place, 8) == (1, 0)
        struct.pack_into("=i", place, 12, -2)
        return code

    with device.allocate(1) as allocation:
        assert backend.location(allocation._handle) == 0
        monkeypatch.setitem(backend._driver._functions, "MemGetAllocationPropertiesFromHandle", hidden)
        assert backend.location(allocation._handle) is None
        with device.import_allocation(exported(allocation, known=False), allocation.size) as again:
            again.buffer.fill(9)
            assert content(allocation.buffer, 1) == b"\x09"
