"""Memory that other libraries have mapped: it can be shared if it is a memfd, and a descriptor of it is left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

from gpuinterop import system
from gpuinterop.backend import Address, Behind, Block, SharingBackend
from gpuinterop.errors import HandleError
from gpuinterop.handles import Handle, OpaqueFd

from .memory import NO_MEMORY, Mapping, Object, Owned, check_size, checked, examine
from .streams import Device

_MEMFD: Final = "/memfd:"


class Sharing(SharingBackend):
    """Arrays in memfds."""

    def block_at(self, address: Address) -> Block:
        """``/proc/self/maps``. Raises `HandleError` if another process could not safely map the memfd."""
        found = next((one for one in system.mappings() if address in one.addresses), None)
        if found is None or found.offset or "s" not in found.access or not found.path.startswith(_MEMFD):
            return Block(behind=Behind.HOST)
        if (fd := _descriptor_of(found.inode)) is None:
            return Block(behind=Behind.HOST)
        size = min(len(found.addresses), _examined(fd).size)
        return Block(behind=Behind.FILE, address=found.addresses.start, size=size, key=found.inode, ordinal=0)

    def export_block(self, device: Device, block: Block) -> Handle:
        """Duplicate a descriptor, and seal the memfd against shrinking (``F_SEAL_SHRINK``)."""
        if (fd := _descriptor_of(block.key)) is not None:
            with OpaqueFd.adopt_duplicate(fd) as handle:  # first: the number may be another file's by now
                _examined(handle.fd, block.size).secure()
                if os.fstat(handle.fd).st_ino == block.key:
                    return OpaqueFd.adopt(handle.detach())
        raise HandleError("handle: expected a memfd that is open, got one whose last descriptor was closed.")

    def attach_blocks(self, device: Device, handles: Sequence[Handle], sizes: Sequence[int]) -> tuple[Mapping, Address]:
        """``mmap``."""
        (handle,), (size,) = handles, sizes
        fd = checked(handle, OpaqueFd).fd
        _examined(fd, size).secure()
        mapping = Mapping()
        mapping.map(fd, size)
        return mapping, mapping.data

    detach_blocks: Any = staticmethod(Owned.release)
    """``munmap``."""


def _examined(fd: int, size: int = 0) -> Object:
    found = examine(fd, "an array's memory", ())
    if found.name.startswith(NO_MEMORY):
        raise HandleError(f"handle: expected memory, got the memfd {found.name!r} of a semaphore.")
    check_size(size, found.size, "memory object")
    return found


def _descriptor_of(inode: int) -> int | None:
    """An open descriptor of a memfd; None if none is open."""
    for name in system.call("opendir(/proc/self/fd)", os.listdir, "/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            # The link first: the kernel answers it by itself, while another file's fstat may wait for its server.
            if system.link(int(name)).startswith(_MEMFD) and os.fstat(int(name)).st_ino == inode:
                return int(name)
    return None
