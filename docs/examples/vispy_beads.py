"""vispy draws a torch tensor: torch moves and colours 2,600 beads on a sunflower's spiral in place.

    python vispy_beads.py               writes vispy_beads.png; needs no display

gpuinterop gives vispy's buffer new storage; vispy's interpreter has the buffer's name in its table of objects.
"""

import os

os.environ.setdefault("EGL_PLATFORM", "surfaceless")  # vispy opens the default display

import numpy as np
import torch
import vispy
from PIL import Image
from vispy import app, gloo

import gpuinterop as gi

COUNT, SIZE, FRAMES = 2600, 720, 40
LAYOUT = [("at", "f4", 2), ("size", "f4"), ("colour", "f4", 3)]
VERTEX = """
attribute vec2 at; attribute float size; attribute vec3 colour; varying vec3 shade;
void main() { gl_Position = vec4(at, 0, 1); gl_PointSize = size; shade = colour; }"""
FRAGMENT = """
varying vec3 shade;
void main() {
    vec2 from = gl_PointCoord * 2.0 - 1.0;
    float far = length(from), gloss = smoothstep(0.35, 0.0, length(from + vec2(0.45, 0.45)));
    if (far > 1.0) discard;
    gl_FragColor = vec4(shade * (1.0 - 0.75 * smoothstep(0.4, 1.0, far)) + 0.7 * gloss, 1.0);
}"""

vispy.use(app="egl")
canvas = app.Canvas(size=(SIZE, SIZE), show=False)
canvas.set_current()
program, vertices = gloo.Program(VERTEX, FRAGMENT), gloo.VertexBuffer(np.zeros(COUNT, LAYOUT))
program.bind(vertices)
target = gloo.FrameBuffer(gloo.Texture2D((SIZE, SIZE, 4)))
with target:
    program.draw("points")  # creates the buffer
name = canvas.context.shared.parser.get_object(vertices.id).handle

device = gi.match_device(gi.opengl.identity())
shared = gi.opengl.share_buffer(device, vertices.nbytes, buffer=name)
beads = torch.from_dlpack(shared.view((COUNT, 6), "float32"))
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
stream = device.wrap_stream(torch.cuda.current_stream() if beads.is_cuda else 0)

torch.set_default_device(beads.device)
number = torch.arange(COUNT)
for frame in range(FRAMES):
    far = ((number + 0.5) / COUNT).sqrt()
    angle = 2.39996323 * number + 0.02 * frame
    wave = torch.sin(9 * far - 0.25 * frame + 3 * torch.sin(2 * angle))
    handoff.acquire(stream)
    beads[:, 0], beads[:, 1] = 0.96 * far * angle.cos(), 0.96 * far * angle.sin()
    beads[:, 2] = 9.5 + 2.5 * wave
    beads[:, 3:] = 0.5 + 0.4 * torch.cos(1.4 * wave[:, None] + 4 * far[:, None] + torch.tensor([0.0, 0.8, 1.7]))
    handoff.release(stream)
    with handoff.gl(shared), target:
        gloo.clear((0.02, 0.02, 0.04, 1))
        program.draw("points")

with target:
    picture = gloo.read_pixels(alpha=False)
Image.fromarray(picture).save("vispy_beads.png")
handoff.acquire(stream)
column, row = ((beads[:, :2].cpu() * torch.tensor([1, -1], device="cpu") + 1) / 2 * SIZE).long().numpy().T
wrong = np.abs(picture[row, column] - 255 * beads[:, 3:].cpu().numpy()).max()
for one in (handoff, shared):
    one.close()
assert wrong < 1, f"a bead's colour differs from the tensor's by {wrong:.0f} of 255"
print(f"{FRAMES} frames; each bead has the tensor's colour\nvispy_beads.png")
