"""Shareable allocations: memory that we allocate and others import."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from ..backend import AllocationBackend
from ..errors import InvalidArgumentError
from ..handles import AllocationHandle, HandleOrigin, OriginKind
from .memory import Buffer, Mapping
from .resource import Resource

if TYPE_CHECKING:
    from ..backend import Native
    from .device import Device


class Allocation(Resource):
    """Memory that other processes and APIs can import. Made by `Device.allocate` and `Device.import_allocation`."""

    _noun = "Allocation"

    def __init__(
        self,
        device: Device,
        backend: AllocationBackend,
        native: Native,
        handle_type: type[AllocationHandle],
        *,
        size: int,
        exportable: bool,
    ) -> None:
        super().__init__(device._reclaimer, lambda: backend.release_allocation(native))
        self._mapping_lock = threading.Lock()
        self._device = device
        self._backend = backend
        self._native = native
        self._size = size
        self._exportable = exportable
        self._buffer: Buffer | None = None
        self.handle_type = handle_type

    @property
    def device(self) -> Device:
        return self._device

    @property
    def size(self) -> int:
        """In bytes: what was asked for, rounded up to the granularity."""
        return self._size

    @property
    def buffer(self) -> Buffer:
        """The whole allocation, mapped on first use (``cuMemMap`` / ``hipMemMap``)."""
        with self._mapping_lock, self._in_use():
            if self._buffer is None or self._buffer.closed:
                backend = self._backend
                native, address = backend.map_allocation(self._native, [self._device._native])
                unmap = functools.partial(backend.unmap_allocation, native)
                mapping = Mapping(self, self._device, address, unmap, offset=0, size=self._size, blocks=False)
                self._buffer = mapping.buffer(0, self._size)
                self._buffer._warns = False  # it is the allocation's own
            return self._buffer

    def export(self) -> AllocationHandle:
        """A new handle that the caller owns (``cuMemExportToShareableHandle`` / ``hipMemExport...``)."""
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                "allocation", f"{self._label} was imported; duplicate() the handle before the import instead."
            )
        with self._in_use():
            handle = self._backend.export_allocation(self._native)
        handle.origin = HandleOrigin(kind=OriginKind.ALLOCATION, device=self._device.identity, size=self._size)
        return handle
