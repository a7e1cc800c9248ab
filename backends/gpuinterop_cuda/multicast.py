"""Multicast objects: what is written to one reaches memory of every device of its team.

The documented order is: ask for the granularity, round the size up to it, and only then put it into the properties that
the object is made with; sizes that come here are rounded by then. ``cuMulticastBindMem``, ``cuMulticastBindAddr`` and
``cuMemMap`` block until every device of the team was added; it is the core that sees to that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from gpuinterop.backend import Address
from gpuinterop.handles import AllocationHandle, Granularity

from . import allocations
from .driver import Context, Driver, Made
from .streams import Stream

_SECOND_VERSION: Final = 13010  # of the binds, as of CUDA 13.1: it is told the device
_ALLOWED_HANDLE_TYPES: Final = 14  # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
_THREADS, _BLOCKS = 256, 1024
_MOST: Final = 1 << 31  # words in a launch: the kernels count in 32 bits, and step past the last word before they stop

# Only multimem instructions may touch a multicast address: they came with ISA 8.1, for sm_90. In both, thread t takes
# the words t, t + all threads, and so on.
_PTX: Final = b"""
.version 8.1
.target sm_90
.address_size 64

.visible .entry gpuinterop_multimem_store(.param .u64 address, .param .u32 value, .param .u32 count)
{
    .reg .pred %past;
    .reg .b32 %value, %count, %index, %step, %size;
    .reg .b64 %address, %word;
    ld.param.u64 %address, [address];
    ld.param.u32 %value, [value];
    ld.param.u32 %count, [count];
    mov.u32 %size, %ntid.x;
    mov.u32 %index, %ctaid.x;
    mov.u32 %step, %tid.x;
    mad.lo.u32 %index, %index, %size, %step;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %size;
more:
    setp.ge.u32 %past, %index, %count;
    @%past ret;
    mad.wide.u32 %word, %index, 4, %address;
    multimem.st.relaxed.sys.global.u32 [%word], %value;
    add.u32 %index, %index, %step;
    bra more;
}

