"""Shareable allocations: memory that we allocate and others import."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..backend import AllocationBackend
from ..errors import InvalidArgumentError
from ..handles import AllocationHandle, HandleOrigin, OriginKind
from .memory import Buffer, Mapping, new_buffer
from .resource import Resource

if TYPE_CHECKING:
    from ..backend import Native
    from .device import Device


class Allocation(Resource):
    """Memory that other processes and APIs can import. Made by `Device.allocate` and `Device.import_allocation`.

    All its devices see it at one address. Unmapping it waits for the work of each of them.
    """

    _noun = "Allocation"

    def __init__(
        self,
        devices: Sequence[Device],
        backend: AllocationBackend,
        native: Native,
        handle_type: type[AllocationHandle],
        *,
        size: int,
        exportable: bool,
        location: int | None = None,
    ) -> None:
        device = devices[0]
        super().__init__(device._reclaimer, lambda: backend.release_allocation(native))
        self._mapping_lock = threading.Lock()
        self._devices = tuple(devices)
        self._device = device
        self._backend = backend
        self._native = native
        self._size = size
        self._exportable = exportable
        self._location = location  # the ordinal of the device whose memory it is, as far as that is known
        self._mapping: Mapping | None = None
        self._buffers: dict[Device, Buffer] = {}
        self.handle_type = handle_type

    @property
    def device(self) -> Device:
        return self._device

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that may use it: its own device first, then those of `access`."""
        return self._devices

    @property
    def size(self) -> int:
        """In bytes: what was asked for, rounded up to the granularity."""
        return self._size

    @property
    def buffer(self) -> Buffer:
        """The whole allocation, mapped on first use (``cuMemMap`` / ``hipMemMap``)."""
        return self.buffer_on(self._device)

    def buffer_on(self, device: Device) -> Buffer:
        """The whole allocation as another of its devices sees it.

        The same bytes at the same address, used by that device's streams and array libraries. It is mapped once, for
        all of them (``cuMemMap``, ``cuMemSetAccess`` / ``hipMem...``), and unmapped when the last of these buffers is
        closed and no device has work pending.

        Parameters
        ----------
        device : Device
            One of `devices`.

        Raises
        ------
        InvalidArgumentError
            It is none of them.
        """
        from .device import check_device  # it stands on this module

        check_device(device, "device")
        if device not in self._devices:
            known = ", ".join(map(repr, self._devices))
            raise InvalidArgumentError(
                "device", f"{device!r} has no access to {self._label}, only {known}; give it to access=."
            )
        with self._mapping_lock, self._in_use():
            found = self._buffers.get(device)
            if found is None or found.closed:
                found = self._buffers[device] = new_buffer(self._mapped, 0, self._size, device)
                found._warns = False  # it is the allocation's own
            return found

    def _mapped(self) -> Mapping:
        if self._mapping is None or not self._mapping.usable:
            backend, devices = self._backend, self._devices
            native, address = backend.map_allocation(self._native, [one._native for one in devices])
            unmap = functools.partial(backend.unmap_allocation, native)
            self._mapping = Mapping(self, self._device, address, unmap, blocks=False, devices=devices)
        return self._mapping

    def export(self) -> AllocationHandle:
        """A new handle that the caller owns (``cuMemExportToShareableHandle`` / ``hipMemExport...``)."""
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                "allocation", f"{self._label} was imported; duplicate() the handle before the import instead."
            )
        with self._in_use():
            handle = self._backend.export_allocation(self._native)
        handle.origin = HandleOrigin(
            kind=OriginKind.ALLOCATION, device=self._device.identity, size=self._size, trusted=True
        )
        return handle
