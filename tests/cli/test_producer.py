"""The exporter's half of the demo, over every exporter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.cli.demo.producer import Producer
from gpuinterop.cli.demo.simulation import WaveParameters
from gpuinterop.handles import Binary, Timeline
from gpuinterop.testing.exporters.base import Exporter, Submission
from tests.limits import LIMIT
from tests.validation import _validation, validation  # noqa: F401 - fixtures

from .parties import open_party

SMALL = WaveParameters(width=50, height=37)
HANDLES: dict[type, Any] = {Binary: gi.OpaqueFd, Timeline: gi.TimelineFd}


@pytest.fixture(params=["memfd", "memfd@process", "swiftshader", "swiftshader@process", "lavapipe"])
def exporter(request: pytest.FixtureRequest) -> Iterator[Exporter]:
    name, _, process = str(request.param).partition("@")
    with open_party(name, process=bool(process)) as opened:
        yield opened


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
