"""What is called SUPPORTED is what runs have exercised: no claim without its proof, no proof without its claim."""

from __future__ import annotations

import pytest

from gpuinterop.capabilities import Cell, Support
from gpuinterop.testing.kit import DeviceSpec
from gpuinterop.testing.plugin import kit_of


def test_supported_is_what_this_run_has_exercised(request: pytest.FixtureRequest) -> None:
    """Runs after the suites, in the same session, and compares with what they have done."""
    kit = kit_of(request.config)
    devices: list[DeviceSpec] = [spec for spec in kit.devices() if not spec.problem and kit.exercised(spec)]
    if kit.partial or not devices:
        pytest.skip("only the whole of tests/conformance shows what is exercised")
    for spec in devices:
        table = kit.device(spec).capabilities
        supported = {Cell(*key) for key, found in table.items() if found.support is Support.SUPPORTED}
        exercised = kit.exercised(spec)
        assert sorted(map(str, supported)) == sorted(map(str, exercised)), (
            f"{spec}: run `pytest tests/conformance --gpuinterop-backend={spec.backend} --gpuinterop-report=FILE` with "
            "the verified.toml of its package"
        )
