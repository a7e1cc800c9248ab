"""What holds for all tests of the core: a scripted backend that was given something dead fails its test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Generator, Iterator

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device

from .explored import forget
from .fake import VIOLATIONS, FakeBackend, fake_device

# Tests of this folder import helpers of the suites, and may be collected before the suites are.
pytest.register_assert_rewrite("gpuinterop.testing.suites")
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_dead_reached_a_driver(request: pytest.FixtureRequest) -> Iterator[None]:
    VIOLATIONS.clear()
    yield
    found = VIOLATIONS.copy()
    VIOLATIONS.clear()
    if found or request.node.stash.get(_FAILED, False):
        forget()  # a drain is the process's: the next test's would come upon what this one has left
    assert found == []


@pytest.fixture(scope="module")
def garbage_is_collected() -> Iterator[None]:
    """What an attack has left in cycles would warn in the middle of another module's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def host() -> Device:
    return gi.get_backend("host").device()


@pytest.fixture
def fake() -> tuple[Device, FakeBackend]:
    return fake_device()
