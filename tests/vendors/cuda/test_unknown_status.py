"""A driver that is newer than the bindings: numbers that they have no name for, out of every call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator

from ..parties import open_party

CODE = 12345


@pytest.mark.parametrize(("call", "nth"), [("cuThreadExchangeStreamCaptureMode", 2), ("cuCtxPopCurrent", 1)])
@pytest.mark.parametrize("strict", [False, True])
def test_what_was_made_is_handed_out_where_the_call_behind_it_fails(
    simulator: Simulator,
    device: gi.Device,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    nth: int,
    strict: bool,
) -> None:
    """The mode of captures or the context is not put back: a warning says so, also where warnings are errors."""
    from cuda.bindings import driver

    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: reported.append(str(hook.exc_value)))
    _ = device._handle  # its context is made, and stays
    before = simulator.live()
    makes: list[Callable[[], Any]] = [device.create_stream, lambda: device.allocate(1)]
    for make in makes:
        simulator.fail(call, code=CODE, nth=nth)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("error" if strict else "always")
            made = make()
        (told,) = reported if strict else [str(warning.message) for warning in caught]
        assert told.startswith(f"{call} failed with CUresult {CODE} ({CODE}): unknown to these bindings")
        reported.clear()
        if call == "cuCtxPopCurrent":
            driver.cuCtxPopCurrent()
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        made.close()
    device.drain()
    assert simulator.live() == before


def test_a_graph_with_a_node_of_a_newer_type(
    simulator: Simulator, device: gi.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It neither signals nor waits: those are known."""
    backend: Any = device.driver
    api = backend._driver.api

    class Newer:
        def __getattr__(self, name: str) -> Any:
            return getattr(api, name)

        def cuGraphNodeGetType(self, node: Any) -> Any:
            code, kind = api.cuGraphNodeGetType(node)
            return code, api.CUgraphNodeType(9999 if kind == api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET else kind)

    with (
        open_party("memfd", device) as exporter,
        exporter.create_memory(4096) as theirs,
        exporter.create_semaphore(gi.Timeline) as counter,
        device.import_memory(theirs.export(), size=4096) as memory,
        device.import_semaphore(counter.export()) as semaphore,
        device.create_stream() as stream,
    ):
        buffer = memory.map_buffer()
        monkeypatch.setattr(backend._driver, "api", Newer())
        with stream.capture() as graph:
            buffer.fill(3, stream=stream)
            semaphore.signal(stream, 1)
        with graph:
            assert [step.values for step in graph.semaphores.steps] == [(1,)]
        buffer.close()
