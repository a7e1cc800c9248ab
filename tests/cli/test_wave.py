"""The engine of the demo, beside what taking things out of it shows."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.cli.demo import producer
from gpuinterop.cli.demo.consumer import ArrayConsumer, CopyConsumer
from gpuinterop.cli.demo.picture import render
from gpuinterop.cli.demo.simulation import Sources, WaveParameters, simulate
from gpuinterop.cli.demo.wave import Sync, choose_sync, run_wave
from gpuinterop.exporters import open_exporter
from gpuinterop.exporters.base import Exporter

from .parties import open_party

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


@pytest.mark.parametrize("size", [(16, 16), (17, 400), (512, 512), (1024, 256)])
def test_sources_stay_off_the_border(size: tuple[int, int]) -> None:
    sources = Sources(*size)
    for frame in range(0, 4000, 7):
        for patch in sources.patches(frame):
            assert 1 <= patch.top <= size[1] - 1 - patch.size
            assert 1 <= patch.left <= size[0] - 1 - patch.size
            assert patch.size == len(sources.window)


@pytest.mark.parametrize("frames", [1, 2, 33])
@pytest.mark.parametrize(
    ("name", "mode", "sync"),
    [
        ("memfd", "auto", "timeline"),
        ("memfd", "native", "timeline"),
        ("memfd", "bridged", "bridged"),
        ("process", "bridged", "bridged"),
        ("swiftshader", "auto", "binary"),
        ("swiftshader", "native", "binary"),
        ("swiftshader", "bridged", "bridged"),
        ("lavapipe", "auto", "bridged"),
        ("lavapipe", "bridged", "bridged"),
        ("lavapipe", "host", "host"),
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


def test_a_driver_without_shareable_semaphores_says_why() -> None:
    with open_party("lavapipe") as exporter:
        device = gi.match_device(exporter.identity)
        sync = choose_sync(exporter, device)
        assert (sync.name, sync.kind) == ("bridged", gi.Timeline)
        assert "VK_KHR_external_semaphore_fd" in sync.reason
        # Asked for by name, nothing else is taken.
        with pytest.raises(gi.UnsupportedError, match="VK_KHR_external_semaphore_fd") as caught:
            choose_sync(exporter, device, "native")
        assert caught.value.capability.operation is gi.Operation.IMPORT_SEMAPHORE
        assert choose_sync(exporter, device, "bridged").reason == ""


@pytest.mark.parametrize("mode", ["auto", "bridged"])
def test_without_words_for_streams_there_is_no_bridge(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_party("lavapipe") as exporter:
        device = gi.match_device(exporter.identity)
        cells = [
            cell.cell.gap(gi.Scope.DEVICE, "its streams wait for no words.", "test")
            if cell.operation is gi.Operation.STREAM_MEMORY_OPS
            else cell
            for cell in device.capabilities.values()
        ]
        with pytest.raises(gi.UnsupportedError) as bridgeable:
            choose_sync(exporter, device, "native")
        monkeypatch.setattr(device, "capabilities", gi.Capabilities(cells, owner=device.name))
        if mode == "bridged":
            with pytest.raises(gi.UnsupportedError, match="wait for no words"):
                choose_sync(exporter, device, mode)
            # Nor is it what one is told to take instead: the table's own way around stays.
            with pytest.raises(gi.UnsupportedError) as alone:
                choose_sync(exporter, device, "native")
            assert bridgeable.value.capability.workaround == "sync bridged, or auto."
            assert (
                alone.value.capability.workaround
                == exporter.capabilities.of(
                    (gi.Operation.IMPORT_SEMAPHORE, alone.value.capability.handle_type)
                ).workaround
            )
            assert "bridged" not in alone.value.capability.workaround
            return
        sync = choose_sync(exporter, device, mode)
        assert (sync.name, sync.kind) == ("host", None)
        assert "VK_KHR_external_semaphore_fd" in sync.reason  # both reasons: either would do
        assert "wait for no words" in sync.reason
        assert run_wave(exporter, device, SMALL, 2, staging=False).sync == sync


def test_a_party_whose_semaphores_are_out_of_reach_has_no_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exporter, "endpoint_gap", "its semaphores are kept elsewhere")
    with open_party("lavapipe") as exporter:
        device = gi.match_device(exporter.identity)
        assert choose_sync(exporter, device).name == "host"
        with pytest.raises(gi.UnsupportedError, match="kept elsewhere"):
            choose_sync(exporter, device, "bridged")


def test_a_field_that_is_not_the_simulation_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine that compared nothing would pass everything above.
    with open_party("memfd") as exporter:
        device = gi.match_device(exporter.identity)
        monkeypatch.setattr("gpuinterop.cli.demo.wave.simulate", lambda p, frames, s: simulate(p, frames + 2, s))
        result = run_wave(exporter, device, SMALL, 5, staging=False)
    assert result.problem == ""
    assert not result.correct


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_a_field_with_holes_is_wrong_and_can_be_drawn(hole: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_party("memfd") as exporter:
        device = gi.match_device(exporter.identity)
        field = np.full((48, 64), hole, np.float32)
        monkeypatch.setattr("gpuinterop.cli.demo.wave._Run.read", lambda self: np.stack([field, field]))
        result = run_wave(exporter, device, SMALL, 2, staging=False)
    assert not result.correct
    assert result.as_dict()["max_error"] is None
    assert render(result.field).size == (512, 384)


class _Stream:
    """CuPy's ExternalStream, as far as the demo knows it. NumPy does not wait for streams, so entering it does."""

    def __init__(self, pointer: int, device_id: int) -> None:
        self.stream = gi.get_backend("host").device(device_id).wrap_stream(pointer)

    def __enter__(self) -> None:
        self.stream.synchronize(10.0)

    def __exit__(self, *exc_info: object) -> None:
        pass


