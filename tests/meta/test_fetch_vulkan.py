"""What is kept of a fetch: a stamp that cannot be read is no stamp, and what was begun is taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import fetch_vulkan

SYSTEM: dict[str, Any] = {"machine": "m", "release": "r", "loader": "", "icds": [], "layers": []}
WANTED = [fetch_vulkan.LOADER]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is fetched, into a folder of the test's."""
    found: list[str] = []

    def fetch(components: list[fetch_vulkan.Component], tree: Path) -> tuple[dict[str, str], dict[str, str], str]:
        found.extend(component.name for component in components)
        (tree / "libvulkan.so.1").write_text("a library")
        return {component.name: "1.0" for component in components}, {}, ""

    for name, path in {"HOME": "", "TREE": "tree", "ENV": "env", "STAMP": "stamp.json"}.items():
        monkeypatch.setattr(fetch_vulkan, name, tmp_path / path)
    monkeypatch.setattr(fetch_vulkan, "fetch", fetch)
    monkeypatch.setattr(fetch_vulkan, "look_at_system", lambda: dict(SYSTEM))
    monkeypatch.setattr(fetch_vulkan, "ask_vulkan", lambda env=None: {"devices": [], "layers": []})
    monkeypatch.setattr(fetch_vulkan, "forget_env_file", list)
    monkeypatch.setattr("sys.platform", "linux")
    return found


def drop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda stamp: {key: value for key, value in stamp.items() if key != name}


@pytest.mark.parametrize(
    "broken",
    [
        lambda stamp: json.dumps(stamp)[:40],
        lambda stamp: "",
        lambda stamp: b"\xff\xfe",
        lambda stamp: [],
        lambda stamp: 5,
        lambda stamp: None,
        lambda stamp: {},
        *map(drop, ("format", "system", "own", "components", "missing", "files")),
        lambda stamp: stamp | {"format": "1"},
        lambda stamp: stamp | {"files": 5},
        lambda stamp: stamp | {"files": [5]},
        lambda stamp: stamp | {"components": ["loader"]},
        lambda stamp: stamp | {"components": {"loader": None}},
        lambda stamp: stamp | {"missing": {"loader": []}},
        lambda stamp: stamp | {"missing": None},
        lambda stamp: stamp | {"own": "yes"},
    ],
)
def test_a_broken_stamp_is_fetched_again(
    fetched: list[str], capsys: pytest.CaptureFixture[str], broken: Callable[[dict[str, Any]], Any]
) -> None:
    assert fetch_vulkan.provide(WANTED, software=True) == {}
    whole = json.loads(fetch_vulkan.STAMP.read_text(encoding="utf-8"))
    assert fetch_vulkan.provide(WANTED, software=True) == {}
    assert fetched == ["loader"], "the second time it is there"
    assert "again" not in capsys.readouterr().err
    found = broken(whole)
    if isinstance(found, bytes):
        fetch_vulkan.STAMP.write_bytes(found)
    else:
        fetch_vulkan.STAMP.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    fetch_vulkan.ENV.write_bytes(b"\xff")  # it is written again as well
    assert fetch_vulkan.provide(WANTED, software=True) == {}
    assert fetched == ["loader", "loader"]
    assert "stamp.json is broken, or of another version: fetching again" in capsys.readouterr().err
    assert json.loads(fetch_vulkan.STAMP.read_text(encoding="utf-8")) == whole
    assert b"\xff" not in fetch_vulkan.ENV.read_bytes()
