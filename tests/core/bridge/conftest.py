"""What the tests of the bridge begin with."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import pytest

from gpuinterop._core.device import Device

from ..fake import fake_device
from .scripted import WordsBackend

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # descriptors and pidfds are Linux's


@pytest.fixture
def words(scope: ExitStack) -> tuple[Device, WordsBackend]:
    backend = WordsBackend()
    device, _ = fake_device(backend=backend)
    return device, backend
