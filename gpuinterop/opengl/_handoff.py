"""Handoffs between an OpenGL context and the compute side's streams, frame by frame."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import system
from .._arguments import NoCopy, check_timeout, check_type
from .._core.stream import Event, check_stream
from ..capabilities import Operation
from ..errors import DriverError, InvalidArgumentError, SemaphoreTimeoutError, UnsupportedError
from ..graphics.handoff import ACQUIRE, RELEASE, SUBMIT, CallOrder, NextCall
from ..graphics.modes import BRIDGED, agree_on_mode, mode_gaps
from ..graphics.sides import Graphics, check_same_device
from ..handles import OpaqueFd, Timeline
from ..vulkan import SharedSemaphore, export_semaphore
from ..vulkan._handoff import share_semaphores
from . import _api as gl
from ._context import current_context
from ._names import Names
from ._pair import Owned, SharedObject
from ._texture import SharedTexture

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.semaphore import ExternalSemaphore
    from .._core.stream import Stream
    from ..vulkan import VulkanContext
    from ._api import Lookup


def gaps(context: Graphics, device: Device) -> dict[str, UnsupportedError | None]:
    """Why the two sides cannot hand over in each mode. Bridged needs only shared memory, because the host waits."""
    missing = context.capabilities.missing((Operation.IMPORT_MEMORY, OpaqueFd))
    bridged = UnsupportedError(missing[0], context=context.identity.name) if missing else None
    return {**mode_gaps(context, device), BRIDGED: bridged}


Barrier: TypeAlias = tuple[int, Any, int, Any, Any]
"""The number and names of buffers, the number and names of textures, and the textures' layouts."""


class _Semaphores(NoCopy):
    """Vulkan's semaphores, imported by both sides: a timeline, with the values of `Handoff`, or two binary ones."""

    label = ""  # the semaphores have labels

    def __init__(self, names: Names, mode: str, halves: Sequence[SharedSemaphore[Any]]) -> None:
        self.mode, self.halves, functions = mode, halves, names.context.functions
        self._timeline, self._waited = mode == "timeline", 0
        self._to_compute, self._to_graphics = halves[0].semaphore, halves[-1].semaphore
        in_gl = [self._import(names, half) for half in halves]
        self._gl_to_compute, self._gl_to_graphics = in_gl[0], in_gl[-1]
        self._value = ctypes.c_uint64()
        self._value_pointer = ctypes.byref(self._value)
        calls = "glSemaphoreParameterui64vEXT", "glWaitSemaphoreEXT", "glSignalSemaphoreEXT", "glFlush"
        self._set, self._wait, self._signal, self._flush = map(functions.unchecked, calls)

    @staticmethod
    def _import(names: Names, half: SharedSemaphore[Any]) -> int:
        check = names.context.functions.check
        if half.kind is Timeline:
            name = names.new("glCreateSemaphoresNV")
            kind = ctypes.c_int(gl.SEMAPHORE_TYPE_TIMELINE)
            check("glSemaphoreParameterivNV", name, gl.SEMAPHORE_TYPE, ctypes.byref(kind))
        else:
            name = names.new("glGenSemaphoresEXT")

        with export_semaphore(half._vk, half.vk_semaphore, half.kind) as handle:
            names.import_fd(handle, "glImportSemaphoreFdEXT", name)
        return name

    def wait_on_stream(self, stream: Stream | object, frame: int, timeout: float | None) -> None:
        self._to_compute.wait(stream, timeout=timeout)

    def signal_on_stream(self, stream: Stream | object) -> None:
        self._to_graphics.signal(stream)

    def wait_in_gl(self, frame: int, barrier: Barrier) -> None:
        # Frame 0 has no release to wait for. After an interrupt, a second wait for a binary semaphore would not end.
        if frame and frame != self._waited:
            self._waited = frame
            if self._timeline:
                self._value.value = 2 * frame
                self._set(self._gl_to_graphics, gl.TIMELINE_SEMAPHORE_VALUE, self._value_pointer)
            self._wait(self._gl_to_graphics, *barrier)

    def signal_in_gl(self, frame: int, barrier: Barrier) -> None:
        if self._timeline:
            self._value.value = 2 * frame + 1
            self._set(self._gl_to_compute, gl.TIMELINE_SEMAPHORE_VALUE, self._value_pointer)
        self._signal(self._gl_to_compute, *barrier)
        self._flush()  # else other APIs do not see the submission


