"""What each public call marks, notes and looks at is what the table says (`call_table`)."""

from __future__ import annotations

import pytest

from .call_table import ROWS, check, without_a_row


@pytest.mark.parametrize("name", ROWS)
def test_a_call_marks_notes_and_looks_as_its_row_says(name: str) -> None:
    check(name)


def test_every_public_method_has_a_row_or_calls_no_driver() -> None:
    assert without_a_row() == []
