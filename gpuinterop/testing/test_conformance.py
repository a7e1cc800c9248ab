"""Every suite, for every installed backend: ``pytest --pyargs gpuinterop.testing``."""

# ruff: noqa: D101 - see the suites

from __future__ import annotations

import pytest

# The suites' asserts are rewritten as those of test modules are: a failure shows both sides.
pytest.register_assert_rewrite("gpuinterop.testing.suites")

from . import suites  # noqa: E402


class TestBackend(suites.BackendSuite): ...


class TestCapability(suites.CapabilitySuite): ...


class TestMemory(suites.MemorySuite): ...


class TestArray(suites.ArraySuite): ...


class TestSemaphore(suites.SemaphoreSuite): ...


class TestCreatedSemaphore(suites.CreatedSemaphoreSuite): ...


class TestOrdering(suites.OrderingSuite): ...


class TestSabotage(suites.SabotageSuite): ...


class TestStream(suites.StreamSuite): ...


class TestStreamWork(suites.StreamWorkSuite): ...


class TestStreamWords(suites.StreamWordsSuite): ...


class TestBridgedSemaphore(suites.BridgedSemaphoreSuite): ...


class TestBridgedOrdering(suites.BridgedOrderingSuite): ...


class TestBridgedSabotage(suites.BridgedSabotageSuite): ...


class TestLifetime(suites.LifetimeSuite): ...


class TestAllocation(suites.AllocationSuite): ...


class TestSharedAllocation(suites.SharedAllocationSuite): ...


class TestMulticast(suites.MulticastSuite): ...


class TestGraph(suites.GraphSuite): ...


class TestBadInput(suites.BadInputSuite): ...


class TestPeerDeath(suites.PeerDeathSuite): ...


class TestVmmArraysInVulkan(suites.VmmArraysInVulkanSuite): ...


class TestHostArraysInVulkan(suites.HostArraysInVulkanSuite): ...


class TestFrame(suites.FrameSuite): ...


class TestSharedVmm(suites.SharedVmmSuite): ...


class TestSharedFile(suites.SharedFileSuite): ...


class TestSharedLegacy(suites.SharedLegacySuite): ...
