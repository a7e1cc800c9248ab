"""The sabotages of the demo, on the host backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import gpuinterop as gi
from gpuinterop.cli.wave import Sabotage, Sync, choose_sync

from .parties import open_party
from .sabotage_cases import Party, SabotageCases, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds and SwiftShader's semaphores are Linux's")


@pytest.fixture(params=["memfd-timeline", "memfd-binary", "swiftshader"])
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    name, _, kind = str(request.param).partition("-")
    with open_party(name) as exporter:
        device = gi.match_device(exporter.identity)
        sync = choose_sync(exporter, device) if kind != "binary" else Sync("binary", gi.Binary)
        assert sync.name == (kind or "binary")
        yield exporter, device, sync


class TestSabotage(SabotageCases):
    pass


def test_a_host_has_no_semaphore_to_take_out() -> None:
    with open_party("lavapipe") as exporter:
        device = gi.match_device(exporter.identity)
        assert choose_sync(exporter, device).name == "host"
        with pytest.raises(gi.InvalidArgumentError, match=r"no semaphore to take out.*external_semaphore"):
            run((exporter, device, choose_sync(exporter, device)), sabotage=Sabotage.CONSUMER_WAIT)
