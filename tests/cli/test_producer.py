"""The exporter's half of the demo, over every exporter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import gpuinterop as gi
from gpuinterop.cli.demo.producer import Producer
from gpuinterop.cli.demo.simulation import WaveParameters
from gpuinterop.exporters.base import Exporter, Submission
from gpuinterop.handles import Binary, Timeline
from tests.validation import _validation, validation  # noqa: F401 - fixtures

from .parties import open_party

SMALL = WaveParameters(width=50, height=37)
LIMIT = 30.0
HANDLES: dict[type, Any] = {Binary: gi.OpaqueFd, Timeline: gi.TimelineFd}
Fields = NDArray[np.float32]


@pytest.fixture(params=["memfd", "memfd@process", "swiftshader", "swiftshader@process", "lavapipe"])
def exporter(request: pytest.FixtureRequest) -> Iterator[Exporter]:
    name, _, process = str(request.param).partition("@")
    with open_party(name, process=bool(process)) as opened:
        yield opened


def step(fields: Fields, frame: int, parameters: WaveParameters) -> None:
    """Step as WaveParameters says, in float32; written without a look at the shader."""
    u, other = fields[frame % 2], fields[(frame + 1) % 2]
    courant2, damping = np.float32(parameters.courant2), np.float32(parameters.damping)
    inner = u[1:-1, 1:-1]
    neighbours = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    after = np.zeros_like(u)
    after[1:-1, 1:-1] = damping * (
        np.float32(2) * inner - other[1:-1, 1:-1] + courant2 * (neighbours - np.float32(4) * inner)
    )
    other[...] = after


def initial(parameters: WaveParameters) -> Fields:
    fields = np.random.default_rng(3).standard_normal((2, parameters.height, parameters.width), dtype=np.float32)
    fields[:, 0], fields[:, -1], fields[:, :, 0], fields[:, :, -1] = 0, 0, 0, 0
    return fields


@pytest.mark.parametrize(
    "parameters",
    [SMALL, WaveParameters(width=3, height=3), WaveParameters(width=64, height=16, courant2=0.5, damping=0.9)],
    ids=["50x37", "3x3", "64x16"],
)
def test_the_wave_steps_as_documented(exporter: Exporter, parameters: WaveParameters) -> None:
    with Producer(exporter, parameters, None) as producer:
        assert producer.memory.size >= parameters.size
        assert producer.read(0) == producer.read(1) == bytes(parameters.slot_bytes)
        fields = initial(parameters)
        for slot in range(2):
            producer.write(slot, fields[slot].tobytes())
        for frame in range(8):
            with producer.submit(frame) as submission:
                assert submission.done(LIMIT)
            step(fields, frame, parameters)
            for slot in range(2):
                got = np.frombuffer(producer.read(slot), np.float32).reshape(fields[slot].shape)
                np.testing.assert_allclose(got, fields[slot], rtol=1e-5, atol=1e-6)


def semaphores(exporter: Exporter) -> list[tuple[type, bool]]:
    """Each kind that there is, and whether it is exportable; every party has one at least."""
    shared = [
        kind
        for kind, handle in HANDLES.items()
        if exporter.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, handle))
    ]
    found = [*((kind, True) for kind in shared), *(() if exporter.endpoint_gap else ((Timeline, False),))]
    assert found
    return found


def begin(exporter: Exporter, kind: type, exportable: bool, frames: int) -> tuple[Producer, list[Submission]]:
    """Submit frames, all but the first of which wait for ever."""
    producer = Producer(exporter, SMALL, kind, exportable=exportable)
    submissions = [producer.submit(frame) for frame in range(frames)]
    assert submissions[0].done(LIMIT)
    if frames > 1:
        assert not submissions[1].done(0.05)
    return producer, submissions


def test_what_is_pending_ends_with_an_abort_and_a_close(exporter: Exporter) -> None:
    for kind, exportable in semaphores(exporter):
        for abort in (True, False):
            for frames in (1, 2, 5):
                producer, submissions = begin(exporter, kind, exportable, frames)
                if abort:
                    producer.abort()
                    assert all(submission.done(LIMIT) for submission in submissions)
                producer.close()
                assert all(submission.done(LIMIT) for submission in submissions)
