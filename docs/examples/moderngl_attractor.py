"""moderngl draws a torch tensor: 200,000 points of a strange attractor, which torch moves in place.

    python moderngl_attractor.py        writes moderngl_attractor.png; needs no display

gpuinterop gives moderngl's own buffers new storage, and torch has the same bytes. Data goes both ways: moderngl reads
its framebuffer into the second buffer.
"""

import moderngl
import torch
from PIL import Image

import gpuinterop as gi

COUNT, SIZE, FRAMES = 200_000, 720, 60
VERTEX = "#version 330\nin vec2 at; void main() { gl_Position = vec4(at / 2.3, 0, 1); }"
FRAGMENT = "#version 330\nout float light; void main() { light = 1; }"

context = moderngl.create_context(standalone=True, backend="egl")
target = context.framebuffer([context.texture((SIZE, SIZE), 1, dtype="f4")])
vertices, pixels = context.buffer(reserve=COUNT * 2 * 4), context.buffer(reserve=SIZE * SIZE * 4)
program = context.program(vertex_shader=VERTEX, fragment_shader=FRAGMENT)
vertex_array = context.vertex_array(program, [(vertices, "2f", "at")])
context.enable(moderngl.BLEND)
context.blend_func = moderngl.ONE, moderngl.ONE
target.use()

device = gi.match_device(gi.opengl.identity())
shared = [gi.opengl.share_buffer(device, one.size, buffer=one.glo) for one in (vertices, pixels)]
points = torch.from_dlpack(shared[0].view((COUNT, 2), "float32"))
picture = torch.from_dlpack(shared[1].view((SIZE, SIZE), "float32"))
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
stream = device.wrap_stream(torch.cuda.current_stream() if points.is_cuda else 0)

expected = torch.zeros(SIZE * SIZE, dtype=torch.int64, device=points.device)
points.uniform_(-1, 1)
for frame in range(FRAMES):
    handoff.acquire(stream)
    x, y = points.unbind(1)
    a, d = 1.7 + 0.0006 * frame, 1.2 + 0.0006 * frame
    moved = torch.sin(a * y) + 0.6 * torch.cos(a * x), torch.sin(1.7 * x) + d * torch.cos(1.7 * y)
    points.copy_(torch.stack(moved, 1))
    column, row = ((points / 2.3 + 1) / 2 * SIZE).long().unbind(1)
    expected += torch.bincount(row * SIZE + column, minlength=SIZE * SIZE)  # points in each pixel, by torch
    handoff.release(stream)
    with handoff.gl(*shared):
        vertex_array.render(moderngl.POINTS)  # and by moderngl
        target.read_into(pixels, components=1, dtype="f4")

handoff.acquire(stream)
wrong = ((picture.flatten() - expected).abs().sum() / expected.sum()).item()
light = (picture.flip(0)[..., None] / picture.max()).pow(torch.tensor([0.22, 0.36, 0.6], device=points.device))
Image.fromarray((light * 255).byte().cpu().numpy()).save("moderngl_attractor.png")
for one in (handoff, *shared):
    one.close()
assert wrong < 0.02, f"{wrong:.1%} of the points are not where the tensor has them"  # rounding differs at pixel borders
print(f"{context.info['GL_RENDERER']}: {FRAMES} frames; {1 - wrong:.1%} in the tensor's pixels\nmoderngl_attractor.png")
