"""What is checked before an import, an allocation or a creation, and who owns a handle after an import.

Drivers accept a handle of a bad type, origin or size, and fail or crash later.

CUDA closes the fd after a successful import, and sometimes after a failed one; HIP never closes it. In gpuinterop,
success consumes the caller's handle, and failure leaves it open and unchanged. So drivers only ever get a duplicate.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from .. import handles, system
from ..capabilities import Capabilities, Operation
from ..errors import ArgumentTypeError, GpuInteropError, HandleError, InvalidArgumentError, warn_leak
from ..handles import AllocationHandle, DeviceIdentity, FdHandle, Handle, MemoryHandle, OriginKind, SemaphoreHandle
from .lifetime import after_fork

if TYPE_CHECKING:
    from ..backend import Backend
    from .lifetime import Lifetime

if sys.platform != "win32":
    import fcntl

H = TypeVar("H", bound=Handle)
T = TypeVar("T")

# -- what is checked ---------------------------------------------------------------------------------------------------

HandleTypes: TypeAlias = "type[AllocationHandle] | Sequence[type[AllocationHandle]]"

_IMPORTS: Final = {"memory": MemoryHandle, "semaphore": SemaphoreHandle, "allocation": AllocationHandle}
_ARRAY_MARKS: Final = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
# The APIs export these only as one resource with its own memory.
_ALWAYS_DEDICATED: tuple[type[Handle], ...] = (handles.D3D12Resource, handles.D3D11Resource, handles.D3D11ResourceKmt)


def _object_size(fd: int) -> int | None:
    """Return the size of a memory object in bytes if the kernel reports it (memfd, dma-buf); else None."""
    if system.seals(fd) is not None:
        return os.fstat(fd).st_size
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:"):  # avoids the slower check
        return None
    # Not lseek, because any file can have such a name. Only dma-bufs have this line.
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="replace") as lines:
        return dmabuf_size(lines.read())


def dmabuf_size(fdinfo: str) -> int | None:
    """Return the size that the kernel reports for a dma-buf (``dma_buf_show_fdinfo``, Linux 5.3); None otherwise."""
    match = re.search(r"^size:\t([0-9]+)\ncount:\t[0-9]+\nexp_name:\t", fdinfo, re.MULTILINE)
    return int(match[1]) if match else None


def check_size(handle: Handle, size: int) -> None:
    """Raise if a size exceeds the object. Drivers accept such a size, and fail or crash later."""
    origin = handle.origin
    exported = origin.size if origin is not None else None
    limits = [("the exporter", exported)]
    if isinstance(handle, FdHandle) and (exported is None or origin is None or not origin.trusted):
        with contextlib.suppress(OSError):  # no /proc, or not seekable: leave the check to the driver
            limits.append(("the system", handle._use(_object_size)))
    for who, limit in limits:
        if limit is not None and size > limit:
            raise InvalidArgumentError(
                "size", f"expected at most {limit} bytes, as {who} says, got {size}; pass the allocation's size."
            )


def check_origin(handle: Handle, kinds: Iterable[OriginKind], device: DeviceIdentity | None = None) -> None:
    """Raise if the origin shows another kind, or another device than `device`. Drivers do not check this."""
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
            f"handle: expected a handle of {device.name}, got one exported by "
            f"{origin.device.name or 'another device'}; pick the device with gpuinterop.match_device(identity)."
        )


def require_import(capabilities: Capabilities, operation: Operation, handle: Handle) -> None:
    capabilities.require((operation, type(handle)))
    if isinstance(handle, handles.Win32Handle) and handle.name is not None:
        capabilities.require((Operation.IMPORT_BY_NAME, type(handle)))


def ordinal_of(handle: Handle, backend: Backend) -> int | None:
    """Return the ordinal, in the backend, of the device that the handle's origin names; None if unknown."""
    identity = handle.origin.device if handle.origin is not None else None
    if identity is None:
        return None
    return next((info.ordinal for info in backend.devices() if info.identity.matches(identity)), None)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def check_handle(handle: object, wanted: type[Handle], call: str, example: str) -> None:
    if not isinstance(handle, wanted):
        takes = [f"import_{name}" for name, kind in _IMPORTS.items() if isinstance(handle, kind)]
        got = type(handle).__name__ + "".join(f", which {name} accepts" for name in takes[:1])
        if isinstance(handle, int):
            got = f"an int; wrap it: {example}"
        elif _is_array(handle):
            got += (
                ", an array and not a handle; pass it to gpuinterop.share(array) for other processes, to "
                "gpuinterop.vulkan.import_array(vk, array) for Vulkan"
            )
        raise ArgumentTypeError("handle", f"{call} expects one of {_names(wanted)}, got {got}.")
    handle._check_open()


def _is_array(value: object) -> bool:
    """Whether a value is an array of some library. Looks attributes up without calling them, as torch's may raise."""
    return any(inspect.getattr_static(value, name, None) is not None for name in _ARRAY_MARKS)


def check_handle_type(handle_type: Any, wanted: type[Handle], argument: str) -> None:
    if not (isinstance(handle_type, type) and issubclass(handle_type, wanted)):
        raise ArgumentTypeError(argument, f"expected one of the types {_names(wanted)}, got {handle_type!r}.")


def check_handle_types(handle_types: HandleTypes) -> tuple[type[AllocationHandle], ...]:
    kinds: tuple[Any, ...] = tuple(handle_types) if isinstance(handle_types, Iterable) else (handle_types,)
    for kind in kinds:
        check_handle_type(kind, AllocationHandle, "handle_types")
    return tuple(dict.fromkeys(kinds))


def _names(wanted: type[Handle]) -> str:
    return ", ".join(kind.__name__ for kind in handles.types_here(handles.handle_types().values(), wanted))


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


# -- who owns the descriptor ------------------------------------------------------------------------------------------

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
    calls, mark = handle.calls, (handles.this_thread(),)
    calls += mark
    try:
        duplicate = _duplicate(handle.fd)
        try:
            result = call(handle._with_fd(duplicate))
        except GpuInteropError:
            if lifetime is None or lifetime.handle is None:
                _take_back(handle._fd, duplicate)
            raise
        handle._state, handle._user, handle._owned = handles._State.CONSUMED, user, True
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
