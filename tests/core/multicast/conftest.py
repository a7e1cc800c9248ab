"""What the tests of multicast begin with."""

from __future__ import annotations

import pytest

from ..fake import fake_team
from .calls import Team


@pytest.fixture
def team() -> Team:
    return fake_team()
