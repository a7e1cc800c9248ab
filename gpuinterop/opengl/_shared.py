"""Common parts of objects that OpenGL and the compute side share: closing both sides, and importing memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from .._arguments import MAX_32, NoCopy, check_int, check_timeout
from .._core.importing import import_duplicate
from ..errors import ArgumentTypeError, ResourceClosedError
from . import _api as gl

if TYPE_CHECKING:
    from .._core.resource import Resource
    from ..handles import Handle
    from ..vulkan._pair import Shared
    from ._context import Context, Names


def check_name(value: object, argument: str, example: str) -> int:
    """Check OpenGL's name of an object."""
    if not hasattr(value, "__index__"):
        kind = type(value).__name__
        raise ArgumentTypeError(argument, f"expected OpenGL's name, an int such as {example}, got {kind}.")
    return check_int(value, argument, minimum=1, maximum=MAX_32)


class Owned(NoCopy):
    """Owns OpenGL names and the compute side's halves. The end of a ``with`` block closes it."""

    def __init__(self, names: Names, halves: Sequence[Resource | Shared]) -> None:
        self._names, self._halves = names, halves
        self.context: Context = names.context
        self.closed = False

    def _check_open(self) -> None:
        if self.closed:
            raise ResourceClosedError(f"the {type(self).__name__} on {self.context.name} is closed; make a new one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """End use on both sides. Idempotent, and allowed in any thread; never blocks unless `timeout` is given.

        OpenGL's names are deleted in the context that made them: now, if it is current in the calling thread, else by
        the next gpuinterop call in it. At exit, one `LeakedResourceWarning` reports the names that are left. Memory
        stays valid while OpenGL draws from it. llvmpipe keeps all memory until the context is destroyed.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait until the compute side has released the object too.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and the compute side still uses the object, which is released later.
        """
        check_timeout(timeout)
        self.closed = True
        with ExitStack() as parts:
            parts.callback(self._names.close)
            for half in self._halves:
                parts.callback(half.close, timeout)


class SharedObject(Owned):
    """An object with one name in OpenGL."""

    def __init__(self, names: Names, name: int, *halves: Resource | Shared) -> None:
        super().__init__(names, halves)
        self._name = name

    @property
    def name(self) -> int:
        """OpenGL's name. Raises `ResourceClosedError` after `close`."""
        self._check_open()
        return self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} on {self.context.name}{' closed' if self.closed else ''}>"


def import_memory(names: Names, handle: Handle, size: int) -> int:
    """Make a memory object of a whole allocation (``glImportMemoryFdEXT``). Consumes the handle."""
    check = names.context.functions.check
    memory = names.new("glCreateMemoryObjectsEXT")
    # Always dedicated. Otherwise NVIDIA's driver (580, H200) sometimes maps the memory compressed, and each side reads
    # repeated bytes that the other wrote wrongly.
    check("glMemoryObjectParameterivEXT", memory, gl.DEDICATED_MEMORY_OBJECT, ctypes.byref(ctypes.c_int(1)))

    import_fd(names, handle, "glImportMemoryFdEXT", memory, size)
    return memory


def import_fd(names: Names, handle: Handle, call: str, *arguments: int) -> None:
    """Import a descriptor with a ``glImport*FdEXT``. Consumes the handle."""
    check = names.context.functions.check

    def take(duplicate: Any) -> None:
        check(call, *arguments, gl.HANDLE_TYPE_OPAQUE_FD, duplicate.fd)

    import_duplicate(handle, take, user="gpuinterop.opengl")  # after a failure, drivers differ in who owns it
