"""What pages say of the vendor: README.md of what works, docs/reference/calls.md of the functions that methods call."""

from __future__ import annotations

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN
from tests.readme_table import column
from tools import native_calls

from .table import VENDOR

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
