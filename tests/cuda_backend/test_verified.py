"""What is called SUPPORTED on NVIDIA GPUs is what this run has exercised, on the GPU as on the simulated driver."""

from __future__ import annotations

import pytest

from gpuinterop.capabilities import Capabilities, Cell, Support
from gpuinterop.testing.kit import DeviceSpec
from gpuinterop.testing.plugin import kit_of
from gpuinterop.testing.report import of_suites


def test_supported_is_what_this_run_has_exercised(request: pytest.FixtureRequest) -> None:
    """After the conformance suite, in the same session. No claim without its proof, and no proof without its claim."""
    kit = kit_of(request.config)
    devices: list[DeviceSpec] = [spec for spec in kit.devices() if not spec.problem and kit.exercised(spec)]
    if kit.partial or not devices:
        pytest.skip("only a run of the whole conformance suite shows what is exercised")
    for spec in devices:
        table = kit.device(spec).capabilities
        found = {of: {str(cell) for cell in of_suites(_cells(table, of))} for of in Support}
        assert found[Support.SUPPORTED] == set(map(str, kit.exercised(spec)))
        assert not found[Support.UNVERIFIED]


def _cells(table: Capabilities, support: Support) -> list[Cell]:
    return [Cell(*key) for key, found in table.items() if found.support is support]


def test_multicast_is_never_claimed_for_what_the_suites_have_shown(request: pytest.FixtureRequest) -> None:
    """They run it on the simulated driver: that proves nothing, and only `gpuinterop selftest multicast` records it."""
    kit = kit_of(request.config)
    for spec in kit.devices():
        assert not [cell for cell in kit.exercised(spec) if "multicast" in cell.operation.value]
