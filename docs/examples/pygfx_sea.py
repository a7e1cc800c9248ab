"""pygfx draws torch tensors with one copy through the host per frame, because wgpu cannot share memory yet.

    python pygfx_sea.py                 writes pygfx_sea.png; needs no display

torch moves and lights the sea. gpuinterop cannot help here: docs/howto/renderers.md explains why.
"""

import numpy as np
import pygfx
import torch
from PIL import Image
from rendercanvas.offscreen import RenderCanvas
from torch.nn.functional import normalize

SIDE, SIZE, FRAMES = 320, 720, 4
EYE, SUN = (0.0, -7.0, 2.2), (0.15, 1.0, 0.22)

canvas = RenderCanvas(size=(SIZE, SIZE), pixel_ratio=1)
renderer = pygfx.renderers.WgpuRenderer(canvas)
geometry = pygfx.plane_geometry(1, 1, SIDE - 1, SIDE - 1)
geometry.colors = pygfx.Buffer(np.zeros((SIDE * SIDE, 3), np.float32))
sky = pygfx.Background(None, pygfx.BackgroundMaterial("#ffb070", "#2b2140"))
scene = pygfx.Scene().add(sky, pygfx.Mesh(geometry, pygfx.MeshBasicMaterial(color_mode="vertex")))
camera = pygfx.PerspectiveCamera(50, 1)
camera.local.position = EYE
camera.look_at((0, 0, 0.2))
canvas.request_draw(lambda: renderer.render(scene, camera))

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(5)
y, x = torch.meshgrid(torch.linspace(-5, 9, SIDE), torch.linspace(-9, 9, SIDE), indexing="ij")
heights, lengths, ways = 0.1 * 0.74 ** torch.arange(14), 1.3 * 1.22 ** torch.arange(14), torch.rand(14) * 2.4 + 0.4
eye, sun = torch.tensor(EYE), normalize(torch.tensor(SUN), dim=0)
deep, low, high = torch.tensor([[0.04, 0.2, 0.28], [1.0, 0.66, 0.42], [0.3, 0.2, 0.42]])
for frame in range(FRAMES):
    phases = zip(heights, lengths, ways, strict=True)
    z = sum(a * torch.sin(k * (d.cos() * x + d.sin() * y) - 0.3 * frame * k.sqrt() + 9 * d) for a, k, d in phases)
    points = torch.stack([x, y, z], -1)
    along_y, along_x = torch.gradient(points, dim=(0, 1))
    normals = normalize(torch.linalg.cross(along_x, along_y), dim=-1)
    looks = normalize(points - eye, dim=-1)
    facing = -(looks * normals).sum(-1, keepdim=True)
    mirrored = looks + 2 * facing * normals
    gloss = 0.05 + 0.95 * (1 - facing.clamp(0, 1)) ** 4
    colours = torch.lerp(deep, torch.lerp(low, high, mirrored[..., 2:].clamp(0, 1).sqrt()), gloss)
    colours = (colours + (mirrored @ sun)[..., None].clamp(0) ** 160).clamp(0, 1)
    linear = ((colours + 0.055) / 1.055) ** 2.4  # pygfx converts it to sRGB, without lighting
    for buffer, tensor in ((geometry.positions, points), (geometry.colors, linear)):
        buffer.data[:] = tensor.view(-1, 3).cpu().numpy()  # the copy; then pygfx uploads it
        buffer.update_full()
    picture = np.asarray(canvas.draw())[..., :3]

Image.fromarray(picture).save("pygfx_sea.png")
placed = np.insert(points.view(-1, 3).cpu().numpy(), 3, 1, axis=1) @ camera.camera_matrix.T
places = ((placed[:, :2] / placed[:, 3:] * (1, -1) + 1) * SIZE / 2).astype(int)
inside = ((places >= 0) & (places < SIZE)).all(axis=1) & (y < 0).flatten().cpu().numpy()  # waves hide most distant ones
drawn = picture[places[inside, 1], places[inside, 0]]
wrong = (abs(drawn - 255 * colours.view(-1, 3).cpu().numpy()[inside]) > 12).any(axis=1).mean()
assert wrong < 0.2, f"{wrong:.0%} of the near vertices have another colour than the tensor has"
print(f"{FRAMES} frames; {1 - wrong:.0%} of the near vertices have the tensor's colour\npygfx_sea.png")
