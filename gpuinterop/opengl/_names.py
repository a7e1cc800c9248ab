"""The objects that this package makes in a context, and when they are deleted."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Self

from .._core.importing import import_duplicate
from ..handles import Handle
from . import _api as gl

if TYPE_CHECKING:
    from ._context import Context


class Names:
    """Objects of a context, deleted only while it is current. After a finalizer, the context's next call deletes them.

    Make them in a ``with`` block, which deletes them if it raises.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._names: list[tuple[str, int]] = []
        self.fence: int | None = None
        context.remember()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.close()

    def new(self, create: str, *arguments: Any) -> int:
        """Make an object with ``glCreate*`` or ``glGen*``."""
        name = ctypes.c_uint()
        self.context.functions.check(create, *arguments, 1, ctypes.byref(name))
        kind = create.removeprefix("glCreate").removeprefix("glGen").replace("NV", "EXT")
        self._names.insert(0, (f"glDelete{kind}", name.value))
        return name.value

    def import_memory(self, handle: Handle, size: int) -> int:
        """Make a memory object of a whole allocation (``glImportMemoryFdEXT``). Consumes the handle."""
        memory, dedicated = self.new("glCreateMemoryObjectsEXT"), ctypes.byref(ctypes.c_int(1))
        # Always dedicated. Otherwise NVIDIA's driver (580, H200) sometimes maps the memory compressed, and each side
        # reads repeated bytes that the other wrote wrongly.
        self.context.functions.check("glMemoryObjectParameterivEXT", memory, gl.DEDICATED_MEMORY_OBJECT, dedicated)
        self.import_fd(handle, "glImportMemoryFdEXT", memory, size)
        return memory

    def import_fd(self, handle: Handle, call: str, *arguments: int) -> None:
        """Import a descriptor with a ``glImport*FdEXT``. Consumes the handle."""
        check = self.context.functions.check

        def take(duplicate: Any) -> None:
            check(call, *arguments, gl.HANDLE_TYPE_OPAQUE_FD, duplicate.fd)

        import_duplicate(handle, take, user="gpuinterop.opengl")  # after a failure, drivers differ in who owns it

    def close(self) -> None:
        """Delete the objects. Idempotent, and allowed in any thread."""
        names, self._names = self._names, []
        self.context.delete(names)
        self.delete_fence()

    def delete_fence(self) -> None:
        """Delete the fence sync, in the same way as `close`."""
        fence, self.fence = self.fence, None
        if fence is not None:
            self.context.delete([("glDeleteSync", fence)])

    def __del__(self) -> None:
        self.context.closed_names.extend(self._names)
