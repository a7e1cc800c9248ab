"""Shareable allocations on several devices: on the simulated driver, and on a machine's own two GPUs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.peer import BackendPeer
from gpuinterop_cuda.backend import CudaBackend
from tests.several_devices import LIMIT, MIB, SeveralDevices, content, exported, share_over_fabric
from tests.simulated.driver import Simulator

from .parties import PARTIES, REAL, open_party


class TestSeveralDevices(SeveralDevices):
    name = "cuda"
    prefix = "cu"
    simulated = not REAL

    @pytest.mark.parametrize("party", PARTIES)
    def test_two_devices_two_processes_and_vulkan(self, peers: list[gi.Device], scope: ExitStack, party: str) -> None:
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

    @pytest.mark.parametrize("party", PARTIES)
    def test_what_another_process_has_on_another_gpu_goes_into_its_vulkan(
        self, peers: list[gi.Device], scope: ExitStack, party: str
    ) -> None:
        """The other process allocates on its GPU; here a mapping on ours, and that GPU's Vulkan, use it."""
        first, second = peers
        peer = scope.enter_context(BackendPeer(second))
        handle, size = peer.allocate(4 * MIB, gi.VmmFd.type_name)
        scope.enter_context(handle)
        exporter = scope.enter_context(open_party(party, second))
        ours = scope.enter_context(first.import_allocation(handle.duplicate(), size, access=[second]))
        theirs = scope.enter_context(exporter.import_memory(handle, size))
        theirs.write(0, b"\x51" * size)
        with second.create_stream() as stream:
            ours.buffer_on(second).fill(0x52, size=MIB, stream=stream)
            stream.synchronize(LIMIT)
        expected = b"\x52" * MIB + b"\x51" * (size - MIB)
        assert peer.read(0, size) == expected == content(ours.buffer)


def test_a_gpu_that_is_hidden_from_the_importer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver then says -2 of where the memory is (measured); nobody is refused for it, as a mapping works."""
    device = gi.get_backend("cuda").device(0)
    backend = device._backend
    assert isinstance(backend, CudaBackend)
    call = backend._driver.call

    def hidden(name: str, *arguments: Any) -> Any:
        found = call(name, *arguments)
        if name == "cuMemGetAllocationPropertiesFromHandle":
            assert found.location.id == 0
            found.location.id = -2
        return found

    with device.allocate(1) as allocation:
        assert backend.location(allocation._native) == 0
        monkeypatch.setitem(vars(backend._driver), "call", hidden)
        assert backend.location(allocation._native) is None
        with device.import_allocation(exported(allocation, known=False), allocation.size) as again:
            again.buffer.fill(9)
            assert content(allocation.buffer, 1) == b"\x09"


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ("7", "7", "imported 1111111111111111 2222222211111111"),
        ("7", "8", "refused cuMemImportFromShareableHandle 800 True"),
        ("7", "", "refused cuMemImportFromShareableHandle 800 True"),
        ("", "7", "refused cuMemCreate 800 True"),
    ],
)
def test_fabric_handles(simulator: Simulator, ours: str, theirs: str, found: str) -> None:
    """Two processes on two devices, who need the same channel; else the error says what is missing."""
    printed = share_over_fabric(simulator, "cuda", 128, ours, theirs)
    assert printed.startswith(found)
    if found.startswith("refused"):
        assert "CUDA_ERROR_NOT_PERMITTED" in printed
        assert "IMEX channel" in printed
