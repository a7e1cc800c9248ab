"""Handoffs between Vulkan's queue and the compute side's streams, frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from .. import system
from .._arguments import check_flags, check_sequence, check_timeout
from .._core.lifetime import LIVE, MARK
from ..bridge import Bridge, BridgedSemaphore
from ..errors import ArgumentTypeError, InvalidArgumentError, SemaphoreTimeoutError
from ..graphics.handoff import Handoff
from ..graphics.modes import BRIDGED, agree_on_mode, mode_gaps
from ..handles import Binary, Timeline
from . import _api as c
from ._api import Api, check
from ._context import VulkanContext
from ._pair import Shared, check_device
from ._semaphore import SharedSemaphore, counter_reader, share_semaphore

if TYPE_CHECKING:
    from .._core.device import Device


class VulkanSubmit(TypedDict):
    """The semaphores that one submission waits for and signals, in parallel lists.

    The values are for ``VkTimelineSemaphoreSubmitInfo``; for binary semaphores they are 0 and ignored.

    Examples
    --------
    >>> handoff = gi.vulkan.share_handoff(vk, device)
    >>> what = handoff.vulkan_submit()
    >>> what["wait_semaphores"], what["signal_values"]  # the first frame waits for nothing
    ([], [0])
    >>> submit(record(lambda commands: None), **what)
    >>> handoff.acquire(stream)
    >>> vk.close()  # waits for the queue
    """

    wait_semaphores: list[Any]
    wait_values: list[int]
    wait_stages: list[int]
    signal_semaphores: list[Any]
    signal_values: list[int]


class Submission:
    """A reusable ``VkSubmitInfo`` with at most one wait and one signal, of timelines or binary semaphores."""

    def __init__(self, api: Api, wait: Any, signal: Any, *, timeline: bool) -> None:
        self._api, new = api, api.ffi.new
        self._waits, self._signals = new("uint64_t[1]"), new("uint64_t[1]")
        self._stages = new("VkPipelineStageFlags[1]")
        chain = api.ffi.NULL
        if timeline:
            chain = api.new(
                "VkTimelineSemaphoreSubmitInfo",
                waitSemaphoreValueCount=1,
                pWaitSemaphoreValues=self._waits,
                signalSemaphoreValueCount=1,
                pSignalSemaphoreValues=self._signals,
            )
        self.info = api.new(
            "VkSubmitInfo",
            pNext=chain,
            pWaitSemaphores=api.array("VkSemaphore", [wait]),
            pWaitDstStageMask=self._stages,
            signalSemaphoreCount=1,
            pSignalSemaphores=api.array("VkSemaphore", [signal]),
        )
        self._commands: tuple[Any, ...] = ()
        self._stage = 0

    def set(self, commands: tuple[Any, ...], take: Callable[[], tuple[int | None, int]], stage: int) -> None:
        """Set the command buffers, then the values that `take` returns: wait (None for no wait) and signal."""
        if commands != self._commands:
            self._set_commands(commands)
        wait, signal = take()
        if wait is None:
            self.info.waitSemaphoreCount = 0
            self._stage = 0
        else:
            if stage != self._stage:
                self.info.waitSemaphoreCount = 1
                self._stage = self._stages[0] = stage
            self._waits[0] = wait
        self._signals[0] = signal

    def _set_commands(self, commands: tuple[Any, ...]) -> None:
        handles = [self._api.handle("VkCommandBuffer", each, "command_buffers") for each in commands]
        self._array = self._api.array("VkCommandBuffer", handles)
        # For the comparison in the next frame. An int cannot change; a caller's handle object, as of ctypes, can.
        self._commands = tuple(
            each if type(each) is int else handle for each, handle in zip(commands, handles, strict=True)
        )
        self.info.commandBufferCount = len(handles)
        self.info.pCommandBuffers = self._array


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFamily:
    """A Vulkan queue family.

    Attributes
    ----------
    index : int
    flags : int
        ``VkQueueFlags``.
    transfer_only : bool
        Whether it supports only transfers. Submit copies to such a family: on NVIDIA a handoff to CUDA costs much less
        there, because the GPU need not switch from graphics to compute.

    Examples
    --------
    >>> with gi.vulkan.share_handoff(vk, device) as handoff:
    ...     handoff.queue_family.index, handoff.queue_family.transfer_only
    (0, False)
    """

    index: int
    flags: int
    transfer_only: bool


class SharedHandoff(Shared, Handoff):
    """A `Handoff` whose graphics side is Vulkan's queue. Made by :func:`share_handoff`.

    Each frame, in this order: `submit` (or your own submission with the semaphores of `vulkan_submit`), `acquire`,
    compute work on the stream, `release`. A call in the wrong order raises at once; it would otherwise wait forever.

    Examples
    --------
    >>> shared = gi.vulkan.share_buffer(vk, device, 4096)
    >>> handoff = gi.vulkan.share_handoff(vk, device)
    >>> commands = record(shared.release)  # after the commands that write the buffer
    >>> for frame in range(3):
    ...     submit(commands, **handoff.vulkan_submit())
    ...     handoff.acquire(stream)
    ...     shared.fill(frame, stream=stream)
    ...     handoff.release(stream)
    >>> handoff.wait_host(timeout=10)
    >>> vk.close()  # waits for the queue
    """

    _submits = "submit or vulkan_submit"

    def __init__(
        self,
        vk: VulkanContext,
        to_compute: SharedSemaphore[Any],
        to_graphics: SharedSemaphore[Any] | None = None,
        *,
        bridge: Bridge | None = None,
    ) -> None:
        Shared.__init__(self, vk)
        Handoff.__init__(self, to_compute.semaphore, to_graphics.semaphore if to_graphics else None)
        self._vk_to_compute = to_compute
        self._vk_to_graphics = to_graphics or to_compute
        self._lifetimes = vk.lifetime, self._vk_to_graphics.vulkan_object, self._vk_to_compute.vulkan_object
        self._spare: list[Submission] = []
        """Submissions not in use: each call pops one or makes one, so that two threads never share one."""
        self._bridge = bridge
        if bridge is not None:  # the handoff's own bridge, for this semaphore only; the context closes it too
            to_compute.semaphore.on_released(bridge.close)

    @property
    def mode(self) -> str:
        """``timeline``, ``binary`` or ``bridged``."""
        return BRIDGED if isinstance(self._to_compute, BridgedSemaphore) else super().mode

    @property
    def queue_family(self) -> QueueFamily | None:
        """Queue family of the context; None if you did not pass one."""
        self._vk._check_open()
        index = self._vk.queue_family_index
        if index is None:
            return None
        flags, _ = self._vk.physical.queue_families[index]
        kinds = c.QUEUE_TRANSFER | c.QUEUE_GRAPHICS | c.QUEUE_COMPUTE
        return QueueFamily(index=index, flags=flags, transfer_only=flags & kinds == c.QUEUE_TRANSFER)

    def vulkan_submit(self, *, stage: int = c.STAGE_ALL_COMMANDS, into: VulkanSubmit | None = None) -> VulkanSubmit:
        """Return the semaphores that this frame's submission waits for and signals. Call it once per frame.

        If the submission fails, call `undo_submit`. If you keep your own structs, you need only the two values:
        `next_submit` returns them.

        Parameters
        ----------
        stage : int
            ``VkPipelineStageFlags`` of the stages that wait for the compute side. Default: all.
        into : VulkanSubmit, optional
            The result of an earlier call, whose lists are changed and returned, so that no list is made.

        Returns
        -------
        VulkanSubmit
            ``wait_semaphores``, ``wait_values``, ``wait_stages``, ``signal_semaphores``, ``signal_values``. The first
            frame has no wait.

        Raises
        ------
        InvalidArgumentError
            The previous frame was not released yet.
        ArgumentTypeError
            `into` is something else. You can submit the frame again.
        ResourceClosedError
            The handoff or the context was closed.
        """
        stage = check_flags(stage, "stage")
        # Both before the turn is taken: a refused call must not count as a submission.
        forth, back = self._vk_to_compute.vk_semaphore, self._vk_to_graphics.vk_semaphore
        if into is None:
            into = VulkanSubmit(
                wait_semaphores=[], wait_values=[], wait_stages=[], signal_semaphores=[], signal_values=[]
            )
        elif not (isinstance(into, dict) and into.keys() >= VulkanSubmit.__required_keys__):  # type: ignore[redundant-expr]
            raise ArgumentTypeError("into", f"expected what an earlier vulkan_submit has returned, got {into!r}.")
        wait, signal = self._take_submit()
        waits = wait is not None
        into["wait_semaphores"][:] = (back,) * waits
        into["wait_values"][:] = () if wait is None else (wait,)
        into["wait_stages"][:] = (stage,) * waits
        into["signal_semaphores"][:] = (forth,)
        into["signal_values"][:] = (signal,)
        return into

    def submit(
        self, queue: Any = None, command_buffers: Sequence[Any] = (), fence: Any = None, *,
        stage: int = c.STAGE_ALL_COMMANDS,
    ) -> None:  # fmt: skip
        """Submit this frame's commands: ``vkQueueSubmit`` with the semaphores of `vulkan_submit`.

        Parameters
        ----------
        queue : VkQueue, optional
            Queue to submit to. Default: the context's. Other threads must not use it meanwhile.
        command_buffers : sequence of VkCommandBuffer
        fence : VkFence, optional
            Fence that is signalled when the commands are done.
        stage : int
            See `vulkan_submit`.

        Raises
        ------
        InvalidArgumentError, ResourceClosedError
            See `vulkan_submit`; or there is no queue.
        DriverError
            ``vkQueueSubmit`` failed. You can submit the frame again.
        """
        vk, api = self._vk, self._vk.api
        if type(command_buffers) is not list and type(command_buffers) is not tuple:
            check_sequence(command_buffers, "command_buffers", "a sequence of command buffers")
        target = vk.queue if queue is None or queue is vk.queue else api.handle("VkQueue", queue, "queue")
        if target is None:
            raise InvalidArgumentError("queue", "expected a queue, got none; pass one here or to VulkanContext.")
        signalled = api.ffi.NULL if fence is None else api.cast("VkFence", fence, "fence")
        if stage is not c.STAGE_ALL_COMMANDS:
            check_flags(stage, "stage")
        context, back, forth = self._lifetimes
        contexts, backs, forths = context.calls, back.calls, forth.calls
        contexts += MARK
        backs += MARK
        forths += MARK
        try:
            if context.state is not LIVE or back.state is not LIVE or forth.state is not LIVE:
                self.check_open()
            try:
                submission = self._spare.pop()
            except IndexError:
                submission = Submission(api, back.handle, forth.handle, timeline=self._timeline)
            submission.set(tuple(command_buffers), self._take_submit, stage)
            code = vk.functions.vkQueueSubmit(target, 1, submission.info, signalled)
            self._spare.append(submission)
            if code < 0:  # not queued; after an exception, such as Ctrl-C, it may be, so the turn stays taken
                self.undo_submit()
                check("vkQueueSubmit", code)
        finally:
            del contexts[-1], backs[-1], forths[-1]

    def check_open(self) -> None:
        """Raise if the context or one of the semaphores is closed."""
        for semaphore in {self._vk_to_graphics, self._vk_to_compute}:
            semaphore.check_open()
            semaphore.vulkan_object.check()

    def wait_host(self, timeout: float | None) -> None:
        """Block the calling thread until the compute side's last release has happened.

        It polls a timeline's counter (``vkGetSemaphoreCounterValue``), because ``vkWaitSemaphores`` notices CUDA's
        signals late. Reading a binary semaphore would consume it, so in that mode the call waits for all work of the
        stream that released.

        Parameters
        ----------
        timeout : float
            Seconds to wait; None: no limit.

        Raises
        ------
        SemaphoreTimeoutError
            `timeout` passed.
        ArgumentTypeError
            `timeout` is not a number.
        ResourceClosedError
            The handoff or the context was closed.
        """
        limit = check_timeout(timeout)
        self.check_open()  # even if there is nothing to wait for
        wanted = 2 * self.frame
        if not wanted:
            return
        if not self._timeline:
            if self._stream is not None and not self._stream.closed:
                self._stream.record().wait(limit)
            return
        native = self._vk_to_compute.vulkan_object
        counter = counter_reader(self._vk, native, native.handle)
        if not system.until(lambda: counter() >= wanted, limit):
            raise SemaphoreTimeoutError(
                f"the compute side did not release frame {self.frame - 1} in {limit:g} s: expected "
                f"{self._to_compute.label} at {wanted}, got {counter()}."
            )

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides (see `SharedBuffer.close`). Vulkan's queue must be done with the semaphores.

        Each part is closed even if closing another one fails.
        """
        with ExitStack() as parts:  # the last one first
            for part in dict.fromkeys((self._bridge, self._vk_to_graphics, self._vk_to_compute)):  # a timeline is both
                if part is not None:
                    parts.callback(part.close, timeout)

    def _end_use(self) -> None:
        for semaphore in {self._vk_to_graphics, self._vk_to_compute}:
            semaphore._end_use()


