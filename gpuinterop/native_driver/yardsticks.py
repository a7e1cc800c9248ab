"""The same work with only a vendor's bindings, for ``gpuinterop bench``: the part that the vendors have in common.

This is the fastest program without gpuinterop: it creates structs once and ignores statuses. Because a failing call
would be fast, each call is made and checked once before it is measured.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any, Final

from ..errors import DriverError
from .streams import NON_BLOCKING
from .table import Table

_REGISTERED: Final = 1 | 2  # portable, and mapped


class NativeYardsticks:
    """Direct calls for one device. The functions of `api`, the bindings, return tuples that begin with the status."""

    def __init__(self, table: Table, api: Any) -> None:
        self.api = api
        self._table = table
        self._pages: list[mmap.mmap] = []  # they stay registered

    def function(self, name: str) -> Any:
        return getattr(self.api, self._table.names.get(name) or self._table.prefix + name)

    @staticmethod
    def check(result: tuple[Any, ...]) -> Any:
        """The results of a call that must not fail."""
        if result[0]:
            raise DriverError("a direct call for comparison", int(result[0]), result[0].name)
        return result[1] if len(result) == 2 else result[1:]

    def stream(self) -> Any:
        """A non-blocking stream."""
        return self.check(self.function("StreamCreate")(NON_BLOCKING))

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream."""
        self.check(self.function("StreamSynchronize")(stream))

    def word(self, stream: Any) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
        """A 64-bit word in a registered page: the calls that make a stream write it and wait for it."""
        write_value, wait_value = self.function("StreamWriteValue64"), self.function("StreamWaitValue64")
        page = mmap.mmap(-1, mmap.PAGESIZE)
        self._pages.append(page)
        place = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self.check(self.function("MemHostRegister")(place, mmap.PAGESIZE, _REGISTERED))
        word = int(self.check(self.function("MemHostGetDevicePointer")(place, 0)))
        how = 0, *self._table.wait_mask

        def write(value: int) -> Any:
            return write_value(stream, word, value, 0)

        def wait(value: int) -> Any:
            return wait_value(stream, word, value, *how)

        self.check(write(1))
        self.check(wait(1))
        self.synchronize(stream)
        return write, wait