class _Fences(NoCopy):
    """The host waits for each side: it polls a fence sync for OpenGL, and waits for an event of a stream."""

    mode = BRIDGED
    halves: Sequence[SharedSemaphore[Any]] = ()

    def __init__(self, names: Names, device: Device, label: str | None) -> None:
        self.label = "OpenGL's fences" + (f' "{label}"' if label else "")
        self._names, self._context, self._device = names, names.context, device
        self._event: Event | None = None

    def wait_on_stream(self, stream: Stream | object, frame: int, timeout: float | None) -> None:
        check_stream(self._device, stream)
        limit = check_timeout(timeout)
        self._context.check_current()
        if self._names.fence is not None:  # None if an interrupt came after the wait
            if not system.until(self._is_reached, limit):
                raise SemaphoreTimeoutError(f"OpenGL did not finish frame {frame} in {limit:g} s: was it drawn?")
            self._names.delete_fence()

    def _is_reached(self) -> bool:
        status = self._context.functions.glClientWaitSync(self._names.fence, 0, 0)
        if status == gl.WAIT_FAILED:
            raise DriverError("glClientWaitSync", status, "GL_WAIT_FAILED")
        return bool(status != gl.TIMEOUT_EXPIRED)

    def signal_on_stream(self, stream: Stream | object) -> None:
        self._event = check_stream(self._device, stream).record()

    def wait_in_gl(self, frame: int, barrier: Barrier) -> None:
        if self._event is not None:
            self._event.wait()

    def signal_in_gl(self, frame: int, barrier: Barrier) -> None:
        functions = self._context.functions  # no glMemoryBarrier: in llvmpipe it is a glFinish
        self._names.fence = functions.glFenceSync(gl.SYNC_GPU_COMMANDS_COMPLETE, 0)
        functions.glFlush()


class _Block(NoCopy):
    """The ``with`` block of `SharedHandoff.gl`."""

    def __init__(self, handoff: SharedHandoff, shared: tuple[SharedObject, ...]) -> None:
        self._handoff, self._context, self._sync, self.shared = handoff, handoff.context, handoff._sync, shared
        self._context.check_current()
        for item in shared:
            check_type(item, SharedObject, "shared", "buffers and textures of gpuinterop.opengl")
            if item.context is not self._context:
                raise InvalidArgumentError("shared", f"expected objects of the handoff's context, got {item!r}.")
        textures = [item for item in shared if isinstance(item, SharedTexture)]
        buffers = [item for item in shared if not isinstance(item, SharedTexture)]
        names = [(ctypes.c_uint * len(items))(*(item.name for item in items)) for items in (buffers, textures)]
        layouts = (ctypes.c_uint * len(textures))(*(item.layout for item in textures))
        self._barrier: Barrier = len(buffers), names[0], len(textures), names[1], layouts

    def __enter__(self) -> None:
        handoff, context = self._handoff, self._context
        if context.current() != context.address:
            context.check_current()
        if context.closed_names:
            context.delete_closed()
        if handoff.closed or handoff._next_call is not SUBMIT:
            handoff._refuse(SUBMIT, "gl")
        handoff._began_in_gl = True
        self._sync.wait_in_gl(handoff._frame, self._barrier)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handoff, context = self._handoff, self._context
        if handoff.closed or handoff._next_call is not SUBMIT:
            return  # closed in the block, or an inner block has ended the frame
        if context.current() == context.address:
            self._sync.signal_in_gl(handoff._frame, self._barrier)
            handoff._next_call = ACQUIRE
        elif error is None:  # never hide the first exception
            context.check_current()


