"""No order of a scene's calls does harm (`scenes`). `make explore` goes deeper."""

from __future__ import annotations

import functools
import os

import pytest

from gpuinterop._core.streams import Gate

from .explorer import Core, Failed, forget, replay
from .fake import VIOLATIONS
from .scenes import SCENES

MORE = int(os.environ.get("GPUINTEROP_EXPLORE", "0"))
"""Pre-emptions above those of a scene."""

pytestmark = [pytest.mark.timeout(3000), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", SCENES)
def test_no_order_does_harm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"\n{name}: {SCENES[name].play(Core(monkeypatch), MORE)} schedules")


def test_a_wait_that_passes_the_gate_is_found_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, core = SCENES["a wait beside a release that blocks"], Core(monkeypatch)
    monkeypatch.setattr(Gate, "let_releases_end", lambda self: None)
    with pytest.raises(Failed, match="blocks while streams wait") as found:
        scene.play(core)
    with pytest.raises(Failed, match="blocks while streams wait"):
        replay(functools.partial(scene.build, core), found.value.script, scene.budget)
    monkeypatch.undo()
    forget()
    VIOLATIONS.clear()
