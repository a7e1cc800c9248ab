"""Leaving a VulkanContext's block: Vulkan's objects go at once, and what the compute side has imported stays.

The shared bytes are read and written through a mapping of the payload's own file descriptor, which neither Vulkan nor
the host's backend has made.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.handles import Binary, Timeline
from tests.beside import beside
from tests.limits import LIMIT

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import (
        Application,
        Calls,
        HeldQueue,
        match,
        require_allocations,
        semaphores_missing,
    )
else:
    from vulkan_application import Application, Calls, HeldQueue, match, require_allocations, semaphores_missing

pytestmark = pytest.mark.signals_beside


class Program:
    """An application, its context and the compute device."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self.application = Application(driver)
        self.vk = self.application.vk
        self.device = match(self.vk)
        self.ended = False

    def handoff(self, mode: str) -> Any:
        """Or a skip, where the driver is known to have none of this mode."""
        try:
            return gi.vulkan.share_handoff(self.vk, self.device, allow=(mode,))
        except gi.UnsupportedError:
            semaphores_missing(self.driver, {"binary": Binary, "timeline": Timeline}[mode])

    def bytes_of(self, shared: Any) -> mmap.mmap:
        """A shared buffer's, mapped by the test."""
        if not self.vk.is_cpu:
            pytest.skip("a GPU's bytes cannot be mapped by their file descriptor")
        with gi.vulkan.export_memory(
            self.vk, shared.vk_memory, size=shared.allocation_size, dedicated=shared.dedicated
        ) as handle:
            assert isinstance(handle, gi.OpaqueFd)
            start = 0
            if self.driver == "lavapipe":  # its payload begins with a header, which says where the data does
                start = int(struct.unpack("<Q", os.pread(handle.fd, 8, 8))[0])
            return mmap.mmap(handle.fd, shared.size, offset=start)

    def end(self) -> None:
        """Destroy the VkDevice and the VkInstance."""
        if not self.ended:
            self.ended = True
            self.application.close()


@pytest.fixture
def program(driver: str) -> Iterator[Program]:
    program = Program(driver)
    yield program
    program.vk.close()
    program.end()


def stays_right(array: Any, mapped: mmap.mmap) -> None:
    """Every byte, both ways, several times."""
    random = np.random.default_rng(1)
    for _ in range(3):
        wanted = random.bytes(array.nbytes)
        array.view(np.uint8).reshape(-1)[:] = np.frombuffer(wanted, np.uint8)
        assert mapped[: array.nbytes] == wanted
        mapped[: array.nbytes] = wanted = random.bytes(array.nbytes)
        assert array.tobytes() == wanted


def released(device: gi.Device, *resources: Any) -> bool:
    """Whether the compute side lets go, now that nothing holds it any more."""
    left = list(resources)
    for resource in resources:
        resource.on_released(lambda resource=resource: left.remove(resource))
    deadline = time.monotonic() + LIMIT
    while left and time.monotonic() < deadline:
        device.drain()
    return not left


class Oops(Exception):
    """The user's own."""


@pytest.mark.parametrize("failing", [False, True], ids=["leaves", "raises"])
def test_arrays_live_on(program: Program, failing: bool) -> None:
    """Also where the SharedBuffer was dropped, and the VkDevice is gone."""
    shared = gi.vulkan.share_buffer(program.vk, program.device, 4096)
    memory, mapped = shared.memory, program.bytes_of(shared)
    array = np.asarray(shared.view(4096))
    del shared
    with pytest.raises(Oops) if failing else nullcontext(), program.vk:
        if failing:
            raise Oops
    program.end()
    stays_right(array, mapped)
    del array
    assert released(program.device, memory)


# -- what is pending ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["wait", "signal"])
def test_a_semaphore_that_a_stream_still_uses(program: Program, what: str) -> None:
    """The VkSemaphore goes; the wait still ends when another party signals the payload, and the signal reaches it."""
    device = program.device
    if not gi.vulkan.capabilities(program.vk).supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)):
        semaphores_missing(program.driver, Binary)
    hold = device.create_semaphore(gi.TimelineFd)
    with device.create_stream() as stream, device.create_stream() as another:
        with program.vk as vk:
            shared = gi.vulkan.share_semaphore(vk, device, Binary)
            other = device.import_semaphore(gi.vulkan.export_semaphore(vk, shared.vk_semaphore, Binary))
            if what == "wait":
                shared.semaphore.wait(stream)
            else:
                hold.wait(stream, 1)
                shared.semaphore.signal(stream)
        program.end()
        assert not stream.query()
        if what == "wait":
            other.signal(another)
        else:
            hold.host_signal(1)
            other.wait(another)
        stream.synchronize(LIMIT)
        another.synchronize(LIMIT)
    assert released(device, shared.semaphore)
    other.close()
    hold.close()


