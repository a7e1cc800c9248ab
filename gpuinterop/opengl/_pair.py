"""An object with names in OpenGL and halves in the compute API: closing both."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from .._arguments import NoCopy, check_timeout
from ..errors import ResourceClosedError

if TYPE_CHECKING:
    from .._core.resource import Resource
    from ..vulkan._pair import Shared
    from ._context import Context
    from ._names import Names


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
