"""Every suite, for every installed backend: ``pytest --pyargs gpuinterop.testing``."""

from __future__ import annotations

import pytest

# The suites' asserts are rewritten as those of test modules are: a failure shows both sides.
pytest.register_assert_rewrite("gpuinterop.testing.suites")

from . import suites  # noqa: E402


class TestBackend(suites.BackendSuite):
    """See the suite."""


class TestCapability(suites.CapabilitySuite):
    """See the suite."""


class TestMemory(suites.MemorySuite):
    """See the suite."""


class TestArray(suites.ArraySuite):
    """See the suite."""


class TestSemaphore(suites.SemaphoreSuite):
    """See the suite."""


class TestCreatedSemaphore(suites.CreatedSemaphoreSuite):
    """See the suite."""


class TestOrdering(suites.OrderingSuite):
    """See the suite."""


class TestSabotage(suites.SabotageSuite):
    """See the suite."""


class TestStream(suites.StreamSuite):
    """See the suite."""


class TestStreamWork(suites.StreamWorkSuite):
    """See the suite."""


class TestStreamWords(suites.StreamWordsSuite):
    """See the suite."""


class TestBridge(suites.BridgeSuite):
    """See the suite."""


class TestBridgedSemaphore(suites.BridgedSemaphoreSuite):
    """See the suite."""


class TestBridgedOrdering(suites.BridgedOrderingSuite):
    """See the suite."""


class TestBridgedSabotage(suites.BridgedSabotageSuite):
    """See the suite."""


class TestLifetime(suites.LifetimeSuite):
    """See the suite."""


class TestAllocation(suites.AllocationSuite):
    """See the suite."""


class TestSharedAllocation(suites.SharedAllocationSuite):
    """See the suite."""


class TestMulticast(suites.MulticastSuite):
    """See the suite."""


class TestGraph(suites.GraphSuite):
    """See the suite."""


class TestBadArgument(suites.BadArgumentSuite):
    """See the suite."""


class TestBadMemory(suites.BadMemorySuite):
    """See the suite."""


class TestBadSemaphore(suites.BadSemaphoreSuite):
    """See the suite."""


class TestPeerDeath(suites.PeerDeathSuite):
    """See the suite."""


class TestVmmArraysInVulkan(suites.VmmArraysInVulkanSuite):
    """See the suite."""


class TestHostArraysInVulkan(suites.HostArraysInVulkanSuite):
    """See the suite."""


class TestFrame(suites.FrameSuite):
    """See the suite."""


class TestSharedVmm(suites.SharedVmmSuite):
    """See the suite."""


class TestSharedFile(suites.SharedFileSuite):
    """See the suite."""


class TestSharedLegacy(suites.SharedLegacySuite):
    """See the suite."""
