"""Shareable allocations: sealed memfds."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any, Final

from gpuinterop import system
from gpuinterop.backend import Address, AllocationBackend
from gpuinterop.errors import HandleError
from gpuinterop.handles import AllocationHandle, Granularity, VmmFd

from .formats import lavapipe
from .memory import NO_MEMORY, Mapping, Owned, check_size, checked, examine
from .streams import Device

ALLOCATION_NAME: Final = "gpuinterop.allocation"


class Allocation(Owned):
    """Shareable memory: a sealed memfd that is mapped on demand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @property
    def fd(self) -> int:
        return int(self.releases[0][1])


class Allocations(AllocationBackend):
    """Shareable memory is a sealed memfd."""

    def granularity(self, device: Device, handle_type: type[AllocationHandle]) -> Granularity:
        """A page."""
        return Granularity(system.PAGE, system.PAGE)

    def allocate(self, device: Device, size: int, handle_type: type[AllocationHandle]) -> Allocation:
        """Create zeroed memory (``memfd_create``). The first touch of a page allocates it, as always on the CPU.

        More than the available memory is refused: the kernel would overcommit, and kill the process on first use.
        """
        if (available := _available()) is not None and size > available:
            meaning = f"{size} bytes were requested, {available} are available"
            raise system.driver_error("memfd_create", errno.ENOMEM, meaning)
        allocation = Allocation(size)
        allocation.releases.append((os.close, system.create_memfd(ALLOCATION_NAME, size)))
        return allocation

    def export_allocation(self, allocation: Allocation) -> AllocationHandle:
        """Duplicate the descriptor."""
        return VmmFd.adopt_duplicate(allocation.fd)

    def import_allocation(self, device: Device, handle: AllocationHandle, *, size: int) -> Allocation:
        """Own the descriptor; leave it alone on an exception."""
        fd = checked(handle, VmmFd).fd
        memfd = examine(fd, "an allocation", ())
        if memfd.name.startswith((*NO_MEMORY, lavapipe.NAME)):
            raise HandleError(f"handle: expected an allocation, got memfd {memfd.name!r}; import it as an OpaqueFd.")
        if not memfd.fixed:
            raise HandleError(
                "handle: expected a shareable allocation of the host, sealed against shrinking and growing, got "
                "another memfd; import it as memory (OpaqueFd)."
            )
        check_size(size, memfd.size, "allocation")
        allocation = Allocation(size)
        allocation.releases.append((os.close, fd))
        return allocation

    def map_allocation(self, allocation: Allocation, devices: Sequence[Device]) -> tuple[Mapping, Address]:
        """``mmap``."""
        mapping = Mapping()
        mapping.map(allocation.fd, allocation.size)
        return mapping, mapping.data

    unmap_allocation: Any = staticmethod(Owned.release)
    """``munmap``."""
    release_allocation = unmap_allocation
    """``close``."""


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
