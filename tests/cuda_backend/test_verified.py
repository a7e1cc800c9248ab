"""What is called SUPPORTED on NVIDIA GPUs is what this run has exercised, on the GPU as on the simulated driver."""

from __future__ import annotations

import pytest

from gpuinterop.capabilities import Cell, Support
from gpuinterop.testing.kit import DeviceSpec
from gpuinterop.testing.plugin import kit_of


def test_supported_is_what_this_run_has_exercised(request: pytest.FixtureRequest) -> None:
    """After the conformance suite, in the same session. No claim without its proof, and no proof without its claim."""
    kit = kit_of(request.config)
    devices: list[DeviceSpec] = [spec for spec in kit.devices() if not spec.problem and kit.exercised(spec)]
    if kit.partial or not devices:
        pytest.skip("only a run of the whole conformance suite shows what is exercised")
    for spec in devices:
        table = kit.device(spec).capabilities
        supported = {str(Cell(*key)) for key, found in table.items() if found.support is Support.SUPPORTED}
        assert supported == set(map(str, kit.exercised(spec)))
        assert not [str(Cell(*key)) for key, found in table.items() if found.support is Support.UNVERIFIED]
