"""External memory, how it is mapped, and buffers."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceBusyError, ResourceClosedError
from ..handles import ArrayLayout, ArrayUsage, MemoryHandle
from .interchange import DType, HostArray, View, contiguous, resolve_ints, resolve_shape, span
from .resource import Exports, Resource, Retirement, check_int, link, work_of
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import Native
    from .array import MipmappedArray
    from .device import Device

_MAX_SIZE = 2**63 - 1
MOMENT_S = 0.01


def check_size_argument(size: object, argument: str = "size", *, minimum: int = 1) -> int:
    number = check_int(size, argument)
    if number < minimum:
        raise InvalidArgumentError(argument, f"must be {minimum} or more bytes, not {number}.")
    if number > _MAX_SIZE:
        raise InvalidArgumentError(argument, f"{number} bytes overflows; the limit is 2**63 - 1.")
    return number


def round_up(size: int, step: int) -> int:
    return check_size_argument(-(-size // step) * step)


@dataclass(frozen=True, slots=True)
class _Use:
    """What a stream was given to do with a mapping: one hull of all its bytes. The stream may be dropped meanwhile."""

    stream: weakref.ref[Stream]
    retirement: Retirement
    start: int
    end: int


class Mapping(Resource):
    """A whole object, mapped: as long as one of its buffers is open."""

    _noun = "Mapping"
    _warns = False  # its buffers do

    def __init__(
        self,
        parent: Resource,
        device: Device,
        address: int,
        unmap: Callable[[], None],
        *,
        blocks: bool,
        devices: Sequence[Device] = (),
    ) -> None:
        self.exports = Exports()
        reclaimers = [one._reclaimer for one in devices or (device,)]
        link(reclaimers)
        super().__init__(
            device._reclaimer,
            unmap,
            parents=(parent,),
            streams=functools.partial(work_of, reclaimers),
            exports=self.exports,
            blocks=blocks,
        )
        self._device = device
        self.address = address
        self._uses: dict[tuple[int, int], _Use] = {}  # by device and native stream: 0 is one of every device
        self._using = threading.RLock()  # a finalizer may use the buffer, too
        self._making = 0
        self._ending = False

    def used_on(self, stream: Stream, start: int = 0, end: int = _MAX_SIZE) -> None:
        """Note that the stream was given work with these bytes."""
        key = stream._device.ordinal, stream._ptr
        with self._using:
            for other, use in list(self._uses.items()):
                if use.retirement.done:
                    del self._uses[other]
                elif other == key:
                    start, end = min(start, use.start), max(end, use.end)
            self._uses[key] = _Use(weakref.ref(stream), stream._retirement, start, end)

    def users(self, start: int, end: int) -> list[Stream]:
        """The streams that others must be ordered behind before they use these bytes."""
        found: list[Stream] = []
        for use in list(self._uses.values()):
            if end <= use.start or start >= use.end:
                continue
            stream = use.stream()
            if stream is None or stream.closed:
                self._reclaimer.wait(use.retirement, None)  # a closed stream cannot be waited for otherwise
            elif not stream.capturing:  # what is being captured does not run: others cannot be ordered behind it
                found.append(stream)
        return found

    @property
    def usable(self) -> bool:
        """Whether more buffers may be made of it."""
        return not (self._closed or self._ending)

    def buffer(self, offset: int, size: int, device: Device | None = None) -> Buffer:
        with self._using:
            if self._ending:
                raise ResourceClosedError(f"{self._label} is closed: its last buffer was; map the memory again.")
            self._making += 1  # seen by the close of another buffer, as this one is from then on
        try:
            return Buffer(self, device or self._device, offset, size)
        finally:
            with self._using:
                self._making -= 1
            self.end_if_unused()  # another may have been closed meanwhile, and this one not be made

    def end_if_unused(self) -> None:
        """Called by the last buffer that is closed."""
        with self._using:
            if self._making or self._open_children():
                return
            self._ending = True
        self._retire()


class Buffer(Resource):
    """Mapped bytes that the device and its array libraries use in place.

    Made by `ExternalMemory.map_buffer`, `Allocation.buffer` and `Allocation.buffer_on`. Closing the last buffer of a
    mapping unmaps it, once pending work and exported arrays are done with it.
    """

    _noun = "Buffer"

    def __init__(self, mapping: Mapping, device: Device, offset: int, size: int) -> None:
        self._mapping = mapping
        super().__init__(device._reclaimer, None, parents=(mapping,), streams=lambda: ((), ()))
        self._device = device
        self._backend = device._backend
        self._address = mapping.address + offset
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
            steps = resolve_ints(strides, "strides")
            if len(steps) != len(dims):
                raise InvalidArgumentError("strides", f"has {len(steps)} entries, shape has {len(dims)}.")
        low, high = span(dims, steps, element.itemsize)
        if start + low < 0 or start + high > self._size:
            raise InvalidArgumentError(
                "shape",
                f"{list(dims)} of {element.name} with strides {list(steps)} covers bytes {start + low} to "
                f"{start + high}, the buffer has {self._size}.",
            )
        if (self._address + start) % element.alignment:
            raise InvalidArgumentError(
                "offset", f"{start} is not aligned to {element.name} ({element.alignment} bytes); view bytes instead."
            )
        return View(self, dims, element, start, steps)

    def hold(self) -> object:
        """An object that keeps the bytes mapped as long as it lives, as an exported array does.

        For whoever hands `ptr` to another API: that API's use of it cannot be seen from here.
        """
        token = self._mapping.exports.token(self)  # first: what is checked then stays true
        self._check_open()
        return token

    def copy_from_host(self, source: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """Copy host memory into the buffer (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        Parameters
        ----------
        source : array or buffer
            Host memory. With a stream it must stay unchanged until the stream got there.
        offset : int
            Where to, in bytes.
        stream : Stream, optional
            None: ordered behind every stream that used these bytes, and done on return.

        Raises
        ------
        ResourceBusyError
            Pageable memory behind a pending semaphore wait: the copy would block the host and so could deadlock.
        """
        array = HostArray(source, argument="source", writable=False)
        start = self._range(offset, array.nbytes, "source")
        self._on(
            stream,
            start,
            array.nbytes,
            lambda native: self._backend.copy(native, self._address + start, array.ptr, array.nbytes),
            array=array,
        )

    def copy_to_host(self, target: object, *, offset: int = 0, stream: Stream | None = None) -> None:
        """Copy from the buffer into host memory; the parameters are those of `copy_from_host`."""
        array = HostArray(target, argument="target", writable=True)
        start = self._range(offset, array.nbytes, "target")
        self._on(
            stream,
            start,
            array.nbytes,
            lambda native: self._backend.copy(native, array.ptr, self._address + start, array.nbytes),
            array=array,
        )

    def fill(self, byte: int = 0, *, offset: int = 0, size: int | None = None, stream: Stream | None = None) -> None:
        """Set every byte (``cuMemsetD8Async`` / ``hipMemsetD8Async``); ``stream=None`` returns when done."""
        value = check_int(byte, "byte")
        if not 0 <= value <= 255:
            raise InvalidArgumentError("byte", f"must be 0 to 255, not {value}.")
        start = check_size_argument(offset, "offset", minimum=0)
        count = check_size_argument(self._size - start if size is None else size)
        self._range(start, count, "size")
        self._on(
            stream,
            start,
            count,
            lambda native: self._backend.fill(native, self._address + start, value, count),
            array=None,
        )

    # -- inside ------------------------------------------------------------------------------------------------

    def _range(self, offset: int, size: int, argument: str) -> int:
        self._check_open()
        start = check_size_argument(offset, "offset", minimum=0)
        if start + size > self._size:
            raise InvalidArgumentError(
                argument, f"bytes {start} to {start + size} are outside the buffer, which has {self._size}."
            )
        return start

    def _used_on(self, stream: Stream, start: int, size: int) -> None:
        first = self._offset + start
        self._mapping.used_on(stream, first, first + size)

    def _users(self, start: int = 0, size: int | None = None) -> list[Stream]:
        """As `Mapping.users`, of a part of the buffer."""
        first = self._offset + start
        return self._mapping.users(first, first + (self._size if size is None else size))

    def _on(
        self, stream: Stream | None, start: int, size: int, enqueue: Callable[[Native], None],
        *, array: HostArray | None,
    ) -> None:  # fmt: skip
        """Enqueue on the given stream, or on our own and wait for it."""
        with self._mapping._in_use():
            if stream is not None:
                check_stream(self._device, stream)
                if array is not None:
                    stream.check_host_copy(array)
                enqueue(stream._native)
                self._used_on(stream, start, size)
                if stream._graph is not None:
                    stream._graph.hold(self._mapping)
                if array is not None:
                    stream.keep_until_done(array)
                return
            with self._device._copy_stream() as copier:
                users = self._users(start, size)
                for user in users:
                    copier.wait_stream(user)
                if array is not None and users:
                    copier.check_host_copy(array)
                enqueue(copier._native)
                if array is not None:
                    copier.keep_until_done(array)  # the caller may be interrupted while the copy is still to come
                copier.synchronize()

    def _ended(self) -> None:
        self._mapping.end_if_unused()

    def close(self, timeout: float | None = None) -> None:
        """End use at once; as `Resource.close`.

        The mapping goes with its last buffer: while others share it, nothing is released, and `timeout` is not waited
        for.
        """
        super().close()
        if self._mapping.closed:
            self._mapping.close(timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """As `Resource.on_released`, for the mapping behind the buffer."""
        self._mapping.on_released(callback)


def new_buffer(mapped: Callable[[], Mapping], offset: int, size: int, device: Device | None = None) -> Buffer:
    """A buffer of the mapping that `mapped` finds or makes, whatever other threads close meanwhile."""
    while True:
        mapping = mapped()
        with contextlib.suppress(ResourceClosedError):  # another thread has closed its last buffer
            return mapping.buffer(offset, size, device)


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
        backend = device._backend

        def release(_keepalive: object = keepalive) -> None:
            backend.destroy_memory(native)

        super().__init__(device._reclaimer, release)
        self._device = device
        self._backend = backend
        self._native = native
        self._size = size
        self._mapping_lock = threading.RLock()  # two threads must not map it twice
        self._mapping: weakref.ref[Mapping] | None = None
        self._mapped: Retirement | None = None
        """The mapping's release: what is mapped twice is not coherent (CUDA), or freed twice (HIP)."""
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

        The driver maps the whole object, once; a buffer is a range of that. Ranges may overlap.

        Parameters
        ----------
        offset, size : int
            In bytes; by default everything.

        Raises
        ------
        InvalidArgumentError
            The range reaches outside the memory.
        ResourceBusyError
            All buffers were closed, and pending work or arrays still use one of them.
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
        with self._mapping_lock, self._in_use():
            self._reclaimer.drain()
            self._check_open()  # what drained may have called back, and closed it
            return new_buffer(lambda: self._open_mapping() or self._map(), start, count)

    def _open_mapping(self) -> Mapping | None:
        mapping = None if self._mapping is None else self._mapping()
        return mapping if mapping is not None and mapping.usable else None

    def _map(self) -> Mapping:
        before = self._mapped
        if before is not None and not before.done:
            exported = before.exports is not None and len(before.exports)
            # Where nothing but events is left, the driver may only need a moment to see them as done.
            if exported or not self._reclaimer.wait(before, MOMENT_S):
                raise ResourceBusyError(
                    f"{self._label} was mapped, and its buffers are closed and still in use ({before.blockers()}); "
                    "call close(timeout=...) on the last of them, or drop its arrays."
                )
        native, address = self._backend.map_buffer(self._native, size=self._size)
        unmap = functools.partial(self._backend.unmap_buffer, native)
        mapping = Mapping(self, self._device, address, unmap, blocks=True)
        self._mapping, self._mapped = weakref.ref(mapping), mapping._retirement
        return mapping

    def map_mipmapped_array(
        self,
        format: str,
        extent: Sequence[int],
        levels: int = 1,
        layers: int = 0,
        offset: int = 0,
        usage: ArrayUsage = ArrayUsage.SURFACE,
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
        usage : ArrayUsage
            What the image is used as; must be what the exporter created it for.

        Raises
        ------
        UnsupportedError
            The device cannot (`Operation.MAP_MIPMAPPED_ARRAY`).
        """
        from .array import map_mipmapped_array

        self._check_open()
        self._device.capabilities.require((Operation.MAP_MIPMAPPED_ARRAY, self.handle_type))
        start = check_size_argument(offset, "offset", minimum=0)
        dims = list(resolve_ints(extent, "extent"))
        if not 1 <= len(dims) <= 3:
            raise InvalidArgumentError("extent", f"has {len(dims)} dimensions; 1 to 3 are possible.")
        if not isinstance(usage, ArrayUsage):
            raise ArgumentTypeError("usage", f"must be a gpuinterop.ArrayUsage, not {usage!r}.")
        dims += [0] * (3 - len(dims))
        layout = ArrayLayout(
            format=format,
            extent=(dims[0], dims[1], dims[2]),
            levels=check_int(levels, "levels"),
            layers=check_int(layers, "layers"),
            offset=start,
            usage=usage,
        )
        with self._in_use():
            return map_mipmapped_array(self, layout)
