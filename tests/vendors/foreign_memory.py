"""Memory as another library would have made it, of each kind, by the driver that this process has: through ctypes.

Nothing of gpuinterop or of the bindings makes it. A program that tests start may use it, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal

from .hip.runtime import Access, AllocationProp, Location
from .table import VENDOR

Kind = Literal["legacy", "pool", "managed", "vmm"]
STEP: Final = 2 << 20
"""Of virtual memory each mapping is that large, and has a handle of its own."""


class Foreign:
    """So many bytes of one kind. An array of them, or of some, is what `__cuda_array_interface__` says."""

    def __init__(self, kind: Kind, ptr: int, size: int, free: Callable[[], Any]) -> None:
        self.kind, self.ptr, self.size = kind, ptr, size
        self.handles: list[int] = []
        """Of virtual memory; they are held as long as it is mapped."""
        self.free = free

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.ptr, False), "version": 3}

    def part(self, offset: int, size: int) -> Foreign:
        """An array within it; whoever has it must keep the whole."""
        return Foreign(self.kind, self.ptr + offset, size, lambda: None)


def call(name: str, *arguments: Any) -> int:
    """The status of a function, named without the vendor's prefix."""
    name = VENDOR.call(name)
    library = ctypes.CDLL(VENDOR.library)
    if VENDOR.name == "cuda":  # it has but one symbol
        found, version = ctypes.c_void_p(), ctypes.c_int(12000)
        library.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version, ctypes.c_uint64(0), None)
        function = ctypes.CFUNCTYPE(ctypes.c_int)(found.value or 0)
        function.argtypes = None  # type: ignore[assignment]
    else:
        function = getattr(library, name)
    return int(function(*(ctypes.c_uint64(one) if isinstance(one, int) else one for one in arguments)))


def ok(name: str, *arguments: Any) -> None:
    code = call(name, *arguments)
    assert code == 0, f"{VENDOR.call(name)}: {code}"


def made(name: str, *arguments: Any) -> int:
    """What a function writes to where its first argument points."""
    found = ctypes.c_uint64()
    ok(name, ctypes.byref(found), *arguments)
    return found.value


def attribute(number: int, address: int) -> int | None:
    """What the driver tells of an address; None where it does not."""
    found = ctypes.c_uint64()
    return None if call("PointerGetAttribute", ctypes.byref(found), number, address) else found.value


@contextmanager
def current(device: int = 0) -> Iterator[None]:
    """The device is this thread's."""
    ok("Init", 0)
    if VENDOR.name == "cuda":
        ok("CtxPushCurrent", made("DevicePrimaryCtxRetain", device))
        yield
        made("CtxPopCurrent")
        ok("DevicePrimaryCtxRelease", device)
    else:
        before = made("GetDevice")
        ok("SetDevice", device)
        yield
        ok("SetDevice", before)


def make(kind: Kind, size: int, device: int = 0) -> Foreign:
    """Memory that `free` releases, once; the device must be `current` then, too."""
    cuda = VENDOR.name == "cuda"
    if kind == "legacy":
        ptr = made("MemAlloc" if cuda else "Malloc", size)
        return Foreign(kind, ptr, size, lambda: ok("MemFree" if cuda else "Free", ptr))
    if kind == "pool":
        ptr = made("MemAllocAsync" if cuda else "MallocAsync", size, 0)
        return Foreign(kind, ptr, size, lambda: ok("MemFreeAsync" if cuda else "FreeAsync", ptr, 0))
    if kind == "managed":
        ptr = made("MemAllocManaged" if cuda else "MallocManaged", size, 1)
        return Foreign(kind, ptr, size, lambda: ok("MemFree" if cuda else "Free", ptr))
    steps = range(0, -(-size // STEP) * STEP, STEP)
    whole = steps.stop + STEP  # nothing is mapped at the end
    undo = ExitStack()
    ptr = made("MemAddressReserve", whole, 0, 0, 0)
    undo.callback(ok, "MemAddressFree", ptr, whole)
    foreign = Foreign(kind, ptr, steps.stop, undo.close)
    where = Location(1, device)
    for offset in steps:
        handle = made("MemCreate", STEP, ctypes.byref(AllocationProp(type=1, handle_types=1, where=where)), 0)
        undo.callback(ok, "MemRelease", handle)
        ok("MemMap", ptr + offset, STEP, 0, handle, 0)
        undo.callback(ok, "MemUnmap", ptr + offset, STEP)
        foreign.handles.append(handle)
    ok("MemSetAccess", ptr, steps.stop, ctypes.byref(Access(where=where, flags=3)), 1)
    return foreign


@contextmanager
def memory(kind: Kind, size: int, device: int = 0) -> Iterator[Foreign]:
    """Made and freed; the device stays `current` meanwhile."""
    with current(device):
        foreign = make(kind, size, device)
        yield foreign
        foreign.free()


# -- of another process ------------------------------------------------------------------------------------------------
