"""The table: total, honest, readable."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import (
    DOMAIN,
    Capabilities,
    Capability,
    Cell,
    Operation,
    Scope,
    Support,
    disable,
    promote,
    read_verified,
)

from .fake import table

TOML = """
[[run]]
date = 2026-11-21
platform = "{platform}"
device = "a GPU"
cells = ["import_memory:opaque_fd", "graph_capture"]
[run.versions]
driver = "1.2"
"""


def test_cells_read_back_what_they_print() -> None:
    assert len({str(cell) for cell in DOMAIN}) == len(DOMAIN)
    assert all(Cell.parse(str(cell)) == cell for cell in DOMAIN)
    with pytest.raises(gi.InvalidArgumentError, match="DOMAIN"):
        Cell.parse("import_memory:timeline_fd")


def test_everything_but_supported_says_why() -> None:
    for missing in ("scope", "reason", "reference"):
        words = {"scope": Scope.DRIVER, "reason": "r", "reference": "x"} | {missing: None if missing == "scope" else ""}
        with pytest.raises(gi.InvalidArgumentError):
            Capability(operation=Operation.GRAPH_CAPTURE, support=Support.UNVERIFIED, **words)  # type: ignore[arg-type]


def test_a_table_must_be_total() -> None:
    cells = list(table().values())
    with pytest.raises(gi.InvalidArgumentError, match="graph_capture"):
        Capabilities(cells[:-1])


def test_three_lines_of_use() -> None:
    capabilities = table(Operation.MAP_BUFFER)
    wanted = ((Operation.IMPORT_MEMORY, gi.OpaqueFd), (Operation.MAP_BUFFER, gi.OpaqueFd))
    missing = capabilities.missing(*wanted)
    assert [found.reason for found in missing] == ["the test says so."]
    assert not capabilities.supports(*wanted)
    assert capabilities.supports(wanted[0], Operation.GRAPH_CAPTURE)
    with pytest.raises(gi.UnsupportedError, match="map_buffer:opaque_fd is unsupported on fake"):
        capabilities.require(*wanted)


def test_a_pair_without_meaning_is_a_gap_and_a_non_pair_an_error() -> None:
    found = table().of((Operation.IMPORT_MEMORY, gi.TimelineFd))
    assert not found
    assert "opaque_fd" in found.reason
    for bad in ("import_memory", ("import_memory", gi.OpaqueFd), 3, ()):
        with pytest.raises(gi.ArgumentTypeError):
            table().of(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["opaque_fd", 3, [], int, gi.OpaqueWin32(handle=8)])
def test_the_handle_type_is_a_handles_type(kind: Any) -> None:
    for requirement in ((Operation.MAP_BUFFER, kind), Cell(Operation.MAP_BUFFER, kind)):
        for ask in (table().of, table().missing, table().supports, table().require):
            with pytest.raises(gi.ArgumentTypeError, match="handle type must be") as caught:
                ask(requirement)
            assert caught.value.argument == "requirement"


def test_as_dict_is_json() -> None:
    rows = [found.as_dict() for found in table(Operation.MAP_BUFFER).values()]
    assert json.loads(json.dumps(rows)) == rows
    assert set(rows[0]) == {"operation", "handle_type", "support", "scope", "reason", "reference", "workaround"}


@pytest.mark.parametrize(("platform", "support"), [(sys.platform, "supported"), ("amiga", "unverified")])
def test_a_run_promotes_on_its_own_platform_only(tmp_path: Path, platform: str, support: str) -> None:
    file = tmp_path / "verified.toml"
    file.write_text(TOML.format(platform=platform))
    promoted = Capabilities(promote(table(Operation.GRAPH_CAPTURE).values(), read_verified(file)))
    found = promoted[Operation.IMPORT_MEMORY, gi.OpaqueFd]
    assert found.support.value == support
    assert ("2026-11-21" in found.reference) == (support == "supported")
    assert promoted[Operation.GRAPH_CAPTURE, None].support is Support.UNSUPPORTED  # a run cannot fill a gap
    assert promoted[Operation.MAP_BUFFER, gi.OpaqueFd].support is Support.UNVERIFIED


MULTICAST_TOML = """
[[run]]
date = 2026-11-21
platform = "{platform}"
device = "a GPU"
cells = ["create_multicast", "import_memory:opaque_fd"]
"""


@pytest.mark.parametrize(
    ("device", "support"), [("a GPU", "supported"), ("another GPU", "unverified"), ("", "unverified")]
)
def test_a_run_of_multicast_says_nothing_of_other_devices(tmp_path: Path, device: str, support: str) -> None:
    """Nor does it say all of the same: the fabric is another, so what it needs is still told."""
    file = tmp_path / "verified.toml"
    file.write_text(MULTICAST_TOML.format(platform=sys.platform))
    promoted = Capabilities(promote(table().values(), read_verified(file), device=device))
    found = promoted[Operation.CREATE_MULTICAST, None]
    assert found.support.value == support
    assert (found.reason, found.scope) == ("the test says so.", Scope.DRIVER)
    assert ("2026-11-21 on a GPU" in found.reference) == (support == "supported")
    other = promoted[Operation.IMPORT_MEMORY, gi.OpaqueFd]
    assert (other.support, other.reason, other.scope) == (Support.SUPPORTED, "", None)


def test_no_file_holds_no_runs(tmp_path: Path) -> None:
    assert read_verified(tmp_path / "none.toml") == []


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("map_bufer", " map_buffer"),
        ("*semaphore:timline_fd", " signal_semaphore:timeline_fd"),
        ("IMPORT_MEMORY", " import_memory"),
        ("import_memory:timeline_fd", " import_semaphore:timeline_fd"),
        ("xyz", "import_memory, map_buffer, map_mipmapped_array"),
    ],
)
def test_a_pattern_that_turns_nothing_off_is_an_error_that_names_what_is_near(pattern: str, near: str) -> None:
    """Beside one that matches, too."""
    with pytest.raises(gi.InvalidArgumentError, match="got " + re.escape(repr(pattern))) as caught:
        disable(table().values(), f"graph_capture, {pattern}")
    assert caught.value.argument == "GPUINTEROP_DISABLE"
    assert near in str(caught.value)


def test_disable_leaves_gaps_their_own_reason() -> None:
    cells = disable(table(Operation.MAP_BUFFER).values(), "map_buffer,import_memory:*")
    by = {found.cell: found for found in cells}
    assert by[Cell(Operation.MAP_BUFFER, gi.OpaqueFd)].support is Support.UNSUPPORTED
    assert by[Cell(Operation.IMPORT_MEMORY, gi.DmaBufFd)].support is Support.DISABLED
