"""The table is total and true, the imports are few, and other platforms are refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpuinterop import handles as h, system
from gpuinterop.capabilities import DOMAIN, Capabilities, Operation, Support
from gpuinterop.errors import BackendUnavailableError
from gpuinterop_host.backend import HostBackend
from gpuinterop_host.formats import swiftshader

USABLE = {
    *((operation, h.OpaqueFd) for operation in (Operation.IMPORT_MEMORY, Operation.MAP_BUFFER)),
    *(
        (operation, kind)
        for kind in (h.OpaqueFd, h.TimelineFd)
        for operation in (
            Operation.IMPORT_SEMAPHORE,
            Operation.SIGNAL_SEMAPHORE,
            Operation.WAIT_SEMAPHORE,
            Operation.WAIT_TIMEOUT,
            Operation.CREATE_SEMAPHORE,
        )
    ),
    (Operation.EXPORT_ALLOCATION, h.VmmFd),
    (Operation.IMPORT_ALLOCATION, h.VmmFd),
    (Operation.EXPORT_ARRAY, h.OpaqueFd),
    (Operation.IMPORT_ARRAY, h.OpaqueFd),
    (Operation.STREAM_MEMORY_OPS, None),
}


def test_table(backend: HostBackend) -> None:
    cells = list(backend.capabilities(0))
    assert len(cells) == len(DOMAIN)
    table = Capabilities(cells)
    assert {key for key, found in table.items() if found} == USABLE
    assert {found.support for found in table.values()} == {Support.UNVERIFIED, Support.UNSUPPORTED}
    for found in table.values():
        assert found.reason.endswith("."), found
        if not found:
            assert found.workaround, found


@pytest.mark.parametrize(
    ("where", "name", "gone"),
    [
        (system, "SYS_FUTEX", {h.OpaqueFd, h.TimelineFd}),
        (swiftshader, "_add", {h.OpaqueFd}),
        (swiftshader, "MUTEX_SIZE", {h.OpaqueFd}),
    ],
)
def test_what_a_machine_lacks_is_a_gap(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch, where: object, name: str, gone: set[type[h.Handle]]
) -> None:
    """Futexes for all semaphores; glibc's layout and an atomic operation for binary ones."""
    monkeypatch.setattr(where, name, None)
    table = Capabilities(backend.capabilities(0))
    assert {key for key, found in table.items() if found} == {
        (operation, kind) for operation, kind in USABLE if "semaphore" not in operation.value or kind not in gone
    } - {(Operation.WAIT_TIMEOUT, kind) for kind in gone}


def test_device(backend: HostBackend) -> None:
    (info,) = backend.devices()
    assert info.ordinal == 0
    assert info.name
    assert info.is_cpu
    assert info.dlpack == (1, 0)
    assert info.array_interface == "__array_interface__"
    assert info.uuid is None
    assert info.identity.is_cpu
    assert {"python", "libc", "kernel"} <= set(backend.versions())
    for path in backend.libraries().values():
        assert Path(path).exists()


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BackendUnavailableError, match="win32"):
        HostBackend()
