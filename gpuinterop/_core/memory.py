"""External memory, the ranges of it that are mapped, and buffers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceBusyError
from ..handles import ArrayLayout, MemoryHandle
from .interchange import DType, HostArray, View, contiguous, resolve_shape, span
from .resource import Exports, Resource, Retirement
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import Native
    from .array import MipmappedArray
    from .device import Device

_MAX_SIZE = 2**63 - 1
_MOMENT_S = 0.01


def check_size_argument(size: object, argument: str = "size", *, minimum: int = 1) -> int:
    try:
        number = operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(argument, f"must be an int (bytes), not {type(size).__name__}.") from None
    if number < minimum:
        raise InvalidArgumentError(argument, f"must be {minimum} or more bytes, not {number}.")
    if number > _MAX_SIZE:
        raise InvalidArgumentError(argument, f"{number} bytes overflows; the limit is 2**63 - 1.")
    return number


class Mapping(Resource):
    """A mapped range: as long as one of its buffers is open."""

    _noun = "Mapping"
    _warns = False  # its buffers do

    def __init__(self, parent: Resource, device: Device, address: int, *, offset: int, size: int) -> None:
        super().__init__(device._reclaimer, parent=parent)
        self._device = device
        self.address = address
        self.offset = offset
        self.size = size
        self.exports = Exports()
        self.unmap: Callable[[], None] = lambda: None
        self._last: Stream | None = None

    def used_on(self, stream: Stream) -> None:
        self._last = stream

    def last_stream(self) -> Stream | None:
        """The stream whose work others must be ordered behind; None when there is none pending."""
        last = self._last
        if last is None or not last.closed:
            return last
        while last._retirement is not None and not self._reclaimer.wait(last._retirement, 1.0):
            pass  # a closed stream cannot be waited for otherwise
        self._last = None
        return None

    def buffer(self, offset: int, size: int) -> Buffer:
        return Buffer(self, self._device, offset, size)

    def buffer_closed(self) -> None:
        if not any(not child.closed for child in self._children):
            self._retire()

    def _make_retirement(self, after: list[Retirement]) -> Retirement:
        return Retirement(
            self._label,
            self.unmap,
            streams=self._reclaimer.streams(),
            after=[*after, *self._reclaimer.retiring_streams()],
            exports=self.exports,
        )


class Buffer(Resource):
    """Mapped bytes that the device and its array libraries use in place.

    Made by `ExternalMemory.map_buffer` and `Allocation.buffer`. Closing the last buffer of a mapping unmaps it, once
    pending work and exported arrays are done with it.
    """

    _noun = "Buffer"

    def __init__(self, mapping: Mapping, device: Device, offset: int, size: int) -> None:
        super().__init__(device._reclaimer, parent=mapping)
        self._mapping = mapping
        self._device = device
        self._backend = device._backend
        self._address = mapping.address + offset - mapping.offset
        self._offset = offset
        self._size = size

    @property
    def device(self) -> Device:
        return self._device

    @property
    def ptr(self) -> int:
        """The address of the first byte on the device."""
        self._check_open()
        return self._address

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    @property
    def offset(self) -> int:
        """In bytes, from the start of the memory."""
        return self._offset

    def view(
        self,
        shape: int | Sequence[int],
        dtype: object = "uint8",
        offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> View:
        """A typed window, without a copy.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : str or dtype
            ``"float32"``, a NumPy or a torch dtype.
        offset : int
            Of the first element, in bytes from the buffer's start.
        strides : sequence of int, optional
            In bytes; by default C-contiguous. A linear image's row pitch goes here.

        Returns
        -------
        View
            For ``numpy.from_dlpack``, ``torch.from_dlpack``, ``cupy.asarray``... It keeps the mapping alive as long
            as the array lives.

        Raises
        ------
        InvalidArgumentError
            The window reaches outside the buffer, or is not aligned to its element size.
        """
        self._check_open()
        element = DType(dtype)
        dims = resolve_shape(shape)
        start = check_size_argument(offset, "offset", minimum=0)
        if strides is None:
            steps = contiguous(dims, element.itemsize)
        else:
            steps = tuple(operator.index(stride) for stride in strides)
            if len(steps) != len(dims):
                raise InvalidArgumentError("strides", f"has {len(steps)} entries, shape has {len(dims)}.")
        low, high = span(dims, steps, element.itemsize)
        if start + low < 0 or start + high > self._size:
            raise InvalidArgumentError(
                "shape",
                f"{list(dims)} of {element.name} with strides {list(steps)} covers bytes {start + low} to "
                f"{start + high}, the buffer has {self._size}.",
            )
        if (self._address + start) % element.itemsize:
            raise InvalidArgumentError(
                "offset", f"{start} is not aligned to {element.name} ({element.itemsize} bytes); view bytes instead."
            )
        return View(self, dims, element, start, steps)

    def hold(self) -> object:
        """An object that keeps the bytes mapped as long as it lives, as an exported array does.

        For whoever hands `ptr` to another API: that API's use of it cannot be seen from here.
        """
        self._check_open()
        return self._mapping.exports.token(self)

    def copy_from_host(self, source: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """Copy host memory into the buffer (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        Parameters
        ----------
        source : array or buffer
            Host memory. With a stream it must stay unchanged until the stream got there.
        offset : int
            Where to, in bytes.
        stream : Stream, optional
            None: ordered behind the buffer's last stream, and done on return.

        Raises
        ------
        ResourceBusyError
            Pageable memory behind a pending semaphore wait: the copy would block the host and so could deadlock.
        """
        array = HostArray(source, argument="source", writable=False)
        start = self._range(offset, array.nbytes, "source")
        self._on(
            stream,
            lambda native: self._backend.copy(native, self._address + start, array.ptr, array.nbytes),
            array=array,
        )

    def copy_to_host(self, target: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """Copy from the buffer into host memory; the parameters are those of `copy_from_host`."""
        array = HostArray(target, argument="target", writable=True)
        start = self._range(offset, array.nbytes, "target")
        self._on(
            stream,
            lambda native: self._backend.copy(native, array.ptr, self._address + start, array.nbytes),
            array=array,
        )

    def fill(self, byte: int = 0, *, offset: int = 0, size: int | None = None, stream: Stream | None = None) -> None:
        """Set every byte (``cuMemsetD8Async`` / ``hipMemsetD8Async``); ``stream=None`` returns when done."""
        value = operator.index(byte)
        if not 0 <= value <= 255:
            raise InvalidArgumentError("byte", f"must be 0 to 255, not {value}.")
        start = check_size_argument(offset, "offset", minimum=0)
        count = check_size_argument(self._size - start if size is None else size)
        self._range(start, count, "size")
        self._on(stream, lambda native: self._backend.fill(native, self._address + start, value, count), array=None)

    # -- inside ------------------------------------------------------------------------------------------------

    def _range(self, offset: int, size: int, argument: str) -> int:
        self._check_open()
        start = check_size_argument(offset, "offset", minimum=0)
        if start + size > self._size:
            raise InvalidArgumentError(
                argument, f"bytes {start} to {start + size} are outside the buffer, which has {self._size}."
            )
        return start

    def _on(self, stream: Stream | None, enqueue: Callable[[Native], None], *, array: HostArray | None) -> None:
        """Enqueue on the given stream, or on our own and wait for it."""
        if stream is not None:
            check_stream(self._device, stream)
            if array is not None and array.pageable:
                stream.refuse_blocking_copy()
            enqueue(stream._native)
            self._mapping.used_on(stream)
            if array is not None:
                stream.keep_until_done(array)
            return
        copier = self._device._copy_stream()
        last = self._mapping.last_stream()
        if last is not None and last is not copier:
            copier.wait_stream(last)
        enqueue(copier._native)
        copier.synchronize()

    def _make_retirement(self, after: list[Retirement]) -> Retirement | None:
        self._mapping.buffer_closed()
        return None

    def _await_release(self, timeout: float) -> None:
        raise AssertionError("a buffer has no native half")

    def close(self, timeout: float | None = None) -> None:
        super().close()
        if timeout is not None and self._mapping.closed:
            self._mapping.close(timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """As `Resource.on_released`, for the mapping behind the buffer."""
        self._mapping.on_released(callback)


class ExternalMemory(Resource):
    """Memory that another API or process exported. Made by `Device.import_memory`.

    Closing it closes its buffers and arrays. The native release (``cuDestroyExternalMemory`` /
    ``hipDestroyExternalMemory``) follows when the device is done with them; the exporter may free its own memory
    after that (`on_released`, ``close(timeout=...)``).
    """

    _noun = "ExternalMemory"

    def __init__(
        self, device: Device, native: Native, handle_type: type[MemoryHandle], *, size: int, dedicated: bool,
        keepalive: object = None,
    ) -> None:  # fmt: skip
        super().__init__(device._reclaimer)
        self._device = device
        self._backend = device._backend
        self._native = native
        self._size = size
        self._keepalive = keepalive
        self.handle_type = handle_type
        self.dedicated = dedicated

    @property
    def device(self) -> Device:
        return self._device

    @property
    def size(self) -> int:
        """Of the allocation, in bytes."""
        return self._size

    def map_buffer(self, offset: int = 0, size: int | None = None) -> Buffer:
        """Map bytes (``cuExternalMemoryGetMappedBuffer`` / ``hipExternalMemoryGetMappedBuffer``).

        A range is mapped once: one that lies within a mapped range becomes a sub-buffer of it.

        Parameters
        ----------
        offset, size : int
            In bytes; by default everything.

        Raises
        ------
        InvalidArgumentError
            The range reaches outside the memory, or overlaps a mapped range without lying in it: two mappings of the
            same bytes are not coherent. The message names the range to map instead.
        ResourceBusyError
            The range was mapped, and closed, and pending work or arrays still use it.
        UnsupportedError
            The device cannot (`Operation.MAP_BUFFER`).
        """
        self._check_open()
        start = check_size_argument(offset, "offset", minimum=0)
        if size is None and start >= self._size:
            raise InvalidArgumentError("offset", f"{start} is outside the memory, which has {self._size} bytes.")
        count = self._size - start if size is None else check_size_argument(size)
        end = start + count
        if end > self._size:
            raise InvalidArgumentError(
                "size", f"bytes {start} to {end} are outside the memory, which has {self._size}."
            )
        self._device.capabilities.require((Operation.MAP_BUFFER, self.handle_type))
        self._reclaimer.drain()
        for child in list(self._children):
            if not isinstance(child, Mapping) or (child._retirement is not None and child._retirement.done):
                continue
            low, high = child.offset, child.offset + child.size
            if end <= low or start >= high:
                continue
            if child.closed:
                # Where nothing but events is left, the driver may only need a moment to see them as done.
                if not len(child.exports) and self._reclaimer.wait(child._retirement, _MOMENT_S):
                    continue
                raise ResourceBusyError(
                    f"bytes {low} to {high} of {self._label} were mapped and closed, and are still in use; call "
                    "close(timeout=...) on that buffer, or drop its arrays."
                )
            if low <= start and end <= high:
                return child.buffer(start, count)
            union = min(low, start), max(high, end)
            raise InvalidArgumentError(
                "offset",
                f"bytes {start} to {end} partly overlap the mapped bytes {low} to {high}, and two mappings of the same "
                f"bytes are not coherent: map offset={union[0]}, size={union[1] - union[0]} once, first, and take "
                "sub-buffers of it.",
            )
        native, address = self._backend.map_buffer(self._native, offset=start, size=count)
        mapping = Mapping(self, self._device, address, offset=start, size=count)
        backend = self._backend
        mapping.unmap = lambda: backend.unmap_buffer(native)
        return mapping.buffer(start, count)

    def map_mipmapped_array(
        self,
        format: str,
        extent: Sequence[int],
        levels: int = 1,
        layers: int = 0,
        offset: int = 0,
        *,
        cubemap: bool = False,
        color_attachment: bool = False,
        surface: bool = True,
    ) -> MipmappedArray:
        """Map an optimally tiled image (``cuExternalMemoryGetMappedMipmappedArray`` / ``hip...``).

        Parameters
        ----------
        format : str
            A Vulkan format without the prefix, e.g. ``R32G32B32A32_SFLOAT``; see `MipmappedArray`.
        extent : sequence of int
            Width, height, depth in texels; 0 or left out where the image has none.
        levels, layers : int
            Mip levels; array layers, 0 for no array.
        offset : int
            In bytes.
        cubemap, color_attachment, surface : bool
            The image's usage; must be what the exporter created it with.

        Raises
        ------
        UnsupportedError
            The device cannot (`Operation.MAP_MIPMAPPED_ARRAY`).
        """
        from .array import map_mipmapped_array

        self._check_open()
        self._device.capabilities.require((Operation.MAP_MIPMAPPED_ARRAY, self.handle_type))
        start = check_size_argument(offset, "offset", minimum=0)
        dims = [operator.index(dim) for dim in extent]
        if not 1 <= len(dims) <= 3:
            raise InvalidArgumentError("extent", f"has {len(dims)} dimensions; 1 to 3 are possible.")
        dims += [0] * (3 - len(dims))
        layout = ArrayLayout(
            format=format,
            extent=(dims[0], dims[1], dims[2]),
            levels=levels,
            layers=layers,
            offset=start,
            cubemap=cubemap,
            color_attachment=color_attachment,
            surface=surface,
        )
        return map_mipmapped_array(self, layout)

    def _make_retirement(self, after: list[Retirement]) -> Retirement:
        backend, native = self._backend, self._native
        return Retirement(
            self._label,
            lambda: backend.destroy_memory(native),
            streams=self._reclaimer.streams(),
            after=[*after, *self._reclaimer.retiring_streams()],
        )