def share_handoff(
    vk: VulkanContext, device: Device, *, allow: Sequence[str] = ("timeline", "binary"), bridge: Bridge | None = None,
    label: str | None = None,
) -> SharedHandoff:  # fmt: skip
    """Create the semaphores for handoffs between Vulkan and the device, in both directions.

    If both sides support timelines, this creates one timeline, else two binary semaphores. A bridged timeline is
    created only if `allow` names it; AMD GPUs on Linux and lavapipe need it. It requires Vulkan timelines, and a
    compute device whose streams wait for words (`Operation.STREAM_MEMORY_OPS`).

    Parameters
    ----------
    vk : VulkanContext
        Context with `queue_family_index` and, for `SharedHandoff.submit`, a `queue`.
    device : Device
    allow : sequence of str
        Modes in order of preference: ``timeline``, ``binary``, ``bridged``.
    bridge : Bridge, optional
        Bridge for a bridged handoff; the caller still owns it. Default: the handoff makes its own.
    label : str, optional
        Name of its semaphores in messages, warnings and its `repr`. Two binary ones have ``to compute`` and
        ``to graphics`` appended.

    Returns
    -------
    SharedHandoff
        The handoff, which owns both sides; close it. `SharedHandoff.mode` names the chosen mode.

    Raises
    ------
    UnsupportedError
        The two sides have no allowed mode in common; nothing was created. The message gives the reason for every mode,
        and names those that would work but are not in `allow`.
    InvalidArgumentError
        `device` is another GPU, `allow` names an unknown mode, or the application did not enable an extension.
    DriverError
        A native call failed.

    Examples
    --------
    This code works on every machine:

    >>> allow = ("timeline", "binary", "bridged")
    >>> with gi.vulkan.share_handoff(vk, device, allow=allow) as handoff:
    ...     handoff.mode  # SwiftShader exports only binary semaphores
    'binary'
    """
    check_device(vk, device)
    mode = agree_on_mode(vk, device, mode_gaps(vk, device), allow)
    with ExitStack() as undo:
        own_bridge = undo.enter_context(Bridge(device, label=label)) if mode == BRIDGED and bridge is None else None
        used = own_bridge or bridge if mode == BRIDGED else None
        semaphores = share_semaphores(vk, device, mode, undo, bridge=used, label=label)
        handoff = SharedHandoff(vk, *semaphores, bridge=own_bridge)
        undo.pop_all()
    return handoff


def share_semaphores(
    vk: VulkanContext, device: Device, mode: str, undo: ExitStack, *, bridge: Bridge | None = None, label: str | None
) -> list[SharedSemaphore[Any]]:
    """Make the semaphores of a mode, to compute and to graphics: a timeline, or two binary ones. `undo` closes them."""
    kind, suffixes = (Binary, (" to compute", " to graphics")) if mode == "binary" else (Timeline, ("",))
    semaphores: list[SharedSemaphore[Any]] = []
    for suffix in suffixes:
        name = label + suffix if isinstance(label, str) else label  # share_semaphore refuses another type
        semaphores.append(share_semaphore(vk, device, kind, bridge=bridge, label=name))
        undo.callback(semaphores[-1].close)  # not a `with` block, which leaves Vulkan's half to the context
    return semaphores
