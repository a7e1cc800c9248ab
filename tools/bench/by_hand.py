"""The same calls without gpuinterop: through a vendor's bindings, and in C (``calls.c``).

This is the fastest program without gpuinterop: it creates structs once and ignores statuses. Because a failing call
would be fast, each call is made and checked once before it is measured, and what it did is checked afterwards.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from gpuinterop import DriverError
from gpuinterop.testing.simulated.build import compiler

_SOURCE: Final = Path(__file__).with_name("calls.c")


def check(result: tuple[Any, ...]) -> Any:
    """The results of a vendor's call that must not fail."""
    if result[0]:
        raise DriverError("a call by hand", int(result[0]), result[0].name)
    return result[1] if len(result) == 2 else result[1:]


class CudaByHand:
    """Direct calls for one device, with cuda-python."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self.api = driver
        check(driver.cuInit(0))
        context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(ordinal))))
        check(driver.cuCtxSetCurrent(context))
        self.timeline, self.memory = partial(CudaTimeline, self), partial(CudaMemory, self)

    def address(self, name: str) -> int:
        """The address of a function of CUDA 12.1, for C."""
        flags = self.api.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
        return int(check(self.api.cuGetProcAddress(name.encode(), 12010, flags))[0])


class CudaTimeline:
    """An imported timeline, which has been signalled to 1, and a stream. The descriptor is consumed."""

    def __init__(self, by_hand: CudaByHand, fd: int) -> None:
        cu = by_hand.api
        desc = cu.CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC()
        desc.type = cu.CUexternalSemaphoreHandleType.CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_TIMELINE_SEMAPHORE_FD
        desc.handle.fd = fd
        self._by_hand, self._stream = by_hand, check(cu.cuStreamCreate(1))  # CU_STREAM_NON_BLOCKING
        self._handles = [check(cu.cuImportExternalSemaphore(desc))]
        self._signal, self._wait = cu.CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS(), cu.CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS()
        self.signal = self._call(cu.cuSignalExternalSemaphoresAsync, self._signal)
        self.wait = self._call(cu.cuWaitExternalSemaphoresAsync, self._wait)
        check(self.signal(1))
        check(self.wait(1))
        self.synchronize()

    def synchronize(self) -> None:
        check(self._by_hand.api.cuStreamSynchronize(self._stream))

    def _call(self, function: Any, params: Any) -> Callable[[int], Any]:
        handles, reused, stream, fence = self._handles, [params], self._stream, params.params.fence

        def call(value: int) -> Any:
            fence.value = value
            return function(handles, reused, 1, stream)

        return call

    def in_c(self, *, signal: bool) -> Sequence[int]:
        """``struct compute``."""
        function = self._by_hand.address(f"cu{'Signal' if signal else 'Wait'}ExternalSemaphoresAsync")
        params = int((self._signal if signal else self._wait).getPtr())  # the value of a fence is the first field
        return (function, int(self._handles[0]), params, params, int(self._stream))


class CudaMemory:
    """Memory of `size` bytes, which is imported, mapped and closed repeatedly."""

    def __init__(self, by_hand: CudaByHand, size: int) -> None:
        cu = by_hand.api
        self._by_hand = by_hand
        self._desc, self._range = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC(), cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
        self._desc.type = cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD
        self._desc.size = self._range.size = size

    def __call__(self, fd: int) -> None:
        """Import a duplicate of `fd`, map and close it."""
        cu, desc = self._by_hand.api, self._desc
        desc.handle.fd = os.dup(fd)
        memory = check(cu.cuImportExternalMemory(desc))
        pointer = check(cu.cuExternalMemoryGetMappedBuffer(memory, self._range))
        check(cu.cuMemFree(pointer))
        check(cu.cuDestroyExternalMemory(memory))

    def in_c(self) -> Sequence[int]:
        """``struct memory``."""
        names = "cuImportExternalMemory", "cuExternalMemoryGetMappedBuffer", "cuMemFree", "cuDestroyExternalMemory"
        load, place, unmap, destroy = map(self._by_hand.address, names)
        desc = int(self._desc.getPtr())
        return (load, desc, desc + 8, place, int(self._range.getPtr()), unmap, destroy)  # the fd is after the type


class HipByHand:
    """Direct calls for one device, with hip-python. Without semaphores, which HIP lacks on Linux."""

    def __init__(self, ordinal: int) -> None:
        from gpuinterop_hip.driver import Driver

        driver = Driver()
        self._api, self._is_new = driver.api, driver.is_new
        check(self._api.hipSetDevice(ordinal))

    def memory(self, size: int) -> Callable[[int], None]:
        """Return a call that imports, maps and closes memory of `size` bytes. HIP leaves the descriptor open."""
        hip = self._api
        desc, where = hip.hipExternalMemoryHandleDesc_st(), hip.hipExternalMemoryBufferDesc_st()
        desc.type = hip.hipExternalMemoryHandleType_enum.hipExternalMemoryHandleTypeOpaqueFd
        desc.size = where.size = size
        out = ctypes.c_void_p()  # bindings before 10 write the result there
        arguments = (desc,) if self._is_new else (ctypes.addressof(out), desc)

        def run(fd: int) -> None:
            desc.handle.fd = fd
            memory = check(hip.hipImportExternalMemory(*arguments)) or out.value
            check(hip.hipFree(check(hip.hipExternalMemoryGetMappedBuffer(memory, where))))
            check(hip.hipDestroyExternalMemory(memory))

        return run


# -- in C --------------------------------------------------------------------------------------------------------------


def in_c(name: str, *structs: Sequence[int]) -> Callable[..., None]:
    """A function of ``calls.c`` that takes these structs and then numbers, and raises if a call fails.

    The fields of the structs all have the size of a pointer.
    """
    function, pointers = getattr(_library(), name), [(ctypes.c_void_p * len(fields))(*fields) for fields in structs]

    def run(*numbers: int) -> None:
        if function(*pointers, *map(ctypes.c_uint64, numbers)):
            raise RuntimeError(f"a call of {name} in C failed")

    return run


@cache
def _library() -> ctypes.CDLL:
    """Build and load ``calls.c``. Raises `BackendUnavailableError` without a compiler."""
    with tempfile.TemporaryDirectory(prefix="gpuinterop-bench-") as folder:
        library = Path(folder, "calls.so")
        subprocess.run([*compiler(), "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)], check=True)
        return ctypes.CDLL(str(library))
