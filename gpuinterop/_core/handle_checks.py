"""Checks of a handle before a driver gets it: type, origin, size. Drivers accept bad ones, and fail or crash later."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from .. import system
from ..errors import ArgumentTypeError, HandleError, InvalidArgumentError
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
    handle_types,
    types_here,
)

HandleTypes: TypeAlias = "type[AllocationHandle] | Sequence[type[AllocationHandle]]"

_IMPORTS: Final = {"memory": MemoryHandle, "semaphore": SemaphoreHandle, "allocation": AllocationHandle}
_ARRAY_MARKS: Final = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
# The APIs export these only as one resource with its own memory.
_ALWAYS_DEDICATED: tuple[type[Handle], ...] = (D3D12Resource, D3D11Resource, D3D11ResourceKmt)


def object_size(fd: int) -> int | None:
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
    found = re.search(r"^size:\t([0-9]+)\ncount:\t[0-9]+\nexp_name:\t", fdinfo, re.MULTILINE)
    return int(found[1]) if found else None


def check_size(handle: Handle, size: int) -> None:
    """Raise if a size exceeds the object. Drivers accept such a size, and fail or crash later."""
    origin = handle.origin
    said = origin.size if origin is not None else None
    known = [("the exporter", said)]
    if isinstance(handle, FdHandle) and (said is None or origin is None or not origin.trusted):
        with contextlib.suppress(OSError):  # no /proc, or not seekable: leave the check to the driver
            known.append(("the system", handle._use(object_size)))
    for who, limit in known:
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
