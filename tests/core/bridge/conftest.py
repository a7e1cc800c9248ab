"""What the tests of the bridge begin with."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge

from ..fake import FakeBackend, fake_device
from .scripted import WordsBackend

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # descriptors and pidfds are Linux's


@pytest.fixture
def fake() -> tuple[Device, FakeBackend]:
    return fake_device(backend=WordsBackend())


@pytest.fixture
def bridge(host: Device) -> Iterator[Bridge]:
    with Bridge(host) as made:
        yield made


@pytest.fixture
def stream(host: Device) -> Iterator[gi.Stream]:
    with host.create_stream() as made:
        yield made
