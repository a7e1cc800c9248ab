"""What the driver was asked, by name, and that it was not; and what the tests share beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device

from ..fake import FakeMulticast

LIMIT = 20.0
STEP, GOOD = FakeMulticast.GROUPS
SIZE = 8 * STEP
REFUSED = gi.DriverError("cuSomething", 1, "CUDA_ERROR_INVALID_VALUE")
Devices = list[Device]


def names(backend: FakeMulticast) -> list[str]:
    return [call[0] for call in backend.calls]


def releases(backend: FakeMulticast) -> list[str]:
    """The native releases of a multicast object and what hangs on it, in the order they came in."""
    kinds = {"unmap_allocation": "unmap", "unbind": "unbind", "release_allocation": "release"}
    return [kinds[call[0]] for call in backend.calls if call[0] in kinds]


def fail() -> None:
    raise REFUSED


def refused(
    backend: FakeMulticast,
    call: Callable[[], object],
    argument: str,
    match: str | None = None,
    error: type[Exception] = gi.InvalidArgumentError,
) -> None:
    """The call is refused for `argument`, before anything is changed."""
    before = list(backend.calls)
    with pytest.raises(error, match=match) as caught:
        call()
    assert isinstance(caught.value, gi.InvalidArgumentError)
    assert caught.value.argument == argument
    assert backend.calls == before


def allocations(devices: Iterable[Device], size: int = SIZE) -> list[gi.Allocation]:
    return [device.allocate(size) for device in devices]


def close_all(*resources: Any) -> None:
    for one in resources:
        one.close(timeout=LIMIT)
