"""The table of vendors: what the tests of this folder must know of each. One of them is under test, `VENDOR`.

GPUINTEROP_TEST_VENDOR names it; else it is hip where GPUINTEROP_TEST_HIP is set, and cuda.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import gpuinterop as gi

INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS, NOT_SUPPORTED, UNKNOWN = 1, 2, 700, 801, 999

MEMORY: Final[Mapping[type[Any], int]] = {
    gi.OpaqueWin32: 2,
    gi.OpaqueWin32Kmt: 3,
    gi.D3D12Heap: 4,
    gi.D3D12Resource: 5,
    gi.D3D11Resource: 6,
    gi.D3D11ResourceKmt: 7,
}
"""Windows' types of memory, with the numbers that both vendors have for them."""


@dataclass(frozen=True, slots=True)
class Vendor:
    """One vendor's driver and bindings, as far as they differ."""

    name: str
    title: str
    prefix: str
    """What the names of the driver's functions begin with."""
    modes: tuple[str, ...]
    """What GPUINTEROP_TEST_CUDA or GPUINTEROP_TEST_HIP may be."""
    library: str
    """What the driver is loaded as."""
    bindings: Mapping[str, str]
    """The modules that have the driver's functions, the first that is there; and where its version stands."""
    symbols: Mapping[int, str]
    """The names of errors."""
    import_fds: tuple[Any, ...]
    """What an import that fails may do with the descriptor."""
    import_codes: tuple[int, ...]
    beyond: Mapping[str, str]
    """What maps memory, and what is said where that fails."""
    semaphores: Mapping[type[Any], int]
    """Windows' types of semaphores, with their numbers."""
    refuses: Mapping[gi.Operation, set[type[Any]]]
    """Handle types that the table of capabilities knows, and the driver refuses."""
    busy: str
    """What is said of a close that takes too long."""
    tells_own: bool
    """Whether the driver's word is taken where it says that an import lies on the device that has imported it."""
    channel: int
    """The attribute that says whether there are fabric handles."""
    without_channel: int
    """The error where a process has no channel for them, or another one."""
    without_channel_says: tuple[str, ...]
    needs: tuple[str, ...]
    """What is said where there is no driver: its library, what to install."""
    missing: tuple[str, ...]
    """And in the error of `get_backend`."""
    no_bindings: tuple[str, ...]
    """And where there are other packages of the bindings' names."""
    broken: tuple[tuple[dict[str, str], tuple[str, ...]], ...]
    """And where the simulated driver is told to be of no use."""
    switches: tuple[tuple[str, str, int], ...]
    """What is called before and after a call on another device; the latter is so many calls on."""
    unnamed: str
    """What a status without a name is called."""
    makes_current: tuple[str, ...]
    """The calls that make a context or device current, or something on it."""

    @property
    def mode(self) -> str:
        """Which driver the run has."""
        return os.environ.get(f"GPUINTEROP_TEST_{self.name.upper()}") or "simulated"

    def call(self, name: str) -> str:
        """The function of the driver."""
        return self.prefix + name


