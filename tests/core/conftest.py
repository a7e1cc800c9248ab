"""What holds for all tests of the core: a scripted backend that was given something dead fails its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device

from .fake import BACKENDS, VIOLATIONS, FakeBackend, fake_device

# Tests of this folder import helpers of the suites, and may be collected before the suites are.
pytest.register_assert_rewrite("gpuinterop.testing.suites")


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
