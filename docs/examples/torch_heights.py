"""Vulkan draws torch's own tensor into an image that torch reads: nothing is copied.

    python torch_heights.py             writes heights.png and heights.gif

torch moves waves over a field of heights, in tensors that torch allocated. A compute shader lights the field and writes
an image, whose texels torch has as a tensor. Each side waits on the device for the other.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

# On CUDA, before torch's first tensor: Vulkan cannot import memory from cudaMalloc.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import vulkan as api
from PIL import Image
from vulkan_application import Application

import gpuinterop as gi

SIZE, FRAMES, STEPS = 256, 60, 3
SHADER = Path(__file__).with_name("heights.spv")
USAGE = api.VK_IMAGE_USAGE_STORAGE_BIT | api.VK_IMAGE_USAGE_TRANSFER_SRC_BIT
DARK, BRIGHT = (0.01, 0.10, 0.30), (0.80, 0.97, 1.00)


def slope(field: torch.Tensor, *ways: tuple[int, int]) -> torch.Tensor:
    """The sum of the neighbours in these directions."""
    return sum((field.roll(way, (0, 1)) for way in ways), torch.zeros_like(field))


def step(field: torch.Tensor, speed: torch.Tensor) -> None:
    """Do one step of the wave, in place."""
    around = slope(field, (0, 1), (0, -1), (1, 0), (-1, 0)) - 4 * field
    speed.add_(around, alpha=0.22).mul_(0.995)
    field.add_(speed)


def drop(field: torch.Tensor, x: int, y: int) -> None:
    """Let a drop fall into the water, in place."""
    rows = torch.arange(SIZE, device=field.device, dtype=torch.float32)
    far = (rows - x).square()[None, :] + (rows - y).square()[:, None]
    field.sub_(torch.exp(far / -40))


def expected(field: torch.Tensor) -> torch.Tensor:
    """Compute with torch what the shader should make of a field."""
    light = (0.45 + 5 * (slope(field, (0, -1), (-1, 0)) - slope(field, (0, 1), (1, 0)))).clamp(0, 1)
    high = (0.4 + 1.2 * field).clamp(0, 1)[..., None]
    dark, bright = (torch.tensor(colour, device=field.device) for colour in (DARK, BRIGHT))
    colour = dark * (1 - high) + bright * high
    return 255 * colour * (0.25 + 0.75 * light[..., None])


def main() -> None:
    with Application(shader_images=True) as application:
        vk, device = application.vk, gi.match_device(gi.vulkan.identity(application.physical_device))
        field = torch.zeros((SIZE, SIZE), device="cpu" if device.identity.is_cpu else "cuda")
        speed = torch.zeros_like(field)
        heights = gi.vulkan.import_array(vk, field)
        image = gi.vulkan.share_image(
            vk, device, (SIZE, SIZE), "R8G8B8A8_UNORM", tiling="linear", usage=USAGE,
            initial=api.VK_IMAGE_LAYOUT_GENERAL,
        )  # fmt: skip
        pixels = torch.from_dlpack(image.view())
        handoff = gi.vulkan.share_handoff(vk, device, allow=("timeline", "binary", "bridged"))
        stream = device.wrap_stream(torch.cuda.current_stream() if field.is_cuda else 0)
        print(f"{application.name}, torch {torch.__version__} on {field.device}, {handoff.mode} semaphores")
        print(f"Vulkan could touch {heights.exposes}")

        shader = application.shader(SHADER, heights, image, push=4)

        def draw(commands: Any) -> None:
            heights.acquire(commands)  # gpuinterop: ownership, from torch
            image.acquire(commands)
            shader.bind(commands)
            shader.dispatch(commands, struct.pack("i", SIZE), (SIZE + 15) // 16)
            image.release(commands)  # gpuinterop: ownership, to torch
            heights.release(commands)

        commands = application.record(draw)
        torch.manual_seed(3)
        drops = torch.randint(32, SIZE - 32, (FRAMES // 8 + 1, 2)).tolist()
        drop(field, *drops[0])
        step(field, speed)
        worst = (pixels[..., :3] - expected(field)).abs().max().zero_()  # each kernel runs once before the first wait
        film, places = [pixels.clone() for _ in range(FRAMES)], set()
        device.synchronize()
        for frame in range(FRAMES):
            application.submit(commands, **handoff.vulkan_submit())
            handoff.acquire(stream)  # torch's stream waits for the shader
            worst = torch.maximum(worst, (pixels[..., :3] - expected(field)).abs().max())
            film[frame].copy_(pixels)
            places.add((field.data_ptr(), pixels.data_ptr()))
            if frame % 8 == 7:
                drop(field, *drops[frame // 8])
            for _ in range(STEPS):
                step(field, speed)
            handoff.release(stream)  # the shader waits for torch
        stream.synchronize(timeout=60)

        images = [Image.fromarray(picture.cpu().numpy()[..., :3]) for picture in film]
        images[-1].resize((512, 512)).save("heights.png")
        small = [picture.resize((192, 192)).quantize(32) for picture in images[::2]]
        small[0].save("heights.gif", save_all=True, append_images=small[1:], duration=90, loop=0)
        assert worst.item() < 1.5, f"a texel differs from torch's own by {worst.item()} of 255"
        assert places == {(heights.ptr, image.view().ptr)}, "a tensor is elsewhere than what Vulkan has"
        print(f"{FRAMES} frames, each of them what torch computes; nothing was copied")
        print("heights.png, heights.gif")
        del pixels
        api.vkQueueWaitIdle(application.queue)  # Vulkan does not know that torch has waited for its work
        shader.destroy()
        handoff.close()
        heights.close()
        image.close()


if __name__ == "__main__":
    main()
