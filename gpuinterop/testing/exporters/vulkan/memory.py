"""Memory of the Vulkan exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...._arguments import check_nbytes
from ....errors import InvalidArgumentError, ResourceClosedError
from ....handles import AllocationHandle, MemoryHandle
from ....vulkan import _api as c
from ....vulkan._buffer import SharedBuffer, create_buffer, import_array, import_fd
from ....vulkan._query import BUFFER_USAGE
from ..base import ExporterMemory
from .staging import TRANSFERS, Staged, map_memory

if TYPE_CHECKING:
    from .exporter import VulkanExporter

__all__ = ["VulkanMemory"]


class VulkanMemory(Staged, ExporterMemory):
    """A buffer with exportable memory, or on memory that a device has allocated: a handle's, or an array's.

    It is accessed through its mapping if the host sees it, otherwise through a staging buffer and the queue.
    """

    def __init__(
        self, exporter: VulkanExporter, size: int, handle: AllocationHandle | None = None, array: object = None,
        usage: int = BUFFER_USAGE,
    ) -> None:  # fmt: skip
        super().__init__(exporter)
        vk = exporter.open()
        self._imported = handle is not None or array is not None
        self._shared: SharedBuffer | None = None
        if array is not None:
            self._shared = import_array(vk, array, usage=usage)
            native, self.size = self._shared.vulkan_object, self._shared.size
        elif handle is not None:
            self.size = check_nbytes(size)
            native = import_fd(vk, handle, self.size, usage, argument="size", user="VulkanExporter.import_memory()")
        else:
            native = create_buffer(vk, size, usage)
            self.size = native.size
        self.vulkan_object = native
        self.dedicated = native.dedicated
        host = c.MEMORY_HOST_VISIBLE | c.MEMORY_HOST_COHERENT
        self._bytes: Any = None
        try:
            # A GPU has its own caches. Even if the host sees its memory, only a copy with a barrier to host reads makes
            # the bytes certain.
            if array is None and vk.is_cpu and native.flags & host == host and not exporter._staged:
                self._bytes = map_memory(vk, native.memory, self.size)
            exporter.children[self] = None
        except BaseException:
            native.close()
            raise

    @property
    def vk_buffer(self) -> Any:
        return self.vulkan_object.handle

    def export(self) -> MemoryHandle:
        self.check()
        if self._imported:
            raise InvalidArgumentError("memory", "was imported; export it where it was allocated.")
        return self.vulkan_object.export()

    def write(self, offset: int, data: bytes) -> None:
        self.check(offset, len(data))
        if not data:
            return
        if self._bytes is not None:
            self._bytes[offset : offset + len(data)] = data
            return
        with self._lock:
            staging = self._stage(len(data))
            staging.bytes[: len(data)] = data
            self._copy_bytes(staging.handle, self.vk_buffer, 0, offset, len(data))

    def read(self, offset: int, size: int) -> bytes:
        self.check(offset, size)
        if not size:
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[offset : offset + size])
        with self._lock:
            staging = self._stage(size)
            self._copy_bytes(self.vk_buffer, staging.handle, offset, 0, size)
            return bytes(staging.bytes[:size])

    def _copy_bytes(self, source: Any, target: Any, source_offset: int, target_offset: int, size: int) -> None:
        vk = self.exporter.vk
        region = vk.api.new("VkBufferCopy", srcOffset=source_offset, dstOffset=target_offset, size=size)

        def record(commands: Any) -> None:
            with self.taken(commands, c.STAGE_TRANSFER, TRANSFERS):
                vk.functions.vkCmdCopyBuffer(commands, source, target, 1, region)
                self._to_host(commands)

        self._copy(record)

    @contextmanager
    def taken(self, commands: Any, stage: int, access: int) -> Iterator[None]:
        """Take ownership back from the other side, let the caller record, and give ownership away again."""
        native = self.vulkan_object
        native.transfer(commands, native.other_side(stage), native.vulkan_side(stage, access))
        yield
        native.transfer(commands, native.vulkan_side(stage, access), native.other_side(c.STAGE_BOTTOM_OF_PIPE))

    def check(self, offset: int = 0, size: int = 0) -> None:
        if self.vulkan_object.closed:
            raise ResourceClosedError("the exporter's memory was closed.")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise InvalidArgumentError(
                "offset", f"expected bytes within 0 to {self.size}, got {offset} to {offset + size}."
            )

    def close(self) -> None:
        if not self.vulkan_object.closed and self.exporter.settle(self):
            self._bytes = None
            self._unstage()
            (self._shared or self.vulkan_object).close()
        self.exporter.children.pop(self, None)
