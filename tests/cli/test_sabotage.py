"""The sabotages of the demo, on the host backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import gpuinterop as gi
from gpuinterop.cli.demo.wave import Sabotage, Sync, WaveRun, choose_sync

from .parties import open_party
from .sabotage_cases import Party, SabotageCases, check_unending, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds and SwiftShader's semaphores are Linux's")


NATIVE = ("memfd-timeline", "memfd-binary", "swiftshader-binary")
BRIDGED = ("memfd-bridged", "process-bridged", "swiftshader-bridged", "lavapipe-bridged")


@contextmanager
def opened(what: str) -> Iterator[Party]:
    name, _, kind = what.partition("-")
    with open_party(name) as exporter:
        device = gi.match_device(exporter.identity)
        if kind == "binary" and name == "memfd":  # which would rather have a timeline
            sync = Sync("binary", gi.Binary)
        else:
            sync = choose_sync(exporter, device, "bridged" if kind == "bridged" else "native")
        assert sync.name == kind
        yield exporter, device, sync


class TestSabotage(SabotageCases):
    @pytest.fixture(params=NATIVE)
    def party(self, request: pytest.FixtureRequest) -> Iterator[Party]:
        with opened(request.param) as party:
            yield party


class TestBridgedSabotage(SabotageCases):
    @pytest.fixture(params=BRIDGED)
    def party(self, request: pytest.FixtureRequest) -> Iterator[Party]:
        with opened(request.param) as party:
            yield party

    def check_problem(self, result: WaveRun, frame: int) -> None:
        check_unending(result, frame)


def test_a_host_has_no_semaphore_to_take_out() -> None:
    with open_party("memfd") as exporter:
        device = gi.match_device(exporter.identity)
        with pytest.raises(gi.InvalidArgumentError, match="no semaphore to take out: it is not wanted"):
            run((exporter, device, Sync("host", None, "it is not wanted")), sabotage=Sabotage.CONSUMER_WAIT)
