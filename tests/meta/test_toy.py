"""The example of a backend passes the kit; with a rule broken it fails, on the test that is there to catch it."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.capabilities import read_verified
from gpuinterop.testing.exporters.vulkan import list_drivers
from tests.missing_vulkan import give_up
from tools import record

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the toy is made of memfds")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "backend"
HERE = ("--gpuinterop-require=toy", "--gpuinterop-exporter=memfd@here")


def test_the_example_passes(run_pytest: Callable[..., Any], tmp_path: Path) -> None:
    """In one process and across processes, with no skip but the gaps that it declares; and it is recorded."""
    report, file = tmp_path / "run.xml", tmp_path / "verified.toml"
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["gpuinterop.backends"].items()
    options = (f"--gpuinterop-require={name}", "--gpuinterop-exporter=memfd", f"--junitxml={report}")
    done = run_pytest(*options, toy=target, entry=name, limit="20")
    assert done.status == 0, done.output[-4000:]
    assert "0 unexpected skips" in done.output
    assert done.counts["passed"] > 150
    record.merge(file, record.runs_of(report)[name])
    (run,) = read_verified(file)
    assert run.device == "Mine"
    assert run.versions["mine"] == "0.1"
    assert {str(cell) for cell in run.cells} == {
        "import_memory:opaque_fd",
        "map_buffer:opaque_fd",
        "import_semaphore:timeline_fd",
        "signal_semaphore:timeline_fd",
        "wait_semaphore:timeline_fd",
    }


BROKEN = [
    ("NoWait", "TestSemaphore::test_stream_waits_for_exporter"),
    ("NoWait", "TestOrdering::test_exporter_then_device"),
    ("NoSignal", "TestSemaphore::test_exporter_waits_for_stream"),
    ("NoSignal", "TestSemaphore::test_timeline_signal_reaches_its_value"),
    ("EarlySignal", "TestOrdering::test_device_then_exporter"),
    ("EarlyEvents", "TestStreamWork::test_event_is_not_done_early"),
    ("NoStreamOrder", "TestStreamWork::test_wait_stream"),
    ("OneStream", "TestStream::test_pointers_differ"),
    ("FirstOfBatch", "TestSemaphore::test_batch"),
    ("ExactWait", "TestSemaphore::test_timeline_waits_for_at_least"),
    ("PrivateMapping", "TestMemory::test_device_writes_exporter_reads"),
    ("NeverUnmap", "TestMemory::test_nothing_is_left_over"),
    ("UnmapForGood", "TestMemory::test_map_again"),
    ("LeakedFd", "TestMemory::test_nothing_is_left_over"),
    ("LeakedFdOfFailure", "TestBadInput::test_memory"),
    ("TakesAnything", "TestBadInput::test_memory"),
    ("WrongByte", "TestMemory::test_fill"),
    ("LongFill", "TestMemory::test_fill"),
    ("ShortCopy", "TestMemory::test_exporter_writes_device_reads"),
    ("EagerCopy", "TestOrdering::test_device_reads_after_exporter"),
    ("EmptyPromise", "TestSemaphore::test_stream_waits_for_exporter"),
    ("ThinReason", "TestCapability::test_reasons"),
    ("ClaimsSupported", "gpuinterop::environment"),
    ("OddIdentity", "TestBackend::test_device_is_described"),
    ("WrongAddressKind", "TestBackend::test_device_is_described"),
    ("Careless", "TestCapability::test_gap_is_refused"),
]
_CAUGHT_BY: dict[str, list[str]] = {}
for _variant, _test in BROKEN:
    _CAUGHT_BY.setdefault(_variant, []).append(_test)


@pytest.mark.parametrize("variant", _CAUGHT_BY)
def test_a_broken_one_is_caught(run_pytest: Callable[..., Any], variant: str) -> None:
    """Each variant fails on those tests and passes another that its fault does not touch."""
    expected = set(_CAUGHT_BY[variant])
    names = {test.split("::")[1] for test in expected}
    classes = {test.split("::")[0] for test in expected}
    untouched = "TestBackend and test_same_device"
    chosen = f"(({' or '.join(classes)}) and ({' or '.join(names)})) or ({untouched})"
    done = run_pytest(*HERE, "-k", chosen, toy=f"toybackend.broken:{variant}")
    assert done.status == 1, done.output[-4000:]
    assert done.failed == expected, done.output[-4000:]


# -- images: the other side has to be a Vulkan driver, and SwiftShader's way of laying them out is known ---------------

BROKEN_ARRAYS = {
    "NoPitch": {"test_formats", "test_shapes", "test_one_level_leaves_the_others"},
    "FirstLayer": {"test_shapes", "test_buffers"},
    "ShortLevel": {"test_formats", "test_shapes", "test_buffers"},
    "LevelsFromZero": {"test_formats", "test_shapes", "test_one_level_leaves_the_others"},
    "OneWay": {"test_formats", "test_buffers", "test_writes_wait_for_their_turn"},
    "EagerLevel": {"test_copies_wait_for_their_turn", "test_writes_wait_for_their_turn"},
}


@pytest.mark.parametrize("variant", BROKEN_ARRAYS)
def test_a_broken_array_is_caught(run_pytest: Callable[..., Any], variant: str) -> None:
    """Each variant fails on those tests; what only asks for extents passes."""
    if not any("SwiftShader" in found.driver for found in list_drivers()):
        give_up("there is no SwiftShader to make images")
    names = BROKEN_ARRAYS[variant]
    done = run_pytest(
        "--gpuinterop-require=toy",
        "--gpuinterop-simulated=toy",
        "--gpuinterop-exporter=vulkan:swiftshader@here",
        "-k",
        f"TestArray and ({' or '.join(names)} or test_levels)",
        toy=f"toybackend.broken:{variant}",
    )
    assert done.status == 1, done.output[-4000:]
    assert done.failed == {f"TestArray::{name}" for name in names}, done.output[-4000:]
