"""The monitor: the one lock of the process under which objects change their state; and what finalizers leave behind.

No native call, wait, callback or I/O happens under it. CPython looks at signals after calls, at the entry of functions
and at backward jumps, and what a handler raises there ends the function. So two writes that belong together stand
without a call between them, and whatever a loop has done so far makes sense by itself.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ..errors import ResourceBusyError

if TYPE_CHECKING:
    from .native import Native

P = ParamSpec("P")
T = TypeVar("T")

_lock = threading.RLock()  # a signal handler may come back in the same thread: see `refuse_reentry`
_resets: list[Callable[[], None]] = []
_generation = 0

dropped: deque[Native] = deque()
"""What nobody has any more: a finalizer appends to it and does nothing else. The next drain retires it."""


def locked(transition: Callable[P, T]) -> Callable[P, T]:
    """Run a function under the monitor. An interrupt behind it may take away what it returns."""

    @functools.wraps(transition)
    def entered(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:  # not `with`: on CPython 3.14 that can lose the lock to an interrupt (cpython #148874)
            _lock.acquire()
            return transition(*arguments, **keywords)
        finally:
            try:  # noqa: SIM105 - a call in between could be interrupted
                _lock.release()
            except RuntimeError:  # the interrupt came before the lock
                pass

    return entered


def interrupted() -> bool:
    """Whether this is a signal handler or a finalizer that has come in the middle of a transition of this thread."""
    return _lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def refuse_reentry() -> None:
    """Raise in such a handler: what it asks for cannot be decided now, and waiting for it would never end."""
    if interrupted():
        raise ResourceBusyError(
            "expected a call outside of gpuinterop's own transitions, got one by a signal handler that came in the "
            "middle of one; call close() there, which is queued, or set a flag and do the rest in the program."
        )


def generation() -> int:
    """How often this process, and those that it comes from, were forked since the library was loaded."""
    return _generation


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """Run `reset` in every child of a fork: the one hook of this library, for whatever a parent's thread may hold."""
    _resets.append(reset)
    return reset


def _forked() -> None:
    global _generation, _lock  # noqa: PLW0603 - a thread of the parent may hold the lock
    _lock = threading.RLock()
    _generation += 1
    dropped.clear()
    for reset in _resets:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
