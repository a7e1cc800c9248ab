"""Semaphores of our own between this backend and another one, in another process: no graphics API.

The oracle is the page itself, read through a mapping of the test's own.
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.testing.peer import BackendPeer
from gpuinterop.testing.simulated import build
from gpuinterop.testing.suites.base import held
from tests.limits import LIMIT

from .parties import WITHOUT_GPU
from .table import VENDOR

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds")

SHORT = 0.05
ROUNDS = 200
VALUE = 16  # where the page has it
OTHERS = ["host", *(["cuda"] if VENDOR.name == "hip" else [])]
"""CUDA's run has no bindings of HIP's."""


def page_of(handle: Any, scope: ExitStack) -> Any:
    """The value, read past everything that is tested."""
    page = scope.enter_context(mmap.mmap(handle.fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ))
    return lambda: int.from_bytes(page[VALUE : VALUE + 8], "little")


def start(other: str, scope: ExitStack, monkeypatch: pytest.MonkeyPatch) -> BackendPeer:
    """A process with the first device of that backend; where there is no GPU with the simulated CUDA driver."""
    if other == "cuda" != VENDOR.name and WITHOUT_GPU:
        entries = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)
        monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(build("cuda").parent), *entries]))
    there: Any = SimpleNamespace(backend=other, ordinal=0)
    return scope.enter_context(BackendPeer(there))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("maker", ["here", "there"])
def test_another_process(
    device: gi.Device, scope: ExitStack, monkeypatch: pytest.MonkeyPatch, other: str, maker: str
) -> None:
    """Streams on both sides take turns, whoever has made it."""
    peer = start(other, scope, monkeypatch)
    if maker == "here":
        ours: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
        handle = ours.export()
        value = page_of(handle, scope)
        peer.import_semaphore(handle)
    else:
        handle = peer.create_semaphore("timeline_fd")
        value = page_of(handle, scope)
        ours = scope.enter_context(device.import_semaphore(handle))
    stream = scope.enter_context(device.create_stream())
    ours.wait(stream, 1)
    assert held(stream)
    peer.signal(1)
    stream.synchronize(LIMIT)
    assert value() == 1
    for turn in range(1, ROUNDS + 1):
        peer.enqueue(wait=2 * turn, signal=2 * turn + 1)
        ours.signal(stream, 2 * turn)
        ours.wait(stream, 2 * turn + 1)
    stream.synchronize(LIMIT)
    assert peer.idle(LIMIT)
    assert value() == 2 * ROUNDS + 1
    peer.enqueue(wait=2 * ROUNDS + 2)
    assert not peer.idle(SHORT)
    ours.host_signal(2 * ROUNDS + 2)
    assert peer.idle(LIMIT)
