"""Mapped memory, of this process or imported: its one mapping, and buffers with copies, fills and their order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from .. import system
from .._arguments import NoCopy, NotAnArray, check_int, check_nbytes
from ..capabilities import Operation
from ..errors import InvalidArgumentError, ResourceBusyError, ResourceClosedError, again
from ..handles import ArrayUsage, MemoryHandle
from .host_array import HostArray
from .image import MipmappedArray, image_layout
from .layout import Layout, layout_of
from .lifetime import (
    FINAL,
    LIVE,
    MARK,
    Dependency,
    Lifetime,
    Marks,
    State,
    dropped,
    forget_use,
    locked,
    marked,
    note_use,
)
from .release import drain, tidy, wait_for
from .resource import Resource
from .stream import Stream, check_stream
from .view import View

if TYPE_CHECKING:
    from ..backend import DriverHandle
    from .device import Device
    from .streams import KnownStream, Streams

    Owners: TypeAlias = Sequence[tuple["Buffer", int]]

SETTLE_S = 0.01  # drivers need a moment to report work as done


def round_up(size: int, step: int) -> int:
    return check_nbytes(-(-size // step) * step)


class Mapping(Lifetime):
    """The mapping of a whole object. It is unmapped after its last buffer is closed."""

    __slots__ = ("address", "arrays", "devices", "size", "waits")

    def __init__(
        self, owner: Mappable, devices: Sequence[Device], unmap: Callable[[DriverHandle], None], *, blocks: bool,
        waits: bool,
    ) -> None:  # fmt: skip
        super().__init__("Mapping", unmap, parents=(owner.lifetime,), gate=devices[0].gate if blocks else None)
        self.ends_with_children = True
        self.arrays = Marks()
        self.devices = devices
        self.waits = waits  # whether the driver's unmap call waits for all work of the device
        self.address = 0
        self.size = owner._size

    def is_of(self, device: Streams) -> bool:
        return any(member.streams is device for member in self.devices)

    def expose(self) -> None:
        """Note that a caller knows the address, so any stream can use it from now on."""
        if not self.untracked and not self.waits:
            self.untracked = tuple(device.streams for device in self.devices)

    def used_on(self, stream: KnownStream, start: int, end: int) -> None:
        hull = self.uses.get(stream)
        if hull is None or start < hull[0] or hull[1] < end:
            _widen(self, stream, start, end)

    def users(self, start: int, end: int, user: Stream | None) -> list[KnownStream]:
        """Return the other streams that `user` must wait for. Raise if one has failed, or is being captured."""
        others = []
        itself = None if user is None else user._known_as()
        for stream, hull in self.uses.copy().items():
            if stream is itself or end <= hull[0] or hull[1] <= start or stream.state in FINAL:
                continue
            if (failure := stream.take_failure()) is not None:
                raise again(failure)
            if stream.is_capturing():
                raise InvalidArgumentError(
                    "stream",
                    f"cannot wait for {stream.label}, which used these bytes before its capture began; synchronize it "
                    "before the capture.",
                )
            others.append(stream)
        return others


@locked
def _widen(mapping: Mapping, stream: KnownStream, start: int, end: int) -> None:
    first, last = mapping.uses.get(stream, (start, end))
    note_use(mapping, stream, (min(first, start), max(last, end)))


class Sized(Resource, NotAnArray):
    """An object that has a device and a size in bytes."""

    device: Device  # the driver is called through this one
    _size: int
    _exportable = False

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._size

    def _check_exportable(self, argument: str) -> None:
        self._check_open()
        if not self._exportable:
            raise InvalidArgumentError(
                argument, f"{self.label} was imported and cannot be exported; duplicate() its handle before the import."
            )

    def _range_of(self, offset: int, size: int | None, argument: str = "size", *, least: int = 1) -> tuple[int, int]:
        """Return start and size of a range of the open object; by default everything from `offset` on."""
        if self.lifetime.state is not LIVE:
            raise self.lifetime.refusal()
        start = check_nbytes(offset, "offset", minimum=0)
        count = max(self._size - start, 1) if size is None else check_nbytes(size, minimum=least)
        if start + count > self._size:
            self._check_range(start, count, argument)
        return start, count

    def _check_range(self, start: int, size: int, argument: str = "size") -> None:
        if start + min(size, 1) > self._size:  # even the first byte is outside
            raise InvalidArgumentError(
                "offset", f"expected an offset in {self.label}, which has {self._size} bytes; got {start}."
            )
        if start + size > self._size:
            left = self._size - start
            raise InvalidArgumentError(
                argument, f"expected {left} bytes or less at offset {start}, got {size}: {self.label} has {self._size}."
            )


class Mappable(Sized):
    """Memory that is mapped once, as a whole; buffers are ranges of the mapping."""

    _mapping: Mapping | None = None

    @abstractmethod
    def _new_mapping(self) -> Mapping:
        """Return a mapping that is not yet mapped natively."""

    @abstractmethod
    def _map(self, mapping: Mapping) -> DriverHandle:
        """Map the memory natively, set the mapping's address and return the handle."""

    def _buffer(self, offset: int, size: int, device: Device, label: str | None = None) -> Buffer:
        """Return a new buffer, and map the memory if necessary. The caller has checked the range."""
        tidy()
        while True:
            mapping = self._mapping
            if mapping is None or mapping.state is not LIVE:
                mapping = self._open()
            if mapping.state is LIVE:
                try:
                    return Buffer(self, mapping, device, offset, size, label)
                except ResourceClosedError:
                    continue  # another thread has closed the last buffer
            self._check_open()
            is_held = mapping.arrays.copy() or Dependency.HOLDS in mapping.dependents.copy().values()
            if mapping.state is State.LEAKED or is_held or not wait_for(mapping, SETTLE_S):
                raise ResourceBusyError(
                    f"the closed buffers of {self.label} are still in use ({mapping.what_holds()}); call "
                    "close(timeout=...) on the last one, or drop its arrays."
                )

    def _open(self) -> Mapping:
        created = self._new_mapping()
        calls = created.calls
        calls += MARK  # written out, because other threads see the mark, and wait until it goes
        try:
            mapping = _claim_mapping(self, created)
            if mapping is created:
                created.create(partial(self._map, created))
        finally:
            del calls[-1]
        if mapping is not created:
            system.until(lambda: mapping.state is not State.BORN or not mapping.calls.copy(), None)
        return mapping