class SharedHandoff(Owned, CallOrder):
    """Hands shared objects back and forth between an OpenGL context and a stream. Made by :func:`share_handoff`.

    Each frame: `acquire`, compute work on the stream, `release`, then a block of `gl`; or first the block. Begin every
    frame in the same way as the first. A call in the wrong order raises at once; it would otherwise wait forever.

    Examples
    --------
    >>> shared = gi.opengl.share_buffer(device, 4096)
    >>> handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
    >>> for frame in range(3):
    ...     handoff.acquire(stream)
    ...     shared.fill(frame, stream=stream)
    ...     handoff.release(stream)
    ...     with handoff.gl(shared):
    ...         pass  # draw
    >>> handoff.close()
    >>> shared.close()
    """

    _submits = _draws = "gl"

    def __init__(self, names: Names, device: Device, sync: _Semaphores | _Fences) -> None:
        Owned.__init__(self, names, sync.halves)
        self._device, self._sync, self._began_in_gl = device, sync, False
        self._timeline: ExternalSemaphore[Any] | None = sync.halves[0].semaphore if sync.mode == "timeline" else None
        """Called directly, because an extra call per frame would be slow."""
        self._block: _Block | None = None

    def __repr__(self) -> str:
        return f"<SharedHandoff of {self._label()} closed>" if self.closed else CallOrder.__repr__(self)

    @property
    def mode(self) -> str:
        """``timeline``, ``binary`` or ``bridged``."""
        return self._sync.mode

    def _semaphores(self) -> Sequence[ExternalSemaphore[Any]]:
        return [half.semaphore for half in self._sync.halves]

    def _label(self) -> str:
        return super()._label() or self._sync.label

    def acquire(self, stream: Stream | object, *, timeout: float | None = None) -> None:
        """Make `stream` wait for OpenGL's last block. If the first frame begins here, there is nothing to wait for.

        In mode ``bridged`` the calling thread waits, and the context must be current in it (``glClientWaitSync``).

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
            Stream of the handoff's device.
        timeout : float, optional
            See `ExternalSemaphore.wait`.

        Raises
        ------
        InvalidArgumentError
            The call is in the wrong order.
        SemaphoreTimeoutError
            `timeout` passed. You can call `acquire` again.
        ResourceClosedError
            The handoff was closed.
        """
        if self._next_call is ACQUIRE and not self.closed:
            if (timeline := self._timeline) is not None:
                timeline.wait(stream, 2 * self._frame + 1, timeout=timeout)
            else:
                self._sync.wait_on_stream(stream, self._frame, timeout)
        elif self._frame or self._began_in_gl or self._next_call is not SUBMIT or self.closed:
            self._refuse(ACQUIRE, "acquire")
        else:  # the compute side begins
            check_stream(self._device, stream)
        self._next_call = RELEASE

    def release(self, stream: Stream | object) -> None:
        """Make `stream` signal OpenGL when its queued work is done. Returns at once.

        Parameters
        ----------
        stream : Stream, int, or stream of torch, CuPy or numba
            Stream of the handoff's device.

        Raises
        ------
        InvalidArgumentError
            The frame was not acquired.
        ResourceClosedError
            The handoff was closed.
        """
        if self.closed or self._next_call is not RELEASE:
            self._refuse(RELEASE, "release")
        if (timeline := self._timeline) is not None:
            timeline.signal(stream, 2 * self._frame + 2)
        else:
            self._sync.signal_on_stream(stream)
        self._next_call = SUBMIT
        self._frame += 1

    def gl(self, *shared: SharedObject) -> _Block:
        """Return OpenGL's part of a frame, a ``with`` block that waits for the compute side and signals at the end.

        Native calls: ``glWaitSemaphoreEXT``; at the end, even if the block raises, ``glSignalSemaphoreEXT`` and
        ``glFlush``. In mode ``bridged`` the calling thread waits for the compute side, and the end calls
        ``glFenceSync`` and ``glFlush``.

        Parameters
        ----------
        *shared : SharedBuffer or SharedTexture
            The objects that the block uses, for the barriers at both ends. Outside, a texture has its `layout`.

        Raises
        ------
        InvalidArgumentError
            The call is in the wrong order, or the context is not current in the calling thread.
        ResourceClosedError
            The handoff or a shared object was closed.
        """
        block = self._block
        if block is None or block.shared != shared:
            block = self._block = _Block(self, shared)
        for item in shared:
            if item.closed:
                item._check_open()
        return block

    def _refuse(self, next_call: NextCall, call: str) -> None:
        """Raise for a call while the handoff is closed, or in the wrong order."""
        self._check_open()
        if self._next_call is SUBMIT and not self._began_in_gl and not self._frame:
            raise InvalidArgumentError("handoff", f"expected acquire or a block of gl, got {call}; begin with one.")
        self._check(next_call, call)


def share_handoff(
    device: Device, *, allow: Sequence[str] = ("timeline", "binary"), vk: VulkanContext | None = None,
    label: str | None = None, get_proc_address: Lookup | None = None,
) -> SharedHandoff:  # fmt: skip
    """Create the semaphores for handoffs between the current context and the device, in both directions.

    OpenGL cannot export semaphores, so Vulkan makes them, in a small VkDevice of the library's own, and both sides
    import them (``glImportSemaphoreFdEXT``): one timeline if both support it, else two binary ones. In mode
    ``bridged``, for llvmpipe and HIP on Linux, the host waits instead: it polls a fence sync of OpenGL
    (``glClientWaitSync``), and waits for an event of a stream. This mode is used only if `allow` names it.

    Parameters
    ----------
    device : Device
        The context's GPU: ``gi.match_device(gi.opengl.identity())``.
    allow : sequence of str
        Modes in order of preference: ``timeline``, ``binary``, ``bridged``.
    vk : VulkanContext, optional
        A VkDevice of this GPU and driver, which then makes the semaphores. It needs no queue.
    label : str, optional
        Name of the semaphores in messages, warnings and the `repr`.
    get_proc_address : callable, optional
        See :func:`share_buffer`.

    Returns
    -------
    SharedHandoff
        The handoff, which owns the semaphores on all sides; close it. `SharedHandoff.mode` names the chosen mode.

    Raises
    ------
    UnsupportedError
        The two sides have no allowed mode in common; nothing was created.
    BackendUnavailableError
        Vulkan is missing: cffi (``pip install gpuinterop[vulkan]``) or the loader.
    InvalidArgumentError, DeviceNotFoundError, DriverError
        See :func:`share_buffer`.

    Examples
    --------
    >>> allow = ("timeline", "binary", "bridged")
    >>> with gi.opengl.share_handoff(device, allow=allow) as handoff:
    ...     handoff.mode  # llvmpipe has no semaphores
    'bridged'
    """
    context = current_context(get_proc_address)
    check_same_device(context, device)
    mode = agree_on_mode(context, device, gaps(context, device), allow)
    names = Names(context)
    if mode == BRIDGED:
        return SharedHandoff(names, device, _Fences(names, device, label))
    with ExitStack() as undo:
        undo.callback(names.close)
        halves = share_semaphores(context.vulkan(vk), device, mode, undo, label=label)
        handoff = SharedHandoff(names, device, _Semaphores(names, mode, halves))
        undo.pop_all()
    return handoff
