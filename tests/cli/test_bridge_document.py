"""docs/concepts/bridge.md: the endpoint that it shows carries a wait and a signal. tests/manual runs the rest."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi

TEXT = (Path(__file__).parents[2] / "docs" / "concepts" / "bridge.md").read_text(encoding="utf-8")


def sample(word: str) -> str:
    (found,) = (
        text for text in re.findall(r"^```python[^\n]*\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL) if word in text
    )
    return str(found)


def test_the_endpoint() -> None:
    names: dict[str, Any] = {"gi": gi, "threading": threading}
    exec(sample("class FlagEndpoint"), names)
    endpoint = names["FlagEndpoint"]()
    device = gi.get_backend("host").device()
    with (
        gi.bridge.Bridge(device) as bridge,
        bridge.from_endpoint(endpoint) as semaphore,
        device.create_stream() as stream,
        device.create_semaphore(gi.TimelineFd) as passed,
    ):
        semaphore.wait(stream)
        passed.signal(stream, 1)
        semaphore.signal(stream)
        with pytest.raises(gi.SemaphoreTimeoutError):
            passed.host_wait(1, timeout=0.05)
        assert not endpoint.answered.is_set()
        endpoint.raised.set()
        stream.synchronize(20.0)
        passed.host_wait(1, timeout=0)
        assert endpoint.answered.wait(20.0)
        assert not endpoint.raised.is_set()