@locked
def _claim_mapping(memory: Mappable, created: Mapping) -> Mapping:
    """Return the existing mapping; without it, return the created one, which the caller then maps."""
    known = memory._mapping
    if known is None or known.state is State.RELEASED or (known.state is State.BORN and not known.calls.copy()):
        known = memory._mapping = created
    return known


class Hold(NoCopy):
    """Keep bytes mapped while the object is alive. The caller checks afterwards that the buffer is open."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Buffer) -> None:
        mapping = buffer.mapping
        arrays = mapping.arrays
        arrays += MARK
        self._buffer = buffer  # no call comes between mark and attribute, so the finalizer removes each mark
        if not mapping.untracked:
            mapping.expose()

    def __del__(self) -> None:
        try:  # no call first: CPython drops an exception raised in a finalizer
            mapping = self._buffer.mapping
            del mapping.arrays[-1]
            if mapping.state is not LIVE:  # checked last: a drain that saw the mark does not look again
                dropped.append(mapping)
        except AttributeError:
            pass


class Buffer(Sized):
    """Mapped bytes that the device and its array libraries use in place.

    `ExternalMemory.map_buffer`, `Allocation.buffer` and `Allocation.buffer_on` return it; pass its `view` to an array
    library. When the last buffer of a mapping is closed, and no pending work or array uses it, it is unmapped.

    Examples
    --------
    >>> buffer.copy_from_host(np.arange(4, dtype="float32"))
    >>> field = np.asarray(buffer.view(4, "float32"))
    >>> field *= 0.5  # in place
    >>> result = np.empty(4, "float32")
    >>> buffer.copy_to_host(result)
    >>> result
    array([0. , 0.5, 1. , 1.5], dtype=float32)
    """

    _as_array = "numpy.asarray(buffer.view(shape, dtype))"

    def __init__(
        self, owner: Resource, mapping: Mapping, device: Device, offset: int, size: int, label: str | None = None
    ) -> None:
        super().__init__(Lifetime("Buffer", parents=(mapping,), label=label, size=size, of=owner.lifetime), owner)
        self.device, self.driver = device, device.driver
        self.mapping = mapping
        self.address = mapping.address + offset
        self._offset, self._size = offset, size
        self.lifetime.open()

    @property
    def offset(self) -> int:
        """Offset from the start of the memory in bytes."""
        return self._offset

    @property
    def ptr(self) -> int:
        """Address of the first byte on the device."""
        self._check_open()
        self.mapping.expose()
        return self.address

    def view(
        self, shape: int | Sequence[int], dtype: object = "uint8", offset: int = 0,
        strides: Sequence[int] | None = None,
    ) -> View:  # fmt: skip
        """Return a typed view of the buffer, without a copy.

        Pass it to ``numpy.from_dlpack``, ``torch.from_dlpack`` or ``cupy.asarray``. The bytes stay mapped as long as
        the array exists.

        Parameters
        ----------
        shape : int or sequence of int
            Number of elements in each dimension.
        dtype : str or dtype
            ``"float32"``, or a dtype of NumPy, ml_dtypes, torch or JAX: bool, int8 to int64, uint8 to uint64, float16
            to float64, complex32 to complex128, bfloat16, and float8 (``"float8_e5m2"``). Elements have the machine's
            byte order.
        offset : int
            Offset in bytes from the start of the buffer to the first element.
        strides : sequence of int, optional
            Strides in bytes; by default the view is C-contiguous. For a linear image, pass its row pitch:
            ``buffer.view((64, 60, 4), strides=(256, 4, 1))`` has 256 bytes a row.

        Raises
        ------
        ArgumentTypeError
            `dtype` is not in this list.
        InvalidArgumentError
            The view exceeds the buffer, or its address is not aligned to the element size.
        """
        return self._view(layout_of(shape, dtype, strides), check_nbytes(offset, "offset", minimum=0))

    def _view(self, layout: Layout, start: int, *, read_only: bool = False) -> View:
        if self.lifetime.state is not LIVE:
            raise self.lifetime.refusal()
        low, high = start + layout.low, start + layout.high
        if low < 0 or high > self._size:
            self._check_range(start, min(high - low, 1))
            argument, instead = "shape", "fewer or closer elements"
            if high - low <= self._size:
                argument, instead = "offset", f"an offset of {-layout.low} to {self._size - layout.high}"
            got = f"got bytes {low} to {high}: {layout}; pass {instead}."
            raise InvalidArgumentError(argument, f"expected elements within the buffer's {self._size} bytes, {got}")
        address, step = self.address + start, layout.dtype.alignment
        if beyond := address % step:
            raise InvalidArgumentError(
                "offset",
                f"expected an address that is a multiple of {step}, for {layout.dtype.name}; got {address:#x}, "
                f"the address of byte {start} of the buffer; pass {start + step - beyond}, or view bytes.",
            )
        return View(self, layout, start, read_only=read_only)

    def hold(self) -> Hold:
        """Return an object that keeps the bytes mapped while it is alive, as an exported array does.

        Use it when you pass `ptr` to another API, because gpuinterop cannot see the work of that API: drop the object
        when that API has finished.
        """
        token = Hold(self)  # first, so that the result of the check below stays true
        if self.lifetime.state is not LIVE:
            del token  # the traceback would keep it alive
            self.lifetime.check()
        return token

    def copy_from_host(self, source: object, *, offset: int = 0, stream: Stream | object = None) -> None:
        """Copy host memory into the buffer (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        Parameters
        ----------
        source : numpy.ndarray or bytes-like
            Host memory of any shape and dtype, or a tensor. Its bytes are copied in C order; conjugated torch tensors
            are resolved first. If you pass a stream, do not change the memory until the stream has copied it.
        offset : int
            Offset in the buffer, in bytes.
        stream : Stream, int, or stream of torch, CuPy or numba, optional
            Stream that does the copy. With None, the copy waits for every stream that used these bytes, and is complete
            on return.

        Raises
        ------
        ArgumentTypeError
            `source` is not host memory.
        InvalidArgumentError
            The bytes do not fit into the buffer, `stream` belongs to another device or is being captured, or `source`
            is an array whose memory does not contain its values (see `gpuinterop.share`).
        ResourceBusyError
            The memory is pageable and the stream waits for a semaphore, so the copy would block and could deadlock.
        """
        self._copy(HostArray(source, argument="source", writable=False), "source", offset, stream, to_host=False)

    def copy_to_host(self, target: object, *, offset: int = 0, stream: Stream | object = None) -> None:
        """Copy from the buffer into host memory (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        Parameters
        ----------
        target : numpy.ndarray or bytearray
            Host memory, writable and C-contiguous. Its size sets how many bytes are copied. If you pass a stream, do
            not read it before the stream has copied the bytes.
        offset, stream
            See `copy_from_host`.

        Raises
        ------
        ArgumentTypeError, InvalidArgumentError, ResourceBusyError
            See `copy_from_host`. Also if `target` is read-only or not contiguous, or if NumPy gets a copy of it.
        """
        self._copy(HostArray(target, argument="target", writable=True), "target", offset, stream, to_host=True)

    def fill(self, byte: int = 0, *, offset: int = 0, size: int | None = None, stream: Stream | object = None) -> None:
        """Set every byte to one value, 0 to 255 (``cuMemsetD8Async`` / ``hipMemsetD8Async``).

        By default it fills everything from `offset` on. `offset` and `size` are in bytes. For `stream`, see
        `copy_from_host`.

        Raises
        ------
        InvalidArgumentError
            The range exceeds the buffer, or `stream` belongs to another device.
        """
        value = check_int(byte, "byte", minimum=0, maximum=255)
        start, count = self._range_of(offset, size)
        self._on(stream, start, count, lambda handle: self.driver.fill(handle, self.address + start, value, count))
        self.mapping.written = True

    def _copy_from(self, source: int, size: int, *, offset: int, stream: object, owners: Owners = ()) -> None:
        """Copy from any address that the device can read. `owners` lists its buffer, if it has one, and the offset."""
        start, count = self._range_of(offset, size, least=0)
        here = self.address + start
        self._on(stream, start, count, lambda handle: self.driver.copy(handle, here, source, count), owners=owners)
        self.mapping.written = True

    def _copy(self, host: HostArray, argument: str, offset: int, stream: object, *, to_host: bool) -> None:
        start, count = self._range_of(offset, host.nbytes, argument, least=0)
        here = self.address + start
        target, source = (host.ptr, here) if to_host else (here, host.ptr)
        self._on(stream, start, count, lambda handle: self.driver.copy(handle, target, source, count), host=host)
        if not to_host:
            self.mapping.written = True

    def _use_on(self, stream: Stream, start: int, size: int) -> None:
        known, first = stream._known_as(), self._offset + start
        if (graph := known.graph) is not None:  # the launches of the graph use them
            graph._hold(self.mapping)
            graph._note(self.mapping, first, first + size)
        else:
            self.mapping.used_on(known, first, first + size)

    def _is_used_by(self, stream: Stream) -> bool:
        """Whether the stream is the only user of the mapping, and has used all bytes of this buffer."""
        known, uses = stream.known or stream._known_as(), self.mapping.uses.copy()
        hull = uses.get(known)
        if hull is None or len(uses) != 1 or known.graph is not None:
            return False
        return bool(hull[0] <= self._offset and self._offset + self._size <= hull[1])

    def _users(self, user: Stream | None, start: int = 0, size: int | None = None) -> list[KnownStream]:
        first = self._offset + start
        return self.mapping.users(first, first + (self._size if size is None else size), user)

    def _wait_for_users(self, start: int = 0, size: int | None = None) -> None:
        for user in self._users(None, start, size):
            user.synchronize(None)
            if (failure := user.take_failure()) is not None:
                raise again(failure)

    def _on(
        self, stream: object, start: int, size: int, enqueue: Callable[[DriverHandle], None],
        *, host: HostArray | None = None, owners: Owners = (),
    ) -> None:  # fmt: skip
        """Enqueue on `stream`. Without one, use a stream of the device and wait; on the CPU, call directly."""
        spans = [(self, start), *owners]
        if stream is not None:
            stream = check_stream(self.device, stream)
            if host is not None:
                stream._check_host_copy(host)
            with marked(stream._known_as().calls):  # no `Stream.capture` begins or ends between the check and the call
                for buffer, first in spans:
                    buffer._use_on(stream, first, size)
                stream._enqueue(enqueue, self.lifetime, self.mapping, host=host)
            return
        if self.device.info.is_cpu:
            caller = self.driver.adopt_stream(self.device._handle, 0)

            def copy(_: DriverHandle) -> None:
                for buffer, first in spans:
                    buffer._wait_for_users(first, size)
                enqueue(caller)
                self.driver.synchronize(caller)

            self.lifetime.use(lambda _: self.mapping.use(copy))
            drain()
            return
        with self.device._copy_stream() as copier:
            users = {user: None for buffer, first in spans for user in buffer._users(copier, first, size)}
            for user in users:
                copier._follow(user)
            if host is not None and users:
                copier._check_host_copy(host)
            for buffer, first in spans:  # before the call: it may fail, and another thread may close the buffer
                buffer._use_on(copier, first, size)
            copier._enqueue(enqueue, self.lifetime, self.mapping, host=host)
            copier.synchronize()
            for buffer, _ in spans:
                forget_use(buffer.mapping, copier._known_as())

    def close(self, timeout: float | None = None) -> None:
        """Close the buffer (see `Resource.close`). If other buffers share its mapping, `timeout` is ignored."""
        super().close()
        if self.mapping.state is not LIVE:
            self._wait(self.mapping, timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the buffer's mapping is released (see `Resource.on_released`)."""
        self._on_released(self.mapping, callback)


class ExternalMemory(Mappable):
    """Memory that another API or process exported. `Device.import_memory` returns it.

    Closing it also closes its buffers and arrays. The native release follows when the device no longer uses them
    (``cuDestroyExternalMemory`` / ``hipDestroyExternalMemory``). Only then can the exporter free its memory; find out
    with `on_released` or ``close(timeout=...)``.

    Attributes
    ----------
    handle_type : type
        Type of the imported handle.
    dedicated : bool
        Whether the exporting allocation is dedicated.

    Examples
    --------
    >>> memory = device.import_memory(gi.OpaqueFd(fd), size=65536)
    >>> buffer = memory.map_buffer()
    >>> buffer.fill(7, stream=stream)
    >>> memory.on_released(lambda: print("the exporter may free its memory"))
    >>> memory.close(timeout=10)  # waits for the stream's work
    the exporter may free its memory
    """

    _as_array = "numpy.asarray(memory.map_buffer().view(shape, dtype))"

    def __init__(
        self, device: Device, handle_type: type[MemoryHandle], *, size: int, dedicated: bool, keepalive: object = None,
        noun: str = "", label: str | None = None,
    ) -> None:  # fmt: skip
        self.device, self.driver, self._size = device, device.driver, size
        noun, release, streams = noun or "ExternalMemory", self.driver.destroy_memory, device.streams
        super().__init__(Lifetime(noun, release, keep=keepalive, device=streams, label=label, size=size))
        self.handle_type = handle_type
        self.dedicated = dedicated

    def map_buffer(self, offset: int = 0, size: int | None = None, *, label: str | None = None) -> Buffer:
        """Map a range of bytes (``cuExternalMemoryGetMappedBuffer`` / ``hipExternalMemoryGetMappedBuffer``).

        The driver maps the whole object once. Buffers are ranges of this mapping and can overlap. You close them;
        closing the memory closes them too.

        Parameters
        ----------
        offset : int
            Offset of the first byte.
        size : int, optional
            Size in bytes; by default everything from `offset` on.

        Raises
        ------
        InvalidArgumentError
            The range exceeds the memory.
        ResourceBusyError
            All earlier buffers are closed, but pending work or arrays still use one of them.
        UnsupportedError
            The device cannot map buffers of this memory (`Operation.MAP_BUFFER`).
        """
        start, count = self._range_of(offset, size)
        self.device.capabilities.require((Operation.MAP_BUFFER, self.handle_type))
        return self._buffer(start, count, self.device, label)

    def map_mipmapped_array(
        self, format: str, extent: Sequence[int], levels: int = 1, layers: int = 0, offset: int = 0,
        usage: ArrayUsage = ArrayUsage.SURFACE, *, label: str | None = None,
    ) -> MipmappedArray:  # fmt: skip
        """Map an optimally tiled image (``cuExternalMemoryGetMappedMipmappedArray`` / ``hip...``). You close it.

        Closing the memory closes it too.

        Parameters
        ----------
        format : str
            Vulkan format without its prefix, such as ``R32G32B32A32_SFLOAT``.
        extent : sequence of int
            Width, height and depth in texels; 0 or omitted for a dimension that the image does not have.
        levels : int
            Number of mip levels.
        layers : int
            Number of array layers; 0 if the image is not an array.
        offset : int
            Offset of the image in the memory, in bytes.
        usage : ArrayUsage
            Usage of the image. The exporter must have created it with the same usage.

        Raises
        ------
        InvalidArgumentError
            The image does not fit into the memory, or APIs lay out its format differently.
        UnsupportedError
            The device cannot map images of this memory (`Operation.MAP_MIPMAPPED_ARRAY`).
        """
        self._check_open()
        self.device.capabilities.require((Operation.MAP_MIPMAPPED_ARRAY, self.handle_type))
        layout = image_layout(self, format, extent, levels, layers, offset, usage)
        drain()
        return MipmappedArray(self, layout, label)

    def _new_mapping(self) -> Mapping:
        backend, blocks = self.driver, self.driver.releases_block
        return Mapping(self, (self.device,), backend.unmap_buffer, blocks=blocks, waits=blocks)

    def _map(self, mapping: Mapping) -> DriverHandle:
        handle, mapping.address = self.driver.map_buffer(self.lifetime.handle, size=self._size)
        return handle
