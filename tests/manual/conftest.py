from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.validation import _validation, validation

__all__ = ["_validation", "own_names", "validation"]


@pytest.fixture(scope="session", autouse=True)
def own_names() -> Iterator[None]:
    """Examples that publish one name run side by side: each worker has its own names."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made, pytest.MonkeyPatch.context() as environment:
        environment.setenv("GPUINTEROP_SHARE_DIR", made)
        yield
