"""The suites: classes of tests that every backend must pass. Their docstrings are the specification.

To run a suite, inherit from it in a class named ``Test...`` of a test module; see :mod:`gpuinterop.testing`.
"""

from __future__ import annotations

from .allocation import AllocationSuite, SharedAllocationSuite
from .arrays import ArraySuite
from .bad_input import BadInputSuite
from .base import Suite
from .bridge import BridgedOrderingSuite, BridgedSabotageSuite, BridgedSemaphoreSuite
from .capability import BackendSuite, CapabilitySuite
from .frames import FrameSuite
from .graphs import GraphSuite
from .lifetime import LifetimeSuite
from .memory import MemorySuite
from .multicast import MulticastSuite
from .ordering import OrderingSuite, SabotageSuite
from .peer_death import PeerDeathSuite
from .semaphores import CreatedSemaphoreSuite, SemaphoreSuite
from .sharing import (
    HostArraysInVulkanSuite,
    SharedFileSuite,
    SharedLegacySuite,
    SharedVmmSuite,
    VmmArraysInVulkanSuite,
)
from .stream_memory import StreamWordsSuite
from .streams import StreamSuite, StreamWorkSuite

__all__ = [
    "AllocationSuite",
    "ArraySuite",
    "BackendSuite",
    "BadInputSuite",
    "BridgedOrderingSuite",
    "BridgedSabotageSuite",
    "BridgedSemaphoreSuite",
    "CapabilitySuite",
    "CreatedSemaphoreSuite",
    "FrameSuite",
    "GraphSuite",
    "HostArraysInVulkanSuite",
    "LifetimeSuite",
    "MemorySuite",
    "MulticastSuite",
    "OrderingSuite",
    "PeerDeathSuite",
    "SabotageSuite",
    "SemaphoreSuite",
    "SharedAllocationSuite",
    "SharedFileSuite",
    "SharedLegacySuite",
    "SharedVmmSuite",
    "StreamSuite",
    "StreamWordsSuite",
    "StreamWorkSuite",
    "Suite",
    "VmmArraysInVulkanSuite",
]
