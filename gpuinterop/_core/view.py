"""Views: typed memory that any array library uses without a copy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import ArgumentTypeError, InvalidArgumentError
from .dlpack import CPU, ROCM, blank_array, capsule_at, check_request, numpy_knows_versions
from .foreign_arrays import Describable, Described, described
from .host_array import HostArray
from .layout import Layout, dense_order, layout_of
from .lifetime import LIVE

if TYPE_CHECKING:
    from .memory import Buffer
    from .stream import Stream
    from .streams import KnownStream


class View(Describable):
    """A typed, strided view of a buffer for any array library. `Buffer.view` returns it.

    It has the protocols that fit the memory: DLPack everywhere, NumPy's ``__array__`` on the host, and
    ``__cuda_array_interface__`` on a GPU. The array that a library makes keeps the bytes mapped, even if you close the
    buffer; the view does not. The exception is ``__cuda_array_interface__``, used by ``cupy.asarray``: then the array
    keeps the view, and the view keeps the bytes, so drop both.

    Attributes
    ----------
    shape : tuple of int
        Number of elements in each dimension.
    strides : tuple of int
        Strides in bytes.
    ndim : int
        Number of dimensions.
    nbytes : int
        Number of elements times the element size.
    dtype : numpy.dtype
        Element type, which compares equal to its name. bfloat16, float8 and complex32 are types of ml_dtypes; if that
        is not installed, `dtype` is the name.
    ptr : int
        Address of the first element on the device.
    read_only : bool
        True if array libraries must not write, because another process shares an immutable array.

    Examples
    --------
    >>> view = buffer.view((2, 3), "float32")
    >>> view.shape, view.strides, view.nbytes
    ((2, 3), (12, 4), 24)
    >>> field = np.asarray(view)  # or torch.from_dlpack(view), cupy.from_dlpack(view)
    >>> field[:] = 1
    >>> second = buffer.view((2, 3), "float32", offset=256)
    >>> second.copy_from(view, stream=stream)
    >>> second.to_numpy()
    array([[1., 1., 1.],
           [1., 1., 1.]], dtype=float32)
    """

    _instead = "send view.to_numpy(), which is a copy, or bytes(gpuinterop.share(view))."
    _token: object = None  # the hold that the first use of `__cuda_array_interface__` takes

    def __init__(self, buffer: Buffer, layout: Layout, offset: int, *, read_only: bool = False) -> None:
        self._buffer, self._layout, self.read_only = buffer, layout, read_only
        self._pointer = buffer.address + offset
        self._start = offset + layout.low
        self.shape, self.strides = layout.shape, layout.strides

    @property
    def dtype(self) -> Any:
        try:
            return self._layout.dtype.for_numpy()
        except (ImportError, AttributeError):
            return self._layout.dtype.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self._layout.dtype.itemsize

    @property
    def ptr(self) -> int:
        self._buffer._check_open()
        self._buffer.mapping.expose()
        return self._pointer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._layout.dtype.name}{list(self.shape)} of {self._buffer.label}>"

    def to_numpy(self) -> Any:
        """Copy to the host and return a NumPy array; works on any device (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        The copy waits for every stream that used these bytes through gpuinterop, and is complete on return. It also
        transfers the bytes between the elements of a strided view. The array is C-contiguous and writable, in new
        memory.

        Raises
        ------
        ArgumentTypeError
            The element type needs ml_dtypes (bfloat16, for example), which is not installed.
        ValueError
            NumPy cannot describe the shape.
        ResourceBusyError
            On a GPU, one of those streams waits for a semaphore, so the copy would block and could deadlock.
            Synchronize the stream first.
        GpuInteropError
            Work on one of those streams has failed.
        InvalidArgumentError
            One of those streams is being captured.
        """
        import numpy as np

        own, low = self._numpys_type(), self._layout.low
        raw = np.empty(self._layout.high - low, np.uint8)
        self._buffer.copy_to_host(raw, offset=self._start)
        return np.asarray(np.ndarray(self.shape, own, raw, -low, self.strides), order="C")

    def copy_from(self, source: Any, *, stream: Stream | object = None) -> None:
        """Copy a view of the same device, or host memory, into this view (``cuMemcpyAsync`` / ``hipMemcpyAsync``).

        Both must have no gaps between elements, and store them in the same order.

        Parameters
        ----------
        source : View, numpy.ndarray, or CPU tensor of torch
            Must have the same shape and element type. If this view is C-contiguous, a host array can have any strides.
            If you pass a stream, do not change the source until the stream has copied it.
        stream : Stream, optional
            Stream that does the copy. With None, the copy waits for every stream that used the bytes of either side
            through gpuinterop, and is complete on return.

        Raises
        ------
        ArgumentTypeError
            `source` is neither a view on this device nor host memory.
        InvalidArgumentError
            Shapes, element types or strides differ, elements have gaps between them, source and target share bytes,
            this view is read-only, or `stream` belongs to another device.
        ResourceBusyError
            See `Buffer.copy_from_host`.
        """
        buffer, layout = self._buffer, self._layout
        on_device = isinstance(source, View) and source._buffer.device is buffer.device
        host = None if on_device else HostArray(source, argument="source", writable=False)
        of_source = source._layout if on_device else described(source, "source", in_place=False).layout
        if host is not None:  # a `HostArray` has C order
            of_source = layout_of(of_source.shape, of_source.dtype.name, None)
        if (order := dense_order(layout)) is None or order != dense_order(of_source):
            raise InvalidArgumentError(
                "source",
                f"expected {layout}, in which each byte belongs to one element, got {of_source}; pass its to_numpy(), "
                "or copy with a library, for example torch.from_dlpack(view).copy_(other).",
            )
        if self.read_only:
            raise InvalidArgumentError("view", f"expected a writable view, got {self!r} of immutable bytes.")
        if host is not None:
            buffer._copy(host, "source", self._start, stream, to_host=False)
            return
        first, owners = source._pointer + of_source.low, [(source._buffer, source._start)]
        if abs(first - self._pointer - layout.low) < self.nbytes:
            raise InvalidArgumentError("source", f"expected bytes outside of {self!r}, got an overlap; copy twice.")

        def copy(_: object) -> None:
            buffer._copy_from(first, self.nbytes, offset=self._start, stream=stream, owners=owners)

        source._buffer.lifetime.use(copy)  # keeps the source mapped until its use on the stream is noted

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._buffer.device.info.dlpack

    def __dlpack__(
        self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """Return a DLPack capsule, following the rules of the array API. A copy is never made.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream. It will wait for every stream that used the buffer through gpuinterop. CUDA: None and
            1 are the legacy default stream, 2 is the per-thread default stream, -1 means no ordering, 0 is refused.
            ROCm: None and 0 are the default stream, -1 means no ordering, 1 and 2 are refused. CPU: None or -1; the
            call itself waits for those streams, because CPU consumers have no streams.

        Raises
        ------
        BufferError
            The consumer asks for a copy or another device, a stride is not a multiple of the element size, or the shape
            has more dimensions than NumPy supports (64; 32 before NumPy 2).
        InvalidArgumentError
            The array API refuses this stream.
        """
        buffer, layout = self._buffer, self._layout
        device = buffer.device.info.dlpack
        check_request(stream, max_version, dl_device, copy, device)
        if (stride := layout.unaligned_stride) is not None:
            raise BufferError(
                f"DLPack counts strides in elements: expected a multiple of {self._layout.dtype.itemsize} bytes, got "
                f"{stride}; use {'numpy.asarray' if self._is_of_host() else 'cupy.asarray'}, or a view of bytes."
            )
        array = blank_array(layout, self)
        array.hold = buffer.hold()  # before the wait, during which the buffer may be closed
        array.consumer = self._order_consumer(stream, device[0])
        versioned = max_version is not None and max_version[0] >= 1 and numpy_knows_versions()
        return capsule_at(array, self._pointer, layout, device, versioned=versioned, read_only=self.read_only)

    def _order_consumer(self, stream: int | None, device_type: int) -> Stream | None:
        """Return the consumer's stream. The array keeps it, so that the release waits for its work."""
        if stream == -1:
            return None
        buffer = self._buffer
        if device_type == CPU:
            buffer._wait_for_users()
            return None
        if stream is None:
            stream = 0 if device_type == ROCM else 1
        consumer = buffer.device._consumer(stream)
        if not buffer._is_used_by(consumer):  # skips the most frequent case
            for user in buffer._users(consumer):
                if user.of_other_thread or not user.uncaptured(buffer.driver.is_idle, True):
                    consumer._follow(user)
            buffer._use_on(consumer, 0, buffer._size)
        return consumer

    def _described(self) -> Described:
        keep = self, self._buffer.hold()
        if self._is_of_host():
            self._buffer._wait_for_users()  # as for other CPU consumers
        return Described(self.__dlpack_device__(), self._pointer, self._layout, self.read_only, keep)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA array interface of GPU memory. From the first access on, the view keeps the bytes mapped.

        A library keeps only the view alive with its array, so nothing else could keep the bytes.
        """
        if self._is_of_host():  # a library would pass the pointer to a GPU
            raise AttributeError("memory of the host has no __cuda_array_interface__; use numpy.asarray(view).")
        if not (dtype := self._layout.dtype).in_numpy:
            raise AttributeError(
                f"__cuda_array_interface__ has no name for {dtype.name}; use from_dlpack(view), or a view of "
                f"'uint{dtype.bits}'."
            )
        token = self._token or self._buffer.hold()
        self._buffer._check_open()
        self._token = token
        interface = self._layout.interface(self._pointer, self.read_only)
        if users := self._buffer._users(None):
            interface["stream"] = self._stream_after(users) or 1
        return interface

    def _stream_after(self, users: list[KnownStream]) -> int:
        """Return the one stream that the interface can name; it waits for the users."""
        if len(users) == 1 and users[0].state is LIVE and not users[0].of_other_thread:
            return users[0].pointer
        after: Stream | None = self.__dict__.get("_after_users")
        if after is None:  # a stream for this view, so that no unrelated work waits for the users
            created = self._buffer.device.create_stream()
            created.lifetime.warns = False
            after = self.__dict__.setdefault("_after_users", created)  # another thread may have been first
        for user in users:
            after._follow(user)
        return after.ptr

    def __buffer__(self, flags: int) -> memoryview:
        """Return host memory as a `memoryview` (PEP 688, Python 3.12 and newer). It counts as an exported array.

        Raises
        ------
        ArgumentTypeError
            The memory is not on the host, or the buffer protocol has no format for the elements, such as bfloat16.
        """
        if not self._is_of_host():
            self._refuse_numpy()
        if not (dtype := self._layout.dtype).in_numpy:
            raise ArgumentTypeError(
                "view",
                f"expected elements with a format of the buffer protocol, got {self!r}; take a view of "
                f"'uint{dtype.bits}'.",
            )
        return memoryview(self.__array__())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a NumPy array on host memory, without a copy. NumPy calls this.

        Raises
        ------
        ArgumentTypeError
            The memory is not on the host, or the element type needs ml_dtypes, which is not installed.
        BufferError
            NumPy cannot describe the shape.
        """
        import numpy as np

        if not self._is_of_host():
            self._refuse_numpy()
        own = self._numpys_type()
        array = self._layout.array(self._pointer, self.read_only, self)
        array.base.hold = self._buffer.hold()
        self._buffer._wait_for_users()  # CPU consumers have no streams
        array = array.view(own)
        return np.asarray(array, dtype) if copy is None else np.array(array, dtype, copy=copy)

    def _numpys_type(self) -> Any:
        try:
            return self._layout.dtype.for_numpy()
        except (ImportError, AttributeError):
            raise ArgumentTypeError(
                "view",
                f"expected an element type of NumPy, got {self!r}: pip install ml_dtypes, whose newest version adds "
                f"{self._layout.dtype.name} to NumPy, or use torch.from_dlpack(view).",
            ) from None

    def _is_of_host(self) -> bool:
        return self._buffer.device.info.array_interface == "__array_interface__"

    def _refuse_numpy(self) -> NoReturn:
        raise ArgumentTypeError(
            "view",
            f"expected memory of the host, got {self!r} on {self._buffer.device.name}; use torch.from_dlpack(view) or "
            "cupy.asarray(view), or copy it to the host with view.to_numpy().",
        )
