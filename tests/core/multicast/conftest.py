"""What the tests of multicast begin with."""

from __future__ import annotations

import pytest

from ..fake import FakeMulticast, fake_team
from .calls import Devices


@pytest.fixture
def fake() -> tuple[Devices, FakeMulticast]:
    return fake_team()


@pytest.fixture
def devices(fake: tuple[Devices, FakeMulticast]) -> Devices:
    return fake[0]
