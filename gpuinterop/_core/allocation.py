"""Allocations that other processes and APIs can import, and arrays in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._arguments import check_type
from ..backend import AllocationBackend
from ..errors import InvalidArgumentError
from ..handles import AllocationHandle, HandleOrigin, OriginKind
from .layout import Layout
from .lifetime import Lifetime, locked
from .memory import Buffer, Mappable, Mapping
from .release import once_default_is_free
from .resource import Resource
from .view import View

if TYPE_CHECKING:
    from ..backend import DriverHandle
    from .device import Device


class Allocation(Mappable):
    """Memory that other processes and APIs can import. `Device.allocate` and `Device.import_allocation` return it.

    Its size is the requested size, rounded up to the granularity. All its devices see it at one address. It is unmapped
    when none of them has work pending, and then released (``cuMemRelease`` / ``hipMemRelease``).

    Attributes
    ----------
    devices : tuple of Device
        Devices that can use it: its own device, then those of `access`.
    handle_type : type
        Type of the handles that `export` returns, or of the imported handle.

    Examples
    --------
    >>> with device.allocate(65536) as allocation, allocation.export() as handle:
    ...     field = np.asarray(allocation.view((64, 64), "float32"))
    ...     field[:] = 1
    ...     with device.import_allocation(handle, allocation.size) as theirs:  # in another process
    ...         np.asarray(theirs.buffer.view(2, "float32"))
    array([1., 1.], dtype=float32)
    """

    def __init__(
        self, devices: Sequence[Device], backend: AllocationBackend, handle_type: type[AllocationHandle], *, size: int,
        exportable: bool, label: str | None,
    ) -> None:  # fmt: skip
        streams = devices[0].streams
        super().__init__(Lifetime("Allocation", backend.release_allocation, device=streams, label=label, size=size))
        self.device, self.driver, self._size = devices[0], backend, size
        self.devices = tuple(devices)
        self._exportable = exportable
        self.location: int | None = devices[0].ordinal  # the device with the memory; None if unknown
        self._buffers: dict[Device, Buffer] = {}
        self.handle_type = handle_type

    @property
    def buffer(self) -> Buffer:
        """The whole allocation, mapped on first use (``cuMemMap`` / ``hipMemMap``)."""
        return self.buffer_on(self.device)

    def view(
        self, shape: int | Sequence[int], dtype: object = "uint8", offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> View:  # fmt: skip
        """Return a view of the whole allocation; see `Buffer.view`."""
        return self.buffer.view(shape, dtype, offset, strides)

    def buffer_on(self, device: Device) -> Buffer:
        """Return the whole allocation as one of its devices sees it, for that device's streams and array libraries.

        All devices see the same bytes at the same address. They are mapped once, for all (``cuMemMap``,
        ``cuMemSetAccess`` / ``hipMem...``), and unmapped when all buffers are closed and no device has work pending.

        Raises
        ------
        InvalidArgumentError
            `device` is not one of `devices`.
        """
        check_type(device, type(self.device), "device", "a gpuinterop Device")
        if device not in self.devices:
            known = ", ".join(map(repr, self.devices))
            raise InvalidArgumentError(
                "device", f"{device!r} has no access to {self.label}; expected one of {known}; name others in access=."
            )
        self._check_open()
        buffer = self._buffers.get(device)
        while buffer is None or buffer.closed:  # another thread may close it
            created = self._buffer(0, self._size, device)
            created.lifetime.warns = False  # the allocation owns it
            buffer = _choose_buffer(self, device, created)
        return buffer

    def export(self) -> AllocationHandle:
        """Return a new handle that you own (``cuMemExportToShareableHandle`` / ``hipMemExport...``).

        It has the type passed to `Device.allocate`. Another process imports it with `Device.import_allocation`.

        Raises
        ------
        InvalidArgumentError
            The allocation was imported.
        """
        self._check_exportable("allocation")
        handle = self.lifetime.use(self.driver.export_allocation)
        handle.origin = HandleOrigin(
            kind=OriginKind.ALLOCATION, device=self.device.identity, size=self._size, trusted=True
        )
        return handle

    def close(self, timeout: float | None = None) -> None:
        """Close the allocation (see `Resource.close`)."""
        try:
            super().close(timeout)
        finally:
            if self.closed:
                self._buffers.clear()  # they refer to the allocation, and the cycle would delay the memory's release

    def _new_mapping(self) -> Mapping:
        backend = self.driver
        return Mapping(self, self.devices, backend.unmap_allocation, blocks=backend.map_allocation_blocks, waits=False)

    def _map(self, mapping: Mapping) -> DriverHandle:
        def call() -> DriverHandle:
            devices = [device._handle for device in self.devices]
            handle, mapping.address = self.driver.map_allocation(self._handle, devices)
            return handle

        if not self.driver.map_allocation_blocks:
            return call()
        return once_default_is_free(self.device.gate, call, f"mapping {self.label}")


class DeviceArray(View, Resource):
    """An array in its own memory, which other processes and APIs can import. `Device.empty` returns it.

    Use it like any array. Dropping it frees the memory, as soon as no work and no array made from it uses the bytes.
    You can also `close` it.

    Examples
    --------
    >>> picture = device.empty((2, 3), "float32")
    >>> picture.copy_from(np.ones((2, 3), "float32"))
    >>> with gi.share(picture) as shared:  # a GPU: torch.from_dlpack(picture) in place of numpy.asarray
    ...     float(np.asarray(picture).sum())
    6.0
    """

    def __init__(self, allocation: Allocation, layout: Layout) -> None:
        Resource.__init__(self, allocation.lifetime)
        self.lifetime.warns = False  # first, because the next call may fail
        # The allocation does not refer to this buffer, so there is no cycle.
        buffer = allocation._buffer(0, allocation.size, allocation.device)
        buffer.lifetime.warns = False
        View.__init__(self, buffer, layout, 0)


@locked
def _choose_buffer(allocation: Allocation, device: Device, created: Buffer) -> Buffer:
    """Return the only buffer of a device. If two threads make one, both get the first."""
    known = allocation._buffers.get(device)
    if known is None or known.closed:
        known = allocation._buffers[device] = created
    return known
