"""The table: total, honest, readable."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop import backend
from gpuinterop.backend import INTERFACES, Backend
from gpuinterop.capabilities import (
    DOMAIN,
    Capabilities,
    Capability,
    Cell,
    Operation,
    Rules,
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
cells = ["import_memory:opaque_fd", "create_multicast", "graph_capture"]
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
    with pytest.raises(gi.InvalidArgumentError, match=str(DOMAIN[-1])):
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
    key: Any = Operation.EXPORT_ARRAY
    with pytest.raises(gi.ArgumentTypeError, match=r"write capabilities\[operation, handle_type\]"):
        table().get(key, gi.OpaqueFd)  # it would be the default


@pytest.mark.parametrize("kind", ["opaque_fd", 3, [], int, gi.OpaqueWin32(handle=8)])
def test_the_handle_type_is_a_handles_type(kind: Any) -> None:
    for requirement in ((Operation.MAP_BUFFER, kind), Cell(Operation.MAP_BUFFER, kind)):
        for ask in (table().of, table().missing, table().supports, table().require):
            with pytest.raises(gi.ArgumentTypeError, match="expected a handle type") as caught:
                ask(requirement)
            assert caught.value.argument == "requirement"


@pytest.mark.parametrize(
    ("platform", "device", "support"),
    [
        (sys.platform, "a GPU", "supported"),
        (sys.platform, None, "supported"),  # the CPU's: any of the platform
        (sys.platform, "another GPU", "unverified"),
        ("amiga", "a GPU", "unverified"),
        ("amiga", None, "unverified"),
    ],
)
@pytest.mark.parametrize("operation", [Operation.IMPORT_MEMORY, Operation.CREATE_MULTICAST])
def test_a_run_promotes_devices_of_its_name(
    tmp_path: Path, operation: Operation, platform: str, device: str | None, support: str
) -> None:
    """On its own platform. Elsewhere the reason names it; what the vendor's word rests on stays."""
    file = tmp_path / "verified.toml"
    file.write_text(TOML.format(platform=platform))
    runs = read_verified(file)
    promoted = Capabilities(promote(table(Operation.GRAPH_CAPTURE).values(), runs, device=device))
    found = next(found for found in promoted.values() if found.operation is operation and found)
    assert found.support.value == support
    assert found.reason.startswith("the test says so")
    assert found.scope is Scope.DRIVER
    assert ("2026-11-21 on a GPU (driver 1.2)" in found.reference) == (support == "supported")
    assert (f"2026-11-21 on a GPU ({platform})" in found.reason) == (support == "unverified")
    assert promoted[Operation.GRAPH_CAPTURE, None].support is Support.UNSUPPORTED  # a run cannot fill a gap
    other = promoted[Operation.MAP_BUFFER, gi.OpaqueFd]
    assert other.support is Support.UNVERIFIED
    assert "no run is recorded" in other.reason


def test_of_several_runs_the_latest_is_named(tmp_path: Path) -> None:
    file = tmp_path / "verified.toml"
    dates = {"2026-11-21": "a GPU", "2026-12-24": "a GPU", "2026-12-25": "another GPU", "2026-10-01": "a GPU"}
    one = TOML.format(platform=sys.platform)
    file.write_text("".join(one.replace("2026-11-21", day).replace("a GPU", of) for day, of in dates.items()))
    cell = (Operation.IMPORT_MEMORY, gi.OpaqueFd)
    here = Capabilities(promote(table().values(), read_verified(file), device="a GPU"))[cell]
    assert here.support is Support.SUPPORTED
    assert "2026-12-24 on a GPU" in here.reference
    elsewhere = Capabilities(promote(table().values(), read_verified(file), device="a third"))[cell]
    assert "2026-12-25 on another GPU" in elsewhere.reason


def test_no_file_holds_no_runs(tmp_path: Path) -> None:
    assert read_verified(tmp_path / "none.toml") == []


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("map_bufer", " map_buffer"),
        ("*semaphore:timline_fd", " signal_semaphore:timeline_fd"),
        ("xyz", "import_memory, map_buffer, map_mipmapped_array"),
    ],
)
def test_a_pattern_that_turns_nothing_off_is_an_error_that_names_what_is_near(pattern: str, near: str) -> None:
    """Beside one that matches, too."""
    with pytest.raises(gi.InvalidArgumentError, match="got " + re.escape(repr(pattern))) as caught:
        disable(table().values(), f"graph_capture, {pattern}", lambda _: ())
    assert caught.value.argument == "GPUINTEROP_DISABLE"
    assert near in str(caught.value)


