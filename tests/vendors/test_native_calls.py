"""What pages say of the vendor: README.md of what works, docs/reference/calls.md of the functions that methods call."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN
from tests.readme_table import column
from tools import native_calls

from .table import VENDOR

CALL_NOTHING = {"on_released", "hold"}
"""Methods that note something for later; `drain` makes the calls of `close`."""


@pytest.mark.usefixtures("simulator")
def test_the_readme_says_what_can_be_used(device: gi.Device) -> None:
    said, usable = column(VENDOR.name), {str(cell) for cell in DOMAIN if device.capabilities.of(cell)}
    assert {name for name, word in said.items() if word != "-"} == usable & said.keys()


@pytest.mark.usefixtures("simulator")
def test_the_page_says_which_functions_each_method_calls() -> None:
    assert native_calls.read(VENDOR.name) == native_calls.run(VENDOR.name), (
        f"run `python -m tools.native_calls {VENDOR.name}`"
    )


def test_the_page_has_each_method() -> None:
    rows = " ".join(row for section in native_calls.read(VENDOR.name).values() for row in section)
    classes = {name: getattr(gi, name) for name in re.findall(r"`(?:with )?(\w+)[.(]", rows) if hasattr(gi, name)}
    methods = {
        f"{name}.{method}"
        for name, one in classes.items()
        if inspect.isclass(one)
        for method, found in inspect.getmembers(one, callable)
        if not method.startswith("_") and method not in CALL_NOTHING | {"drain"}
    }
    assert len(methods) > 50
    assert sorted(method for method in methods if not re.search(rf"{re.escape(method)}\b", rows)) == []


def test_a_column_is_written_beside_the_other(tmp_path: Path) -> None:
    page = tmp_path / "calls.md"
    page.write_text(native_calls.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    before = {vendor: native_calls.read(vendor, page) for vendor in native_calls.VENDORS}
    native_calls.write("hip", {"A": {"`a`": "`hipA`", "`b`": "-"}}, page)
    assert native_calls.read("hip", page) == {"A": {"`a`": "`hipA`", "`b`": "-"}}
    native_calls.write("cuda", before["cuda"], page)
    assert native_calls.read("cuda", page) == before["cuda"]
    native_calls.write("hip", before["hip"], page)
    assert page.read_text(encoding="utf-8") == native_calls.PAGE.read_text(encoding="utf-8")
