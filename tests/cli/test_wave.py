"""The engine of the demo, beside what taking things out of it shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.cli.demo import producer
from gpuinterop.cli.demo.consumer import CopyConsumer
from gpuinterop.cli.demo.simulation import Sources, WaveParameters, simulate
from gpuinterop.cli.demo.wave import Sync, choose_sync, run_wave
from gpuinterop.testing.exporters import open_exporter
from gpuinterop.testing.exporters.vulkan import list_drivers

from .parties import open_party, require_driver

SMALL = WaveParameters(width=64, height=48)
HOST = Sync("host", None, "no semaphore is wanted here.")


def test_the_simulation_by_hand() -> None:
    # Cell by cell and in float64: as slow as it is plain.
    parameters = WaveParameters(width=16, height=16)
    sources = Sources(16, 16)
    before, now = np.zeros((16, 16)), np.zeros((16, 16))
    for frame in range(6):
        after = np.zeros((16, 16))
        for y in range(1, 15):
            for x in range(1, 15):
                around = now[y - 1, x] + now[y + 1, x] + now[y, x - 1] + now[y, x + 1]
                after[y, x] = parameters.damping * (
                    2 * now[y, x] - before[y, x] + parameters.courant2 * (around - 4 * now[y, x])
                )
        for patch in sources.patches(frame):
            for row in range(patch.size):
                for column in range(patch.size):
                    at = patch.top + row, patch.left + column
                    after[at] += float(sources.window[row, column]) * (patch.target - after[at])
        before, now = now, after
    slots = simulate(parameters, 6, sources)
    np.testing.assert_allclose(slots[0], now, atol=1e-5)  # frame 5 leaves its field in slot 0
    np.testing.assert_allclose(slots[1], before, atol=1e-5)


def test_a_step_of_the_party_that_is_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation, which checks the run, does not step with the party's own function."""
    with open_exporter("memfd") as exporter:
        device = gi.match_device(exporter.identity)
        assert run_wave(exporter, device, SMALL, 4).correct

        def stiffer(slots: object, width: int, height: int, courant2: float, *rest: Any) -> None:
            real(slots, width, height, 0.75 * courant2, *rest)

        real = producer.step
        monkeypatch.setattr(producer, "step", stiffer)
        assert not run_wave(exporter, device, SMALL, 4).correct


@pytest.mark.parametrize(
    ("name", "mode", "sync", "frames"),
    [
        ("memfd", "auto", "timeline", 1),
        ("memfd", "native", "timeline", 2),
        ("memfd", "bridged", "bridged", 33),
        ("process", "bridged", "bridged", 33),
        ("swiftshader", "auto", "binary", 33),
        ("swiftshader", "bridged", "bridged", 2),
        ("lavapipe", "auto", "bridged", 33),
        ("lavapipe", "host", "host", 33),
    ],
)
def test_each_way_to_keep_in_order(name: str, mode: str, sync: str, frames: int) -> None:
    ticks = []
    with open_party(name) as exporter:
        device = gi.match_device(exporter.identity)
        how = HOST if mode == "host" else choose_sync(exporter, device, mode)
        result = run_wave(exporter, device, SMALL, frames, sync=how, tick=lambda *told: ticks.append(told))
    assert result.problem == ""
    assert result.correct
    assert result.sync.name == sync
    assert ticks == [(done, frames) for done in range(1, frames + 1)]
    assert len(result.frame_us) == frames
    assert result.memory_handle == "opaque_fd"
    assert result.semaphore_handle == {"timeline": "timeline_fd", "binary": "opaque_fd"}.get(sync)
    assert result.shared_bytes == 2 * 64 * 48 * 4
    assert result.staging_ratio is not None
    assert np.abs(result.field).max() > 0.1


@pytest.mark.parametrize("name", ["memfd", "swiftshader"])
def test_without_an_array_library_rows_are_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuinterop.cli.demo.wave.open_consumer", CopyConsumer)
    with open_party(name) as exporter:
        result = run_wave(exporter, gi.match_device(exporter.identity), SMALL, 20)
    assert result.problem == ""
    assert result.correct
    assert result.staging_ratio is not None


def test_each_driver_is_opened_by_its_place() -> None:
    require_driver("swiftshader")
    for driver in list_drivers():
        with open_exporter("vulkan", device_index=driver.index) as exporter:
            assert exporter.device == driver.name
            assert exporter.identity.uuid == driver.identity.uuid
