"""Share buffers, textures and handoffs with the OpenGL context that is current in the calling thread.

Other code makes the context: moderngl, pyglet, VTK, Qt. Functions of OpenGL are looked up with the context's own loader
(EGL, GLX, or `get_proc_address`). Importing this module needs no package and loads no library. To share GPU memory you
need nothing else. Vulkan makes semaphores and llvmpipe's memory, which needs cffi and a Vulkan loader.

Examples
--------
>>> device = gi.match_device(gi.opengl.identity())
>>> shared = gi.opengl.share_buffer(device, 4096)
>>> handoff = gi.opengl.share_handoff(device, allow=("timeline", "binary", "bridged"))
>>> for frame in range(3):
...     handoff.acquire(stream)
...     shared.fill(frame, stream=stream)
...     handoff.release(stream)
...     with handoff.gl(shared):
...         pass  # draw from shared.name
>>> handoff.close()
>>> shared.close()
"""

from __future__ import annotations

from ._buffer import SharedBuffer, import_array, share_buffer
from ._handoff import SharedHandoff, share_handoff
from ._query import capabilities, identity
from ._texture import SharedTexture, import_image

__all__ = [
    "SharedBuffer",
    "SharedHandoff",
    "SharedTexture",
    "capabilities",
    "identity",
    "import_array",
    "import_image",
    "share_buffer",
    "share_handoff",
]
