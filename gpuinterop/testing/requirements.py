"""What a test declares: the capabilities that it exercises, and why it is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pytest

from ..capabilities import DOMAIN, Cell, Operation
from ..errors import ArgumentTypeError, InvalidArgumentError
from ..handles import Binary, OpaqueFd, Timeline, TimelineFd
from .results import DECLARED

__all__ = ["HANDLE_TYPES", "KIND", "cells_of", "params_of", "requires", "skip_declared"]

KIND: Final = "kind"
"""In `requires`, the handle type of the semaphore kind in the test's ``kind`` parameter.

Examples
--------
>>> from gpuinterop.testing import KIND, requires
>>> mark = requires((gi.Operation.IMPORT_SEMAPHORE, KIND))
"""

HANDLE_TYPES: Final[dict[Any, Any]] = {Binary: OpaqueFd, Timeline: TimelineFd}
"""The handle type of an exporter's semaphore, by kind."""


def requires(*cells: Any) -> pytest.MarkDecorator:
    """Declare the capabilities that a test, or every test of a class, exercises.

    The test is skipped on a device where one of them is a gap, with the gap's reason. A cell counts as exercised when
    all tests that declare it have passed.

    Parameters
    ----------
    *cells : Operation, Cell or (Operation, handle type)
        `KIND` as a handle type means the type of the test's ``kind`` parameter.

    Raises
    ------
    ArgumentTypeError
        An argument is a string, or a handle type without an operation.
    InvalidArgumentError
        There is no such cell.

    Examples
    --------
    >>> from gpuinterop.testing import requires
    >>> from gpuinterop.testing.suites import Suite
    >>> class TestMyRenderer(Suite):
    ...     @requires((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd))
    ...     def test_total(self, harness):
    ...         assert harness.exporter.create_memory(4096).size >= 4096
    """
    for wanted in cells:
        operation, handle_type = wanted if isinstance(wanted, tuple) and len(wanted) == 2 else (wanted, None)
        if not isinstance(operation, Operation) and not isinstance(wanted, Cell):
            name = wanted.__name__ if isinstance(wanted, type) else repr(wanted)
            raise ArgumentTypeError(
                "requires",
                f"expected operations, and pairs such as (Operation.MAP_BUFFER, OpaqueFd), got {name}; write a pair.",
            )
        for one in HANDLE_TYPES.values() if handle_type == KIND else [handle_type]:
            cell = wanted if isinstance(wanted, Cell) else Cell(operation, one)
            if cell not in DOMAIN:
                there = [other for other in DOMAIN if other.operation is cell.operation]
                pair = f"({cell.operation}, {_name(there[0])})" if there[0].handle_type else cell.operation
                raise InvalidArgumentError(
                    "requires",
                    f"expected {cell.operation.name} with {' or '.join(map(_name, there))}, got {_name(cell)}; "
                    f"write requires({pair}).",
                )
    mark: pytest.MarkDecorator = pytest.mark.gpuinterop_requires(*cells)
    return mark


def _name(cell: Cell) -> str:
    """The handle type of a cell, or whatever the caller wrote there."""
    kind: Any = cell.handle_type
    return "no handle type" if kind is None else getattr(kind, "__name__", str(kind))


def skip_declared(reason: str) -> Any:
    """Skip for a reason that a table or the documentation states, which is no failure on a required backend."""
    pytest.skip(DECLARED + reason)


def params_of(item: pytest.Item) -> dict[str, Any]:
    """The test's parameters."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return params


def cells_of(item: pytest.Item) -> list[Cell]:
    """The cells that a test requires, with `KIND` resolved."""
    params = params_of(item)
    instead: Mapping[Operation, Operation] = getattr(getattr(item, "cls", None), "gpuinterop_instead", {})
    cells: dict[Cell, None] = {}
    for mark in item.iter_markers("gpuinterop_requires"):
        for wanted in mark.args:
            cell = wanted
            if not isinstance(wanted, Cell):
                operation, handle_type = wanted if isinstance(wanted, tuple) else (wanted, None)
                if operation not in instead:
                    cell = Cell(operation, HANDLE_TYPES[params["kind"]] if handle_type == KIND else handle_type)
                else:
                    cell = Cell(instead[operation], None)
            cells[cell] = None
    return list(cells)
