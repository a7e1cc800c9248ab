"""OpenGL as the demo's other side: a shader steps the wave in a shared buffer, and another draws its picture."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib.resources import files
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ... import opengl
from ..._core.device import Device
from ..._core.memory import Buffer
from ...errors import DriverError, InvalidArgumentError
from ...exporters.base import Driver, Submission
from ...exporters.opengl import HeadlessContext
from ...handles import OpaqueFd, TimelineFd, VmmFd
from ...handoff import BRIDGED
from ...opengl import _api as gl
from ...opengl._context import current_context
from .picture import SHADER_VALUES, factor_of, scale_of
from .producer import GROUP, Producer
from .simulation import Field, WaveParameters
from .wave import Run, run_wave

__all__ = ["OpenGLParty", "run_wave_in_opengl"]

_FRAGMENT, _VERTEX, _COMPUTE, _LINK_STATUS = 0x8B30, 0x8B31, 0x91B9, 0x8B82
_STORAGE, _UNIFORM, _STATIC_DRAW = 0x90D2, 0x8A11, 0x88E4
_FRAMEBUFFER, _RENDERBUFFER, _COLOR = 0x8D40, 0x8D41, 0x8CE0
_ALL_BARRIERS: Final = 0xFFFFFFFF
_RGBA8, _RGBA, _UNSIGNED_BYTE, _TRIANGLES = 0x8058, 0x1908, 0x1401, 4
_EVERYWHERE: Final = """#version 450
void main() { gl_Position = vec4(gl_VertexID % 2 * 4 - 1, gl_VertexID / 2 * 4 - 1, 0, 1); }"""


class OpenGLParty:
    """A context that is current in the thread that made it, and its device. Close it."""

    name = "opengl"

    def __init__(self, facts: Driver, device: Device) -> None:
        self.device = device
        self.identity, self.capabilities = facts.identity, facts.capabilities
        self.endpoint_gap, self.gaps = facts.endpoint_gap, facts.gaps
        self.driver = f"{facts.driver} {facts.version}"
        self.context = HeadlessContext(facts.index)
        self.functions = current_context().functions

    def program(self, *shaders: tuple[int, str]) -> int:
        """Link shaders."""
        call = self.context.call
        program = call("glCreateProgram")
        for kind, source in shaders:
            shader = call("glCreateShader", kind)
            call("glShaderSource", shader, 1, ctypes.byref(ctypes.c_char_p(source.encode())), None)
            call("glCompileShader", shader)
            call("glAttachShader", program, shader)
        call("glLinkProgram", program)
        linked, log = ctypes.c_int(), ctypes.create_string_buffer(4096)
        call("glGetProgramiv", program, _LINK_STATUS, ctypes.byref(linked))
        if not linked.value:
            call("glGetProgramInfoLog", program, len(log), None, log)
            raise DriverError("glLinkProgram", 0, log.value.decode(errors="replace"))
        return program

    def new(self, what: str) -> int:
        """Make an object."""
        name = ctypes.c_uint()
        self.context.call(f"glCreate{what}", 1, ctypes.byref(name))
        return name.value

    def uniforms(self, form: str, *values: float) -> int:
        """Make a buffer of a shader's parameters."""
        data, name = struct.pack(form, *values), self.new("Buffers")
        self.context.call("glNamedBufferData", name, len(data), data, _STATIC_DRAW)
        return name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.context.close()


class _Bytes:
    """A buffer's bytes, as OpenGL reads and writes them."""

    def __init__(self, call: Callable[..., int], name: int) -> None:
        self._call, self._name = call, name

    def read(self, offset: int, size: int) -> bytes:
        found = (ctypes.c_ubyte * size)()
        self._call("glGetNamedBufferSubData", self._name, offset, size, found)
        return bytes(found)

    def write(self, offset: int, data: bytes) -> None:
        self._call("glNamedBufferSubData", self._name, offset, len(data), data)


