"""Mistakes are put into the core one at a time, and each is found (`mutants`)."""

from __future__ import annotations

import gc

import pytest

from .explored import forget
from .fake import VIOLATIONS
from .mutants import MUTANTS, find


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = find(MUTANTS[name], monkeypatch)
    monkeypatch.undo()
    VIOLATIONS.clear()
    gc.collect()  # what the mutant has left would be released in another test
    forget()
    print(f"\n{name}: {MUTANTS[name].found_by}: {how}")
    assert how
