"""Handing over between Vulkan's queue and the compute side's streams, frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from .. import system
from .._arguments import check_flags, check_sequence, check_timeout
from ..bridge import Bridge, BridgedSemaphore
from ..capabilities import Operation
from ..errors import (
    GpuInteropError,
    InvalidArgumentError,
    SemaphoreTimeoutError,
    UnsupportedError,
)
from ..handles import Binary, OpaqueFd, Timeline, TimelineFd
from . import _api as c
from ._context import VulkanContext
from ._semaphore import SharedSemaphore, share_semaphore
from ._shared import Shared, agree, check_device

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.stream import Stream

__all__ = ["QueueFamily", "SharedHandoff", "VulkanSubmit", "share_handoff"]

_OPERATIONS = (Operation.IMPORT_SEMAPHORE, Operation.WAIT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE)
_MODES = {"timeline": TimelineFd, "binary": OpaqueFd}
_BRIDGED = "bridged"


class VulkanSubmit(TypedDict):
    """What one submission waits for and signals. The lists run in parallel.

    The values belong into ``VkTimelineSemaphoreSubmitInfo``; binary semaphores' are 0 and mean nothing.
    """

    wait_semaphores: list[Any]
    wait_values: list[int]
    wait_stages: list[int]
    signal_semaphores: list[Any]
    signal_values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFamily:
    """A queue family.

    Attributes
    ----------
    index : int
    flags : int
        ``VkQueueFlags``.
    transfer_only : bool
        It copies and nothing else. On NVIDIA a handoff to CUDA through such a family costs a fortieth, because the
        GPU need not switch from graphics to compute: give it the copies.
    """

    index: int
    flags: int
    transfer_only: bool


class SharedHandoff(Shared):
    """Both directions between Vulkan's queue and one device's streams. Made by :func:`share_handoff`.

    Each frame, in this order: `submit` (or a submission of your own with what `vulkan_submit` says), `acquire`,
    compute work on the stream, `release`. Out of order they raise, instead of a wait that never returns.

    Attributes
    ----------
    mode : str
        ``timeline``, ``binary`` or ``bridged``.
    """

    def __init__(
        self,
        vk: VulkanContext,
        to_compute: SharedSemaphore[Any],
        to_graphics: SharedSemaphore[Any] | None,
        *,
        bridge: Bridge | None = None,
    ) -> None:
        from ..handoff import Handoff

        super().__init__(vk)
        self._to_compute = to_compute
        self._to_graphics = to_graphics
        self._handoff = Handoff(to_compute.semaphore, to_graphics.semaphore if to_graphics else None)
        self._stream: Stream | None = None
        self._bridge = bridge
        if bridge is not None:  # ours, for this one semaphore, which the context closes too
            to_compute.semaphore.on_released(bridge.close)
        self._timeline = self._handoff.mode == "timeline"
        self.mode = self._handoff.mode if not isinstance(to_compute.semaphore, BridgedSemaphore) else "bridged"

    @property
    def frame(self) -> int:
        """The frame that is under way, from 0."""
        return self._handoff.frame

    @property
    def queue_family(self) -> QueueFamily | None:
        """The family that the context was given; None when it was given none."""
        self._vk.check_open()
        index = self._vk.queue_family_index
        if index is None:
            return None
        flags, _ = self._vk._physical.queue_families[index]
        kinds = c.QUEUE_TRANSFER | c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE
        return QueueFamily(index=index, flags=flags, transfer_only=flags & kinds == c.QUEUE_TRANSFER)

    def vulkan_submit(self, *, stage: int = c.STAGE_ALL_COMMANDS) -> VulkanSubmit:
        """Say what this frame's submission waits for and signals. Call it once a frame, and submit with it.

        When the submission fails, say so with `undo_submit`.

        Parameters
        ----------
        stage : int
            ``VkPipelineStageFlags`` that wait for the compute side; by default all.

        Returns
        -------
        VulkanSubmit
            ``wait_semaphores``, ``wait_values``, ``wait_stages``, ``signal_semaphores``, ``signal_values``. The first
            frame waits for nothing.

        Raises
        ------
        InvalidArgumentError
            The frame before was not released yet.
        ResourceClosedError
            The handoff was closed, or the context.
        """
        check_flags(stage, "stage")
        # Both before the turn is taken: whoever is refused here has submitted nothing.
        forth = self._to_compute.vk_semaphore
        back = (self._to_graphics or self._to_compute).vk_semaphore
        step = self._handoff.next_submit()
        waits = step.wait_value is not None
        return VulkanSubmit(
            wait_semaphores=[back] if waits else [],
            wait_values=[step.wait_value] if step.wait_value is not None else [],
            wait_stages=[stage] if waits else [],
            signal_semaphores=[forth],
            signal_values=[step.signal_value],
        )

    def undo_submit(self) -> None:
        """Take `vulkan_submit` back: the submission failed, and nothing of it was queued. Then it can be retried.

        Raises
        ------
        InvalidArgumentError
            No submission is under way: none was asked for, or it was acquired already.
        """
        self._handoff.undo_submit()

    def submit(
        self, queue: Any = None, command_buffers: Sequence[Any] = (), fence: Any = None, *,
        stage: int = c.STAGE_ALL_COMMANDS,
    ) -> None:  # fmt: skip
        """Submit this frame's commands: ``vkQueueSubmit`` with what `vulkan_submit` says.

        Parameters
        ----------
        queue : VkQueue, optional
            By default the context's. It must not be used by another thread meanwhile.
        command_buffers : sequence of VkCommandBuffer
        fence : VkFence, optional
            Signalled when the commands are done.
        stage : int
            As for `vulkan_submit`.

        Raises
        ------
        InvalidArgumentError
            The frame before was not released yet, or there is no queue.
        ResourceClosedError
            The handoff was closed, or the context.
        DriverError
            ``vkQueueSubmit`` failed. The frame can be submitted again.
        """
        vk = self._vk
        api, null = vk.api, vk.api.ffi.NULL
        target = vk.queue if queue is None else api.handle("VkQueue", queue, "queue")
        if target is None:
            raise InvalidArgumentError("queue", "give one here, or to VulkanContext.")
        check_sequence(command_buffers, "command_buffers", "a sequence of command buffers")
        commands = [api.handle("VkCommandBuffer", each, "command_buffers") for each in command_buffers]
        signalled = null if fence is None else api.cast("VkFence", fence, "fence")
        what = self.vulkan_submit(stage=stage)
        chain = null
        if self._timeline:
            chain = api.new(
                "VkTimelineSemaphoreSubmitInfo",
                waitSemaphoreValueCount=len(what["wait_values"]),
                pWaitSemaphoreValues=api.array("uint64_t", what["wait_values"]),
                signalSemaphoreValueCount=1,
                pSignalSemaphoreValues=api.array("uint64_t", what["signal_values"]),
            )
        info = api.new(
            "VkSubmitInfo",
            pNext=chain,
            waitSemaphoreCount=len(what["wait_semaphores"]),
            pWaitSemaphores=api.array("VkSemaphore", what["wait_semaphores"]),
            pWaitDstStageMask=api.array("VkPipelineStageFlags", what["wait_stages"]),
            commandBufferCount=len(commands),
            pCommandBuffers=api.array("VkCommandBuffer", commands),
            signalSemaphoreCount=1,
            pSignalSemaphores=api.array("VkSemaphore", what["signal_semaphores"]),
        )
        try:
            back, forth = (self._to_graphics or self._to_compute)._native, self._to_compute._native
            back.use(lambda _: forth.call("vkQueueSubmit", target, 1, info, signalled))
        except GpuInteropError:
            # Nothing was queued. After anything else, Ctrl-C above all, it may have been: then the turn stays taken.
            self.undo_submit()
            raise

    def acquire(self, stream: Stream, *, timeout: float | None = None) -> None:
        """Enqueue: `stream` waits for Vulkan. Returns at once. As `Handoff.acquire`."""
        self._handoff.acquire(stream, timeout=timeout)

    def release(self, stream: Stream) -> None:
        """Enqueue: `stream` signals Vulkan. Returns at once. As `Handoff.release`."""
        self._handoff.release(stream)
        self._stream = stream

    def wait_host(self, timeout: float | None) -> None:
        """Block the calling thread until the compute side's last release has happened.

        A timeline's counter is polled (``vkGetSemaphoreCounterValue``): ``vkWaitSemaphores`` sleeps in steps of 10 ms
        on what CUDA signals. A binary semaphore cannot be looked at without consuming it: there the stream that
        released is waited for, with whatever was enqueued on it since.

        Parameters
        ----------
        timeout : float
            Seconds; None for no limit.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed.
        ArgumentTypeError
            `timeout` is no number.
        ResourceClosedError
            The handoff was closed, or the context.
        """
        limit = check_timeout(timeout)
        _ = self._to_compute.vk_semaphore  # raises when closed, also where nothing is to be waited for
        wanted = 2 * self._handoff.frame
        if not wanted:
            return
        if not self._timeline:
            if self._stream is not None and not self._stream.closed:
                self._stream.record().wait(limit)
            return
        if not system.until(lambda: self._to_compute.counter() >= wanted, limit):
            raise SemaphoreTimeoutError(
                f"the compute side did not release frame {self._handoff.frame - 1} in {timeout:g} s: "
                f"the timeline is at {self._to_compute.counter()}, and {wanted} is awaited."
            )

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides; as `SharedBuffer.close`. Vulkan's queue must be done with the semaphores.

        Each part is closed whatever becomes of the others.
        """
        with ExitStack() as parts:  # the last first
            for part in (self._bridge, self._to_graphics, self._to_compute):
                if part is not None:
                    parts.callback(part.close, timeout)


