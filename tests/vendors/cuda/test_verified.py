"""What is called SUPPORTED on NVIDIA GPUs is what this run has exercised; on the simulated driver nothing is."""

from __future__ import annotations

import sys

import pytest

import gpuinterop as gi
from gpuinterop import capabilities
from gpuinterop.capabilities import DOMAIN, Cell, Support, VerifiedRun
from gpuinterop.testing.participants import DeviceSpec
from gpuinterop.testing.plugin import kit_of
from gpuinterop.testing.results import exercised, of_suites
from tests.cli.parties import require_driver
from tests.conformance.test_verified import is_recorded, recorded_runs
from tests.simulated.driver import Simulator


@pytest.mark.whole_run
def test_what_can_be_used_is_what_this_run_has_exercised(request: pytest.FixtureRequest) -> None:
    """After the conformance suite, in the same session; and SUPPORTED, where a run counts for the device.

    What GPUs have shown the simulated driver shows as well.
    """
    kit = kit_of(request.config)
    devices: list[DeviceSpec] = [
        spec for spec in kit.devices() if not spec.problem and exercised(kit.results.of(str(spec)))
    ]
    if kit.partial or not devices:
        pytest.skip("only a run of the whole conformance suite, in one process, shows what is exercised")
    if any(kit.is_simulated(spec.backend) for spec in devices):
        require_driver("swiftshader")  # it alone makes images for the simulated driver
    for spec in devices:
        table, shown = kit.device(spec).capabilities, exercised(kit.results.of(str(spec)))
        assert of_suites(Cell(*key) for key, found in table.items() if found) == shown
        supported = of_suites(Cell(*key) for key, found in table.items() if found.support is Support.SUPPORTED)
        assert supported == (shown if is_recorded(kit, spec) else set())
        if kit.is_simulated(spec.backend):
            assert shown == of_suites(cell for run in recorded_runs("cuda") for cell in run.cells)


def test_no_run_counts_for_the_simulated_driver(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices have names that no GPU has, and a run counts for devices of its name."""
    device = gi.get_backend("cuda").device()
    here, there = (
        VerifiedRun(date="2026-11-21", platform=sys.platform, device=name, versions={}, cells=frozenset(DOMAIN))
        for name in (device.name, "a GPU")
    )

    def table(run: VerifiedRun) -> dict[Support, list[str]]:
        monkeypatch.setattr(capabilities, "recorded", lambda _file: [run])
        found: dict[Support, list[str]] = {}
        for capability in gi.get_backend("cuda")._table(device.info).values():
            found.setdefault(capability.support, []).append(capability.reason)
        return found

    assert device.name.startswith("Simulated ")
    found = table(there)
    assert Support.SUPPORTED not in found
    for reason in found[Support.UNVERIFIED]:
        assert reason.endswith(f"; recorded elsewhere: 2026-11-21 on a GPU ({sys.platform}).")
    assert Support.UNVERIFIED not in table(here)


def test_multicast_is_never_claimed_for_what_the_suites_have_shown(request: pytest.FixtureRequest) -> None:
    """They run it on the simulated driver: that proves nothing, and only `gpuinterop selftest multicast` records it."""
    kit = kit_of(request.config)
    for spec in kit.devices():
        assert not [cell for cell in exercised(kit.results.of(str(spec))) if "multicast" in cell.operation.value]
