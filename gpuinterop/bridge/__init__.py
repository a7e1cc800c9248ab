"""Semaphores for devices that have none, or none of that kind: a stream waits for a word, and a watcher sees to it.

HIP has no external semaphores on Linux; no GPU waits for an eventfd or a DRM syncobj; lavapipe's timelines leave the
process in no form. With a bridge the stream waits for a 64-bit word in pinned host memory and writes another
(`Operation.STREAM_MEMORY_OPS`); one thread of the bridge, the watcher, waits for the foreign semaphore and stores the
one, sees the other change and signals.

It is chosen by name, never a silent fallback, because it costs a thread, tens of microseconds a handoff, and a CPU core
while a wait is short (docs/bridge.md).

>>> with gpuinterop.bridge.Bridge(device) as bridge:
...     semaphore = bridge.from_endpoint(gpuinterop.vulkan.TimelineEndpoint(vk, vk_semaphore))
...     semaphore.wait(stream, 1)
...     semaphore.signal(stream, 2)
"""

from __future__ import annotations

from ._bridge import Bridge, BridgedSemaphore
from ._endpoints import (
    Endpoint,
    EventFdEndpoint,
    OwnTimelineEndpoint,
    SemaphoreEndpoint,
    SyncFdEndpoint,
    SyncobjEndpoint,
)

__all__ = [
    "Bridge",
    "BridgedSemaphore",
    "Endpoint",
    "EventFdEndpoint",
    "OwnTimelineEndpoint",
    "SemaphoreEndpoint",
    "SyncFdEndpoint",
    "SyncobjEndpoint",
]