def share_handoff(
    vk: VulkanContext,
    device: Device,
    *,
    allow: Sequence[str] = ("timeline", "binary"),
    bridge: Bridge | None = None,
) -> SharedHandoff:
    """Make the semaphores for handing over between Vulkan and the device, both ways.

    One timeline where both sides have timelines, else two binary semaphores. Or, only where that is allowed, a bridged
    timeline, which asks nothing of Vulkan's driver but timelines of its own, and of the device that its streams wait
    for words (`Operation.STREAM_MEMORY_OPS`): AMD GPUs on Linux, lavapipe.

    Parameters
    ----------
    vk : VulkanContext
        With `queue_family_index` and, for `SharedHandoff.submit`, a `queue`.
    device : Device
    allow : sequence of str
        In order of preference: ``timeline``, ``binary``, ``bridged``.
    bridge : Bridge, optional
        For a bridged handoff; it stays the caller's. By default the handoff makes its own.

    Returns
    -------
    SharedHandoff
        Owns both sides; close it. `SharedHandoff.mode` says which it is.

    Raises
    ------
    UnsupportedError
        The two sides have nothing in common of what is allowed; nothing was created.
    InvalidArgumentError
        `device` is another GPU, `allow` names something else, or the application did not enable an extension.
    DriverError
        A native call failed.

    Examples
    --------
    One source for every machine:

    >>> handoff = gi.vulkan.share_handoff(vk, device, allow=("timeline", "binary", "bridged"))
    >>> log(handoff.mode)
    """
    check_device(vk, device)
    check_sequence(allow, "allow", "a sequence such as ('timeline', 'binary')")
    if not allow:
        raise InvalidArgumentError("allow", "must name one mode or more: 'timeline', 'binary', 'bridged'.")
    if unknown := [mode for mode in allow if mode not in (*_MODES, _BRIDGED)]:
        raise InvalidArgumentError("allow", f"{unknown[0]!r} is none of 'timeline', 'binary' and 'bridged'.")
    mode = _agree_on_mode(vk, device, allow)
    with ExitStack() as undo:
        own = None
        if mode == _BRIDGED and bridge is None:
            bridge = own = Bridge(device)
            undo.callback(own.close)
        if mode == _BRIDGED:
            handoff = SharedHandoff(vk, share_semaphore(vk, device, Timeline, bridge=bridge), None, bridge=own)
        elif mode == "timeline":
            handoff = SharedHandoff(vk, share_semaphore(vk, device, Timeline), None)
        else:
            to_compute = share_semaphore(vk, device, Binary)
            undo.callback(to_compute.close)
            to_graphics = share_semaphore(vk, device, Binary)
            undo.callback(to_graphics.close)
            handoff = SharedHandoff(vk, to_compute, to_graphics)
        undo.pop_all()
    return handoff


def _agree_on_mode(vk: VulkanContext, device: Device, allow: Sequence[str]) -> str:
    """The first that both sides can do; else the first gap, with those of the others beside it."""
    gaps = []
    for mode in allow:
        try:
            if mode == _BRIDGED:
                device.capabilities.require(Operation.STREAM_MEMORY_OPS)
            else:
                agree(vk, device, _OPERATIONS, [_MODES[mode]])
        except UnsupportedError as error:
            gaps.append(error)
        else:
            return mode
    for mode, other in zip(allow[1:], gaps[1:], strict=True):
        gaps[0].add_note(f"{mode}: {other}")
    if _BRIDGED not in allow and device.capabilities.supports(Operation.STREAM_MEMORY_OPS):
        gaps[0].add_note("A bridged handoff would work here: allow=(..., 'bridged').")
    raise gaps[0]
