"""Timelines that the application bridges by hand, and what a context and a handoff see to when they are closed."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.lifetime import LIVE
from gpuinterop.vulkan._api import NOT_READY
from tests.limits import LIMIT

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application

pytestmark = pytest.mark.signals_beside


@pytest.fixture
def context(application: Application) -> gi.vulkan.VulkanContext:
    """A second one of the same VkDevice, which is still there when this is closed."""
    return gi.vulkan.VulkanContext(application.instance, application.physical_device, application.device)


@pytest.fixture
def timeline(application: Application) -> Iterator[Any]:
    vulkan = application.api
    kind = vulkan.VkSemaphoreTypeCreateInfo(semaphoreType=vulkan.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
    semaphore = vulkan.vkCreateSemaphore(application.device, vulkan.VkSemaphoreCreateInfo(pNext=kind), None)
    yield semaphore
    vulkan.vkDestroySemaphore(application.device, semaphore, None)


class Gate(gi.bridge.Endpoint):
    """Opens when something else is closed."""

    kind, label = gi.Timeline, "a gate"

    def __init__(self, other: Any) -> None:
        self.other = other

    def wait(self, value: int, timeout: float) -> bool:
        return bool(self.other.closed)

    def signal(self, value: int) -> None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_a_context_waits_for_what_was_bridged_by_hand(
    application: Application, context: gi.vulkan.VulkanContext, timeline: Any, device: gi.Device
) -> None:
    """A signal is pending when it is closed: it is told, and then nothing calls Vulkan any more."""
    endpoint = gi.vulkan.TimelineEndpoint(context, timeline)
    with gi.bridge.Bridge(device) as bridge, device.create_stream() as stream:
        drawn = bridge.from_endpoint(endpoint)
        gate = bridge.from_endpoint(Gate(drawn))
        gate.wait(stream, 1)
        drawn.signal(stream, 7)
        released: list[int] = []
        drawn.on_released(lambda: released.append(endpoint._vk is context and context.lifetime.state is LIVE))
        context.close(timeout=LIMIT)
        assert released == [True]
        look = gi.vulkan.TimelineEndpoint(application.vk, timeline)
        assert look.counter() == 7
        stream.synchronize(LIMIT)
        with pytest.raises(gi.ResourceClosedError):
            endpoint.counter()
        with pytest.raises(gi.ResourceClosedError):
            drawn.wait(stream, 8)
        # One more of a closed context is refused, and so is a bridge for one that was made before.
        with pytest.raises(gi.ResourceClosedError):
            bridge.from_endpoint(endpoint)
        with pytest.raises(gi.ResourceClosedError):
            gi.vulkan.TimelineEndpoint(context, timeline)
    context.close()


def test_a_context_that_gives_up_is_called_no_more(
    context: gi.vulkan.VulkanContext, timeline: Any, device: gi.Device
) -> None:
    """A look is under way when the time is over: `close` returns behind it, and the stream that waits is let go."""
    endpoint = gi.vulkan.TimelineEndpoint(context, timeline)
    look, inside, go_on = context.functions.vkGetSemaphoreCounterValue, threading.Event(), threading.Event()
    ended: list[bool] = []
    after_the_end: list[bool] = []

    def slow(*arguments: Any) -> Any:
        inside.set()
        go_on.wait(LIMIT)
        after_the_end.append(bool(ended))
        return look(*arguments)

    def close() -> None:
        with pytest.raises(gi.ResourceBusyError, match="still uses bridged Vulkan timeline"):
            context.close(timeout=0.0)
        ended.append(True)

    with gi.bridge.Bridge(device) as bridge, device.create_stream() as stream:
        context.functions.__dict__["vkGetSemaphoreCounterValue"] = slow
        drawn = bridge.from_endpoint(endpoint)
        drawn.wait(stream, 9)
        behind = stream.record()
        assert inside.wait(LIMIT)
        closing = threading.Thread(target=close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive(), "the driver is in a call"
        go_on.set()
        closing.join(LIMIT)
        assert ended
        with pytest.raises(gi.ResourceClosedError, match=r"VulkanContext #\d+ is closed"):
            behind.wait(LIMIT)
    assert True not in after_the_end


def test_a_bridged_semaphore_outlives_the_queues_work(application: Application, device: gi.Device) -> None:
    """The streams are done with it, and the queue is not: it is destroyed behind the queue's fence."""
    vk: Any = application.vk
    handoff = gi.vulkan.share_handoff(vk, device, allow=("bridged",))
    destroyed: list[bool] = []
    done: list[bool] = []
    fence_status, destroy = vk.functions.vkGetFenceStatus, vk.functions.vkDestroySemaphore

    def status(*arguments: Any) -> int:
        done.append(len(done) > 20)  # the queue is at work for twenty looks
        return int(fence_status(*arguments)) if done[-1] else NOT_READY

    def watch(*arguments: Any) -> None:
        destroyed.append(bool(done) and done[-1])
        destroy(*arguments)

    vk.functions.__dict__.update(vkGetFenceStatus=status, vkDestroySemaphore=watch)
    with device.create_stream() as stream:
        handoff.submit()
        handoff.acquire(stream)
        handoff.release(stream)
        vk.close(LIMIT)
    assert destroyed == [True]


