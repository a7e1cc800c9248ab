"""A torch tensor in a window: moderngl draws the vertices that torch moves in place, and GLFW shows them.

python opengl_window.py [FRAMES]    runs until the window is closed, or for FRAMES frames
"""

import sys

import glfw
import moderngl
import torch

import gpuinterop as gi

COUNT, SIZE, FRAMES = 100_000, 720, int(sys.argv[1]) if len(sys.argv) > 1 else sys.maxsize
VERTEX = "#version 330\nin vec2 at; void main() { gl_Position = vec4(at, 0, 1); }"
FRAGMENT = "#version 330\nout vec3 light; void main() { light = vec3(0.3, 0.2, 0.1); }"

glfw.init()
window = glfw.create_window(SIZE, SIZE, "A tensor", None, None)
glfw.make_context_current(window)
context = moderngl.create_context()
context.enable(moderngl.BLEND)
context.blend_func = moderngl.ONE, moderngl.ONE
program = context.program(vertex_shader=VERTEX, fragment_shader=FRAGMENT)
vertices = context.buffer(reserve=COUNT * 8)
array = context.vertex_array(program, [(vertices, "2f", "at")])

device = gi.match_device(gi.opengl.identity())
shared = gi.opengl.share_buffer(device, vertices.size, buffer=vertices.glo)
points = torch.from_dlpack(shared.view((COUNT, 2), "float32"))
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
stream = device.wrap_stream(torch.cuda.current_stream() if points.is_cuda else 0)

line = torch.linspace(0, 2 * torch.pi, COUNT, device=points.device)
frame = 0
while frame < FRAMES and not glfw.window_should_close(window):
    handoff.acquire(stream)
    radius = 0.6 + 0.3 * torch.cos(42 * line + frame / 20)
    points[:, 0] = radius * torch.cos(64 * line)
    points[:, 1] = radius * torch.sin(64 * line)
    handoff.release(stream)
    with handoff.gl(shared):
        context.clear()
        array.render(moderngl.POINTS)
    glfw.swap_buffers(window)
    glfw.poll_events()
    frame += 1

print(f"{context.info['GL_RENDERER']}: {frame} frames, handed over {handoff.mode}")
handoff.close()
shared.close()
glfw.terminate()