.visible .entry gpuinterop_multimem_add(.param .u64 target, .param .u64 address, .param .u32 count)
{
    .reg .pred %past;
    .reg .b32 %sum, %count, %index, %step, %size;
    .reg .b64 %target, %address, %word;
    ld.param.u64 %target, [target];
    ld.param.u64 %address, [address];
    ld.param.u32 %count, [count];
    mov.u32 %size, %ntid.x;
    mov.u32 %index, %ctaid.x;
    mov.u32 %step, %tid.x;
    mad.lo.u32 %index, %index, %size, %step;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %size;
more:
    setp.ge.u32 %past, %index, %count;
    @%past ret;
    mad.wide.u32 %word, %index, 4, %address;
    multimem.ld_reduce.relaxed.sys.global.add.u32 %sum, [%word];
    mad.wide.u32 %word, %index, 4, %target;
    st.global.u32 [%word], %sum;
    add.u32 %index, %index, %step;
    bra more;
}
\0"""


class Group(allocations.Mappable):
    """A multicast object. Its context is only what the calls are made through."""

    __slots__ = ("bindings",)

    def __init__(self, context: Context, size: int, alignment: int) -> None:
        super().__init__(context, size, alignment)
        self.bindings: dict[tuple[int, int], _Binding] = {}
        """By device and offset: the latest each."""


class _Binding(Made):
    __slots__ = ()
    back = "cuMulticastUnbind"


def granularity(driver: Driver, devices: int, size: int, kinds: Sequence[type[AllocationHandle]]) -> Granularity:
    """``cuMulticastGetGranularity``, for the minimum and what is recommended, which depends on the size."""
    flags = driver.api.CUmulticastGranularity_flags
    properties = _properties(driver, devices, size, kinds)
    return Granularity(
        int(driver.call("cuMulticastGetGranularity", properties, flags.CU_MULTICAST_GRANULARITY_MINIMUM)),
        int(driver.call("cuMulticastGetGranularity", properties, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED)),
    )


def create(driver: Driver, context: Context, devices: int, size: int, kinds: Sequence[type[AllocationHandle]]) -> Group:
    """``cuMulticastCreate``."""
    minimum = granularity(driver, devices, size, kinds).minimum
    return Group(context, size, minimum).create("cuMulticastCreate", _properties(driver, devices, size, kinds))


def load(driver: Driver, context: Context, handle: AllocationHandle, *, devices: int, size: int) -> Group:
    """``cuMemImportFromShareableHandle``."""
    minimum = granularity(driver, devices, size, (type(handle),)).minimum  # asked first: what fails must leave nothing
    return Group(context, size, minimum).load(handle)


def add_device(group: Group, device: Context) -> None:
    """``cuMulticastAddDevice``."""
    group.context.call("cuMulticastAddDevice", group.handle, device.device)


def bind_memory(
    driver: Driver, group: Group, device: Context, offset: int, memory: allocations.Mappable, start: int, size: int
) -> None:
    """``cuMulticastBindMem``."""
    _bind(driver, "cuMulticastBindMem", group, device, offset, memory.handle, start, size)


def bind_address(driver: Driver, group: Group, device: Context, offset: int, address: Address, size: int) -> None:
    """``cuMulticastBindAddr``."""
    _bind(driver, "cuMulticastBindAddr", group, device, offset, address, size)


def _bind(driver: Driver, call: str, group: Group, device: Context, offset: int, *what: Any) -> None:
    """The first version finds out the device by itself, of the memory."""
    binding = group.bindings[device.ordinal, offset] = _Binding(device, device.device, offset, what[-1])
    if _has_second(driver, call):
        arguments = (f"{call}_v2", group.handle, device.device, offset, *what, 0)
        device.create(binding, partial(binding.add, *arguments, version=_SECOND_VERSION))
    else:
        device.create(binding, partial(binding.add, call, group.handle, offset, *what, 0))


@functools.cache
def _has_second(driver: Driver, call: str) -> bool:
    return driver.has(f"{call}_v2", _SECOND_VERSION)


def unbind(group: Group, device: Context, offset: int) -> None:
    """``cuMulticastUnbind``."""
    if (binding := group.bindings.get((device.ordinal, offset))) is not None:
        binding.release()


def is_shareable(driver: Driver, context: Context, address: Address) -> bool:
    """``cuPointerGetAttribute``: whether there is a handle type that the memory may be exported as.

    There is none for memory that was itself imported (measured); the core takes that for "not shareable" (inferred).
    """
    attribute = driver.api.CUpointer_attribute(_ALLOWED_HANDLE_TYPES)
    code, *found = context.status("cuPointerGetAttribute", attribute, address)
    return code == 0 and int(found[0]) != 0


class Kernels:
    """The two kernels that touch a multicast address, loaded once a context and never unloaded."""

    def __init__(self) -> None:
        self._loaded: dict[int, tuple[Any, ...]] = {}

    def store(self, stream: Stream, address: Address, value: int, count: int) -> None:
        """``multimem.st``."""
        types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
        for first, part in _parts(count):
            self._launch(stream, self._of(stream.context)[0], ((address + first, value, part), types), part)

    def add(self, stream: Stream, target: Address, address: Address, count: int) -> None:
        """``multimem.ld_reduce``."""
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        for first, part in _parts(count):
            self._launch(stream, self._of(stream.context)[1], ((target + first, address + first, part), types), part)

    def _launch(self, stream: Stream, kernel: Any, arguments: Any, count: int) -> None:
        """``cuLaunchKernel``."""
        blocks = min(-(-count // _THREADS), _BLOCKS)
        shape = (blocks, 1, 1, _THREADS, 1, 1, 0)
        stream.context.call("cuLaunchKernel", kernel, *shape, stream.handle, arguments, 0, aside=False)

    def _of(self, context: Context) -> tuple[Any, ...]:
        """``cuModuleLoadData``, ``cuModuleGetFunction``. Of two threads that load them at once the first is right."""
        found = self._loaded.get(context.ordinal)
        if found is None:
            module, driver = _Module(context), context.driver

            def work() -> None:
                module.make("cuModuleLoadData", _PTX)
                names = b"gpuinterop_multimem_store", b"gpuinterop_multimem_add"
                kernels = [driver.call("cuModuleGetFunction", module.handle, name) for name in names]
                self._loaded.setdefault(context.ordinal, (*kernels, module))

            try:
                context.run(work)
            finally:
                found = self._loaded.get(context.ordinal)
                if found is None or found[-1] is not module:
                    module.undo()
            assert found is not None
        return found


class _Module(Made):
    __slots__ = ()
    back = "cuModuleUnload"


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """What is launched at a time: where it begins, in bytes, and how many words it has."""
    for first in range(0, count, _MOST):
        yield 4 * first, min(_MOST, count - first)


def _properties(driver: Driver, devices: int, size: int, kinds: Sequence[type[AllocationHandle]]) -> Any:
    properties = driver.api.CUmulticastObjectProp()
    properties.numDevices = devices
    properties.size = size
    properties.handleTypes = 0
    for kind in kinds:
        properties.handleTypes |= int(allocations.handle_type(driver, kind))
    return properties
