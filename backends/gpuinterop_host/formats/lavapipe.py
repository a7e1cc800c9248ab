"""Layout of lavapipe's memory, exported as OPAQUE_FD (Mesa's ``os_memory_fd.c``).

It is a memfd named ``llvmpipe memory fd``, sealed against shrinking and growing, with a header before the data:

===============  ==================================================================================================
offset           content
===============  ==================================================================================================
0                size_t total: the object's size, header included
8                size_t data: offset of the data (4096 for pages of that size; read it, do not assume it)
16               16 bytes: SHA-1 of ``llvmpipe`` and Mesa's revision; differs between builds
data - 8         size_t data, again
===============  ==================================================================================================

The total is the allocation's size plus a page plus 40, so up to 40 bytes follow the allocation's end.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from gpuinterop.errors import HandleError

NAME: Final = "llvmpipe memory fd"
_HEADER = struct.Struct("=QQ16s")


def data_offset(fd: int, total: int) -> int:
    """Return the offset of the data in an object of `total` bytes. `HandleError`: the header is not lavapipe's."""
    header = os.pread(fd, _HEADER.size, 0)  # not read(), because the exporter shares the file position
    if len(header) == _HEADER.size:
        size, offset, _ = _HEADER.unpack(header)
        if size == total and _HEADER.size + 8 <= offset <= total:
            (repeated,) = struct.unpack("=Q", os.pread(fd, 8, offset - 8))
            if repeated == offset:
                return int(offset)
    raise HandleError(
        f"handle: expected the header of lavapipe (Mesa 22.3 to 25.0) in the memfd {NAME!r}, got a memfd without the "
        "header; this version of Mesa may lay its memory out differently."
    )