VENDORS: Final = {
    "cuda": Vendor(
        name="cuda",
        title="CUDA",
        prefix="cu",
        modes=("simulated", "real"),
        library="libcuda.so.1",
        bindings={"cuda.bindings.driver": "cuda.bindings"},
        symbols={
            INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
            ILLEGAL_ADDRESS: "CUDA_ERROR_ILLEGAL_ADDRESS",
            UNKNOWN: "CUDA_ERROR_UNKNOWN",
        },
        import_fds=("closed", "open"),
        import_codes=(OUT_OF_MEMORY, UNKNOWN, NOT_SUPPORTED),
        beyond={
            "ExternalMemoryGetMappedBuffer": "exported object",
            "ExternalMemoryGetMappedMipmappedArray": "layout",
        },
        semaphores={
            gi.OpaqueWin32: 2,
            gi.OpaqueWin32Kmt: 3,
            gi.D3D12Fence: 4,
            gi.D3D11Fence: 5,
            gi.KeyedMutex: 7,
            gi.KeyedMutexKmt: 8,
            gi.TimelineWin32: 10,
        },
        refuses={gi.Operation.IMPORT_MEMORY: set(), gi.Operation.IMPORT_SEMAPHORE: set()},
        busy="may be waiting for a semaphore",
        tells_own=True,
        channel=128,
        without_channel=800,
        without_channel_says=("CUDA_ERROR_NOT_PERMITTED", "IMEX channel"),
        needs=("libcuda.so.1", "Install the NVIDIA driver"),
        missing=("the NVIDIA driver is not installed", "--gpus all", "gpuinterop.testing.simulated cuda -- COMMAND"),
        no_bindings=("pip install 'gpuinterop[cuda]'",),
        broken=(
            ({"GPUINTEROP_SIM_DEVICES": "0"}, ("no device", "CUDA_VISIBLE_DEVICES")),
            ({"GPUINTEROP_SIM_INIT": "803"}, ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "nvidia-smi")),
        ),
        switches=(
            ("cuCtxPushCurrent", "cuCtxPopCurrent", 1),
            ("cuThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode", 2),
        ),
        unnamed="CUresult",
        makes_current=("cuDevicePrimaryCtxRetain", "cuStreamCreateWithPriority"),
    ),
    "hip": Vendor(
        name="hip",
        title="HIP",
        prefix="hip",
        modes=("simulated", "amd", "real"),
        library="libamdhip64.so",
        bindings={"rocm.bindings.hip": "rocm.version", "hip.hip": "hip._version"},
        symbols={
            INVALID_VALUE: "hipErrorInvalidValue",
            ILLEGAL_ADDRESS: "hipErrorIllegalAddress",
            UNKNOWN: "hipErrorUnknown",
        },
        import_fds=("open",),  # HIP closes none
        import_codes=(INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED, UNKNOWN),
        beyond={"ExternalMemoryGetMappedBuffer": "exported object"},
        semaphores={
            gi.OpaqueWin32: 2,
            gi.OpaqueWin32Kmt: 3,
            gi.D3D12Fence: 4,
            gi.TimelineWin32: 2,  # its own number, 10, is refused by every HIP
        },
        refuses={
            gi.Operation.IMPORT_MEMORY: {gi.NvSciBuf},
            gi.Operation.IMPORT_SEMAPHORE: {
                gi.OpaqueFd,
                gi.TimelineFd,
                gi.D3D11Fence,
                gi.KeyedMutex,
                gi.KeyedMutexKmt,
                gi.NvSciSync,
            },
        },
        busy="still in use",
        tells_own=False,
        channel=95,
        without_channel=NOT_SUPPORTED,
        without_channel_says=(),
        needs=("libamdhip64.so", "Install ROCm"),
        missing=("the HIP runtime is not installed", "gpuinterop.testing.simulated hip -- COMMAND"),
        no_bindings=("pip install 'gpuinterop[hip]'", "is not hip-python"),
        broken=(
            ({"GPUINTEROP_SIM_INIT": "100"}, ("no device", "HIP_VISIBLE_DEVICES", "/dev/kfd")),
            ({"GPUINTEROP_SIM_INIT": "101"}, ("no device", "HIP_VISIBLE_DEVICES", "/dev/kfd")),
            ({"GPUINTEROP_SIM_INIT": "999"}, ("hipErrorUnknown (999)", "rocminfo")),
            ({"GPUINTEROP_SIM_HIP_VERSION": "50731921"}, ("5.7.31921", "before 6.0", "Install ROCm 6.0 or newer")),
        ),
        switches=(
            ("hipSetDevice", "hipSetDevice", 2),
            ("hipThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", 2),
        ),
        unnamed="hipError_t",
        makes_current=("hipSetDevice", "hipStreamCreateWithPriority", "hipMalloc"),
    ),
}

VENDOR: Final = VENDORS[
    os.environ.get("GPUINTEROP_TEST_VENDOR") or ("hip" if os.environ.get("GPUINTEROP_TEST_HIP") else "cuda")
]