CLOSED = "close() returned"
CALLS = [
    ("share", "vkCreateBuffer"),
    ("share", "vkGetBufferMemoryRequirements2"),
    ("share", "vkAllocateMemory"),
    ("share", "vkBindBufferMemory"),
    ("share", "vkGetMemoryFdKHR"),
    ("close", "vkDestroyBuffer"),
    ("close", "vkFreeMemory"),
    ("release", "vkCmdPipelineBarrier"),
    ("submit", "vkQueueSubmit"),
    ("counter", "vkGetSemaphoreCounterValue"),
    ("signal", "vkSignalSemaphore"),
]


@pytest.mark.parametrize(("what", "held"), CALLS, ids=lambda name: name)
def test_close_waits_for_a_call_of_another_thread(
    context: gi.vulkan.VulkanContext, timeline: Any, monkeypatch: pytest.MonkeyPatch, what: str, held: str
) -> None:
    """It stands before Vulkan's function when `close` comes. No other call follows, and nothing is left undestroyed."""
    device = gi.match_device(context.identity)
    context.queue_family_index = 0
    endpoint = gi.vulkan.TimelineEndpoint(context, timeline)
    shared: Any = gi.vulkan.share_buffer(context, device, 4096) if what in ("close", "release") else None
    handoff: Any = gi.vulkan.share_handoff(context, device, allow=("bridged",)) if what == "submit" else None
    actions: dict[str, Callable[[], Any]] = {
        "share": lambda: gi.vulkan.share_buffer(context, device, 4096),
        "close": lambda: shared and shared.close(),
        "release": lambda: shared and shared.release(1 << 20),
        "submit": lambda: handoff and handoff.submit(1 << 20),
        "counter": endpoint.counter,
        "signal": lambda: endpoint.signal(1),
    }
    news: queue.Queue[str] = queue.Queue()
    calls: list[str] = []
    seen: list[str] = []
    real, wait = context.functions, system.until

    def close() -> None:
        context.close(timeout=LIMIT)
        calls.append(CLOSED)
        news.put("closed")

    closing = threading.Thread(target=close)

    def until(condition: Callable[[], bool], timeout: float | None) -> bool:
        if threading.current_thread() is closing and not condition():
            news.put("waits")
        return wait(condition, timeout)

    class Spy:
        def __getattr__(self, name: str) -> Any:
            function = getattr(real, name)

            def call(*arguments: Any) -> Any:
                if name == held and not seen:
                    closing.start()
                    seen.append(news.get(timeout=LIMIT))
                calls.append(name)
                return 0 if name in ("vkCmdPipelineBarrier", "vkQueueSubmit") else function(*arguments)

            return call

    monkeypatch.setattr(system, "until", until)
    context.functions = cast(Any, Spy())
    with pytest.raises(gi.ResourceClosedError) if what == "share" else nullcontext():
        actions[what]()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert seen == ["waits"]
    assert held in calls
    assert calls[-1] == CLOSED
    context.close()
    for thing in (shared, handoff):
        if thing is not None:
            thing.close(timeout=LIMIT)
    assert calls[-1] == CLOSED


def test_a_handoff_closes_its_bridge_whatever_happens(application: Application, device: gi.Device) -> None:
    """The semaphore is busy: that is raised, the bridge is closed all the same, and the stream goes on."""
    handoff = gi.vulkan.share_handoff(application.vk, device, allow=("bridged",))
    bridge = handoff._bridge
    assert bridge is not None
    with device.create_stream() as stream:
        handoff.vulkan_submit()  # and nothing is submitted
        handoff.acquire(stream)
        behind = stream.record()
        with pytest.raises(gi.ResourceBusyError):
            handoff.close(timeout=0.05)
        assert bridge.closed
        with pytest.raises(gi.ResourceClosedError):
            behind.wait(LIMIT)
        bridge.close(timeout=LIMIT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_childs_context_waits_for_no_thread_of_the_parent(context: gi.vulkan.VulkanContext) -> None:
    """A watcher is in a call at the fork; the child closes its copy as it exits."""
    inside, go_on = threading.Event(), threading.Event()

    def call(*_: object) -> int:
        inside.set()
        go_on.wait(LIMIT)
        return 0

    context.functions.__dict__["vkSignalSemaphore"] = call
    thread = threading.Thread(target=context._call, args=("vkSignalSemaphore",))
    thread.start()
    assert inside.wait(LIMIT)
    child = os.fork()
    if not child:
        signal.alarm(300)
        context.close()
        os._exit(0)
    go_on.set()
    thread.join(LIMIT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    context.close()
