"""HIP runtimes that fail: what HIP alone says, and what its backend alone has to undo."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

import gpuinterop as gi
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from ..parties import SIMULATED, watch
from ..table import INVALID_VALUE

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")


def test_a_range_that_stays_mapped_is_not_used_again(
    simulator: Simulator, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, taken = 50 << 20, list[int]()
    watch(monkeypatch, device, "MemMap", lambda address, *_: taken.append(address))
    simulator.fail("hipMemSetAccess", code=INVALID_VALUE)
    simulator.fail("hipMemUnmap", code=INVALID_VALUE)
    allocation = device.allocate(size)
    with pytest.raises(gi.DriverError, match="hipMemSetAccess"):
        _ = allocation.buffer
    with pytest.warns(gi.LeakedResourceWarning, match="hipMemUnmap"):
        device.drain()
    with pytest.raises(gi.ResourceBusyError, match="could not be released"):
        _ = allocation.buffer
    with device.allocate(size) as other:
        other.buffer.fill(1)
    assert len(set(taken)) == 2
    assert ctypes.CDLL("libamdhip64.so").hipMemUnmap(ctypes.c_void_p(taken[0]), ctypes.c_size_t(size)) == 0
    allocation.close()  # it stays, for the driver may still have it mapped
    allocation._handle.release()


def test_no_error_of_ours_is_left_for_others(simulator: Simulator, device: gi.Device, hip: Any) -> None:
    """torch asks for the thread's last error behind its launches: it must not find one that was told already."""
    stream = device.create_stream()
    word: Any = device.create_semaphore(gi.TimelineFd)
    hip.hipGetLastError()
    word.wait(stream, 1)
    assert not stream.query()  # hipErrorNotReady
    with open(os.devnull) as file, pytest.raises(gi.DriverError):
        device.import_memory(gi.OpaqueFd(file.fileno()), size=4096)
    assert device.driver.is_pageable(device._handle, id(stream))  # no address of HIP's: hipErrorInvalidValue
    assert int(hip.hipPeekAtLastError()[0]) == 0
    word.host_signal(1)
    stream.synchronize(LIMIT)
    stream.close()
    word.close(timeout=LIMIT)