def test_disable_leaves_gaps_their_own_reason() -> None:
    cells = disable(table(Operation.MAP_BUFFER).values(), "map_buffer,import_memory:*", lambda _: ())
    by = {found.cell: found for found in cells}
    assert by[Cell(Operation.MAP_BUFFER, gi.OpaqueFd)].support is Support.UNSUPPORTED
    assert by[Cell(Operation.IMPORT_MEMORY, gi.DmaBufFd)].support is Support.DISABLED


RULES = """
[texts]
who = "the vendor"

[symbols]
map_buffer = ["map"]
"map_*" = ["unmap"]

[[rule]]
cells = ["map_*"]
when = ["missing"]
gap = "driver"
reason = "lacks {missing}."
reference = "{who}"

[[rule]]
cells = ["*"]
but = ["*:opaque_fd"]
when = ["not open"]
gap = "platform"
reason = "closed since {date}."
reference = "{who}"
workaround = "OpaqueFd."

[[rule]]
cells = ["*"]
reason = "open."
reference = "{who}"
"""


def test_the_first_rule_that_fits_says_what_a_cell_comes_to(tmp_path: Path) -> None:
    file = tmp_path / "capabilities.toml"
    file.write_text(RULES)
    rules = Rules(file)
    assert rules.facts == {"open"}

    def of(operation: Operation, kind: type[Any], lacks: str = "", **facts: object) -> tuple[bool, Scope | None, str]:
        found = rules.of(Cell(operation, kind), {"date": "2026", **facts}, lambda symbol: symbol != lacks)
        assert found is not None
        return bool(found), found.scope, found.reason

    assert of(Operation.MAP_BUFFER, gi.DmaBufFd, open=True) == (True, Scope.PLATFORM, "open.")
    assert of(Operation.MAP_BUFFER, gi.DmaBufFd, open=False) == (False, Scope.PLATFORM, "closed since 2026.")
    assert of(Operation.MAP_BUFFER, gi.OpaqueFd, open=False) == (True, Scope.PLATFORM, "open.")
    assert of(Operation.MAP_BUFFER, gi.OpaqueFd, "map", open=True) == (False, Scope.DRIVER, "lacks map.")
    assert of(Operation.MAP_MIPMAPPED_ARRAY, gi.OpaqueFd, "unmap", open=True) == (False, Scope.DRIVER, "lacks unmap.")
    assert of(Operation.MAP_MIPMAPPED_ARRAY, gi.OpaqueFd, "map", open=True) == (True, Scope.PLATFORM, "open.")
    with pytest.raises(KeyError, match="open"):
        of(Operation.MAP_BUFFER, gi.DmaBufFd)
    with pytest.raises(gi.InvalidArgumentError, match=r"^facts: .* got none for open"):
        rules.table({})
    file.write_text(RULES.rpartition("[[rule]]")[0])
    assert [str(found.cell) for found in Rules(file).table({"open": True})] == []
    assert {str(found.cell) for found in Rules(file).table({"open": False, "date": ""})} == {
        str(cell) for cell in DOMAIN if cell.handle_type is not gi.OpaqueFd
    }


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('cells = ["map_*"]', 'cells = ["mop_*"]'),
        ('cells = ["map_*"]', 'cells = "map_*"'),
        ('cells = ["map_*"]', ""),
        ('but = ["*:opaque_fd"]', 'but = ["*:opaqe_fd"]'),
        ('map_buffer = ["map"]', 'map_bufer = ["map"]'),
        ('gap = "driver"', 'gap = "drver"'),
        ('gap = "driver"', 'scop = "driver"'),
    ],
)
def test_a_rule_that_says_nothing_is_refused(right: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "capabilities.toml"
    file.write_text(RULES.replace(right, wrong))
    with pytest.raises(gi.InvalidArgumentError, match=r"^file: .*capabilities\.toml: "):
        Rules(file)


def test_every_optional_interface_is_of_an_operation() -> None:
    """Else a backend without it would have no gap."""
    optional = {one for one in vars(backend).values() if isinstance(one, type) and issubclass(one, Backend)} - {Backend}
    assert optional == {interface for interfaces in INTERFACES.values() for interface in interfaces}
