"""Check a handle, lend it to a driver, and settle afterwards who owns the descriptor.

CUDA closes the fd after a successful import and sometimes after a failed one; HIP never does. gpuinterop has one rule:
success consumes the caller's handle, failure leaves it open and untouched. So a driver only ever gets a duplicate.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from .. import system
from ..errors import ArgumentTypeError, GpuInteropError, HandleError, InvalidArgumentError, warn_leak
from ..handles import (
    AllocationHandle,
    D3D11Resource,
    D3D11ResourceKmt,
    D3D12Resource,
    DeviceIdentity,
    FdHandle,
    Handle,
    MemoryHandle,
    OriginKind,
    SemaphoreHandle,
    _State,
    handle_types,
    this_thread,
    types_here,
)
from .monitor import after_fork

if TYPE_CHECKING:
    from .lifetime import Lifetime

if sys.platform != "win32":
    import fcntl

H = TypeVar("H", bound=Handle)
T = TypeVar("T")

HandleTypes: TypeAlias = "type[AllocationHandle] | Sequence[type[AllocationHandle]]"

# No other import may run between the duplicate and the check: after a driver's close, another thread's descriptor
# could otherwise get our number.
_import_lock = threading.RLock()


@after_fork
def _forked() -> None:
    global _import_lock  # noqa: PLW0603 - a thread of the parent may hold it; the child does not have that thread
    _import_lock = threading.RLock()


_F_DUPFD_QUERY = 1027  # Linux 6.10: are these two descriptors the same open file?
_KCMP_FILE = 0
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
# Above what a process has open, as far as its limit goes: the low numbers are those that other threads get meanwhile.
_DUPLICATE_BASES = (4096, 900, 0)
_IMPORTS: Final = {"memory": MemoryHandle, "semaphore": SemaphoreHandle, "allocation": AllocationHandle}
# The APIs know these only as one resource that owns its memory.
_ALWAYS_DEDICATED: tuple[type[Handle], ...] = (D3D12Resource, D3D11Resource, D3D11ResourceKmt)


def lend(handle: H, call: Callable[[H], T], *, user: str, lifetime: Lifetime | None = None) -> T:
    """Run `call` with a duplicate of `handle`; consume the handle when it returns, keep it when it raises.

    Where it raises what is not an error of this library, nothing tells whether the driver has the duplicate: that stays
    open.

    Parameters
    ----------
    handle : Handle
        An open handle. NT, KMT, NvSci and fabric handles have no descriptor and are passed as they are.
    call : callable
        The object import. On success the driver owns the duplicate, or the backend has closed it.
    user : str
        Consumer that the error of a second use names.
    lifetime : Lifetime, optional
        What `call` makes. Once it is made the duplicate is its own, also if `call` raises after that: its release
        closes it, in a later drain.
    """
    if not isinstance(handle, FdHandle):
        handle.check_open()
        return call(handle)
    try:
        return system.under(_import_lock, _lend, handle, call, user, lifetime)
    finally:
        handle.settle()


def _lend(handle: FdHandle, call: Callable[[Any], T], user: str, lifetime: Lifetime | None) -> T:
    calls, mark = handle.calls, (this_thread(),)
    calls += mark
    try:
        lent = _duplicate(handle.fd)
        try:
            result = call(handle.lent(lent))
        except GpuInteropError:
            if lifetime is None or lifetime.handle is None:
                _take_back(handle._fd, lent)
            raise
        handle._state, handle._user, handle._owned = _State.CONSUMED, user, True
        return result
    finally:
        calls.remove(mark[0])


def _duplicate(fd: int) -> int:
    for base in _DUPLICATE_BASES:
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, base)
        except OSError as error:
            failure = error
    raise HandleError(f"fd: {fd} cannot be duplicated ({failure.strerror}).") from failure


def _take_back(original: int, duplicate: int) -> None:
    """Close the duplicate of a failed import if it is certainly still ours."""
    same = same_open_file(original, duplicate)
    if same:
        system.close(duplicate)
    elif same is None:
        warn_leak(
            f"fd {duplicate}, lent to a driver whose import failed, is left open: this system cannot tell whether the "
            "driver closed it"
        )


def same_open_file(first: int, second: int) -> bool | None:
    """Whether two descriptors are one open file; None if this system cannot tell."""
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
        return False if any(memfds) else None  # anonymous inodes and device nodes are shared
    here = os.fstat(first)
    if not os.path.samestat(here, os.fstat(second)):
        return False
    return True if here.st_nlink == 0 else None  # a memfd's inode is its own; a tmpfs file may be opened twice


def _kcmp(first: int, second: int) -> bool | None:
    if _KCMP is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.getpid()
    result = libc.syscall(_KCMP, pid, pid, _KCMP_FILE, ctypes.c_ulong(first), ctypes.c_ulong(second))
    return None if result < 0 else bool(result == 0)


def object_size(fd: int) -> int | None:
    """The size of a memory object in bytes if the kernel knows it (memfd, dma-buf); else None."""
    if system.seals(fd) is not None:
        return os.fstat(fd).st_size
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:"):  # skips the dearer check
        return None
    # Not lseek: any file may be named like a dma-buf. Only dma-bufs have this line.
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="replace") as lines:
        return dmabuf_size(lines.read())


def dmabuf_size(fdinfo: str) -> int | None:
    """The size that the kernel reports for a dma-buf (``dma_buf_show_fdinfo``, Linux 5.3); None for other files."""
    found = re.search(r"^size:\t([0-9]+)\ncount:\t[0-9]+\nexp_name:\t", fdinfo, re.MULTILINE)
    return int(found[1]) if found else None


def check_size(handle: Handle, size: int) -> None:
    """Refuse a size that exceeds the object: drivers accept it and fail, or crash, later."""
    origin = handle.origin
    said = origin.size if origin is not None else None
    known = [("the exporter", said)]
    if isinstance(handle, FdHandle) and (said is None or origin is None or not origin.trusted):
        with contextlib.suppress(OSError):  # no /proc, or an object that cannot seek: the driver must check
            known.append(("the system", handle.use(object_size)))
    for who, limit in known:
        if limit is not None and size > limit:
            raise InvalidArgumentError(
                "size",
                f"{size} bytes is beyond the object, which has {limit} as {who} says; pass the allocation's size.",
            )


def check_origin(handle: Handle, kinds: Iterable[OriginKind], device: DeviceIdentity | None = None) -> None:
    """Refuse what drivers swallow, as far as the origin shows it: another kind, or another device than `device`."""
    origin = handle.origin
    if origin is None:
        return
    if origin.kind not in kinds:
        raise HandleError(
            f"handle: this {type(handle).__name__} was exported from {_article(origin.kind.value)} object, and the "
            "driver does not check that; use the handle type and the import call of that kind."
        )
    if device is not None and origin.device is not None and origin.device.conflicts(device):
        raise HandleError(
            f"handle: expected one of {device.name}, got one that was exported by "
            f"{origin.device.name or 'another device'}; pick the device with gpuinterop.match_device(identity)."
        )


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def check_handle(handle: object, wanted: type[Handle], call: str, example: str) -> None:
    """Refuse what is not an open handle of the wanted types."""
    if not isinstance(handle, wanted):
        takes = [f"import_{name}" for name, kind in _IMPORTS.items() if isinstance(handle, kind)]
        got = type(handle).__name__ + "".join(f", which {name} takes" for name in takes[:1])
        if isinstance(handle, int):
            got = f"an int; wrap it: {example}"
        raise ArgumentTypeError("handle", f"{call} expects one of {_names(wanted)}, got {got}.")
    handle.check_open()


def check_handle_type(handle_type: Any, wanted: type[Handle], argument: str) -> None:
    if not (isinstance(handle_type, type) and issubclass(handle_type, wanted)):
        raise ArgumentTypeError(argument, f"expected one of the types {_names(wanted)}, got {handle_type!r}.")


def check_handle_types(handle_types: HandleTypes) -> tuple[type[AllocationHandle], ...]:
    kinds: tuple[Any, ...] = tuple(handle_types) if isinstance(handle_types, Iterable) else (handle_types,)
    for kind in kinds:
        check_handle_type(kind, AllocationHandle, "handle_types")
    return tuple(dict.fromkeys(kinds))


def _names(wanted: type[Handle]) -> str:
    return ", ".join(kind.__name__ for kind in types_here(handle_types().values(), wanted))


def is_dedicated(handle: Handle, dedicated: bool | None) -> bool:
    if dedicated is not None and not isinstance(dedicated, bool):
        raise ArgumentTypeError("dedicated", f"expected True, False or None, got {dedicated!r}.")
    known = handle.origin.dedicated if handle.origin is not None else None
    if isinstance(handle, _ALWAYS_DEDICATED):
        known = True
    if dedicated is None:
        return bool(known)
    if known is not None and dedicated != known:
        raise InvalidArgumentError(
            "dedicated", f"the exporter's allocation {'is' if known else 'is not'} dedicated; pass dedicated={known}."
        )
    return dedicated
