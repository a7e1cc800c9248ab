"""The HIP runtime through ctypes: nothing of what is tested is between a test and the library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.descriptors import is_open as is_open

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE = 0, 1, 2, 100
NOT_READY, NOT_SUPPORTED, UNKNOWN = 600, 801, 999

MIB: Final = 1 << 20
OPAQUE_FD: Final = 1


class _Handle(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("win32", ctypes.c_void_p * 2))


class MemoryDesc(ctypes.Structure):
    """``hipExternalMemoryHandleDesc``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle", _Handle),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    )


class BufferDesc(ctypes.Structure):
    """``hipExternalMemoryBufferDesc``."""

    _fields_ = (
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    )


class SemaphoreDesc(ctypes.Structure):
    """``hipExternalSemaphoreHandleDesc``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle", _Handle),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
        ("end", ctypes.c_uint),
    )


class Location(ctypes.Structure):
    """``hipMemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """``hipMemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("where", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class Access(ctypes.Structure):
    """``hipMemAccessDesc``."""

    _fields_ = (("where", Location), ("flags", ctypes.c_int))


class IpcHandle(ctypes.Structure):
    """``hipIpcMemHandle_t``, and what AMD's runtime has in it."""

    _fields_ = (
        ("below", ctypes.c_uint8 * 32),
        ("size", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("process", ctypes.c_int),
        ("reserved", ctypes.c_uint8 * 12),
    )


SIZES: Final = {
    MemoryDesc: 104,
    BufferDesc: 88,
    SemaphoreDesc: 96,
    AllocationProp: 32,
    Access: 12,
    IpcHandle: 64,
}
for _struct, _size in SIZES.items():
    assert ctypes.sizeof(_struct) == _size, _struct


class Runtime:
    """The library at `path`."""

    def __init__(self, path: Path | str) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.hipGetErrorName.restype = self.library.hipGetErrorString.restype = ctypes.c_char_p

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def __call__(self, name: str, *arguments: Any) -> int:
        """Call a function. In a register a smaller integer is the lower part of a larger one."""
        passed = [ctypes.c_uint64(argument) if isinstance(argument, int) else argument for argument in arguments]
        return int(getattr(self.library, name)(*passed))

    def ok(self, name: str, *arguments: Any) -> None:
        code = self(name, *arguments)
        assert code == SUCCESS, f"{name}: {self.library.hipGetErrorName(code).decode()} ({code})"

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_int) -> int:
        """Call a function that writes a number to where its first argument points."""
        found = kind()
        self.ok(name, ctypes.byref(found), *arguments)
        return int(found.value or 0)

    def object(self, name: str, *arguments: Any) -> int:
        """The same, of a handle, a pointer or a size."""
        return self.number(name, *arguments, kind=ctypes.c_size_t)

    def attribute(self, number: int, device: int = 0) -> int:
        return self.number("hipDeviceGetAttribute", number, device)

    # -- external memory -----------------------------------------------------------------------------------------

    def import_fd(self, fd: int, size: int, *, kind: int = OPAQUE_FD, flags: int = 0) -> tuple[int, int]:
        """The status and the external memory."""
        desc = MemoryDesc(type=kind, size=size, flags=flags)
        desc.handle.fd = fd
        made = ctypes.c_size_t()
        return self("hipImportExternalMemory", ctypes.byref(made), ctypes.byref(desc)), made.value

    def map(self, memory: int, offset: int, size: int) -> tuple[int, int]:
        """The status and the address."""
        desc = BufferDesc(offset=offset, size=size)
        address = ctypes.c_size_t()
        code = self("hipExternalMemoryGetMappedBuffer", ctypes.byref(address), memory, ctypes.byref(desc))
        return code, address.value

    def mapped(self, memory: int, offset: int, size: int) -> int:
        code, address = self.map(memory, offset, size)
        assert code == SUCCESS
        return address

    @contextmanager
    def imported(self, party: Any, size: int = 1 << 16) -> Iterator[tuple[Any, int]]:
        """What the party has made, and our external memory of it; destroyed in the end, when it is still there."""
        with party.create_memory(size) as theirs:
            handle = theirs.export()
            code, memory = self.import_fd(handle.fd, theirs.size, flags=int(theirs.dedicated))
            assert code == SUCCESS
            handle.close()
            yield theirs, memory
            self("hipDestroyExternalMemory", memory)

    def import_semaphore(self, kind: int, fd: int = 0, handle: int = 0) -> tuple[int, int]:
        """The status and the external semaphore."""
        desc = SemaphoreDesc(type=kind)
        if fd:
            desc.handle.fd = fd
        else:
            desc.handle.win32[0] = handle
        made = ctypes.c_size_t()
        return self("hipImportExternalSemaphore", ctypes.byref(made), ctypes.byref(desc)), made.value

    # -- memory that is there already ----------------------------------------------------------------------------

    def asked(self, number: int, address: int) -> tuple[int, bytes]:
        """What ``hipPointerGetAttribute`` returns, and the bytes that it has written."""
        place = (ctypes.c_uint8 * 16)(*[0xEE] * 16)
        code = self("hipPointerGetAttribute", place, number, address)
        return code, bytes(place).rstrip(b"\xee")

    def range_of(self, address: int) -> tuple[int, int, int]:
        """The status, the base and the size."""
        base, size = ctypes.c_size_t(), ctypes.c_size_t()
        return self("hipMemGetAddressRange", ctypes.byref(base), ctypes.byref(size), address), base.value, size.value

    def access(self, address: int, device: int = 0) -> tuple[int, int]:
        """The status and the flags."""
        flags = ctypes.c_uint64()
        return self("hipMemGetAccess", ctypes.byref(flags), ctypes.byref(Location(1, device)), address), flags.value

    def ipc_handle(self, address: int) -> tuple[int, IpcHandle]:
        handle = IpcHandle()
        return self("hipIpcGetMemHandle", ctypes.byref(handle), address), handle

    def ipc_open(self, handle: bytes, flags: int = 1) -> tuple[int, int]:
        """The status and the address."""
        made = ctypes.c_size_t()
        given = IpcHandle.from_buffer_copy(handle)
        return self("hipIpcOpenMemHandle", ctypes.byref(made), given, flags), made.value

    def read(self, address: int, size: int = 4) -> bytes:
        place = ctypes.create_string_buffer(size)
        self.ok("hipMemcpy", place, address, size, 2)
        return place.raw

    # -- the rest ------------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, flags: int = 1) -> Iterator[int]:
        made = self.object("hipStreamCreateWithFlags", flags)
        yield made
        self.ok("hipStreamDestroy", made)

    @contextmanager
    def pinned(self, size: int = 4096) -> Iterator[int]:
        """Memory of the host that the device reaches, zeroed."""
        address = self.object("hipHostMalloc", size, 0)
        ctypes.memset(address, 0, size)
        yield address
        self.ok("hipHostFree", address)

    def properties(self, device: int = 0) -> AllocationProp:
        """Pinned memory of the device, exported as a descriptor."""
        return AllocationProp(type=1, handle_types=1, where=Location(1, device))


def word(address: int) -> Any:
    return ctypes.c_uint64.from_address(address)
