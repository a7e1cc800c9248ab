"""What shared buffers of Vulkan and OpenGL have in common: an array's one handle, and the compute side's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from .. import system
from .._arguments import NotAnArray
from ..backend import SharingBackend
from ..capabilities import Cell, Operation, Scope
from ..errors import InvalidArgumentError, UnsupportedError
from ..handles import FdHandle
from .sides import GraphicsSide, agree

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.foreign_arrays import Described
    from .._core.memory import Buffer
    from .._core.stream import Stream
    from .._core.view import View
    from ..backend import Block


@contextmanager
def exported_block(
    graphics: GraphicsSide, device: Device, array: Described, what: str, check_size: Callable[[int], None],
    way_out: str = "",
) -> Iterator[tuple[FdHandle, int, int]]:  # fmt: skip
    """The one handle that contains an array (a GPU's VMM handle, or a memfd), its size, and the array's offset in it.

    `what` imports it: the VkDevice, or the context.
    """
    from ..sharing.find_memory import check_block, locate
    from ..sharing.server import driver_lock

    name = graphics.identity.name
    if graphics.identity.conflicts(device.identity):
        raise InvalidArgumentError(
            "array",
            f"expected memory of {graphics.side}'s {name}, got that of {device.name}; create the {what} on that GPU.",
        )

    def check(device: Device, block: Block, what: str) -> None:
        agree(graphics, device, (Operation.EXPORT_ARRAY,), (block.kind.handle_type,))
        if not block.kind.travels:
            wanted = "a memfd" if device.info.is_cpu else "an exportable VMM handle"
            gap = Cell(Operation.EXPORT_ARRAY, block.kind.handle_type).gap(
                Scope.DRIVER,
                f"the driver imports memory only as {wanted}, and this array is not one: it is {block.kind.value}.",
                f"gpuinterop.{graphics.side.lower()}.import_array",
                f"put the array into Device.empty(shape, dtype). {way_out}".rstrip(),
            )
            raise UnsupportedError(gap, context=name)
        check_block(device, block, what)

    blocks = [block for run in locate(device, {"array": array}, check)[0] for block in run]
    if len(blocks) > 1:
        raise InvalidArgumentError(
            "array",
            f"expected an array in one handle, got one across {len(blocks)}; put it into Device.empty(shape, dtype), "
            "which is one handle of any size.",
        )
    (block,) = blocks
    check_size(block.size)
    with system.under(driver_lock, cast(SharingBackend, device.driver).export_block, device._handle, block) as handle:
        assert isinstance(handle, FdHandle)
        yield handle, block.size, array.span[0] - block.address


class BufferMethods(NotAnArray):
    """The compute side's methods of a shared buffer."""

    _as_array = "numpy.asarray(shared.view(shape, dtype))"
    _buffer: Buffer
    _immutable: bool

    @property
    def buffer(self) -> Buffer:
        """The compute side's buffer, with `ptr`, `view`, `copy_from_host`, `copy_to_host` and `fill`.

        Raises
        ------
        InvalidArgumentError
            It is an imported array that its library treats as immutable: read the array itself.
        """
        if self._immutable:
            raise InvalidArgumentError(
                "array", "expected an array that may be written, got an immutable one; read it with its own library."
            )
        return self._buffer

    @property
    def ptr(self) -> int:
        """`Buffer.ptr`."""
        return self.buffer.ptr

    @property
    def size(self) -> int:
        """Size in bytes: the size that you passed, or the imported array's."""
        return self._buffer.size

    def view(
        self, shape: int | Sequence[int], dtype: object = "uint8", offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> View:  # fmt: skip
        """Call `Buffer.view`."""
        return self.buffer.view(shape, dtype, offset, strides)

    def copy_from_host(self, source: object, *, offset: int = 0, stream: Stream | object = None) -> None:
        """Call `Buffer.copy_from_host`."""
        self.buffer.copy_from_host(source, offset=offset, stream=stream)

    def copy_to_host(self, target: object, *, offset: int = 0, stream: Stream | object = None) -> None:
        """Call `Buffer.copy_to_host`."""
        self.buffer.copy_to_host(target, offset=offset, stream=stream)

    def fill(self, byte: int = 0, *, offset: int = 0, size: int | None = None, stream: Stream | object = None) -> None:
        """Call `Buffer.fill`."""
        self.buffer.fill(byte, offset=offset, size=size, stream=stream)
