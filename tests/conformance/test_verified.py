"""What is called SUPPORTED is what runs have exercised: no claim without its proof, no proof without its claim."""

from __future__ import annotations

import os
import sys
from importlib.resources import files

import pytest

from gpuinterop.capabilities import Cell, Support, VerifiedRun, read_verified
from gpuinterop.testing.kit import Kit
from gpuinterop.testing.participants import DeviceSpec
from gpuinterop.testing.plugin import kit_of
from gpuinterop.testing.results import exercised, of_suites

pytestmark = pytest.mark.whole_run


def recorded_runs(backend: str) -> list[VerifiedRun]:
    return read_verified(files(f"gpuinterop_{backend}") / "verified.toml")


def is_recorded(kit: Kit, spec: DeviceSpec) -> bool:
    """Whether a run counts for the device: on its platform and, for a GPU, its name; for a stand-in none does."""
    device = kit.device(spec)
    names = [run.device for run in recorded_runs(spec.backend) if run.platform == sys.platform]
    return not kit.why_unrecorded(spec.backend) and (bool(names) if device.info.is_cpu else device.name in names)


def test_supported_is_what_this_run_has_exercised(request: pytest.FixtureRequest) -> None:
    """Runs after the suites, in the same session, and compares with what they have done."""
    kit = kit_of(request.config)
    devices: list[DeviceSpec] = [
        spec for spec in kit.devices() if not spec.problem and exercised(kit.results.of(str(spec)))
    ]
    if kit.partial or not devices:
        pytest.skip("only the whole of the suites, in one process, shows what is exercised")
    for spec in devices:
        table = kit.device(spec).capabilities
        supported = of_suites(Cell(*key) for key, found in table.items() if found.support is Support.SUPPORTED)
        shown = exercised(kit.results.of(str(spec))) if is_recorded(kit, spec) else ()
        assert sorted(map(str, supported)) == sorted(map(str, shown)), (
            f"{spec}: `gpuinterop selftest --backend {spec.backend} --report FILE`, then `python -m tools.record FILE`"
        )


def test_what_vulkan_drivers_are_said_to_support_is_exercised_too(request: pytest.FixtureRequest) -> None:
    """The same for the other side's table, as far as its drivers are here and took part."""
    kit = kit_of(request.config)
    runs = {run["device"]: run["cells"] for run in kit.driver_runs()}
    if kit.partial or not runs or os.environ.get("GPUINTEROP_DISABLE"):
        pytest.skip("only the whole of tests/conformance, with Vulkan drivers and nothing off, shows what is exercised")
    for driver in kit.drivers():
        if driver.driver in runs:
            table = driver.capabilities
            supported = {Cell(*key) for key, found in table.items() if found.support is Support.SUPPORTED}
            assert sorted(map(str, supported)) == runs[driver.driver], (
                f"{driver.driver}: `gpuinterop selftest --report FILE`, then `python -m tools.record FILE`"
            )
