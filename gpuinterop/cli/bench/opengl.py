"""Measure frames with OpenGL: their calls, and how long 1 MiB takes from the compute side to the screen."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ... import opengl
from ...errors import DriverError
from ...graphics.modes import MODES
from ...handles import Timeline
from ...opengl import _api as gl
from ...opengl._context import current_context
from ...vulkan import export_semaphore, share_semaphore
from .clock import OURS, Contender, Figure, NotMeasured, Times, Values
from .frames import PATIENCE_S, PREPARED, STAGED

if TYPE_CHECKING:
    from .rig import Bench

REGISTERED: Final = "registered and mapped"
SIDE: Final = 512
SIZE: Final = 4 * SIDE * SIDE
AHEAD: Final = 20
"""Frames that are queued ahead."""
_FLUSH: Final = 1  # GL_SYNC_FLUSH_COMMANDS_BIT
_RGBA, _UNSIGNED_BYTE, _RGBA8, _COLOR_ATTACHMENT0 = 0x1908, 0x1401, 0x8058, 0x8CE0
_COLOR_BUFFER_BIT, _NEAREST = 0x4000, 0x2600


def frames(bench: Bench) -> Iterator[Figure]:
    """The calls of a frame; and frames of 1 MiB, several ways."""
    with ExitStack() as scope:
        rig, times, calls, ways = _Rig(bench, scope), Times(), {}, {}
        calls[OURS] = rig.timed(rig.calls, calls=AHEAD)
        if bench.by_hand is not None and rig.handoff.mode == "timeline":
            with times.measuring(PREPARED):
                calls[PREPARED] = rig.timed(_by_hand(rig, scope), calls=AHEAD)
        times.rounds(bench.rounds(120), calls)
        yield times.figure("calls", f"acquire + release + gl, OpenGL, {rig.handoff.mode}", "frame")
        times, made = Times(), {OURS: rig.shared_way, STAGED: rig.staged_way}
        if hasattr(bench.by_hand, "registered"):
            made[REGISTERED] = rig.registered_way
        for name, make in made.items():
            with times.measuring(name):
                ways[name] = rig.timed(rig.checked(make(scope)), each=1, ahead=AHEAD)
        times.rounds(bench.rounds(120), ways)
        yield times.figure("each", f"1 MiB to the screen, {rig.handoff.mode}, finished each", "frame")
        yield times.figure("ahead", f"1 MiB to the screen, {rig.handoff.mode}, queued ahead", "frame")


class _Rig:
    """A context, a stream, and the memory and order they share."""

    def __init__(self, bench: Bench, scope: ExitStack) -> None:
        self.bench, self.gl, self.functions = bench, bench.opengl, current_context().functions
        self.stream = scope.enter_context(bench.device.create_stream())
        self.shared = scope.enter_context(opengl.share_buffer(bench.device, SIZE))
        self.handoff = scope.enter_context(opengl.share_handoff(bench.device, allow=MODES))
        self._texture, self._image = self._surface()
        self._screen, self._drawn = self._surface()

    def timed(self, run: Contender, **figures: int) -> Callable[[], Mapping[str, float]]:
        """Make a function that times this many frames for each of these figures."""

        def once() -> Mapping[str, float]:
            times = {}
            for figure, count in figures.items():
                began = time.perf_counter_ns()
                run(count)
                times[figure] = (time.perf_counter_ns() - began) / count / 1000
                self.gl.call("glFinish")
                self.stream.synchronize()
            return times

        return once

    def calls(self, count: int) -> None:
        """Run frames without work."""
        handoff, stream, shared = self.handoff, self.stream, self.shared
        for _ in range(count):
            handoff.acquire(stream)
            handoff.release(stream)
            with handoff.gl(shared):
                pass

    # -- ways to move 1 MiB: in each frame all bytes have one value ----------------------------------------------------

    def shared_way(self, scope: ExitStack) -> Contender:
        """The compute side fills the memory that OpenGL reads."""
        handoff, stream, shared = self.handoff, self.stream, self.shared

        def way(byte: int) -> None:
            handoff.acquire(stream)
            shared.fill(byte, stream=stream)
            handoff.release(stream)
            with handoff.gl(shared):
                self._show(shared.name)

        return way

    def staged_way(self, scope: ExitStack) -> Contender:
        """Without sharing: copy to the host, and from there into an OpenGL buffer."""
        buffer, stream = scope.enter_context(self.bench.device.allocate(SIZE)).buffer, self.stream
        pages, name = mmap.mmap(-1, SIZE), self.gl.buffer(SIZE)  # the memory that NumPy allocates for this size
        data = ctypes.addressof(ctypes.c_char.from_buffer(pages))

        def way(byte: int) -> None:
            buffer.fill(byte, stream=stream)
            buffer.copy_to_host(pages)
            self.gl.call("glNamedBufferSubData", name, 0, SIZE, data)
            self._show(name)

        return way

    def registered_way(self, scope: ExitStack) -> Contender:
        """An OpenGL buffer that the vendor's own calls register once, and map for each frame."""
        by_hand, name = self.bench.by_hand, self.gl.buffer(SIZE)
        fill = scope.enter_context(by_hand.registered(name, SIZE, by_hand.stream()))

        def way(byte: int) -> None:
            fill(byte)
            self._show(name)

        return way

    def _surface(self) -> tuple[int, int]:
        """Create a framebuffer of 1 MiB, and its texture."""
        texture, framebuffer = ctypes.c_uint(), self.gl.new("Framebuffers")
        self.gl.call("glCreateTextures", gl.TEXTURE_2D, 1, ctypes.byref(texture))
        self.gl.call("glTextureStorage2D", texture.value, 1, _RGBA8, SIDE, SIDE)
        self.gl.call("glNamedFramebufferTexture", framebuffer, _COLOR_ATTACHMENT0, texture.value, 0)
        return framebuffer, texture.value

    def _show(self, name: int) -> None:
        """Draw a buffer's bytes as texels, and flush the frame to the GPU."""
        call, area = self.gl.call, (0, 0, SIDE, SIDE)
        call("glBindBuffer", gl.PIXEL_UNPACK_BUFFER, name)
        call("glTextureSubImage2D", self._image, 0, *area, _RGBA, _UNSIGNED_BYTE, None)
        call("glBindBuffer", gl.PIXEL_UNPACK_BUFFER, 0)
        call("glBlitNamedFramebuffer", self._texture, self._screen, *area, *area, _COLOR_BUFFER_BIT, _NEAREST)
        call("glFlush")

    def checked(self, way: Contender) -> Contender:
        """Run frames one way until the last is done, once the bytes have arrived: frames without bytes are fast."""

        def run(count: int, byte: int = 7) -> None:
            for _ in range(count):
                way(byte)
            fence = self.functions.glFenceSync(gl.SYNC_GPU_COMMANDS_COMPLETE, 0)
            found = self.functions.glClientWaitSync(fence, _FLUSH, PATIENCE_S * 10**9)
            self.functions.glDeleteSync(fence)
            if found in (gl.TIMEOUT_EXPIRED, gl.WAIT_FAILED):
                raise NotMeasured(f"expected OpenGL to finish in {PATIENCE_S} s, and it did not", True)

        for byte in (1, 2):
            run(1, byte)
            found = ctypes.create_string_buffer(SIZE)
            self.gl.call("glGetTextureImage", self._drawn, 0, _RGBA, _UNSIGNED_BYTE, SIZE, found)
            if found.raw != bytes([byte]) * SIZE:
                raise NotMeasured(f"expected {SIZE} bytes of {byte} in OpenGL, got others", True)
        return run