def test_an_exception_is_not_held_up_by_a_wait_that_never_ends(program: Program) -> None:
    """Bridged: a thread of ours calls Vulkan as long as a stream waits. It is given a moment, and the stream fails."""
    with program.device.create_stream() as stream:
        handoff = program.handoff("bridged")
        with pytest.raises(Oops), program.vk:
            handoff.vulkan_submit()  # and nothing is submitted
            handoff.acquire(stream)
            raise Oops
        program.end()
        with pytest.raises(gi.ResourceClosedError):
            stream.synchronize(LIMIT)
        handoff.close()


# -- Vulkan's own queue ------------------------------------------------------------------------------------------------


def held(program: Program, shared: Any) -> HeldQueue:
    """The queue at work with a shared buffer."""
    fill = program.application.api.vkCmdFillBuffer
    return HeldQueue(program.application, lambda commands: fill(commands, shared.vk_buffer, 0, shared.size, 0x01010101))


@pytest.mark.parametrize("closers", [1, 2])
def test_vulkans_own_queue_is_waited_for(program: Program, closers: int) -> None:
    """Each thread that closes has a fence behind the queue's work, and whoever comes first destroys all."""
    shared: Any = gi.vulkan.share_buffer(program.vk, program.device, 4096)
    mapped, array = program.bytes_of(shared), np.asarray(shared.view(4096))
    status = program.vk.functions.vkGetFenceStatus
    looking: set[int] = set()

    def look(device: Any, fence: Any) -> int:
        looking.add(threading.get_ident())
        return int(status(device, fence))

    program.vk.functions.__dict__["vkGetFenceStatus"] = look
    with held(program, shared) as queue, beside(*[lambda: program.vk.close(LIMIT)] * closers):
        assert system.until(lambda: len(looking) == closers, LIMIT)
        assert not shared.vulkan_object.closed, "the queue is at work with the buffer"
        queue.let_go()
    assert shared.vulkan_object.closed
    program.end()
    assert bytes(mapped) == b"\1" * 4096
    stays_right(array, mapped)


@pytest.mark.parametrize("raises", [False, True])
def test_a_queue_that_does_not_end_keeps_its_objects(program: Program, raises: bool) -> None:
    """They are destroyed neither under it nor later: who does not know when it ends must not.

    A warning says so when they are left, once, and no drain waits for them.
    """
    vulkan, device = program.application.api, program.application.device
    shared = gi.vulkan.share_buffer(program.vk, program.device, 4096)
    objects = shared.vk_buffer, shared.vk_memory
    mapped = program.bytes_of(shared)
    with (
        held(program, shared),
        pytest.warns(gi.LeakedResourceWarning, match=re.escape(shared.memory.label)) as told,
    ):
        if raises:
            with pytest.raises(Oops), program.vk:
                raise Oops
        else:
            with pytest.raises(gi.ResourceBusyError, match="queue"):
                program.vk.close(timeout=0.05)
        shared.close()
        program.device.drain(timeout=LIMIT)
        program.vk.close()
    program.device.drain(timeout=LIMIT)
    assert len(told) == 1
    assert bytes(mapped) == b"\1" * 4096
    # What the library left is destroyed by the test, and the layer would say so if it had been before.
    vulkan.vkDestroyBuffer(device, objects[0], None)
    vulkan.vkFreeMemory(device, objects[1], None)
    (fence,) = (native for native in program.vk.lifetime.dependents if native.label.startswith("fence"))
    vulkan.vkDestroyFence(device, fence.handle, None)


