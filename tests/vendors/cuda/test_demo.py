"""The demo's wave, stepped by the other side and stirred by CUDA; and with each wait and signal taken out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gpuinterop as gi
from gpuinterop.cli.demo.simulation import WaveParameters
from gpuinterop.cli.demo.wave import Sync, run_wave
from tests.cli.sabotage_cases import Party, SabotageCases
from tests.limits import LIMIT

from ..parties import REAL, open_party

SYNCS = (
    ("vulkan-timeline", "vulkan-binary", "vulkan-bridged")
    if REAL
    else ("memfd-timeline", "memfd-bridged", "swiftshader-binary")
)
"""Who shares memory and semaphores, and what keeps them in order."""


@pytest.fixture(params=SYNCS)
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    name, _, kind = str(request.param).partition("-")
    device = gi.get_backend("cuda").device()
    with open_party(name, device) as exporter:
        yield exporter, device, Sync(kind, gi.Binary if kind == "binary" else gi.Timeline)


class TestSabotage(SabotageCases):
    pass


def test_the_field_is_right(party: Party) -> None:
    exporter, device, how = party
    run = run_wave(exporter, device, WaveParameters(width=128, height=96), 60, sync=how, timeout=LIMIT)
    assert run.problem == ""
    assert run.correct
    assert run.sync.name == how.name
    assert run.memory_handle == "opaque_fd"
    assert run.semaphore_handle == {"timeline": "timeline_fd", "binary": "opaque_fd", "bridged": None}[how.name]
    assert run.staging_ratio is not None


@pytest.mark.skipif(not REAL, reason="a simulated GPU has no array library")
def test_an_array_library_works_in_place(party: Party) -> None:
    exporter, device, how = party
    run = run_wave(exporter, device, WaveParameters(width=64, height=64), 10, sync=how, timeout=LIMIT)
    assert "in place" in run.consumer, f"CuPy or torch is to be installed: {run.consumer}"
