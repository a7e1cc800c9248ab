"""Memory that other libraries have mapped. It can be shared if it is a memfd with a descriptor that is still open."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping as Table, Sequence
from types import MappingProxyType
from typing import Any, Final

from gpuinterop import system
from gpuinterop.backend import Address, Block, MemoryKind, SharingBackend
from gpuinterop.errors import HandleError
from gpuinterop.handles import Handle, OpaqueFd

from .memory import NO_MEMORY, Mapping, Object, Owned, check_size, checked, examine
from .streams import Device

_MEMFD: Final = "/memfd:"


class Sharing(SharingBackend):
    """Arrays in memfds."""

    _files: Table[int, int] = MappingProxyType({})  # each memfd's descriptor by its key, as of the last search

    def find_blocks(self) -> Callable[[Address], Block]:
        """``/proc/self/maps``. The call raises `HandleError` if other processes cannot safely map the memfd."""
        mapped = [mapping for mapping in system.mappings(_MEMFD) if "s" in mapping.access and not mapping.offset]
        starts = [mapping.addresses.start for mapping in mapped]

        def block_at(address: Address) -> Block:
            at = bisect_right(starts, address)
            memfd = mapped[at - 1] if at and address in mapped[at - 1].addresses else None
            key = _key(*memfd.file) if memfd else 0
            if memfd is None or (fd := self._descriptor_of(key)) is None:
                return Block(kind=MemoryKind.HOST)
            size = min(len(memfd.addresses), _examined(fd).size)
            return Block(kind=MemoryKind.FILE, address=memfd.addresses.start, size=size, key=key, ordinal=0)

        return block_at

    def is_there(self, block: Block) -> bool:
        """True: the memory belongs to the descriptor, and an export checks the descriptor."""
        return True

    def export_block(self, device: Device, block: Block) -> Handle:
        """Duplicate a descriptor and seal the memfd against shrinking (``F_SEAL_SHRINK``)."""
        if (fd := self._descriptor_of(block.key)) is not None:
            with OpaqueFd.adopt_duplicate(fd) as handle:  # first, because the number may be another file's by now
                if _memfd_at(handle.fd) == block.key:
                    _examined(handle.fd, block.size).secure()
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

    def _descriptor_of(self, key: int) -> int | None:
        """An open descriptor of a memfd; None if none is open."""
        if _memfd_at(self._files.get(key, -1)) != key:
            fds = map(int, system.call("opendir(/proc/self/fd)", os.listdir, "/proc/self/fd"))
            self._files = {_memfd_at(fd): fd for fd in fds}
        return self._files.get(key)

    detach_blocks: Any = staticmethod(Owned.release)
    """``munmap``."""


def _examined(fd: int, size: int = 0) -> Object:
    memfd = examine(fd, "an array's memory", ())
    if memfd.name.startswith(NO_MEMORY):
        raise HandleError(f"handle: expected memory, got the memfd {memfd.name!r} of a semaphore.")
    check_size(size, memfd.size, "memory object")
    return memfd


def _memfd_at(fd: int) -> int:
    """The key of a descriptor's memfd; 0 if it is not a memfd."""
    with contextlib.suppress(OSError):  # closed meanwhile
        # The link first, because the fstat of another kind of file may wait for its server.
        if system.link(fd).startswith(_MEMFD):
            status = os.fstat(fd)
            return _key(status.st_dev, status.st_ino)
    return 0


def _key(device: int, inode: int) -> int:
    return device << 64 | inode
