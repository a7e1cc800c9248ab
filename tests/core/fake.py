"""A scripted backend: it does its work on the CPU at once, records every call, and fails where a test says so.

It stands for a driver whose habits the core must bear: one that closes the fd of a failed import, keeps that of a
successful one, never finishes an event.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuinterop._core.device import Device
from gpuinterop.backend import ArrayBackend, DeviceInfo, MulticastBackend, Native, StreamMemoryBackend
from gpuinterop.capabilities import DOMAIN, Capabilities, Capability, Operation, Scope, Support
from gpuinterop.handles import (
    AllocationHandle,
    AnySemaphoreHandle,
    ArrayLayout,
    FabricHandle,
    FdHandle,
    Granularity,
    MemoryHandle,
    VmmFd,
)


class FakeBackend(ArrayBackend):
    name = "fake"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.blocked: set[int] = set()  # streams whose events are not done
        self.on_is_done: Callable[[], None] = lambda: None
        self.on_synchronize: Callable[[], None] = lambda: None
        self.on_map: Callable[[], None] = lambda: None
        self.on_record: Callable[[], None] = lambda: None
        self.live: set[tuple[str, int]] = set()
        self.on_import: Callable[[FdHandle], None] = lambda handle: os.close(handle.fd)
        self.memory = ctypes.create_string_buffer(1 << 16)
        self._serial = itertools.count(1)
        self.event_streams: dict[Native, Native] = {}

    def _new(self, what: str) -> tuple[str, int]:
        native = (what, next(self._serial))
        self.live.add(native)
        return native

    def _drop(self, native: tuple[str, int]) -> None:
        self.calls.append(("destroy", native[0]))
        self.live.remove(native)

    def count(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.live)

    # -- backend --

    def versions(self) -> Mapping[str, str]:
        return {}

    def devices(self) -> Sequence[DeviceInfo]:
        return [fake_info()]

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return ()

    def open_device(self, ordinal: int) -> Native:
        return ordinal

    def create_stream(self, device: Native, *, high_priority: bool = False) -> Native:
        self.calls.append(("create_stream", high_priority))
        return self._new("stream")

    def adopt_stream(self, device: Native, pointer: int) -> Native:
        return ("adopted", pointer)

    def stream_pointer(self, stream: Native) -> int:
        return int(stream[1])

    def destroy_stream(self, stream: Native) -> None:
        self._drop(stream)

    def synchronize(self, stream: Native) -> None:
        self.calls.append(("synchronize", stream))
        self.on_synchronize()

    def wait_event(self, stream: Native, event: Native) -> None:
        self.calls.append(("wait_event", stream, self.event_streams[event]))

    def record(self, stream: Native) -> Native:
        self.on_record()
        event = self._new("event")
        self.event_streams[event] = stream
        return event

    def is_done(self, event: Native) -> bool:
        self.on_is_done()
        return self.event_streams[event][1] not in self.blocked

    def destroy_event(self, event: Native) -> None:
        self.live.remove(event)

    def copy(self, stream: Native, target: int, source: int, size: int) -> None:
        self.calls.append(("copy", stream, size))
        ctypes.memmove(target, source, size)

    def fill(self, stream: Native, target: int, byte: int, size: int) -> None:
        self.calls.append(("fill", stream, byte, size))
        ctypes.memset(target, byte, size)

    def import_memory(self, device: Native, handle: MemoryHandle, *, size: int, dedicated: bool) -> Native:
        self.calls.append(("import_memory", type(handle).__name__, size, dedicated))
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        return self._new("memory")

    def map_buffer(self, memory: Native, *, size: int) -> tuple[Native, int]:
        self.calls.append(("map_buffer", size))
        self.on_map()
        return self._new("mapping"), ctypes.addressof(self.memory)

    def unmap_buffer(self, mapping: Native) -> None:
        self._drop(mapping)

    def destroy_memory(self, memory: Native) -> None:
        self._drop(memory)

    def import_semaphore(self, device: Native, handle: AnySemaphoreHandle) -> Native:
        self.calls.append(("import_semaphore", type(handle).__name__))
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        return self._new("semaphore")

    def prepare(self, semaphores: Sequence[Native]) -> Native:
        return tuple(semaphores)

    def signal(self, batch: Native, stream: Native, values: Sequence[int]) -> None:
        self.calls.append(("signal", stream, tuple(values)))

    def wait(self, batch: Native, stream: Native, values: Sequence[int], timeout_ms: int | None) -> None:
        self.calls.append(("wait", stream, tuple(values), timeout_ms))

    def destroy_semaphore(self, semaphore: Native) -> None:
        self._drop(semaphore)

    def abandon_semaphore(self, semaphore: Native) -> None:
        self.calls.append(("abandon", semaphore))

    def map_array(self, memory: Native, layout: ArrayLayout) -> Native:
        self.calls.append(("map_array", layout))
        return self._new("array")

    def copy_level(self, stream: Native, array: Native, level: int, address: int, size: int, *, to_array: bool) -> None:
        self.calls.append(("copy_level", level, size, to_array))

    def destroy_array(self, array: Native) -> None:
        self._drop(array)


class FakeWords(FakeBackend, StreamMemoryBackend):
    """Its streams write words, at once; they wait for nothing, and what they were to wait for is in `calls`.

    Devices know a page by another address than the process does, `APART` higher.
    """

    APART = 1 << 52

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[Native, int] = {}
        self.capturing: set[int] = set()
        self.on_pin: Callable[[], None] = lambda: None
        self.on_unpin: Callable[[int], None] = lambda address: None

    def is_capturing(self, stream: Native) -> bool:
        return stream[1] in self.capturing

    def is_idle(self, stream: Native) -> bool:
        return stream[1] not in self.blocked

    def pin(self, device: Native, address: int, size: int) -> tuple[Native, int]:
        self.calls.append(("pin", address, size))
        self.on_pin()
        pin = self._new("pin")
        self.pins[pin] = address
        return pin, address + self.APART

    def unpin(self, pin: Native) -> None:
        self.on_unpin(self.pins.pop(pin))
        self._drop(pin)

    def write_value(self, stream: Native, word: int, value: int) -> None:
        assert word >= self.APART, "the process's own address was given to the device"
        self.calls.append(("write_value", stream, word, value))
        ctypes.c_uint64.from_address(word - self.APART).value = value

    def wait_value(self, stream: Native, word: int, value: int) -> None:
        self.calls.append(("wait_value", stream, word, value))


class FakeMulticast(FakeBackend, MulticastBackend):
    """Devices with shareable allocations and multicast.

    What changes something is in `calls`, what only asks in `asked`. `on` runs, or fails, at a call of that name.
    """

    name = "team"
    COUNT = 4
    ALLOCATIONS = Granularity(1 << 12, 1 << 14)
    GROUPS = Granularity(1 << 13, 1 << 15)

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []
        self.on: dict[str, Callable[[], None]] = {}
        self.strangers: set[tuple[int, int]] = set()  # (device, peer) without access
        self.lies_on: int | None = None  # what `location` says
        self.shareable = True
        self.bytes: dict[Native, Any] = {}

    def _note(self, call: str, *arguments: Any) -> None:
        self.calls.append((call, *arguments))
        self.on.get(call, lambda: None)()

    def devices(self) -> Sequence[DeviceInfo]:
        return [
            replace(fake_info((2, ordinal)), ordinal=ordinal, name=f"fake {ordinal}", uuid=bytes([ordinal]) * 16,
                    pci_bus_id=f"0000:0{ordinal}:00.0")
            for ordinal in range(self.COUNT)
        ]  # fmt: skip

    # -- allocations --

    def granularity(self, device: Native, handle_type: type[AllocationHandle]) -> Granularity:
        return self.ALLOCATIONS

    def allocate(self, device: Native, size: int, handle_type: type[AllocationHandle]) -> Native:
        self._note("allocate", device, size, handle_type)
        native = self._new("allocation")
        self.bytes[native] = ctypes.create_string_buffer(size)
        return native

    def export_allocation(self, allocation: Native) -> AllocationHandle:
        return VmmFd.adopt(os.memfd_create("allocation"))

    def import_allocation(self, device: Native, handle: AllocationHandle, *, size: int) -> Native:
        self._note("import_allocation", device, size)
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        native = self._new("allocation")
        self.bytes[native] = ctypes.create_string_buffer(size)
        return native

    def map_allocation(self, allocation: Native, devices: Sequence[Native]) -> tuple[Native, int]:
        self._note("map_allocation", allocation, tuple(devices))
        memory = self.bytes.get(allocation)
        return self._new("mapping"), ctypes.addressof(memory) if memory is not None else 1 << 40

    def unmap_allocation(self, mapping: Native) -> None:
        self._note("unmap_allocation", mapping)
        self.live.remove(mapping)

    def release_allocation(self, allocation: Native) -> None:
        self._note("release_allocation", allocation)
        self.live.remove(allocation)

    def can_access(self, ordinal: int, peer: int) -> bool:
        self.asked.append(("can_access", ordinal, peer))
        return (ordinal, peer) not in self.strangers

    def location(self, allocation: Native) -> int | None:
        return self.lies_on

    # -- multicast --

    def multicast_granularity(
        self, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Granularity:
        self.asked.append(("multicast_granularity", devices, size, tuple(handle_types)))
        return self.GROUPS

    def create_multicast(
        self, device: Native, devices: int, size: int, handle_types: Sequence[type[AllocationHandle]]
    ) -> Native:
        self._note("create_multicast", device, devices, size, tuple(handle_types))
        return self._new("group")

    def export_multicast(self, group: Native, handle_type: type[AllocationHandle]) -> AllocationHandle:
        self._note("export_multicast", group, handle_type)
        return VmmFd.adopt(os.memfd_create("group")) if handle_type is VmmFd else FabricHandle(bytes(64))

    def import_multicast(self, device: Native, handle: AllocationHandle, *, devices: int, size: int) -> Native:
        self._note("import_multicast", device, devices, size)
        if isinstance(handle, FdHandle):
            self.on_import(handle)
        return self._new("group")

    def add_device(self, group: Native, device: Native) -> None:
        self._note("add_device", group, device)

    def bind_memory(
        self, group: Native, device: Native, offset: int, allocation: Native, start: int, size: int
    ) -> None:
        self._note("bind_memory", group, device, offset, allocation, start, size)

    def bind_address(self, group: Native, device: Native, offset: int, address: int, size: int) -> None:
        self._note("bind_address", group, device, offset, address, size)

    def unbind(self, group: Native, device: Native, offset: int, size: int) -> None:
        self._note("unbind", group, device, offset, size)

    def is_shareable(self, device: Native, address: int) -> bool:
        self.asked.append(("is_shareable", device, address))
        return self.shareable

    def multimem_store(self, stream: Native, address: int, value: int, count: int) -> None:
        self._note("multimem_store", stream, address, value, count)

    def multimem_add(self, stream: Native, target: int, address: int, count: int) -> None:
        self._note("multimem_add", stream, target, address, count)


def fake_team(*gaps: Operation, backend: FakeMulticast | None = None) -> tuple[list[Device], FakeMulticast]:
    """Its devices, all usable but for `gaps`."""
    found = backend or FakeMulticast()
    devices: list[Device] = []
    devices += [Device(found, info, table(*gaps), lambda: devices) for info in found.devices()]
    return devices, found


def fake_info(dlpack: tuple[int, int] = (1, 0)) -> DeviceInfo:
    interface = "__array_interface__" if dlpack[0] == 1 else "__cuda_array_interface__"
    return DeviceInfo(
        ordinal=0, name="fake", uuid=b"f" * 16, pci_bus_id="0000:01:00.0", dlpack=dlpack, array_interface=interface
    )


def table(*gaps: Operation) -> Capabilities:
    """Everything usable but `gaps`."""
    return Capabilities(
        [
            Capability(
                operation=cell.operation,
                handle_type=cell.handle_type,
                support=Support.UNSUPPORTED if cell.operation in gaps else Support.UNVERIFIED,
                scope=Scope.DRIVER,
                reason="the test says so.",
                reference="tests",
            )
            for cell in DOMAIN
        ],
        owner="fake",
    )


def fake_device(
    *gaps: Operation, dlpack: tuple[int, int] = (1, 0), backend: FakeBackend | None = None
) -> tuple[Device, FakeBackend]:
    found = backend or FakeBackend()
    return Device(found, fake_info(dlpack), table(*gaps)), found
