"""A driver that is newer than the bindings: numbers that they have no name for, out of every call."""

from __future__ import annotations

import os

from gpuinterop.testing.simulated import build
from tests.simulated import unknown_status
from tests.simulated.driver import Simulator

from .table import VENDOR


def test_whatever_call_it_comes_out_of_it_is_told_and_nothing_is_lost(simulator: Simulator) -> None:
    # With arrays, which AMD's library for Linux has not.
    folder = build(VENDOR.name, extra=("-DGIP_MIPMAP=1",) if VENDOR.name == "hip" else ()).parent
    environment = simulator.environment(GPUINTEROP_SIM_DEVICES="2")
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), environment["LD_LIBRARY_PATH"]])
    assert unknown_status.run(VENDOR.name, environment) == []
