"""PyOpenGL draws a torch tensor as a texture: torch marbles paper with ink, and the pixels stay on the device.

    python pyopengl_ink.py              writes pyopengl_ink.png; needs no display

The tensor is a pixel unpack buffer, so OpenGL copies it to the texture on the device.
"""

import os

os.environ["PYOPENGL_PLATFORM"] = "egl"

import numpy as np
import torch
from OpenGL import EGL, GL
from OpenGL.EGL.EXT import device_base, platform_base, platform_device
from OpenGL.GL.shaders import compileProgram, compileShader
from PIL import Image

import gpuinterop as gi

SIZE, FRAMES = 640, 45
VERTEX = "#version 450\nvoid main() { gl_Position = vec4(ivec2(gl_VertexID & 1, gl_VertexID >> 1) * 4 - 1, 0, 1); }"
FRAGMENT = """#version 450
uniform sampler2D ink; out vec4 pixel; void main() { pixel = texelFetch(ink, ivec2(gl_FragCoord), 0); }"""

first = device_base.egl_get_devices()[0]
display = platform_base.eglGetPlatformDisplayEXT(platform_device.EGL_PLATFORM_DEVICE_EXT, first, None)
EGL.eglInitialize(display, None, None)
EGL.eglBindAPI(EGL.EGL_OPENGL_API)
context = EGL.eglCreateContext(display, None, EGL.EGL_NO_CONTEXT, None)
EGL.eglMakeCurrent(display, EGL.EGL_NO_SURFACE, EGL.EGL_NO_SURFACE, context)
target, texture = GL.glGenTextures(2)
for one in (target, texture):
    GL.glBindTexture(GL.GL_TEXTURE_2D, one)
    GL.glTexStorage2D(GL.GL_TEXTURE_2D, 1, GL.GL_RGBA8, SIZE, SIZE)
GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, GL.glGenFramebuffers(1))
GL.glFramebufferTexture2D(GL.GL_FRAMEBUFFER, GL.GL_COLOR_ATTACHMENT0, GL.GL_TEXTURE_2D, target, 0)
GL.glViewport(0, 0, SIZE, SIZE)
GL.glBindVertexArray(GL.glGenVertexArrays(1))
shaders = compileShader(VERTEX, GL.GL_VERTEX_SHADER), compileShader(FRAGMENT, GL.GL_FRAGMENT_SHADER)
GL.glUseProgram(compileProgram(*shaders))

device = gi.match_device(gi.opengl.identity())
shared = gi.opengl.share_buffer(device, SIZE * SIZE * 4)
ink = torch.from_dlpack(shared.view((SIZE, SIZE, 4), "uint8"))
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
stream = device.wrap_stream(torch.cuda.current_stream() if ink.is_cuda else 0)

torch.set_default_device(ink.device)
line = torch.linspace(-1, 1, SIZE)
paper = line + 1j * line[:, None]
whirls = ((-0.5 - 0.4j, 1.0), (0.5 - 0.3j, -1.2), (-0.1 + 0.5j, 1.4), (0.6 + 0.6j, -0.8), (-0.7 + 0.4j, -0.9))
inks = torch.tensor([[9, 30, 66], [240, 232, 214], [190, 54, 38], [222, 165, 62], [36, 110, 122]]).byte()
for _ in range(FRAMES):
    for at, speed in whirls:
        paper = at + (paper - at) * torch.exp(0.2j * speed * torch.exp(-5 * (paper - at).abs() ** 2))
    drops = 7 * (paper + 0.1 * torch.sin(5 * paper.imag)).abs() + 0.6 * torch.sin(3 * paper.real)
    handoff.acquire(stream)
    ink[..., :3] = inks[drops.long() % 5]
    handoff.release(stream)
    with handoff.gl(shared):
        shared.upload_to(texture, ink.shape, "uint8")
        GL.glDrawArrays(GL.GL_TRIANGLES, 0, 3)

rows = GL.glReadPixels(0, 0, SIZE, SIZE, GL.GL_RGB, GL.GL_UNSIGNED_BYTE)
picture = np.frombuffer(rows, np.uint8).reshape(SIZE, SIZE, 3)
Image.fromarray(picture).save("pyopengl_ink.png")
handoff.acquire(stream)
wrong = (picture != ink[..., :3].cpu().numpy()).mean()
for one in (handoff, shared):
    one.close()
assert not wrong, f"{wrong:.1%} of the picture's bytes differ from the tensor's"
print(f"{GL.glGetString(GL.GL_RENDERER).decode()}: {FRAMES} frames, each pixel the tensor's\npyopengl_ink.png")