@pytest.mark.parametrize("what", ["buffer", "handoff", "imported"])
def test_an_exception_in_the_block_of_what_is_shared(
    program: Program, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The queue may be waiting for a signal that the exception has prevented: what it uses goes with the context."""
    with ExitStack() as scope:
        shared: Any
        if what == "handoff":
            shared = program.handoff("binary")
        elif what == "buffer":
            shared = gi.vulkan.share_buffer(program.vk, program.device, 4096)
        else:
            require_allocations(program.application, program.device)
            allocation = scope.enter_context(program.device.allocate(1 << 16))
            shared = gi.vulkan.import_array(program.vk, allocation.buffer.view(1 << 16))
        names = ("vkDestroyBuffer", "vkFreeMemory") if what != "handoff" else ("vkDestroySemaphore",) * 2
        calls = Calls(program.vk, monkeypatch, *{*names})
        used = gi.vulkan.share_buffer(program.vk, program.device, 4096) if what == "handoff" else shared
        with held(program, used):
            with pytest.raises(Oops), shared:
                raise Oops
            program.device.drain(timeout=LIMIT)
            assert calls.made == []
            with pytest.raises(gi.ResourceClosedError):
                shared.vulkan_submit() if what == "handoff" else shared.vk_buffer
        program.vk.close()
        assert sorted(calls.made) == sorted(names)


def test_a_handoff_of_which_one_half_cannot_be_made(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is destroyed at once: no caller has it."""
    program.handoff("binary").close()
    calls = Calls(program.vk, monkeypatch, "vkCreateSemaphore", "vkDestroySemaphore")
    calls.failing["vkCreateSemaphore"] = 1
    with pytest.raises(gi.OutOfMemoryError):
        program.handoff("binary")
    assert calls.made == ["vkCreateSemaphore", "vkDestroySemaphore"]


@pytest.mark.parametrize("call", ["vkQueueSubmit", "vkGetFenceStatus"])
def test_a_lost_device_is_not_waited_for(program: Program, call: str) -> None:
    """And what was shared is destroyed, as Vulkan wants it before the VkDevice is."""

    def lost(*_: object) -> int:
        program.application.idle()  # in truth it is not lost
        return -4  # VK_ERROR_DEVICE_LOST

    shared = gi.vulkan.share_buffer(program.vk, program.device, 4096)
    program.vk.functions.__dict__[call] = lost
    program.vk.close()
    assert shared.vulkan_object.closed


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_closing_one_thing_destroys_vulkans_half_at_once(program: Program) -> None:
    shared = gi.vulkan.share_buffer(program.vk, program.device, 4096)
    image = gi.vulkan.share_image(program.vk, program.device, (64, 16), "R8_UNORM", tiling="linear")
    mapped = program.bytes_of(shared)
    array, texels = np.asarray(shared.view(1024, "uint32")), np.asarray(image.view())
    for thing in (shared, image):
        thing.close()
        assert thing.vulkan_object.closed
        with pytest.raises(gi.ResourceBusyError, match="array"):
            thing.close(timeout=0)
    with pytest.raises(gi.ResourceClosedError):
        shared.view(1)
    assert not program.vk.lifetime.dependents, "each would be kept as long as the context"
    program.vk.close()
    program.end()
    stays_right(array, mapped)
    texels[:] = 7
    assert (texels == 7).all()
    del array, texels
    assert released(program.device, shared.memory, image.memory)
    shared.close(timeout=LIMIT)


# -- the other way round: Vulkan stands on our bytes -------------------------------------------------------------------


def test_our_bytes_outlive_vulkans_object_on_them(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vulkan may have the address of our mapping: the VkDeviceMemory goes first, whatever is closed first."""
    if not program.vk.is_cpu:
        pytest.skip("a GPU's addresses stay reserved: /proc does not tell what is mapped there")
    require_allocations(program.application, program.device)
    allocation = program.device.allocate(1 << 16)
    imported = gi.vulkan.import_array(program.vk, allocation.buffer.view(1 << 16))
    address = allocation.buffer.ptr
    free = program.vk.functions.vkFreeMemory
    seen: list[bool] = []

    def watched(*arguments: Any) -> None:
        seen.append(mapped_at(address))
        free(*arguments)

    monkeypatch.setitem(program.vk.functions.__dict__, "vkFreeMemory", watched)
    allocation.close()
    program.device.drain()
    program.application.run(
        lambda commands: program.application.api.vkCmdFillBuffer(commands, imported.vk_buffer, 0, 1 << 16, 0x01010101)
    )
    program.vk.close()
    assert seen == [True]
    assert released(program.device, allocation)
    assert not mapped_at(address)


def mapped_at(address: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as lines:
        spans = (line.split()[0].split("-") for line in lines)
        return any(int(start, 16) <= address < int(end, 16) for start, end in spans)
