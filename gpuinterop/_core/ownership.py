"""Lending a handle to a driver, and settling afterwards who owns the descriptor.

Drivers close the fd of a successful import, sometimes that of a failed one, and HIP closes none. The rule here is one:
success consumes the caller's handle, failure leaves it open and untouched. So a driver only ever sees a duplicate.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TypeVar

from .. import system
from ..errors import HandleError, InvalidArgumentError, LeakedResourceWarning
from ..handles import FdHandle, Handle, _State
from .monitor import after_fork

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

# From the duplicate to the check no other import may run: a driver's close could otherwise hand our number to
# another thread's descriptor between the two.
_import_lock = threading.RLock()


@after_fork
def _forked() -> None:
    global _import_lock  # noqa: PLW0603 - a thread of the parent may hold it, and does not exist in the child
    _import_lock = threading.RLock()


_F_DUPFD_QUERY = 1027  # Linux 6.10: are these two descriptors the same open file?
_KCMP_FILE = 0
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_DUPLICATE_BASE = 200  # away from the low numbers that other threads are given meanwhile


def lend(handle: Handle, call: Callable[[Handle], T], *, user: str) -> T:
    """Run `call` with a duplicate of `handle`; consume the handle when it returns, keep it when it raises.

    An interrupt behind the end of `call` takes away what this returns, and the handle is consumed all the same: what
    must not be lost, `call` stores by itself.

    Parameters
    ----------
    handle : Handle
        Open. NT, KMT, NvSci and fabric handles hold no descriptor and are passed as they are.
    call : callable
        The native import. On success the driver owns the duplicate, or the backend has closed it.
    user : str
        Who consumes, for the message of a second use.
    """
    if not isinstance(handle, FdHandle):
        handle._check_open()
        return call(handle)
    done: list[T] = []
    try:
        _lend(handle, call, user, done)
    finally:
        try:
            handle._settle()
        except BaseException:
            handle._settle()
            raise
    return done[0]


def _lend(handle: FdHandle, call: Callable[[Handle], T], user: str, done: list[T]) -> None:
    # An interrupt comes between two steps of Python's, and takes nothing away that C has put into a list by then.
    lock = _import_lock
    held: list[bool] = []
    lent: list[int] = []
    calls, mark = handle._calls, (threading.get_ident(),)

    def settle() -> None:
        if done:
            handle._state, handle._user, handle._owned = _State.CONSUMED, user, True
        elif lent:
            _take_back(handle._fd, lent)

    try:
        held.extend(map(lock.acquire, (True,)))
        calls += mark
        try:
            _duplicate(handle.fd, lent)
            done.extend(map(call, (type(handle)(lent[0], origin=handle.origin, trusted=handle.trusted),)))
        finally:
            try:
                settle()
            except BaseException:  # the interrupt came in there
                settle()
                raise
            finally:
                calls.remove(mark[0])
    finally:
        if held:
            lock.release()


def _duplicate(fd: int, lent: list[int]) -> None:
    for base in (_DUPLICATE_BASE, 0):
        try:
            lent.extend(map(fcntl.fcntl, (fd,), (fcntl.F_DUPFD_CLOEXEC,), (base,)))
            return
        except OSError as error:
            if base == 0:
                raise HandleError(f"fd: {fd} cannot be duplicated ({error.strerror}).") from error


def _take_back(original: int, lent: list[int]) -> None:
    """After a failed import: close the duplicate if it is certainly still ours."""
    duplicate = lent[0]
    same = same_open_file(original, duplicate)
    if same:
        closed: list[object] = []
        closed.extend(map(system.closer(duplicate), map(list.pop, (lent,))))
        return
    lent.clear()
    if same is None:
        warnings.warn(
            f"fd {duplicate}, lent to a driver whose import failed, is left open: nothing on this system can tell "
            "whether the number is still ours",
            LeakedResourceWarning,
            stacklevel=6,
        )


def same_open_file(first: int, second: int) -> bool | None:
    """Whether two descriptors are one open file; None where nothing can prove it."""
    try:
        os.get_inheritable(second)
    except OSError:
        return False  # closed
    try:
        return bool(fcntl.fcntl(first, _F_DUPFD_QUERY, second))
    except OSError:
        pass  # before Linux 6.10
    if (by_kcmp := _kcmp(first, second)) is not None:
        return by_kcmp
    memfds = [system.seals(fd) is not None for fd in (first, second)]
    if not all(memfds):
        return False if any(memfds) else None  # anonymous inodes and device nodes are shared
    here = os.fstat(first)
    if not os.path.samestat(here, os.fstat(second)):
        return False
    return True if here.st_nlink == 0 else None  # a memfd has an inode of its own; a file of tmpfs is opened twice


def _kcmp(first: int, second: int) -> bool | None:
    if _KCMP is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.getpid()
    result = libc.syscall(_KCMP, pid, pid, _KCMP_FILE, ctypes.c_ulong(first), ctypes.c_ulong(second))
    return None if result < 0 else bool(result == 0)


def object_size(fd: int) -> int | None:
    """The size of a memory object in bytes, where the kernel knows it by itself (memfd, dma-buf)."""
    if system.seals(fd) is not None:
        return os.fstat(fd).st_size
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:"):  # spares what is dearer
        return None
    # Not lseek: a file that is named like a dma-buf may be anybody's. No other file has this line here.
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="replace") as lines:
        return dmabuf_size(lines.read())


def dmabuf_size(fdinfo: str) -> int | None:
    """The size that the kernel notes of a dma-buf (``dma_buf_show_fdinfo``, Linux 5.3); None of anything else."""
    found = re.search(r"^size:\t([0-9]+)\ncount:\t[0-9]+\nexp_name:\t", fdinfo, re.MULTILINE)
    return int(found[1]) if found else None


def check_size(handle: Handle, size: int) -> None:
    """Refuse a size beyond the object: drivers accept it and fail, or crash, later."""
    origin = handle.origin
    known = [("the exporter", origin.size)] if origin is not None and origin.size is not None else []
    if isinstance(handle, FdHandle) and not (known and origin is not None and origin.trusted):
        try:
            real = handle._use(object_size)
        except OSError:
            real = None  # no /proc, or an object that cannot seek: the driver has to tell
        if real is not None:
            known.append(("the system", real))
    for who, limit in known:
        if size > limit:
            raise InvalidArgumentError(
                "size",
                f"{size} bytes is beyond the object, which has {limit} as {who} says; pass the allocation's size.",
            )
