"""A Vulkan shader animates a torch tensor, and torch disturbs it: without a copy, and without a wait of the host.

    python torch_reaction.py            writes reaction.png and reaction.gif

In a buffer, a compute shader lets two substances react and diffuse (Gray and Scott's model). torch drops one of them
into the same bytes, and colours the field. Each side waits on the device for the other.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
import vulkan as api
from PIL import Image
from vulkan_application import Application, Shader

import gpuinterop as gi

SIZE, FRAMES, STEPS = 160, 64, 80
FEED, KILL = 0.0545, 0.062
SHADER = Path(__file__).with_name("reaction.spv")


def steps(shader: Shader, buffer: Any, commands: Any) -> None:
    """Record STEPS steps; the number is even, so the first field is the newest."""
    buffer.acquire(commands)  # gpuinterop: ownership, from torch
    shader.bind(commands)
    written = api.VkMemoryBarrier(
        srcAccessMask=api.VK_ACCESS_SHADER_WRITE_BIT,
        dstAccessMask=api.VK_ACCESS_SHADER_READ_BIT | api.VK_ACCESS_SHADER_WRITE_BIT,
    )
    compute = api.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
    for step in range(STEPS):
        shader.dispatch(commands, struct.pack("iiff", SIZE, step % 2, FEED, KILL), (SIZE + 15) // 16)
        api.vkCmdPipelineBarrier(commands, compute, compute, 0, 1, [written], 0, None, 0, None)
    buffer.release(commands)  # gpuinterop: ownership, to torch


class Colours:
    """The second substance as colours. Its tensors are made once, because making one waits for the device."""

    def __init__(self, device: torch.device) -> None:
        table = torch.tensor([[18.0, 22, 48], [38, 132, 160], [250, 226, 150]], device=device)
        self.dark, self.to_middle, self.to_light = table[0], table[1] - table[0], table[2] - table[1]

    def __call__(self, field: torch.Tensor) -> torch.Tensor:
        amount = (field[..., 1:] * 2.6).clamp(0, 1)
        return (
            self.dark + self.to_middle * (2 * amount).clamp(0, 1) + self.to_light * (2 * amount - 1).clamp(0, 1)
        ).byte()


def expected(field: torch.Tensor) -> torch.Tensor:
    """Compute with torch what the shader should make of a field in one frame."""
    for _ in range(STEPS):
        near = sum(field.roll(way, (0, 1)) for way in ((0, 1), (0, -1), (1, 0), (-1, 0)))
        far = sum(field.roll(way, (0, 1)) for way in ((1, 1), (1, -1), (-1, 1), (-1, -1)))
        spread = 0.2 * near + 0.05 * far - field
        u, v = field[..., 0], field[..., 1]
        reaction = u * v * v
        change = (spread[..., 0] - reaction + FEED * (1 - u), 0.5 * spread[..., 1] + reaction - (KILL + FEED) * v)
        field = field + torch.stack(change, -1)
    return field


def main() -> None:
    with Application() as application:
        device = gi.match_device(gi.vulkan.identity(application.physical_device))
        buffer = gi.vulkan.share_buffer(application.vk, device, 2 * SIZE * SIZE * 8)
        handoff = gi.vulkan.share_handoff(application.vk, device, allow=("timeline", "binary", "bridged"))
        fields = torch.from_dlpack(buffer.view((2, SIZE, SIZE, 2), "float32"))
        stream = device.wrap_stream(torch.cuda.current_stream() if fields.is_cuda else 0)
        print(f"{application.name}, torch {torch.__version__} on {fields.device}, {handoff.mode} semaphores")

        fields[0] = torch.tensor([1.0, 0.0], device=fields.device)
        shader = application.shader(SHADER, buffer, push=16)
        commands = application.record(lambda commands: steps(shader, buffer, commands))
        torch.manual_seed(7)
        colours = Colours(fields.device)
        drop = torch.tensor([0.5, 0.5], device=fields.device)
        drops = torch.randint(8, SIZE - 8, (9, 2)).tolist()
        pictures, before = [], fields[0].clone()
        device.synchronize()
        for frame in range(FRAMES):
            application.submit(commands, **handoff.vulkan_submit())
            handoff.acquire(stream)  # torch's stream waits for the shader
            if frame == FRAMES - 1:
                error = (fields[0] - expected(before)).abs().max()
            if frame % 4 == 0 and drops:
                x, y = drops.pop()
                fields[0, y - 5 : y + 5, x - 5 : x + 5] = drop  # in place
            pictures.append(colours(fields[0]))
            before = fields[0].clone()
            handoff.release(stream)  # the shader waits for torch
        stream.synchronize(timeout=60)

        images = [Image.fromarray(picture.cpu().numpy()) for picture in pictures]
        images[-1].resize((480, 480)).save("reaction.png")
        films = [image.quantize(24) for image in images[::2]]
        films[0].save("reaction.gif", save_all=True, append_images=films[1:], duration=90, loop=0)
        assert error.item() < 1e-4, f"the last frame differs from torch's own by {error.item()}"
        print(f"{FRAMES} frames of {STEPS} steps; the last is what torch computes of the one before")
        print("reaction.png, reaction.gif")
        del fields, pictures, before
        api.vkQueueWaitIdle(application.queue)  # Vulkan does not know that torch has waited for its work
        shader.destroy()
        handoff.close()
        buffer.close()


if __name__ == "__main__":
    main()
