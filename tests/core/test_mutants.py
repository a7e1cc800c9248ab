"""A few mistakes are put into the core, and each is found; all of them in `make explore` (`mutants`)."""

from __future__ import annotations

import os

import pytest

from .explored import forget
from .fake import VIOLATIONS
from .mutants import FEW, MUTANTS, find

pytestmark = pytest.mark.usefixtures("garbage_is_collected")

DEEP = bool(os.environ.get("GPUINTEROP_EXPLORE"))


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUTANTS if DEEP else FEW)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how = find(MUTANTS[name], monkeypatch)
    monkeypatch.undo()
    VIOLATIONS.clear()
    forget()
    print(f"\n{name}: {MUTANTS[name].found_by}: {how}")
    assert how
