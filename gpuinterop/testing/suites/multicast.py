"""Multicast objects, only on simulated drivers: `gpuinterop selftest multicast` tries them on hardware."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from ..._core import discovery
from ..._core.allocation import Allocation
from ..._core.device import Device
from ..._core.multicast import MulticastMapping, MulticastObject, create_multicast, import_multicast
from ...capabilities import Operation
from ...handles import VmmFd
from ..multimem import multimem_add, multimem_store
from ..peer import BackendPeer
from ..requirements import requires, skip_declared
from ..stand_ins import simulated_driver
from .base import LIMIT, Suite, leaves_nothing, new_stream, pattern, read, word, write

CREATE = Operation.CREATE_MULTICAST
EXPORT = (Operation.EXPORT_MULTICAST, VmmFd)
IMPORT = (Operation.IMPORT_MULTICAST, VmmFd)


@requires(CREATE, (Operation.EXPORT_ALLOCATION, VmmFd))
class MulticastSuite(Suite):
    """A store to one address reaches the memory of every device; rules keep drivers from blocking."""

    @pytest.fixture(autouse=True)
    def team(self, device: Device) -> list[Device]:
        """The device under test, and the others with multicast. Skips before any call if there may be hardware."""
        backend = discovery.get_backend(device.backend)
        if not simulated_driver(backend.libraries):
            skip_declared("multicast can block, or disturb a machine; try it with `gpuinterop selftest multicast`")
        every = backend.devices()
        team = [device, *(one for one in every if one is not device and one.capabilities.supports(CREATE))]
        if len(team) < 2:
            skip_declared("multicast needs two devices that support it")
        return team

    @pytest.fixture
    def step(self, team: list[Device]) -> int:
        """The smallest size of objects and of memory."""
        sizes = [team[0].multicast_granularity(team, 1, VmmFd).minimum]
        return max(sizes + [one.allocation_granularity(VmmFd).minimum for one in team])

    # -- creation ----------------------------------------------------------------------------------------------------

    def test_granularity(self, team: list[Device]) -> None:
        """Both are positive, the recommended one is a multiple of the minimum; from devices or from their number."""
        found = team[0].multicast_granularity(team, 1 << 20, VmmFd)
        assert found.minimum > 0
        assert found.recommended >= found.minimum
        assert found.recommended % found.minimum == 0
        assert found == team[0].multicast_granularity(len(team), 1 << 20, (VmmFd,))

    # -- use ---------------------------------------------------------------------------------------------------------

    def test_a_store_reaches_all(self, team: list[Device], step: int, scope: ExitStack) -> None:
        """A store by any device is in the memory of every device, and changes no other byte."""
        mapping, memory = _bound(team, step, scope)
        assert mapping.size == step
        assert list(mapping.devices) == team
        for index, device in enumerate(team):
            for one, allocation in enumerate(memory):
                allocation.buffer.fill(0x10 + one)
            multimem_store(new_stream(device, scope), mapping, word(0x70 + index), 64, first=16)
            for one, allocation in enumerate(memory):
                expected = bytearray(bytes([0x10 + one]) * step)
                expected[64 : 64 + 256] = bytes([0x70 + index]) * 256
                assert read(allocation.buffer) == bytes(expected)

    def test_sums(self, team: list[Device], step: int, scope: ExitStack) -> None:
        """A load adds up the words of every device."""
        mapping, memory = _bound(team, step, scope)
        total = np.zeros(step // 4, np.uint32)
        for index, allocation in enumerate(memory):
            data = pattern(step, index)
            write(allocation.buffer, data)
            total += np.frombuffer(data, np.uint32)
        for device in team:
            sums = scope.enter_context(device.allocate(step))
            sums.buffer.fill(0)
            multimem_add(new_stream(device, scope), sums.buffer, mapping, 100)
            assert read(sums.buffer, 0, 400) == total[:100].tobytes()
            assert read(sums.buffer, 400, 4) == bytes(4)

    def test_parts(self, team: list[Device], step: int, scope: ExitStack) -> None:
        """Part of an allocation is bound to part of the object."""
        made = scope.enter_context(create_multicast(team, 2 * step, VmmFd))
        memory = [scope.enter_context(device.allocate(3 * step)) for device in team]
        for allocation in memory:
            bound = made.bind_memory(allocation, step, start=2 * step, size=step)
            assert (bound.offset, bound.size, bound.device) == (step, step, allocation.device)
            allocation.buffer.fill(0x21)
        mapping = scope.enter_context(made.map())
        multimem_store(new_stream(team[0], scope), mapping, word(0x43), 8, first=step // 4)
        for allocation in memory:
            assert read(allocation.buffer, 0, 2 * step) == b"\x21" * (2 * step)
            assert read(allocation.buffer, 2 * step, 36) == b"\x43" * 32 + b"\x21" * 4

    def test_addresses(self, team: list[Device], step: int, scope: ExitStack) -> None:
        """Mapped memory is bound through its buffer, and through its address."""
        memory = [scope.enter_context(device.allocate(step)) for device in team]
        made = scope.enter_context(create_multicast(team, step, VmmFd))  # closed first: an address keeps nothing alive
        for index, allocation in enumerate(memory):
            allocation.buffer.fill(0)
            made.bind_address(allocation.device, allocation.buffer if index else allocation.buffer.ptr, step)
        multimem_store(new_stream(team[0], scope), scope.enter_context(made.map()), word(0x35), 8)
        for allocation in memory:
            assert read(allocation.buffer, 0, 36) == b"\x35" * 32 + bytes(4)

    # -- other processes ---------------------------------------------------------------------------------------------

    @requires(EXPORT, IMPORT)
    def test_two_processes(self, team: list[Device], step: int, scope: ExitStack) -> None:
        """Each adds its devices and binds their memory; a store by either is in the memory of both."""
        peer = scope.enter_context(BackendPeer(team[-1]))
        made = scope.enter_context(create_multicast(len(team), step, VmmFd, device=team[0]))
        handle = made.export()
        assert isinstance(handle, VmmFd)
        peer.import_multicast(handle, len(team), step)
        for device in team[:-1]:
            made.add_device(device)
        peer.add_device()
        peer.bind_memory(step)
        memory = [scope.enter_context(device.allocate(step)) for device in team[:-1]]
        for allocation in memory:
            made.bind_memory(allocation, assume_all_added=True)
            allocation.buffer.fill(0)
        peer.fill(0, 0, step)
        peer.map_multicast()
        mapping = scope.enter_context(made.map(assume_all_added=True))
        multimem_store(new_stream(team[0], scope), mapping, word(0x51), 4)
        peer.multimem_store(word(0x52), 4, first=4)
        expected = b"\x51" * 16 + b"\x52" * 16 + bytes(4)
        for allocation in memory:
            assert read(allocation.buffer, 0, len(expected)) == expected
        assert peer.read(0, len(expected)) == expected
        peer.close_multicast()

    @requires(EXPORT, IMPORT)
    def test_nothing_is_left_over(self, team: list[Device], step: int) -> None:

        def round_trip(_turn: int) -> None:
            with ExitStack() as scope:
                mapping, memory = _bound(team, step, scope)
                import_multicast(mapping.multicast.export(), len(team), step, device=team[0]).close(timeout=LIMIT)
                for one in (mapping.multicast, *memory):
                    one.close(timeout=LIMIT)

        leaves_nothing(round_trip)


def _bound(team: list[Device], size: int, scope: ExitStack) -> tuple[MulticastMapping, list[Allocation]]:
    """Make an object with memory of every device bound to it, mapped for all."""
    made: MulticastObject = scope.enter_context(create_multicast(team, size, VmmFd))
    memory = [scope.enter_context(device.allocate(size)) for device in team]
    for allocation in memory:
        made.bind_memory(allocation)
    return scope.enter_context(made.map()), memory