def _by_hand(rig: _Rig, scope: ExitStack) -> Contender:
    """Run the calls of a frame through the backend's yardstick, and OpenGL's own through ctypes."""
    by_hand, functions = rig.bench.by_hand, rig.functions
    # Only the pair's Vulkan half is used.
    pair = scope.enter_context(share_semaphore(current_context().vulkan(None), rig.bench.device, Timeline))
    export = partial(export_semaphore, pair._vk, pair.vk_semaphore, Timeline)
    stream = by_hand.stream()
    timelines = by_hand.timelines([export().detach()], stream)
    semaphore, kind = ctypes.c_uint(), ctypes.c_int(gl.SEMAPHORE_TYPE_TIMELINE)
    functions.check("glCreateSemaphoresNV", 1, ctypes.byref(semaphore))
    functions.check("glSemaphoreParameterivNV", semaphore, gl.SEMAPHORE_TYPE, ctypes.byref(kind))
    functions.check("glImportSemaphoreFdEXT", semaphore, gl.HANDLE_TYPE_OPAQUE_FD, export().detach())
    value, values = ctypes.c_uint64(), Values(timelines.signalled)
    barrier: Any = semaphore, 1, (ctypes.c_uint * 1)(rig.shared.name), 0, None, None
    uint, pointer = ctypes.c_uint, ctypes.c_void_p
    set_value = rig.gl.function("glSemaphoreParameterui64vEXT", None, uint, uint, pointer)
    at = semaphore, gl.TIMELINE_SEMAPHORE_VALUE, ctypes.byref(value)
    types = None, uint, uint, pointer, uint, pointer, pointer
    wait, signal = (rig.gl.function(f"gl{name}SemaphoreEXT", *types) for name in ("Wait", "Signal"))
    flush = functions.glFlush

    def run(count: int) -> None:
        for number in values.take(count, 2):
            value.value = number - 1
            set_value(*at)
            wait(*barrier)
            value.value = number
            set_value(*at)
            signal(*barrier)
            flush()
            timelines.wait(number)
            timelines.signal(number + 1)

    run(1)
    by_hand.synchronize(stream)
    if code := functions.glGetError():
        raise DriverError("a call of the yardstick", code, f"{code:#06x}")
    return run


PARTS: Final = {"opengl": frames}