class _Dispatch(Submission):
    def __init__(self, functions: gl.Functions) -> None:
        self._functions = functions

    def done(self, timeout: float = 0.0) -> bool:
        functions = self._functions
        fence = functions.glFenceSync(gl.SYNC_GPU_COMMANDS_COMPLETE, 0)
        found = functions.glClientWaitSync(fence, 1, int(timeout * 1e9))
        functions.glDeleteSync(fence)
        return found not in (gl.TIMEOUT_EXPIRED, gl.WAIT_FAILED)

    def close(self) -> None:
        """Nothing is kept."""


class _Producer(Producer):
    """The wave, in a buffer that OpenGL and the device share."""

    memory: Any

    def __init__(self, party: Any, parameters: WaveParameters, kind: type | None, *, exportable: bool = True) -> None:
        self._party, self.parameters = party, parameters
        self.forth = self.back = None
        mode = kind.__name__.lower() if kind and exportable else BRIDGED
        with ExitStack() as undo:
            self.shared = undo.enter_context(opengl.share_buffer(party.device, parameters.size))
            self.handoff = undo.enter_context(opengl.share_handoff(party.device, allow=(mode,)))
            self.memory = _Bytes(party.context.call, self.shared.name)
            self.memory.write(0, bytes(parameters.size))
            self._step = party.program((_COMPUTE, _source("wave.comp")))
            self._arguments = [party.uniforms("IIffII", *parameters.step(frame)) for frame in range(2)]
            self._undo = undo.pop_all()

    def submit(self, frame: int, *, wait: bool = True, signal: bool = True) -> Submission:
        p = self.parameters
        with self.handoff.gl(self.shared) if signal else nullcontext():
            self._use(self._step, self._arguments[frame % 2])
            self._party.context.call("glDispatchCompute", -(-p.width // GROUP), -(-p.height // GROUP), 1)
            self._party.context.call("glMemoryBarrier", _ALL_BARRIERS)
        return _Dispatch(self._party.functions)

    def _use(self, program: int, parameters: int) -> None:
        call = self._party.context.call
        call("glUseProgram", program)
        call("glBindBufferBase", _STORAGE, 0, self.shared.name)
        call("glBindBufferBase", _UNIFORM, 0, parameters)

    def draw(self, slot: int, field: Field) -> NDArray[np.uint8]:
        """Draw the field of a slot into a framebuffer, and read that back."""
        party, factor, (height, width) = self._party, factor_of(field), field.shape
        pixels = np.empty((height * factor, width * factor, 4), np.uint8)
        rows, columns, _ = pixels.shape
        frame, colour = party.new("Framebuffers"), party.new("Renderbuffers")
        call = party.context.call
        call("glNamedRenderbufferStorage", colour, _RGBA8, columns, rows)
        call("glNamedFramebufferRenderbuffer", frame, _COLOR, _RENDERBUFFER, colour)
        call("glBindFramebuffer", _FRAMEBUFFER, frame)
        call("glViewport", 0, 0, columns, rows)
        call("glBindVertexArray", party.new("VertexArrays"))
        source = _source("picture.frag")
        for mark, value in SHADER_VALUES.items():
            source = source.replace(mark, value)
        parameters = party.uniforms("iiiif", width, height, slot, factor, scale_of(field))
        self._use(party.program((_VERTEX, _EVERYWHERE), (_FRAGMENT, source)), parameters)
        call("glDrawArrays", _TRIANGLES, 0, 3)
        call("glReadPixels", 0, 0, columns, rows, _RGBA, _UNSIGNED_BYTE, pixels.ctypes.data)
        if code := call("glGetError"):
            raise DriverError("glDrawArrays", code, "an error of OpenGL's")
        return pixels

    def abort(self) -> None:
        """Nothing waits: what OpenGL submits, it has flushed."""


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
                pass  # what OpenGL reads from here on is what the device has written last
        return problem

    def draw(self, field: Field) -> NDArray[np.uint8]:
        return self.producer.draw(self.frames % 2, field)


def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


run_wave_in_opengl: Final = partial(run_wave, make_producer=_Producer, make_run=_Run)
"""`run_wave` with an `OpenGLParty` in the exporter's place."""
