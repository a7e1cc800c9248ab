"""Bridged semaphores, for kinds that a device cannot import: streams use words, and a thread uses the semaphore.

HIP has no external semaphores on Linux; GPUs cannot wait for an eventfd or a DRM syncobj; lavapipe cannot export
timelines. With a bridge, a stream waits for a 64-bit word in pinned host memory and writes another
(`Operation.STREAM_MEMORY_OPS`). The bridge's thread, the watcher, waits for the foreign semaphore and stores the first
word; when the second word changes, it signals.

You choose it by name; it is never a silent fallback. It costs a thread, tens of microseconds per handoff, and a CPU
core during short waits (docs/reference/bridge.md).

Examples
--------
>>> import vulkan
>>> with gi.bridge.Bridge(device) as bridge:
...     shared = gi.vulkan.share_semaphore(vk, device, gi.Timeline, bridge=bridge)
...     commands = record(lambda commands: None)
...     submit(commands, wait_semaphores=[shared.vk_semaphore], wait_values=[1], wait_stages=[0x10000])
...     shared.semaphore.signal(stream, 1)
...     vulkan.vkQueueWaitIdle(queue)  # the queue goes on when the stream has signalled
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