@pytest.mark.parametrize("consumer", ["array", "copy"])
@pytest.mark.parametrize("name", ["memfd", "swiftshader"])
def test_what_consumers_on_a_gpu_do(name: str, consumer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if consumer == "copy":
        monkeypatch.setattr("gpuinterop.cli.demo.wave.open_consumer", CopyConsumer)
    else:
        cupy = ModuleType("cupy")
        cuda = SimpleNamespace(ExternalStream=_Stream, Device=lambda ordinal: nullcontext())
        # np.array: the upload to a GPU is a copy, too. np.asarray: what NumPy 1 takes from DLPack cannot be written.
        vars(cupy).update(__version__="0", cuda=cuda, from_dlpack=np.asarray, asarray=np.array, asnumpy=np.asarray)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr("gpuinterop.cli.demo.wave.open_consumer", partial(ArrayConsumer, "cupy"))
    with open_party(name) as exporter:
        result = run_wave(exporter, gi.match_device(exporter.identity), SMALL, 20)
    assert result.problem == ""
    assert result.correct
    assert result.staging_ratio is not None


@pytest.mark.parametrize(
    ("parameters", "frames", "argument"), [(SMALL, 0, "frames"), (WaveParameters(width=8, height=64), 4, "size")]
)
def test_arguments(parameters: WaveParameters, frames: int, argument: str) -> None:
    with open_party("memfd") as exporter:
        device = gi.match_device(exporter.identity)
        with pytest.raises(gi.InvalidArgumentError) as caught:
            run_wave(exporter, device, parameters, frames)
    assert caught.value.argument == argument


@pytest.mark.parametrize("shape", [(16, 16), (64, 200), (512, 512), (700, 100)])
def test_the_picture(shape: tuple[int, int]) -> None:
    field = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    image = render(field)
    assert image.mode == "RGB"
    assert max(image.size) >= 512
    assert image.width * shape[0] == image.height * shape[1]
    dark = render(np.zeros(shape, np.float32))
    assert np.asarray(dark).max() < 100
