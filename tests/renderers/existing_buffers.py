"""A program: a renderer's own buffer gets shared storage; the compute side writes it, and then the renderer does.

OpenGL's bytes are read by PyOpenGL, in the renderer's context.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["PYOPENGL_PLATFORM"] = "egl"

import numpy as np
from OpenGL import GL

import gpuinterop as gi

COUNT = 3 * 1024
Write = Callable[[np.ndarray[Any, Any]], object]


def of_moderngl() -> tuple[Any, int, Write]:
    import moderngl

    context = moderngl.create_context(standalone=True, backend="egl")
    buffer = context.buffer(reserve=4 * COUNT)
    return context, buffer.glo, lambda values: buffer.write(values.tobytes())


def of_pyglet() -> tuple[Any, int, Write]:
    import pyglet

    pyglet.options["headless"] = True
    window = pyglet.window.Window(64, 64)
    vertices = pyglet.graphics.get_default_shader().vertex_list(COUNT // 3, GL.GL_TRIANGLES)
    buffer = vertices.domain.attrib_name_buffers["position"]
    buffer.commit()
    data = np.ctypeslib.as_ctypes
    return (window, vertices), buffer.id, lambda values: buffer.set_data_region(data(values), 0, values.nbytes)


def of_vtk() -> tuple[Any, int, Write]:
    from vtkmodules.vtkFiltersSources import vtkPlaneSource
    from vtkmodules.vtkRenderingCore import vtkActor, vtkRenderer
    from vtkmodules.vtkRenderingOpenGL2 import vtkEGLRenderWindow, vtkOpenGLPolyDataMapper

    mapper = vtkOpenGLPolyDataMapper(vbo_shift_scale_method=0)
    mapper.SetInputData(vtkPlaneSource(x_resolution=31, y_resolution=31).update().output)
    renderer, window = vtkRenderer(), vtkEGLRenderWindow(size=(64, 64))
    renderer.AddActor(vtkActor(mapper=mapper))
    window.AddRenderer(renderer)
    window.Render()
    name = mapper.GetVBOs().GetVBO("vertexMC").GetHandle()
    # VTK's own upload is glBufferData: what is written into such a buffer is another program's.
    return (window, mapper), name, lambda values: GL.glNamedBufferSubData(name, 0, values.nbytes, values)


def main(renderer: str) -> None:
    faulthandler.dump_traceback_later(80, exit=True)
    kept, name, write = {"moderngl": of_moderngl, "pyglet": of_pyglet, "vtk": of_vtk}[renderer]()
    device = gi.match_device(gi.opengl.identity())
    size = np.zeros(1, np.int32)
    GL.glGetNamedBufferParameteriv(name, GL.GL_BUFFER_SIZE, size)
    with (
        gi.opengl.share_buffer(device, int(size[0]), buffer=name) as shared,
        gi.opengl.share_handoff(device, allow=("bridged",)) as handoff,
    ):
        assert shared.name == name
        found, before = np.zeros((2, COUNT), np.float32)
        copy = np.zeros(1, np.uint32)
        GL.glCreateBuffers(1, copy)
        GL.glNamedBufferStorage(copy[0], found.nbytes, None, 0)
        for frame in range(20):
            values = np.arange(COUNT, dtype=np.float32) + 10_000 * frame
            handoff.acquire(0)
            if frame:
                shared.copy_to_host(found)
                assert (found == -before).all(), f"frame {frame}: what the renderer wrote is not in the array"
            shared.copy_from_host(values)
            before = values
            handoff.release(0)
            with handoff.gl(shared):
                # NVIDIA's driver keeps what the host has read of a buffer, and gives it again.
                GL.glCopyNamedBufferSubData(name, copy[0], 0, 0, found.nbytes)
                GL.glGetNamedBufferSubData(copy[0], 0, found.nbytes, found)
                write(-values)
            assert (found == values).all(), f"frame {frame}: what was computed is not in the renderer's buffer"
    del kept
    print(f"{renderer}: both ways")


if __name__ == "__main__":
    main(sys.argv[1])
