"""A frame that is captured once and launched many times, on a Vulkan queue that only copies.

    python captured_frame.py           prints the time of a frame with 32 operations, call by call and as a graph

Vulkan copies a picture into the shared buffer. The compute side waits, changes it, and signals. If the device cannot
capture semaphores (only CUDA can), the program reports that and skips the second half.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import vulkan as api
from vulkan_application import Application

import gpuinterop as gi

NBYTES = 1 << 20
OPERATIONS = 32  # per frame, on the compute side
FRAMES = 500


def main() -> None:
    with Application(transfer=True) as application:
        device = gi.match_device(gi.vulkan.identity(application.physical_device))
        buffer = gi.vulkan.share_buffer(application.vk, device, NBYTES)
        stream = device.create_stream()
        graphs = device.capabilities.supports(gi.Operation.GRAPH_CAPTURE)

        def copy(commands: object) -> None:
            buffer.acquire(commands)
            api.vkCmdFillBuffer(commands, buffer.vk_buffer, 0, NBYTES, 0x01010101)
            buffer.release(commands)

        commands = application.record(copy)

        def work() -> None:  # yours: kernels of torch or CuPy
            size = NBYTES // 2 // OPERATIONS
            for part in range(OPERATIONS):
                buffer.fill(7, offset=part * size, size=size, stream=stream)

        with gi.vulkan.share_handoff(application.vk, device) as handoff:
            family = handoff.queue_family
            queue = "transfer" if family is not None and family.transfer_only else "compute"
            print(f"{application.name}, {handoff.mode}, {queue} queue")

            def frame() -> None:
                application.submit(commands, **handoff.vulkan_submit())
                handoff.acquire(stream)
                work()
                handoff.release(stream)

            print(f"  call by call: {measure(frame, stream):7.1f} us a frame")
            check(buffer)

        if not graphs:
            print("  as a graph:   not here:", device.capabilities.of(gi.Operation.GRAPH_CAPTURE).reason)
        else:
            timeline = gi.vulkan.share_semaphore(application.vk, device, gi.Timeline)
            with stream.capture() as graph:
                timeline.semaphore.wait(stream, 1)
                work()
                timeline.semaphore.signal(stream, 2)
            values = iter(range(0, 10 * FRAMES, 2))

            def launched() -> None:
                last = next(values)  # 0, 2, 4: the last signal of the frame before
                application.submit(
                    commands,
                    wait_semaphores=[timeline.vk_semaphore],
                    wait_values=[last],
                    wait_stages=[api.VK_PIPELINE_STAGE_TRANSFER_BIT],
                    signal_semaphores=[timeline.vk_semaphore],
                    signal_values=[last + 1],
                )
                graph.launch(stream)
                graph.semaphores.advance(2)  # the next launch waits for 3 and signals 4

            print(f"  as a graph:   {measure(launched, stream):7.1f} us a frame")
            check(buffer)
            graph.close()
            timeline.close()
        stream.close()
        api.vkQueueWaitIdle(application.queue)  # Vulkan does not know that the stream has waited for its work
        buffer.close()


def measure(frame: Callable[[], None], stream: gi.Stream) -> float:
    """Microseconds per frame, queued ahead; the first frames are not counted."""
    for _ in range(20):
        frame()
    stream.synchronize(timeout=60)
    began = time.perf_counter()
    for _ in range(FRAMES):
        frame()
    stream.synchronize(timeout=60)
    return 1e6 * (time.perf_counter() - began) / FRAMES


def check(buffer: gi.vulkan.SharedBuffer) -> None:
    """Check that half of the bytes are the compute side's, and half Vulkan's; then clear them."""
    found = np.empty(NBYTES, np.uint8)
    buffer.copy_to_host(found)
    assert (found[: NBYTES // 2] == 7).all(), "the compute side has not worked last"
    assert (found[NBYTES // 2 :] == 1).all(), "Vulkan has not worked"
    buffer.fill(0)


if __name__ == "__main__":
    main()
