"""Bridged semaphores, for kinds that a device cannot import. Streams use words in memory; a thread uses the semaphore.

HIP has no external semaphores on Linux, GPUs cannot wait for an eventfd or a DRM syncobj, and lavapipe cannot export
timelines. With a bridge, a stream waits for a 64-bit word in pinned host memory and writes another word
(`Operation.STREAM_MEMORY_OPS`). The bridge's thread, the watcher, waits for the foreign semaphore and then stores the
first word. When the second word changes, it signals the semaphore.

You create a bridge explicitly; gpuinterop never falls back to one silently. It costs a thread, some time per handoff,
and a CPU core during short waits (docs/reference/bridge.md).

Examples
--------
>>> import vulkan
>>> with gi.bridge.Bridge(device) as bridge:
...     shared = gi.vulkan.share_semaphore(vk, device, gi.Timeline, bridge=bridge)
...     commands = record(lambda commands: None)
...     submit(commands, wait_semaphores=[shared.vk_semaphore], wait_values=[1], wait_stages=[0x10000])
...     shared.semaphore.signal(stream, 1)
...     vulkan.vkQueueWaitIdle(queue)  # the queue continues when the stream has signalled
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
