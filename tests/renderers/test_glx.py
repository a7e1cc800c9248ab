"""A window system's loader: moderngl by GLX, on a display of Xvfb."""

from __future__ import annotations

import subprocess
import sys

from tests.fetched import x11
from tests.limits import LIMIT
from tools.fetch_vulkan import TREE

PROGRAM = """
import sys

import moderngl
import numpy as np

import gpuinterop as gi

context = moderngl.create_context(standalone=True)
device = gi.match_device(gi.opengl.identity())
vertices, copied = context.buffer(reserve=4096), context.buffer(reserve=4096)
with gi.opengl.share_buffer(device, 4096, buffer=vertices.glo) as shared:
    shared.copy_from_host(np.arange(1024, dtype="uint32"))
    context.copy_buffer(copied, vertices)
    assert (np.frombuffer(copied.read(), "uint32") == np.arange(1024)).all()
maps = open("/proc/self/maps").read()
assert sys.argv[1] + "/lib/libGLX_mesa" in maps and "libEGL" not in maps
print(context.info["GL_RENDERER"])
"""


def test_a_context_of_glx_shares_a_buffer() -> None:
    with x11() as environment:
        command = [sys.executable, "-c", PROGRAM, str(TREE)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert "llvmpipe" in done.stdout, done.stderr
