"""A short run of the stress program; a long one is ``python -m tests.simulated.stress --backend cuda``."""

import pytest

from tests.simulated.stress import run

from .parties import REAL

pytestmark = pytest.mark.skipif(REAL, reason="its counts are the simulated driver's")


@pytest.mark.parametrize("switch", ["default", "1e-6"])
def test_eight_threads_at_random(switch: str) -> None:
    status, printed = run("--backend", "cuda", "--minutes", "0.05", "--switch", switch)
    assert status == 0, printed[-8000:]
