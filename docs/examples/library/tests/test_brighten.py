"""The library's tests, on every backend: the plugin provides the device, and an exporter that uses no backend.

    pytest                                       every backend that works here
    GPUINTEROP_BACKEND=cuda pytest               CUDA; fails if it does not work
    GPUINTEROP_DISABLE=profile:hip-linux pytest  the library's other path: no semaphores, as with AMD on Linux
    GPUINTEROP_DISABLE='map_buffer:*' pytest     the refusal

A test that hangs ends after 90 seconds with all stacks; use `@pytest.mark.timeout(10)` for less.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from brighten import NEEDS, ON_DEVICE, Brightener

import gpuinterop as gi
from gpuinterop.testing import requires
from gpuinterop.testing.suites import Suite
from gpuinterop.testing.suites.base import Harness

SIZE = 4096


class TestBrightener(Suite):
    @requires(*NEEDS)
    def test_it_brightens_what_the_renderer_has_drawn(self, harness: Harness) -> None:
        theirs = harness.export(SIZE)  # the renderer's memory: Vulkan's, or a memfd
        shares = harness.exporter.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))
        drawn = harness.scope.enter_context(harness.make_semaphore(gi.Binary)) if shares else None
        with nullcontext() if drawn is None else drawn.export() as ready:
            brightener = Brightener(harness.device, theirs.export(), theirs.size, ready)
        on_device = drawn is not None and not harness.device.capabilities.missing(*ON_DEVICE)
        assert (brightener.ready is not None) == on_device
        theirs.write(0, bytes([10, 250]) * (SIZE // 2))
        if drawn is not None:
            drawn.signal()
        waited = []
        brightener.run(20, lambda: waited.append("on the host"))  # yours: vkWaitForFences
        assert theirs.read(0, SIZE) == bytes([30, 255]) * (SIZE // 2)
        assert waited == ([] if on_device else ["on the host"])
        brightener.close()

    def test_a_gap_is_refused_with_its_reason(self, device: gi.Device) -> None:
        gaps = device.capabilities.missing(*NEEDS)
        if gaps:
            with pytest.raises(gi.UnsupportedError) as refused:
                Brightener(device, gi.OpaqueFd(0), SIZE)
            assert refused.value.capability == gaps[0]
