"""OpenGL as the demo's other side: one shader steps the wave in a shared buffer, another draws its picture."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from ctypes import byref, c_char_p, c_int, create_string_buffer
from functools import partial
from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ... import opengl
from ..._core.device import Device
from ..._core.memory import Buffer
from ...errors import DriverError, InvalidArgumentError
from ...graphics.modes import BRIDGED
from ...handles import OpaqueFd, TimelineFd, VmmFd
from ...testing.exporters.base import Driver, Submission
from ...testing.exporters.opengl import HeadlessContext
from .picture import SHADER_VALUES, factor_of, scale_of
from .producer import GROUP, Producer
from .simulation import Field, WaveParameters
from .wave import Run, run_wave

__all__ = ["OpenGLParty", "run_wave_in_opengl"]

_FRAGMENT, _VERTEX, _COMPUTE, _LINK_STATUS = 0x8B30, 0x8B31, 0x91B9, 0x8B82
_STORAGE, _UNIFORM, _ALL_BARRIERS = 0x90D2, 0x8A11, 0xFFFFFFFF
_FRAMEBUFFER, _RENDERBUFFER, _COLOR = 0x8D40, 0x8D41, 0x8CE0
_RGBA8, _RGBA, _UNSIGNED_BYTE, _TRIANGLES = 0x8058, 0x1908, 0x1401, 4
_EVERYWHERE: Final = """#version 450
void main() { gl_Position = vec4(gl_VertexID % 2 * 4 - 1, gl_VertexID / 2 * 4 - 1, 0, 1); }"""


class OpenGLParty(HeadlessContext):
    """A context that is current in the thread that made it, and its device."""

    name = "opengl"

    def __init__(self, facts: Driver, device: Device) -> None:
        super().__init__(facts.index)
        self.facts, self.device, self.identity = facts, device, facts.identity
        self.driver = f"{facts.driver} {facts.version}"


class _Dispatch(Submission):
    def __init__(self, context: HeadlessContext) -> None:
        self._context = context

    def done(self, timeout: float = 0.0) -> bool:
        self._context.call("glFinish")
        return True

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class _Producer(Producer):
    """The wave, in a buffer that OpenGL and the device share."""

    def __init__(self, party: OpenGLParty, parameters: WaveParameters, kind: type, *, exportable: bool = True) -> None:
        self._party, self.parameters = party, parameters
        self.forth = self.back = None
        mode = kind.__name__.lower() if exportable else BRIDGED
        with ExitStack() as undo:
            self.shared = undo.enter_context(opengl.share_buffer(party.device, parameters.size))
            self.handoff = undo.enter_context(opengl.share_handoff(party.device, allow=(mode,)))
            for slot in (0, 1):
                self.write(slot, bytes(parameters.slot_bytes))
            self._step = self._program((_COMPUTE, _source("wave.comp")))
            self._arguments = [self._uniforms("IIffII", *parameters.step(frame)) for frame in range(2)]
            self._undo = undo.pop_all()

    def _program(self, *shaders: tuple[int, str]) -> int:
        call = self._party.call
        program = call("glCreateProgram")
        for kind, source in shaders:
            shader = call("glCreateShader", kind)
            call("glShaderSource", shader, 1, byref(c_char_p(source.encode())), None)
            call("glCompileShader", shader)
            call("glAttachShader", program, shader)
        call("glLinkProgram", program)
        linked, log = c_int(), create_string_buffer(4096)
        call("glGetProgramiv", program, _LINK_STATUS, byref(linked))
        if not linked.value:
            call("glGetProgramInfoLog", program, len(log), None, log)
            raise DriverError("glLinkProgram", 0, log.value.decode(errors="replace"))
        return program

    def _uniforms(self, form: str, *values: float) -> int:
        data = struct.pack(form, *values).ljust(32, b"\0")  # std140 pads a block to 16 bytes
        return self._party.buffer(len(data), data)

    def _use(self, program: int, parameters: int) -> None:
        self._party.call("glUseProgram", program)
        self._party.call("glBindBufferBase", _STORAGE, 0, self.shared.name)
        self._party.call("glBindBufferBase", _UNIFORM, 0, parameters)

    def submit(self, frame: int, *, wait: bool = True, signal: bool = True) -> Submission:
        p = self.parameters
        with self.handoff.gl(self.shared) if signal else nullcontext():
            self._use(self._step, self._arguments[frame % 2])
            self._party.call("glDispatchCompute", -(-p.width // GROUP), -(-p.height // GROUP), 1)
            self._party.call("glMemoryBarrier", _ALL_BARRIERS)
        return _Dispatch(self._party)

    def read(self, slot: int) -> bytes:
        size = self.parameters.slot_bytes
        return self._party.read(self.shared.name, slot * size, size)

    def write(self, slot: int, data: bytes) -> None:
        self._party.call("glNamedBufferSubData", self.shared.name, slot * len(data), len(data), data)

    def draw(self, slot: int, field: Field) -> NDArray[np.uint8]:
        """Draw the field of a slot into a framebuffer, and read the pixels back."""
        call, new, factor, (height, width) = self._party.call, self._party.new, factor_of(field), field.shape
        frame, colour, size = new("Framebuffers"), new("Renderbuffers"), (width * factor, height * factor)
        call("glNamedRenderbufferStorage", colour, _RGBA8, *size)
        call("glNamedFramebufferRenderbuffer", frame, _COLOR, _RENDERBUFFER, colour)
        call("glBindFramebuffer", _FRAMEBUFFER, frame)
        call("glViewport", 0, 0, *size)
        call("glBindVertexArray", new("VertexArrays"))
        source = _source("picture.frag")
        for mark, values in SHADER_VALUES.items():
            source = source.replace(mark, values)
        parameters = self._uniforms("iiiif", width, height, slot, factor, scale_of(field))
        self._use(self._program((_VERTEX, _EVERYWHERE), (_FRAGMENT, source)), parameters)
        call("glDrawArrays", _TRIANGLES, 0, 3)
        pixels = np.empty((size[1], size[0], 4), np.uint8)
        call("glReadPixels", 0, 0, *size, _RGBA, _UNSIGNED_BYTE, pixels.ctypes.data)
        if code := call("glGetError"):
            raise DriverError("glDrawArrays", code, f"{code:#06x}")
        return pixels

    def abort(self) -> None:
        """Do nothing: OpenGL flushes what it submits, so nothing waits."""


class _Run(Run):
    producer: _Producer

    def _connect(self, cleanup: ExitStack) -> Callable[[], Buffer]:
        if self.sabotage:
            raise InvalidArgumentError("sabotage", "expected --exporter vulkan or process.")
        shared, self.handoff = self.producer.shared, self.producer.handoff
        self.memory_handle = getattr(shared.memory, "handle_type", VmmFd).type_name
        native = {"timeline": TimelineFd, "binary": OpaqueFd}.get(self.sync.name)
        self.semaphore_handle = native and native.type_name
        return lambda: shared.buffer

    def _acquire(self, frame: int) -> None:
        self.producer.handoff.acquire(self.stream, timeout=self.timeout if self.sync.name == BRIDGED else None)

    def go(self) -> str:
        problem = super().go()
        if not problem:
            with self.producer.handoff.gl(self.producer.shared):
                pass  # from here on OpenGL reads what the device has written last
        return problem

    def draw(self, field: Field) -> NDArray[np.uint8]:
        return self.producer.draw(self.frames % 2, field)


def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


run_wave_in_opengl: Final = partial(run_wave, make_producer=_Producer, make_run=_Run)
"""`run_wave` with an `OpenGLParty` as the exporter."""
