"""The conformance kit, unchanged, on the vendor's backend and whichever driver the run has."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpuinterop.testing.suites import SharedLegacySuite
from gpuinterop.testing.test_conformance import *  # noqa: F403

from .foreign_memory import memory
from .parties import REAL


class TestSharedLegacy(SharedLegacySuite):  # type: ignore[no-redef]
    """See the suite; no library has memory of a simulated driver."""

    if not REAL:

        @pytest.fixture
        def array(self) -> Iterator[Any]:
            with memory("legacy", 1 << 16) as made:
                yield made.part(512, 5000)
