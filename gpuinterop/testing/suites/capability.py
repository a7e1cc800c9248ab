"""Backends are found and described; tables are complete and honest; gaps are refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ..._core import discovery
from ..._core.device import Device
from ..._core.lifetime import revive
from ..._core.memory import ExternalMemory
from ..._core.multicast import create_multicast, import_multicast
from ..._core.own_timeline import PinnedWords
from ..._core.semaphore import DriverSemaphores, ExternalSemaphore
from ..._core.stream import Stream
from ...backend import Block, MemoryKind
from ...capabilities import DOMAIN, Capability, Cell, Operation, Support
from ...errors import UnsupportedError
from ...handles import Binary, FabricHandle, FdHandle, Handle, KmtHandle, PointerHandle, Win32Handle
from ...sharing.find_memory import check_block
from ...sharing.imports import device_for
from ...sharing.messages import Contents, Region
from .base import NotToBeCalled, Suite, same_file


class BackendSuite(Suite):
    """A backend describes itself and what it builds on."""

    def test_versions_and_libraries(self, device: Device) -> None:
        """`versions` names what the backend builds on."""
        loaded = discovery.get_backend(device.backend)
        assert loaded.versions
        for name, version in (*loaded.versions.items(), *loaded.libraries.items()):
            assert isinstance(name, str)
            assert isinstance(version, str)
            assert name
            assert version

    def test_device_is_described(self, device: Device) -> None:
        """A device has a name, well-formed identities, a DLPack device and the array interface of its memory."""
        info = device.info
        assert device.name
        assert info.uuid is None or len(info.uuid) == 16
        assert info.luid is None or len(info.luid) == 8
        assert info.pci_bus_id is None or info.pci_bus_id == info.pci_bus_id.lower()
        assert info.array_interface in ("__array_interface__", "__cuda_array_interface__")
        assert len(info.dlpack) == 2
        assert info.is_cpu or info.uuid or info.pci_bus_id or info.luid, "the device has no identity"

    def test_same_device_every_time(self, device: Device) -> None:
        """A device is opened once: every caller gets the same object."""
        assert discovery.get_backend(device.backend).device(device.ordinal) is device


class CapabilitySuite(Suite):
    """The table is complete, every cell but SUPPORTED has a reason, and a gap is refused before anything happens."""

    def test_total(self, device: Device) -> None:
        """The table has exactly the cells of `DOMAIN`."""
        assert {Cell(*key) for key in device.capabilities} == set(DOMAIN)
        assert len(device.capabilities) == len(DOMAIN)

    def test_reasons(self, device: Device) -> None:
        """Every cell but SUPPORTED has scope, reason and reference; SUPPORTED names the run that has shown it."""
        for found in device.capabilities.values():
            if found.support is Support.SUPPORTED:
                assert "verified.toml" in found.reference, found
            else:
                assert found.scope, found
                assert len(found.reason) > 10, found
                assert found.reference, found

    def test_gap_is_refused(self, device: Device, gap: Cell, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
        """A declared gap raises an `UnsupportedError` with that gap; no driver is called, nothing is consumed."""
        forbidden = NotToBeCalled(device.driver, nothing=("prepare", "semaphore_pointer"))
        monkeypatch.setattr(device, "driver", forbidden)
        attempt = _Attempt(device, gap, stream)
        before = os.fstat(attempt.fd) if attempt.fd is not None else None
        try:
            with pytest.raises(UnsupportedError) as caught:
                attempt.run()
        finally:
            monkeypatch.undo()
        assert caught.value.capability in attempt.expected
        assert not caught.value.capability.usable
        assert caught.value.capability.reason in str(caught.value)
        assert not forbidden.calls
        if attempt.handle is not None:
            assert not attempt.handle.closed, "a refused handle is not consumed"
            if before is not None and attempt.fd is not None:
                assert same_file(attempt.fd, before), "the caller's descriptor has changed"
            attempt.close()


class _Attempt:
    """Tries to use a gap."""

    def __init__(self, device: Device, cell: Cell, stream: Stream) -> None:
        self._device = device
        self._cell = cell
        self._stream = stream
        self.handle: Handle | None = None
        self.fd: int | None = None
        self._pipe: tuple[int, int] | None = None

    @property
    def expected(self) -> list[Capability]:
        """The cell's capability, or that of an earlier operation which is a gap too."""
        table, kind = self._device.capabilities, self._cell.handle_type
        before = {
            Operation.IMPORT_BY_NAME: (Operation.IMPORT_MEMORY, Operation.IMPORT_SEMAPHORE),
            Operation.WAIT_TIMEOUT: (Operation.WAIT_SEMAPHORE,),
            Operation.EXPORT_MULTICAST: (Operation.CREATE_MULTICAST,),
        }.get(self._cell.operation, ())
        cells = [(operation, of) for operation in before for of in (kind, None) if (operation, of) in table]
        return [found for found in (table.of(self._cell), *map(table.of, cells)) if not found.usable]

    def run(self) -> None:
        device, operation, kind = self._device, self._cell.operation, self._cell.handle_type
        match operation:
            case Operation.IMPORT_MEMORY:
                device.import_memory(self._make(), size=4096)
            case Operation.IMPORT_SEMAPHORE:
                device.import_semaphore(self._make())
            case Operation.IMPORT_BY_NAME:
                assert kind is not None
                handle: Any = kind(name="gpuinterop-conformance")  # type: ignore[call-arg]
                self.handle = handle
                if (Operation.IMPORT_SEMAPHORE, kind) in device.capabilities:
                    device.import_semaphore(handle)
                else:
                    device.import_memory(handle, size=4096)
            case Operation.MAP_BUFFER:
                self._memory().map_buffer(0, 4096)
            case Operation.MAP_MIPMAPPED_ARRAY:
                self._memory().map_mipmapped_array("R8_UNORM", (4, 4))
            case Operation.SIGNAL_SEMAPHORE:
                semaphore = self._semaphore()
                semaphore.signal(self._stream, *([] if semaphore.kind is Binary else [1]))
            case Operation.WAIT_SEMAPHORE:
                semaphore = self._semaphore()
                semaphore.wait(self._stream, *([] if semaphore.kind is Binary else [1]))
            case Operation.WAIT_TIMEOUT:
                semaphore = self._semaphore()
                semaphore.wait(self._stream, *([] if semaphore.kind is Binary else [1]), timeout=1.0)
            case Operation.CREATE_SEMAPHORE:
                wanted: Any = kind
                device.create_semaphore(wanted)
            case Operation.EXPORT_ALLOCATION:
                wanted = kind
                device.allocate(4096, wanted, access=[device])
            case Operation.IMPORT_ALLOCATION:
                device.import_allocation(self._make(), 4096, access=[device])
            case Operation.CREATE_MULTICAST:
                create_multicast([device], 4096)
            case Operation.EXPORT_MULTICAST:
                wanted = kind
                create_multicast([device], 4096, wanted)
            case Operation.IMPORT_MULTICAST:
                import_multicast(self._make(), [device], 4096)
            case Operation.EXPORT_ARRAY:
                of_memory = next(one for one in MemoryKind if one.travels and one.handle_type is kind)
                check_block(device, Block(kind=of_memory, ordinal=device.ordinal), "array")
            case Operation.IMPORT_ARRAY:
                assert kind is not None
                device_for(Contents(0, True, device.identity, [Region(kind, (1,), (4096,))], {}), device)
            case Operation.STREAM_MEMORY_OPS:
                PinnedWords(device)
            case Operation.GRAPH_CAPTURE:
                with self._stream.capture():
                    pass
            case _:
                raise AssertionError(f"say here how a user attempts {operation}")

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        for fd in self._pipe or ():
            os.close(fd)

    def _make(self) -> Any:
        """Make a handle of the type around something harmless."""
        kind: Any = self._cell.handle_type
        if issubclass(kind, FdHandle):
            self._pipe = os.pipe()
            self.fd = self._pipe[0]
            self.handle = kind(self.fd)
        elif issubclass(kind, FabricHandle):
            self.handle = kind(bytes(FabricHandle.SIZE))
        elif issubclass(kind, PointerHandle):
            self.handle = kind(pointer=4096)
        else:
            assert issubclass(kind, Win32Handle | KmtHandle)
            self.handle = kind(handle=4096)
        return self.handle

    # If the import is a gap too, there is no native object to call, so one without a native half replaces it. It never
    # reaches a driver, and must not be retired.

    def _memory(self) -> ExternalMemory:
        kind: Any = self._cell.handle_type
        memory = ExternalMemory(self._device, kind, size=4096, dedicated=False)
        revive(memory.lifetime)
        memory.lifetime.release, memory.lifetime.warns = None, False
        return memory

    def _semaphore(self) -> ExternalSemaphore[Any]:
        kind: Any = self._cell.handle_type
        semaphore: ExternalSemaphore[Any] = ExternalSemaphore(self._device, kind, DriverSemaphores(self._device))
        revive(semaphore.lifetime)
        semaphore.lifetime.release, semaphore.lifetime.warns = None, False
        return semaphore
