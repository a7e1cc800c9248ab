"""Memory that another object has mapped, as buffers and views: of shares, attachments and imported arrays."""

from __future__ import annotations

from collections.abc import Sequence

from .._core.device import Device
from .._core.lifetime import Lifetime
from .._core.memory import Buffer, Mappable, Mapping
from ..backend import DriverHandle
from .messages import Region


class SharedMemory(Mappable):
    """The memory of one share or attachment, from the first byte of its regions to the last.

    Its arrays keep only this object. `keep` holds memory that belongs to this process.
    """

    def __init__(
        self, device: Device, address: int, size: int, parents: Sequence[Lifetime] = (), *, keep: object = None,
        noun: str = "", label: str | None = None,
    ) -> None:  # fmt: skip
        noun, streams = noun or "shared memory", device.streams
        super().__init__(Lifetime(noun, parents=parents, keep=keep, device=streams, label=label, size=size))
        self.lifetime.warns = not parents  # a share or an attachment gives its own warning
        self.device, self.driver, self._size, self._address = device, device.driver, size, address
        self.lifetime.open()
        self.buffer: Buffer = self._buffer(0, size, device, label)
        self.buffer.lifetime.warns = False

    def _new_mapping(self) -> Mapping:
        return Mapping(self, (self.device,), _nothing, blocks=False, waits=False)

    def _map(self, mapping: Mapping) -> DriverHandle:
        mapping.address = self._address
        return self._address


def _nothing(_: object) -> None:
    """Unmap nothing: an import or another library does."""


def memory_of(
    device: Device, regions: Sequence[Region], addresses: Sequence[int], parents: Sequence[Lifetime]
) -> tuple[SharedMemory, list[int]]:
    """The memory that contains regions at these addresses, and the offset of each."""
    first = min(addresses, default=0)
    end = max((at + region.size for at, region in zip(addresses, regions, strict=True)), default=first)
    return SharedMemory(device, first, end - first, parents), [at - first for at in addresses]
