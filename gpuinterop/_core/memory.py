"""External memory, how it is mapped, and buffers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .. import system
from .._arguments import check_int, check_nbytes
from ..capabilities import Operation
from ..errors import ArgumentTypeError, InvalidArgumentError, ResourceBusyError, ResourceClosedError, again
from ..handles import ArrayLayout, ArrayUsage, MemoryHandle
from .drain import drain, wait_for
from .interchange import DType, HostArray, View, contiguous, resolve_ints, resolve_shape, span
from .monitor import dropped, locked
from .native import BORN, EXPORTED, GONE, LEAKED, LIVE, MARK, RELEASED, Native, Standing, forget_use, note_use
from .resource import Resource
from .stream import Stream, check_stream

if TYPE_CHECKING:
    from ..backend import Native as Handle
    from .array import MipmappedArray
    from .device import Device
    from .native_stream import NativeStream

MOMENT_S = 0.01


def round_up(size: int, step: int) -> int:
    return check_nbytes(-(-size // step) * step)


class Mapping(Native):
    """A whole object, mapped: as long as one of its buffers is open."""

    __slots__ = ("address", "devices", "waits")

    def __init__(
        self, owner: Native, devices: Sequence[Device], unmap: Callable[[Handle], None], *, blocks: bool, waits: bool
    ) -> None:
        super().__init__("Mapping", unmap, parents=(owner,), gate=devices[0]._gate if blocks else None)
        self.ends_with_children = True
        self.devices = devices
        self.waits = waits
        """Its release waits for all work of the device by itself."""
        self.address = 0

    def expose(self) -> None:
        """Its address is out: any stream may use it from now on."""
        if not self.untracked and not self.waits:
            self.untracked = tuple(device._streams for device in self.devices)

    def used_on(self, stream: NativeStream, start: int, end: int) -> None:
        """Note that a stream is given work with these bytes."""
        hull = self.uses.get(stream)
        if hull is None or start < hull[0] or hull[1] < end:
            _widen(self, stream, start, end)

    def users(self, start: int, end: int, user: Stream | None) -> list[NativeStream]:
        """The other streams that `user` must be ordered behind before it uses these bytes.

        Raises
        ------
        InvalidArgumentError
            One of them is being captured, and cannot be waited for.
        GpuInteropError
            One of them has failed.
        """
        found = []
        mine = None if user is None else user._known_as()
        for stream, hull in self.uses.copy().items():
            if end <= hull[0] or hull[1] <= start or stream.state in GONE or stream is mine:
                continue
            if (failure := stream.tell_failure()) is not None:
                raise again(failure)
            if stream.is_capturing():
                raise InvalidArgumentError(
                    "stream",
                    f"expected streams that can be waited for, got {stream.label}, which used these bytes before its "
                    "capture began; synchronize it before the capture.",
                )
            found.append(stream)
        return found


@locked
def _widen(mapping: Mapping, stream: NativeStream, start: int, end: int) -> None:
    first, last = mapping.uses.get(stream, (start, end))
    note_use(mapping, stream, (min(first, start), max(last, end)))


class Mappable(Resource):
    """Memory that is mapped once, whole; buffers are ranges of that."""

    def __init__(self, lifetime: Native) -> None:
        super().__init__(lifetime)
        self._mapping: Mapping | None = None

    @abstractmethod
    def _new_mapping(self) -> Mapping:
        """Not mapped yet."""

    @abstractmethod
    def _map(self) -> tuple[Handle, int]:
        """Map it natively: the handle, and the address."""

    def _buffer(self, offset: int, size: int, device: Device) -> Buffer:
        """A buffer of what is mapped, or is now; whatever other threads close meanwhile."""
        while True:
            drain()
            self._check_open()
            mapping = self._mapping
            if mapping is None or mapping.state is not LIVE:
                mapping = self._open()
            if mapping.state is LIVE:
                try:
                    return Buffer(self, mapping, device, offset, size)
                except ResourceClosedError:
                    continue  # another thread has closed the last buffer
            held = mapping.state is LEAKED or any(how is Standing.HOLDS for how in mapping.standing.copy().values())
            if held or not wait_for(mapping, MOMENT_S):  # the driver may only need a moment to see work as done
                raise ResourceBusyError(
                    f"{self.label} was mapped, and its buffers are closed and still in use ({mapping.what_holds()}); "
                    "call close(timeout=...) on the last of them, or drop its arrays."
                )

    def _open(self) -> Mapping:
        fresh = self._new_mapping()
        found: list[Mapping] = []
        making = fresh.calls  # it is marked as long as somebody makes it
        making += MARK
        try:
            _claim_mapping(self, fresh, found)
            if found[0] is fresh:
                fresh.create(lambda: self._map_into(fresh))
        finally:
            del making[-1]
        mapping = found[0]
        if mapping is not fresh:
            system.until(lambda: mapping.state is not BORN or not mapping.calls.copy(), None)
        return mapping

    def _map_into(self, mapping: Mapping) -> Handle:
        handle, mapping.address = self._map()
        return handle


@locked
def _claim_mapping(memory: Mappable, fresh: Mapping, found: list[Mapping]) -> None:
    """The mapping there is; else the fresh one, which whoever brings it maps."""
    known = memory._mapping
    if known is None or known.state is RELEASED or (known.state is BORN and not known.calls.copy()):
        known = memory._mapping = fresh
    found.append(known)


class Hold:
    """Keeps bytes mapped as long as it lives."""

    __slots__ = ("_lifetime", "keep")

    def __init__(self, buffer: Buffer) -> None:
        self.keep: object = buffer
        self._lifetime = Native(EXPORTED, parents=(buffer._mapping,), how=Standing.HOLDS)
        buffer._mapping.expose()
        self._lifetime.open()

    def __del__(self) -> None:
        try:  # noqa: SIM105 - no call comes first: CPython loses what is raised in a finalizer
            dropped.append(self._lifetime)
        except AttributeError:
            pass


class Buffer(Resource):
    """Mapped bytes that the device and its array libraries use in place.

    Made by `ExternalMemory.map_buffer`, `Allocation.buffer` and `Allocation.buffer_on`. Closing the last buffer of a
    mapping unmaps it, once pending work and exported arrays are done with it.
    """

    def __init__(self, owner: Resource, mapping: Mapping, device: Device, offset: int, size: int) -> None:
        super().__init__(Native("Buffer", parents=(mapping,)), owner)
        self._mapping = mapping
        self._device = device
        self._backend = device._backend
        self._address = mapping.address + offset
        self._offset = offset
        self._size = size
        self._lifetime.open()

    @property
    def device(self) -> Device:
        return self._device

    @property
    def ptr(self) -> int:
        """The address of the first byte on the device."""
        self._check_open()
        self._mapping.expose()
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
        start = check_nbytes(offset, "offset", minimum=0)
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

    def hold(self) -> Hold:
        """An object that keeps the bytes mapped as long as it lives, as an exported array does.

        For whoever hands `ptr` to another API: that API's use of it cannot be seen from here.
        """
        token = Hold(self)  # first: what is checked then stays true
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
        value = check_int(byte, "byte", minimum=0, maximum=255)
        start = check_nbytes(offset, "offset", minimum=0)
        count = check_nbytes(self._size - start if size is None else size)
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
        start = check_nbytes(offset, "offset", minimum=0)
        if start + size > self._size:
            raise InvalidArgumentError(
                argument, f"bytes {start} to {start + size} are outside the buffer, which has {self._size}."
            )
        return start

    def _use(self, stream: Stream, start: int, size: int) -> None:
        """Note that a stream is about to be given work with these bytes."""
        native, first = stream._known_as(), self._offset + start
        if (graph := native.graph) is not None:  # its launches use them
            graph.hold(self._mapping)
            graph._note(self._mapping, first, first + size)
        else:
            self._mapping.used_on(native, first, first + size)

    def _users(self, user: Stream | None, start: int = 0, size: int | None = None) -> list[NativeStream]:
        first = self._offset + start
        return self._mapping.users(first, first + (self._size if size is None else size), user)

    def _wait_for_users(self) -> None:
        """Block until all that was given work with the bytes has done it."""
        for user in self._users(None):
            user.synchronize(None)
            if (failure := user.tell_failure()) is not None:
                raise again(failure)

    def _on(
        self, stream: Stream | None, start: int, size: int, enqueue: Callable[[Handle], None],
        *, array: HostArray | None,
    ) -> None:  # fmt: skip
        """Enqueue on the given stream, or on our own and wait for it."""
        if stream is not None:
            check_stream(self._device, stream)
            if array is not None:
                stream.check_host_copy(array)
            calls = stream._known_as().calls
            calls += MARK  # no capture of ours begins or ends between the look at it and the call
            try:
                self._use(stream, start, size)
                stream._enqueue(enqueue, self._lifetime, self._mapping, host=array)
            finally:
                del calls[-1]
            return
        with self._device._copy_stream() as copier:
            users = self._users(copier, start, size)
            for user in users:
                copier._follow(user)
            if array is not None and users:
                copier.check_host_copy(array)
            self._use(copier, start, size)  # another thread may close it, and what is below may fail
            copier._enqueue(enqueue, self._lifetime, self._mapping, host=array)
            copier.synchronize()
            forget_use(self._mapping, copier._known_as())

    def close(self, timeout: float | None = None) -> None:
        """End use at once; as `Resource.close`.

        The mapping goes with its last buffer: while others share it, nothing is released, and `timeout` is not waited
        for.
        """
        super().close()
        if self._mapping.state is not LIVE:
            self._wait(self._mapping, timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """As `Resource.on_released`, for the mapping behind the buffer."""
        self._on_released(self._mapping, callback)


class ExternalMemory(Mappable):
    """Memory that another API or process exported. Made by `Device.import_memory`.

    Closing it closes its buffers and arrays. The native release (``cuDestroyExternalMemory`` /
    ``hipDestroyExternalMemory``) follows when the device is done with them; the exporter may free its own memory
    after that (`on_released`, ``close(timeout=...)``).
    """

    def __init__(
        self, device: Device, handle_type: type[MemoryHandle], *, size: int, dedicated: bool, keepalive: object = None
    ) -> None:
        backend = device._backend
        super().__init__(Native("ExternalMemory", backend.destroy_memory, keep=keepalive))
        self._device = device
        self._backend = backend
        self._size = size
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
        start = check_nbytes(offset, "offset", minimum=0)
        if size is None and start >= self._size:
            raise InvalidArgumentError("offset", f"{start} is outside the memory, which has {self._size} bytes.")
        count = self._size - start if size is None else check_nbytes(size)
        end = start + count
        if end > self._size:
            raise InvalidArgumentError(
                "size", f"bytes {start} to {end} are outside the memory, which has {self._size}."
            )
        self._device.capabilities.require((Operation.MAP_BUFFER, self.handle_type))
        return self._buffer(start, count, self._device)

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
        start = check_nbytes(offset, "offset", minimum=0)
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
        drain()
        return map_mipmapped_array(self, layout)

    # -- inside ------------------------------------------------------------------------------------------------

    def _new_mapping(self) -> Mapping:
        backend, blocks = self._backend, self._backend.releases_block
        return Mapping(self._lifetime, (self._device,), backend.unmap_buffer, blocks=blocks, waits=blocks)

    def _map(self) -> tuple[Handle, int]:
        return self._backend.map_buffer(self._native, size=self._size)
