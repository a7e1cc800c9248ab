"""Multicast objects: one store reaches the memory of every device of the team.

The size in a new object's properties must be rounded up to the granularity; the core does that. The calls
``cuMulticastBindMem``, ``cuMulticastBindAddr`` and ``cuMemMap`` block until every device of the team is added; the core
adds them first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_uint32, c_uint64
from functools import partial
from struct import Struct
from typing import Any, Final

from gpuinterop.backend import Address, MulticastBackend
from gpuinterop.handles import AllocationHandle, Granularity
from gpuinterop.native_driver.allocations import (
    Allocation,
    GenericObject,
    NativeAllocations,
    granularity_of,
    native_handle_type,
)
from gpuinterop.native_driver.driver import NativeDevice, NativeObject
from gpuinterop.native_driver.memory import pointer_attribute
from gpuinterop.native_driver.streams import NativeStream

from .driver import SECOND_BINDS, Context, Driver

# Number of devices, size, handle types, flags: CUmulticastObjectProp.
_PROPERTIES: Final = Struct("=I4xQQQ")
_ALLOWED_HANDLE_TYPES: Final = 14  # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
_THREADS, _BLOCKS = 256, 1024
_MOST: Final = 1 << 31  # words per launch: the kernels count in 32 bits, and step past the last word before they stop

# Only multimem instructions (ISA 8.1, sm_90) can access a multicast address. In both kernels thread t processes the
# words t, t + number of threads, and so on.
_KERNEL: Final = """
.visible .entry gpuinterop_multimem_%s(%s, .param .u32 count)
{
    .reg .pred %%past;
    .reg .b32 %%value, %%count, %%index, %%step, %%size;
    .reg .b64 %%target, %%address, %%word;
    %s
    ld.param.u64 %%address, [address];
    ld.param.u32 %%count, [count];
    mov.u32 %%size, %%ntid.x;
    mov.u32 %%index, %%ctaid.x;
    mov.u32 %%step, %%tid.x;
    mad.lo.u32 %%index, %%index, %%size, %%step;
    mov.u32 %%step, %%nctaid.x;
    mul.lo.u32 %%step, %%step, %%size;
more:
    setp.ge.u32 %%past, %%index, %%count;
    @%%past ret;
    mad.wide.u32 %%word, %%index, 4, %%address;
    %s
    add.u32 %%index, %%index, %%step;
    bra more;
}
"""
_STORE: Final = _KERNEL % (
    "store", ".param .u64 address, .param .u32 value", "ld.param.u32 %value, [value];",
    "multimem.st.relaxed.sys.global.u32 [%word], %value;",
)  # fmt: skip
_ADD: Final = _KERNEL % (
    "add", ".param .u64 target, .param .u64 address", "ld.param.u64 %target, [target];",
    """multimem.ld_reduce.relaxed.sys.global.add.u32 %value, [%word];
    mad.wide.u32 %word, %index, 4, %target;
    st.global.u32 [%word], %value;""",
)  # fmt: skip
_PTX: Final = f"\n.version 8.1\n.target sm_90\n.address_size 64{_STORE}{_ADD}\0".encode()


class Group(GenericObject):
    """A multicast object. Its context is only used to call the driver."""

    def __init__(self, context: Context, size: int, alignment: int) -> None:
        super().__init__(context, size, alignment)
        self.bindings: dict[tuple[int, int], _Binding] = {}  # the latest of each device and offset


class _Binding(NativeObject):
    release_call = "MulticastUnbind"


class _Module(NativeObject):
    release_call = "ModuleUnload"


class Multicast(NativeAllocations, MulticastBackend):
    """Multicast objects, and two kernels that access their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: dict[int, tuple[Any, ...]] = {}  # each device's, with their module, which is never unloaded
        self._takes_device: dict[str, bool] = {}  # whether the driver has a bind's second version, with the device

    def multicast_granularity(
        self, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Granularity:
        """``cuMulticastGetGranularity``: the minimum and the recommended one. Both depend on the size."""
        properties = _properties(self._driver, devices, size, handle_types)
        return granularity_of(self._driver, "MulticastGetGranularity", properties)

    def create_multicast(
        self, device: Context, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Group:
        """``cuMulticastCreate``."""
        minimum = self.multicast_granularity(devices, size, handle_types).minimum
        return Group(device, size, minimum).create(
            "MulticastCreate", _properties(self._driver, devices, size, handle_types)
        )

    def export_multicast(self, group: Group, handle_type: type[AllocationHandle]) -> AllocationHandle:
        """``cuMemExportToShareableHandle``."""
        return group.export(handle_type)

    def import_multicast(self, device: Context, handle: AllocationHandle, *, devices: int, size: int) -> Group:
        """``cuMemImportFromShareableHandle``."""
        # Query the granularity first, so that a failure leaves no object.
        minimum = self.multicast_granularity(devices, size, (type(handle),)).minimum
        return Group(device, size, minimum).load(handle)

    def add_device(self, group: Group, device: Context) -> None:
        """``cuMulticastAddDevice``."""
        group.device.call("MulticastAddDevice", group.handle, device.number)

    def bind_memory(
        self, group: Group, device: Context, offset: int, allocation: Allocation, start: int, size: int
    ) -> None:
        """``cuMulticastBindMem``."""
        self._bind("MulticastBindMem", group, device, offset, allocation.handle, start, size)

    def bind_address(self, group: Group, device: Context, offset: int, address: Address, size: int) -> None:
        """``cuMulticastBindAddr``."""
        self._bind("MulticastBindAddr", group, device, offset, address, size)

    def _bind(self, call: str, group: Group, device: Context, offset: int, *memory: Any) -> None:
        """Bind. The first version of the call derives the device from the memory."""
        second = self._takes_device.get(call)
        if second is None:
            second = self._takes_device[call] = self._driver.has(f"cu{call}_v2", SECOND_BINDS)
        binding = group.bindings[device.ordinal, offset] = _Binding(device, device.number, offset, memory[-1])

        def work() -> None:
            if second:
                binding.add(f"{call}_v2", group.handle, device.number, offset, *memory, 0)
            else:
                binding.add(call, group.handle, offset, *memory, 0)

        device.create(binding, work)

    def unbind(self, group: Group, device: Context, offset: int, size: int) -> None:
        """``cuMulticastUnbind``."""
        if (binding := group.bindings.get((device.ordinal, offset))) is not None:
            binding.release()

    def is_shareable(self, device: Context, address: Address) -> bool:
        """``cuPointerGetAttribute``: whether the memory can be exported as any handle type.

        For imported memory it reports no type (measured), so the core treats that memory as not shareable (inferred).
        """
        return bool(device.run(pointer_attribute, self._driver, address, _ALLOWED_HANDLE_TYPES))

    def multimem_store(self, stream: NativeStream, address: Address, value: int, count: int) -> None:
        """``cuLaunchKernel`` with the ``multimem.st`` kernel."""
        for first, part in _parts(count):
            self._launch_kernel(stream, 0, part, c_uint64(address + first), c_uint32(value), c_uint32(part))

    def multimem_add(self, stream: NativeStream, target: Address, address: Address, count: int) -> None:
        """``cuLaunchKernel`` with the ``multimem.ld_reduce`` kernel."""
        for first, part in _parts(count):
            self._launch_kernel(stream, 1, part, c_uint64(target + first), c_uint64(address + first), c_uint32(part))

    def _launch_kernel(self, stream: NativeStream, which: int, count: int, *arguments: Any) -> None:
        kernel = (self._kernels.get(stream.device.ordinal) or self._load_kernels(stream.device))[which]
        blocks = min(-(-count // _THREADS), _BLOCKS)
        shape = (blocks, 1, 1, _THREADS, 1, 1, 0)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream.device.call("LaunchKernel", kernel, *shape, stream.handle, pointers, None, relaxed=False)

    def _load_kernels(self, context: NativeDevice) -> tuple[Any, ...]:
        """``cuModuleLoadData``, ``cuModuleGetFunction``. If two threads load at once, the first module is kept."""
        module, ordinal = _Module(context), context.ordinal

        def work() -> None:
            module.make("ModuleLoadData", _PTX)
            names = b"gpuinterop_multimem_store", b"gpuinterop_multimem_add"
            find = partial(self._driver.ask, "ModuleGetFunction", module.handle, kind=ctypes.c_void_p)
            kernels = [find(name) for name in names]
            self._kernels.setdefault(ordinal, (*kernels, module))

        try:
            context.run(work)
        finally:
            if ordinal not in self._kernels or self._kernels[ordinal][-1] is not module:
                module.undo()
        return self._kernels[ordinal]


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """The launches for `count` words: each one's offset in bytes and its number of words."""
    for first in range(0, count, _MOST):
        yield 4 * first, min(_MOST, count - first)


def _properties(driver: Driver, devices: int, size: int, kinds: Sequence[type[AllocationHandle]]) -> bytes:
    return _PROPERTIES.pack(devices, size, sum({native_handle_type(driver, kind) for kind in kinds}), 0)
