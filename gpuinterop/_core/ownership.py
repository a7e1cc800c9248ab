"""Pass a duplicate of a handle to a driver, then settle who owns the descriptor.

CUDA closes the fd after a successful import, and sometimes after a failed one; HIP never closes it. In gpuinterop,
success consumes the caller's handle, and failure leaves it open and unchanged. So drivers only ever get a duplicate.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from .. import system
from ..errors import GpuInteropError, HandleError, warn_leak
from ..handles import FdHandle, Handle, _State, this_thread
from .lifetime import after_fork

if TYPE_CHECKING:
    from .lifetime import Lifetime

if sys.platform != "win32":
    import fcntl

H = TypeVar("H", bound=Handle)
T = TypeVar("T")

# Held from the duplication to the check: another import in between could get the number that a driver has closed.
_import_lock = threading.RLock()


@after_fork
def _forked() -> None:
    global _import_lock  # noqa: PLW0603 - a thread of the parent may hold it, and the child does not have that thread
    _import_lock = threading.RLock()


_F_DUPFD_QUERY = 1027  # Linux 6.10: are these two descriptors the same open file?
_KCMP_FILE = 0
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
# Above the open descriptors of most processes: other threads get the low numbers.
_DUPLICATE_BASES = (4096, 900)


def import_duplicate(handle: H, call: Callable[[H], T], *, user: str, lifetime: Lifetime | None = None) -> T:
    """Run `call` with a duplicate of `handle`. Consume the handle if it returns; keep the handle if it raises.

    On success, the driver owns the duplicate, or the backend has closed it. If `call` raises an exception other than
    `GpuInteropError`, the duplicate stays open, because the driver may have it. Handles without a descriptor (NT, KMT,
    NvSci, fabric) are passed as they are. `user` is named in the error if the handle is used again. `lifetime` is the
    object that `call` makes: once made, it owns the duplicate even if `call` raises, and a later drain closes both.
    """
    if not isinstance(handle, FdHandle):
        handle._check_open()
        return call(handle)
    try:
        return system.under(_import_lock, _import_duplicate, handle, call, user, lifetime)
    finally:
        handle._settle()


def _import_duplicate(handle: FdHandle, call: Callable[[Any], T], user: str, lifetime: Lifetime | None) -> T:
    calls, mark = handle.calls, (this_thread(),)
    calls += mark
    try:
        duplicate = _duplicate(handle.fd)
        try:
            result = call(handle._with_fd(duplicate))
        except GpuInteropError:
            if lifetime is None or lifetime.handle is None:
                _take_back(handle._fd, duplicate)
            raise
        handle._state, handle._user, handle._owned = _State.CONSUMED, user, True
        return result
    finally:
        calls.remove(mark[0])


def _duplicate(fd: int) -> int:
    for base in _DUPLICATE_BASES:
        with contextlib.suppress(OSError):
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, base)
    try:
        return system.opened("dup", os.dup, fd)
    except OSError as error:
        raise HandleError(
            f"fd: expected one that can be duplicated, got {fd} ({error.strerror}); was it closed elsewhere?"
        ) from error


def _take_back(original: int, duplicate: int) -> None:
    """Close the duplicate after a failed import, if it is certainly still open and ours."""
    same = same_open_file(original, duplicate)
    if same:
        system.close(duplicate)
    elif same is None:
        warn_leak(
            f"fd {duplicate}, a duplicate for a driver whose import failed, is left open: this system cannot tell "
            "whether the driver closed it"
        )


def same_open_file(first: int, second: int) -> bool | None:
    """Whether two descriptors refer to one open file; None if this system cannot tell."""
    try:
        os.get_inheritable(second)
    except OSError:
        return False  # closed
    with contextlib.suppress(OSError):  # before Linux 6.10
        return bool(fcntl.fcntl(first, _F_DUPFD_QUERY, second))
    if (by_kcmp := _kcmp(first, second)) is not None:
        return by_kcmp
    memfds = [system.seals(fd) is not None for fd in (first, second)]
    if not all(memfds):
        return False if any(memfds) else None  # inodes of anonymous files and device nodes are shared
    here = os.fstat(first)
    if not os.path.samestat(here, os.fstat(second)):
        return False
    return True if here.st_nlink == 0 else None  # every memfd has its inode; a tmpfs file can be opened twice


def _kcmp(first: int, second: int) -> bool | None:
    if _KCMP is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.getpid()
    result = libc.syscall(_KCMP, pid, pid, _KCMP_FILE, ctypes.c_ulong(first), ctypes.c_ulong(second))
    return None if result < 0 else bool(result == 0)
