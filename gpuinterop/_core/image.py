"""Images in external memory, optimally tiled (`MipmappedArray`), and copies of their levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from .._arguments import NotAnArray, check_int, check_nbytes
from ..backend import ArrayBackend
from ..errors import ArgumentTypeError, InvalidArgumentError
from ..handles import ArrayLayout, ArrayUsage
from .host_array import HostArray
from .layout import resolve_ints
from .lifetime import Lifetime, marked, note_use
from .resource import Resource
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import DriverHandle
    from .memory import Buffer, ExternalMemory


class MipmappedArray(Resource, NotAnArray):
    """An optimally tiled image in external memory. `ExternalMemory.map_mipmapped_array` returns it.

    After `close`, it is released when the device has finished with it (``cuMipmappedArrayDestroy``).

    Attributes
    ----------
    layout : ArrayLayout
        Format, extent, levels, layers, offset and usage.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.import_memory(gi.OpaqueFd(fd), size=65536) as memory:
    ...     image = memory.map_mipmapped_array("R32_SFLOAT", (64, 64), levels=3)
    ...     [image.level(n).extent for n in range(3)]
    [(64, 64, 0), (32, 32, 0), (16, 16, 0)]
    """

    _as_array = "image.level(0).copy_to_host(target, stream=stream)"

    def __init__(self, memory: ExternalMemory, layout: ArrayLayout, label: str | None) -> None:
        backend = cast(ArrayBackend, memory.driver)  # otherwise the capability is a gap
        gate = memory.device.gate if backend.releases_block else None
        parents, destroy = (memory.lifetime,), backend.destroy_array
        super().__init__(Lifetime("MipmappedArray", destroy, parents=parents, gate=gate, label=label), memory)
        self.device, self.driver = memory.device, backend
        self.layout = layout
        self.lifetime.create(lambda: backend.map_array(memory._handle, layout))

    def level(self, n: int) -> ArrayLevel:
        """Return one mip level; 0 is the largest.

        Raises
        ------
        InvalidArgumentError
            The image does not have level `n`.
        """
        self._check_open()
        return ArrayLevel(self, check_int(n, "n", minimum=0, maximum=self.layout.levels - 1))


class ArrayLevel(NotAnArray):
    """One mip level of an image, with all its layers.

    Copies run on the stream that you pass, a stream of the same device (``cuMipmappedArrayGetLevel``,
    ``cuMemcpy3DAsync``). In host memory and in buffers, texels are tightly packed: row by row, slice by slice, layer by
    layer.

    Attributes
    ----------
    index : int
        Number of the level.
    extent : tuple of int
        Width, height and depth of this level in texels.
    nbytes : int
        Size of all layers, tightly packed.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> with device.import_memory(gi.OpaqueFd(fd), size=65536) as memory:
    ...     level = memory.map_mipmapped_array("R32_SFLOAT", (64, 64)).level(0)
    ...     level.copy_from_buffer(buffer, stream=stream)
    ...     texels = np.empty((64, 64), "float32")
    ...     level.copy_to_host(texels, stream=stream)
    ...     stream.synchronize(timeout=10)
    """

    _as_array = "level.copy_to_host(target, stream=stream)"

    def __init__(self, image: MipmappedArray, index: int) -> None:
        self._image, self.index = image, index
        width, height, depth = (max(1, dim >> index) if dim else 0 for dim in image.layout.extent)
        self.extent = (width, height, depth)
        texels = width * max(1, height) * max(1, depth) * max(1, image.layout.layers)
        self.nbytes = texels * image.layout.texel.nbytes

    def copy_from_host(self, source: object, *, stream: Stream | object) -> None:
        """Enqueue a copy of host memory into the level.

        The memory has `nbytes` bytes, and any shape and dtype. Do not change it until the stream has copied it.

        Raises
        ------
        InvalidArgumentError
            The size is not `nbytes`, or the stream is being captured.
        ResourceBusyError
            See `Buffer.copy_from_host`.
        """
        self._copy_host(HostArray(source, argument="source", writable=False), "source", stream, to_image=True)

    def copy_to_host(self, target: object, *, stream: Stream | object) -> None:
        """Enqueue a copy of the level into host memory.

        The memory has `nbytes` bytes, and is writable and C-contiguous. Do not read it before the stream has copied it.

        Raises
        ------
        InvalidArgumentError, ResourceBusyError
            See `copy_from_host`.
        """
        self._copy_host(HostArray(target, argument="target", writable=True), "target", stream, to_image=False)

    def copy_from_buffer(self, source: Buffer, *, offset: int = 0, stream: Stream | object) -> None:
        """Enqueue a copy of `nbytes` of a buffer of the same device, from byte `offset` on, into the level."""
        self._copy_buffer(source, offset, stream, to_image=True)

    def copy_to_buffer(self, target: Buffer, *, offset: int = 0, stream: Stream | object) -> None:
        """Enqueue a copy of the level into `nbytes` of a buffer of the same device, from byte `offset` on."""
        self._copy_buffer(target, offset, stream, to_image=False)

    def _copy_host(self, host: HostArray, argument: str, stream: object, *, to_image: bool) -> None:
        if host.nbytes != self.nbytes:
            raise InvalidArgumentError(
                argument, f"expected the {self.nbytes} bytes of level {self.index}, got {host.nbytes}."
            )
        stream = check_stream(self._image.device, stream)
        stream._check_host_copy(host)
        self._enqueue(host.ptr, stream, to_image=to_image, host=host)

    def _copy_buffer(self, buffer: Buffer, offset: int, stream: object, *, to_image: bool) -> None:
        start, _ = buffer._range_of(offset, self.nbytes, "offset")
        stream = check_stream(self._image.device, stream)
        self._enqueue(buffer.address + start, stream, buffer, start, to_image=to_image)

    def _enqueue(
        self, address: int, stream: Stream, buffer: Buffer | None = None, start: int = 0, *, to_image: bool,
        host: HostArray | None = None,
    ) -> None:  # fmt: skip
        image, known = self._image, stream._known_as()
        with marked(known.calls):  # no `Stream.capture` begins or ends between the check and the call
            if (graph := known.graph) is not None:
                graph._hold(image.lifetime)
            elif known not in image.lifetime.uses:
                note_use(image.lifetime, known, None)
            owners = [image.lifetime]
            if buffer is not None:
                buffer._use_on(stream, start, self.nbytes)
                owners.append(buffer.mapping)

            def copy(handle: DriverHandle) -> None:
                image.driver.copy_level(handle, image._handle, self.index, address, self.nbytes, to_array=to_image)

            stream._enqueue(copy, *owners, host=host)
            if to_image:
                image.lifetime.written = True
            elif buffer is not None:
                buffer.mapping.written = True


def image_layout(
    memory: ExternalMemory, format: str, extent: Sequence[int], levels: int, layers: int, offset: int, usage: ArrayUsage
) -> ArrayLayout:
    """Check the arguments against the memory, and return the layout. The caller has required MAP_MIPMAPPED_ARRAY."""
    start = check_nbytes(offset, "offset", minimum=0)
    dims = resolve_ints(extent, "extent")
    if not 1 <= len(dims) <= 3:
        raise InvalidArgumentError("extent", f"expected 1 to 3 dimensions, got {len(dims)}.")
    if not isinstance(usage, ArrayUsage):
        raise ArgumentTypeError("usage", f"expected a gpuinterop.ArrayUsage, got {usage!r}.")
    width, height, depth = (*dims, 0, 0)[:3]
    whole = (width, height, depth)
    levels, layers = check_int(levels, "levels"), check_int(layers, "layers")
    layout = ArrayLayout(format=format, extent=whole, levels=levels, layers=layers, offset=start, usage=usage)
    if width < 1 or min(height, depth) < 0 or (depth and not height):
        raise InvalidArgumentError("extent", f"expected the extent of an image, got {whole}.")
    most = max(whole).bit_length()
    if not 1 <= levels <= most:
        raise InvalidArgumentError("levels", f"expected 1 to {most} levels for an image of {whole}, got {levels}.")
    if layers < 0 or (usage & ArrayUsage.CUBEMAP and layers % 6):
        raise InvalidArgumentError("layers", f"expected 0 or more, for cube maps a multiple of 6, got {layers}.")
    least = width * max(1, height) * max(1, depth) * max(1, layers) * layout.texel.nbytes
    memory._check_range(start, 1)
    if start + least > memory.size:
        raise InvalidArgumentError(
            "extent",
            f"expected a level 0 of {memory.size - start} bytes or fewer from offset {start}, got {least} or more; "
            "pass a smaller extent, or an earlier offset.",
        )
    return layout
