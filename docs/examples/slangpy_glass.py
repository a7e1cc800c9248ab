"""slangpy draws a torch tensor into another: stained glass, whose panes torch moves.

    python slangpy_glass.py             writes slangpy_glass.png; needs no display

slangpy draws with Vulkan. It keeps and closes the descriptors of its buffers and its fence, so they are imported with
`adopt_duplicate`. On a CPU driver it has no fence to share, and the host waits.
"""

import slangpy
import torch
from PIL import Image

import gpuinterop as gi

PANES, SIZE, FRAMES = 160, 512, 8
SHADER = """
struct Pane { float2 at, unused; float4 colour; };
[shader("compute")] [numthreads(8, 8, 1)]
void main(uint3 id: SV_DispatchThreadID, StructuredBuffer<Pane> panes, RWStructuredBuffer<float4> picture,
          uniform uint count, uniform uint size) {
    float nearest = 1e9, second = 1e9;
    float4 colour = 0;
    for (uint i = 0; i < count; i++) {
        float far = distance(float2(id.xy), panes[i].at);
        if (far < nearest) colour = panes[i].colour;
        second = min(second, max(nearest, far));
        nearest = min(nearest, far);
    }
    picture[id.y * size + id.x] = colour * clamp(second / 4 - nearest / 4, 0, 1) * clamp(1.3 - nearest / 55, 0.3, 1);
}"""

slang = slangpy.create_device(type=slangpy.DeviceType.vulkan)
module = slang.load_module_from_source("glass", SHADER)
kernel = slang.create_compute_kernel(slang.link_program([module], [module.entry_point("main")]))
usage = slangpy.BufferUsage.shared | slangpy.BufferUsage.unordered_access | slangpy.BufferUsage.shader_resource
buffers = [slang.create_buffer(size=size, usage=usage) for size in (PANES * 32, SIZE * SIZE * 16)]

device = gi.match_device(gi.vulkan.identity(slang.native_handles[1].value))
handles = [gi.OpaqueFd.adopt_duplicate(one.shared_handle.value, trusted=True) for one in buffers]
shared = [device.import_memory(one, size=theirs.size) for one, theirs in zip(handles, buffers, strict=True)]
panes = torch.from_dlpack(shared[0].map_buffer().view((PANES, 8), "float32"))
picture = torch.from_dlpack(shared[1].map_buffer().view((SIZE, SIZE, 4), "float32"))
stream = device.wrap_stream(torch.cuda.current_stream() if panes.is_cuda else 0)
if panes.is_cuda:
    fence = slang.create_fence(shared=True)
    semaphore = device.import_semaphore(gi.TimelineFd.adopt_duplicate(fence.shared_handle.value, trusted=True))

torch.set_default_device(panes.device)
number = (torch.arange(PANES) + 0.5)[:, None]
at = 1.35 * (number / PANES).sqrt() * torch.cat([torch.cos(2.4 * number), torch.sin(2.4 * number)], 1)
for frame in range(FRAMES):
    far = at.norm(dim=1, keepdim=True)
    at = at + 0.04 * torch.stack([-at[:, 1], at[:, 0]], 1) / (far + 0.15)
    panes[:, :2] = (at + 1) * SIZE / 2
    panes[:, 4:] = 0.55 + 0.43 * torch.cos(5 * far + 2 * at[:, :1] + torch.tensor([0.0, 1.1, 2.6, 0.0]))
    todo = slang.create_command_encoder()
    kernel.dispatch([SIZE, SIZE, 1], {}, todo, panes=buffers[0], picture=buffers[1], count=PANES, size=SIZE)
    if panes.is_cuda:
        semaphore.signal(stream, 2 * frame + 1)
        slang.submit_command_buffers([todo.finish()], [fence], [2 * frame + 1], [fence], [2 * frame + 2])
        semaphore.wait(stream, 2 * frame + 2)
    else:
        slang.submit_command_buffers([todo.finish()])
        slang.wait_for_idle()

Image.fromarray((picture[..., :3] * 255).byte().cpu().numpy()).save("slangpy_glass.png")
line = torch.arange(0, SIZE, 4, dtype=torch.float32)  # torch computes every fourth pixel again
far, pane = (torch.cartesian_prod(line, line).flip(1)[:, None] - panes[:, :2]).norm(dim=2).topk(2, largest=False)
light = (far[:, 1] / 4 - far[:, 0] / 4).clamp(0, 1) * (1.3 - far[:, 0] / 55).clamp(0.3, 1)
wrong = (picture[::4, ::4].reshape(-1, 4) - light[:, None] * panes[pane[:, 0], 4:]).abs().max()
for one in (*shared, *([semaphore] if panes.is_cuda else [])):
    one.close()
assert wrong < 0.01, f"slangpy's picture differs from torch's by {wrong:.2f} of 1"
print(f"{slang.info.adapter_name}: {FRAMES} frames, the last as torch computes it\nslangpy_glass.png")
