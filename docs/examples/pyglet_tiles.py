"""pyglet draws torch tensors: torch turns, scales and colours 3,600 tiles in place, while two waves cross.

    python pyglet_tiles.py              writes pyglet_tiles.png; needs no display

gpuinterop gives the two buffers of pyglet's own vertex list new storage, and torch has the same bytes.
"""

import math

import numpy as np
import pyglet
import torch
from PIL import Image
from pyglet import gl

import gpuinterop as gi

TILES, CELL, FRAMES = 60, 12, 40
SIZE = TILES * CELL

pyglet.options["headless"] = True
window = pyglet.window.Window(SIZE, SIZE, config=gl.Config(red_size=8, green_size=8, blue_size=8))
program = pyglet.graphics.get_default_shader()
vertices = program.vertex_list(TILES * TILES * 6, gl.GL_TRIANGLES)
buffers = [vertices.domain.attrib_name_buffers[name] for name in ("position", "colors")]
for one in buffers:
    one.commit()  # first let pyglet upload with glBufferData, which fails on shared storage

device = gi.match_device(gi.opengl.identity())
shared = [gi.opengl.share_buffer(device, one.size, buffer=one.id) for one in buffers]
corners = torch.from_dlpack(shared[0].view((TILES * TILES, 6, 3), "float32"))
colours = torch.from_dlpack(shared[1].view((TILES * TILES, 6, 4), "float32"))
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
stream = device.wrap_stream(torch.cuda.current_stream() if corners.is_cuda else 0)

torch.set_default_device(corners.device)
line = torch.arange(TILES) * CELL + CELL / 2
middles = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).view(-1, 2)
near, far = ((middles - torch.tensor(at)).norm(dim=1) / 360 for at in ((220, 250), (760, 790)))
turns, hues = torch.tensor([0, 1, 2, 0, 2, 3]) * math.pi / 2, torch.tensor([0.0, 0.7, 1.5])
program.use()
for frame in range(FRAMES):
    handoff.acquire(stream)
    wave = torch.sin(9 * near - 0.2 * frame) + torch.sin(7 * far - 0.15 * frame)
    angles = turns + 0.7 * wave[:, None]
    sizes = (7.8 + 1.8 * wave)[:, None, None]  # no tile covers the middle of another
    corners[..., :2] = middles[:, None] + sizes * torch.stack([angles.cos(), angles.sin()], -1)
    colours[..., :3] = (0.5 - 0.48 * torch.cos(1.1 * wave[:, None] + hues + 0.8 * far[:, None]))[:, None]
    handoff.release(stream)
    with handoff.gl(*shared):
        window.clear()
        vertices.draw(gl.GL_TRIANGLES)

rows = pyglet.image.get_buffer_manager().get_color_buffer().get_image_data().get_data("RGB", 3 * SIZE)
picture = np.frombuffer(rows, np.uint8).reshape(SIZE, SIZE, 3)
Image.fromarray(picture[::-1]).save("pyglet_tiles.png")
handoff.acquire(stream)
drawn = picture[CELL // 2 :: CELL, CELL // 2 :: CELL].reshape(-1, 3)
wrong = np.abs(drawn - 255 * colours[:, 0, :3].cpu().numpy()).max()
for one in (handoff, *shared):
    one.close()
assert wrong < 1, f"the middle of a tile differs from the tensor's colour by {wrong:.0f} of 255"
print(f"{gl.gl_info.get_renderer()}: {FRAMES} frames; each tile has the tensor's colour\npyglet_tiles.png")
