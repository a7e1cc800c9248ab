"""What holds for all tests of the core: a scripted backend that was given something dead fails its test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core import discovery, entry_points
from gpuinterop._core.device import Device

from .fake import BACKENDS, VIOLATIONS, FakeBackend, fake_device


@pytest.fixture(autouse=True)
def _nothing_dead_reached_a_driver() -> Iterator[None]:
    VIOLATIONS.clear()
    yield
    for backend in list(BACKENDS):
        backend.pass_all()  # else what they use would stay
    found = VIOLATIONS.copy()
    VIOLATIONS.clear()
    assert found == []


@pytest.fixture
def host() -> Device:
    return gi.get_backend("host").device()


@pytest.fixture
def fake() -> tuple[Device, FakeBackend]:
    return fake_device()


@pytest.fixture
def device(fake: tuple[Device, FakeBackend]) -> Device:
    return fake[0]


@pytest.fixture
def backend(fake: tuple[object, FakeBackend]) -> FakeBackend:
    """What is below `device`; of a module with a `fake` of its own, that one's."""
    return fake[1]


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install exactly these backends; forget what was loaded."""
    monkeypatch.setattr(discovery, "_loaded", {})
    monkeypatch.setattr(discovery, "_warned", {})
    monkeypatch.delenv("GPUINTEROP_BACKEND", raising=False)
    monkeypatch.delenv("GPUINTEROP_DISABLE", raising=False)

    def put(*classes: type[Any], extra: Iterable[EntryPoint] = ()) -> None:
        points = [
            EntryPoint(getattr(cls, "entry", cls.name), f"{cls.__module__}:{cls.__qualname__}", entry_points.GROUP)
            for cls in classes
        ]
        monkeypatch.setattr(entry_points, "entry_points", lambda group: [*points, *extra])
        monkeypatch.setattr(discovery, "_chosen", ([], {}))

    return put
