"""VTK draws torch tensors: a knot whose vertices, normals and colours torch computes in place.

    python vtk_knot.py                  writes vtk_knot.png; needs no display

gpuinterop gives the mapper's own buffers new storage, and torch has the same bytes.
"""

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize
from vtkmodules.util.numpy_support import numpy_to_vtk, vtk_to_numpy
from vtkmodules.vtkCommonCore import vtkFloatArray, vtkUnsignedCharArray
from vtkmodules.vtkFiltersSources import vtkPlaneSource
from vtkmodules.vtkRenderingCore import vtkActor, vtkRenderer
from vtkmodules.vtkRenderingOpenGL2 import vtkEGLRenderWindow, vtkOpenGLPolyDataMapper

import gpuinterop as gi

ROWS, COLUMNS, SIZE, FRAMES = 49, 601, 720, 30

mesh = vtkPlaneSource(x_resolution=COLUMNS - 1, y_resolution=ROWS - 1).update().output  # reserves room for the vertices
mesh.GetPointData().SetScalars(numpy_to_vtk(np.full((ROWS * COLUMNS, 4), 255, np.uint8), deep=True))
mapper = vtkOpenGLPolyDataMapper(vbo_shift_scale_method=0)  # OpenGL gets the vertices unchanged
mapper.SetInputData(mesh)
actor, renderer = vtkActor(mapper=mapper), vtkRenderer(background=(0.02, 0.03, 0.06))
actor.property.specular, actor.property.specular_power = 0.5, 30
renderer.AddActor(actor)
renderer.ResetCamera(-2.3, 2.3, -2.3, 2.3, -1.7, 1.7)
window = vtkEGLRenderWindow(size=(SIZE, SIZE), multi_samples=0)
window.AddRenderer(renderer)
window.Render()  # creates the buffers

device = gi.match_device(gi.opengl.identity())
buffers = [mapper.GetVBOs().GetVBO(name) for name in ("vertexMC", "normalMC", "scalarColor")]
shared = [gi.opengl.share_buffer(device, ROWS * COLUMNS * one.GetStride(), buffer=one.GetHandle()) for one in buffers]
points, normals = (torch.from_dlpack(one.view((ROWS, COLUMNS, 3), "float32")) for one in shared[:2])
colours = torch.from_dlpack(shared[2].view((ROWS, COLUMNS, 4), "uint8"))
handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
stream = device.wrap_stream(torch.cuda.current_stream() if points.is_cuda else 0)

torch.set_default_device(points.device)
v, u = torch.meshgrid(*(2 * torch.pi * torch.linspace(0, 1, one) for one in (ROWS, COLUMNS)), indexing="ij")
out = 2 + torch.cos(3 * u)
curve = torch.stack([out * torch.cos(2 * u), out * torch.sin(2 * u), 1.2 * torch.sin(3 * u)], -1)
(along,) = torch.gradient(curve, dim=1, edge_order=2)
side = normalize(along[..., [1, 0, 2]] * torch.tensor([-1.0, 1, 0]), dim=-1)
around = v.cos()[..., None] * side + v.sin()[..., None] * normalize(torch.linalg.cross(along, side), dim=-1)
for frame in range(FRAMES):
    wave = torch.sin(4 * v + 14 * u - 0.4 * frame)[..., None]
    handoff.acquire(stream)
    torch.addcmul(curve, 0.42 + 0.05 * wave + 0.1 * torch.sin(6 * u + 0.2 * frame)[..., None], around, out=points)
    normals.copy_(normalize(torch.linalg.cross(*torch.gradient(points, dim=(1, 0), edge_order=2)), dim=-1))
    colours[..., :3] = 140 + 100 * torch.cos(u[..., None] + 1.1 * wave + torch.tensor([0.3, 1.3, 2.4]))
    colours[..., 3] = 255
    handoff.release(stream)
    with handoff.gl(*shared):
        window.Render()

pixels, depths = vtkUnsignedCharArray(), vtkFloatArray()
window.GetPixelData(0, 0, SIZE - 1, SIZE - 1, 1, pixels, 0)
window.GetZbufferData(0, 0, SIZE - 1, SIZE - 1, depths)
Image.fromarray(vtk_to_numpy(pixels).reshape(SIZE, SIZE, 3)[::-1]).save("vtk_knot.png")
handoff.acquire(stream)
camera = np.reshape(renderer.GetActiveCamera().GetCompositeProjectionTransformMatrix(1, -1, 1).GetData(), (4, 4))
placed = np.insert(points.cpu().numpy().reshape(-1, 3), 3, 1, axis=1) @ camera.T
x, y, depth = (placed[:, :3] / placed[:, 3:] + 1).T / 2
there = vtk_to_numpy(depths).reshape(SIZE, SIZE)[(y * SIZE).astype(int), (x * SIZE).astype(int)]
seen, lost = (abs(there - depth) < 0.003).mean(), (there > depth + 0.003).mean()  # edges may round to the next pixel
for one in (handoff, *shared):
    one.close()
assert lost < 0.08, f"{lost:.0%} of the tensor's vertices are not in the picture"
print(f"{FRAMES} frames; {seen:.0%} of the tensor's vertices are seen, the others hidden\nvtk_knot.png")
