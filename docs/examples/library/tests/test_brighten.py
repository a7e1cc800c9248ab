"""Tests of one's own, on every backend: the plugin brings the device, and a party that is not gpuinterop's backend.

pytest                                          what works here
GPUINTEROP_BACKEND=cuda pytest                  CUDA, and fail where it does not work
GPUINTEROP_DISABLE='import_semaphore:*' pytest  the library's other path
"""

from __future__ import annotations

import pytest
from brighten import NEEDS, Brightener, can_wait

import gpuinterop as gi
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite
from gpuinterop.testing.suites.base import Bench

SIZE = 4096
WAIT = (gi.Operation.WAIT_SEMAPHORE, gi.OpaqueFd)


class TestBrightener(Suite):
    @requires(*NEEDS)
    def test_it_brightens_the_renderers_bytes(self, bench: Bench) -> None:
        theirs = bench.export(SIZE)  # the renderer's memory: Vulkan's, or a memfd
        theirs.write(0, bytes([10, 250]) * (SIZE // 2))
        brightener = Brightener(bench.device, theirs.export(), theirs.size)
        brightener.run(20)
        assert theirs.read(0, SIZE) == bytes([30, 255]) * (SIZE // 2)
        brightener.close()

    @requires(*NEEDS, (gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd), WAIT)
    def test_it_waits_for_the_renderer(self, bench: Bench) -> None:
        assert can_wait(bench.device)
        theirs = bench.export(SIZE)
        signal, ready = bench.semaphore(gi.Binary)
        brightener = Brightener(bench.device, theirs.export(), theirs.size)
        theirs.write(0, bytes(SIZE))
        signal.signal()  # the renderer has drawn
        brightener.run(7, ready)
        assert theirs.read(0, SIZE) == bytes([7]) * SIZE
        brightener.close()

    def test_a_gap_is_refused_with_its_reason(self, device: gi.Device) -> None:
        if not device.capabilities.missing(*NEEDS):
            pytest.skip("this device has no gap here; GPUINTEROP_DISABLE makes one")
        with pytest.raises(gi.UnsupportedError, match=r"\w"):
            Brightener(device, gi.OpaqueFd(0), SIZE)
