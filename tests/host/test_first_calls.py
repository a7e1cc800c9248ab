"""The same on the host."""

from __future__ import annotations

import pytest

import gpuinterop as gi
from tests.vendors.test_first_calls import *  # noqa: F403


@pytest.fixture
def device() -> gi.Device:
    return gi.get_backend("host").device()
