"""The scenes that the pairs do not have, in all orders (`scenes`); deeper in `make explore`."""

from __future__ import annotations

import os

import pytest

from .explored import Core
from .scenes import SCENES

DEEP = bool(os.environ.get("GPUINTEROP_EXPLORE"))


@pytest.mark.timeout(3000 if DEEP else 300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCENES)
def test_no_order_does_harm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SCENES[name].play(Core(monkeypatch), more=DEEP, reduce=DEEP)
    print(f"\n{name}: {found}")
