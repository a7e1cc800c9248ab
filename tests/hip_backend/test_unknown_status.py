"""A runtime that is newer than the bindings: numbers that they have no name for, out of every call."""

from __future__ import annotations

import os

import pytest

from tests.simulated import unknown_status
from tests.simulated.build import build

from .parties import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")


def test_whatever_call_it_comes_out_of_it_is_told_and_nothing_is_lost() -> None:
    folder = build("hip", extra=("-DGIP_MIPMAP=1",)).parent  # with arrays, which AMD's library for Linux has not
    found = unknown_status.run(
        "hip",
        {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ["LD_LIBRARY_PATH"]]),
            "GPUINTEROP_SIM_DEVICES": "2",
        },
    )
    assert found["problems"] == []
    assert found["missed"] == [
        "hipDeviceGetUuid",  # a comment says why it is not called
        "hipGetDeviceProperties",  # it is called on Windows
        "hipGetErrorString", "hipGetLastError",  # they do not fail
        "hipStreamDestroy",  # streams are kept: see test_kept_streams.py
    ]  # fmt: skip
