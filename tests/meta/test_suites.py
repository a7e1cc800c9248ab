"""The kit runs every suite that it has."""

from importlib import import_module
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import Cell, Operation
from gpuinterop.handles import OpaqueFd, TimelineFd
from gpuinterop.testing import KIND, requires


def test_every_suite_is_run() -> None:
    test_conformance = import_module(
        "gpuinterop.testing.test_conformance"
    )  # first: it has the suites' asserts rewritten
    suites = import_module("gpuinterop.testing.suites")
    run = {base for one in vars(test_conformance).values() if isinstance(one, type) for base in one.__mro__}
    assert {name for name in suites.__all__ if name.endswith("Suite") and getattr(suites, name) not in run} == set()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            (Operation.MAP_BUFFER, OpaqueFd),
            r"MAP_BUFFER with OpaqueFd or .*, got no handle type; write requires\(\(Operation.MAP_BUFFER, OpaqueFd\)\)",
        ),  # parentheses forgotten
        ((Operation.GRAPH_CAPTURE, OpaqueFd), "and pairs such as .*, got OpaqueFd"),
        (("map_buffer:opaque_fd",), "and pairs such as .*, got 'map_buffer:opaque_fd'"),
        (((Operation.MAP_BUFFER, OpaqueFd, 1),), "and pairs such as .*, got .*OpaqueFd.*, 1"),
        (((Cell(Operation.GRAPH_CAPTURE), OpaqueFd),), "and pairs such as .*, got .*Cell.*"),
        (((Operation.MAP_BUFFER, TimelineFd),), "MAP_BUFFER with OpaqueFd or .*, got TimelineFd"),
        (((Operation.MAP_BUFFER, "opaque_fd"),), "MAP_BUFFER with OpaqueFd or .*, got opaque_fd"),
        (((Operation.MAP_BUFFER, KIND),), "MAP_BUFFER with OpaqueFd or .*, got TimelineFd"),
        (
            (Cell(Operation.GRAPH_CAPTURE, OpaqueFd),),
            r"GRAPH_CAPTURE with no handle type, got OpaqueFd; write requires\(Operation.GRAPH_CAPTURE\)",
        ),
    ],
)
def test_a_requirement_that_no_table_has(cells: Any, words: str) -> None:
    """It is refused where it stands, which is when the module is collected."""
    with pytest.raises(gi.InvalidArgumentError, match=f"^requires: expected .*{words}"):
        requires(*cells)
