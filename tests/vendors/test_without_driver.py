"""Where there is no driver, no device or no binding: one line says what is missing, and nothing else breaks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import programs

from .parties import SIMULATED
from .table import VENDOR

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a driver is there")

ROOT = Path(__file__).resolve().parents[2]
BINDINGS = os.environ.get("PYTHONPATH", "")
REASON = f"import gpuinterop as gi; print(gi.backends()[{VENDOR.name!r}].error)"


def python(
    program: str, tmp_path: Path, *, path: str | None = None, driver: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process with or without the simulated driver; `path` is where it finds packages, by default the bindings."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GPUINTEROP_") and name != "PYTHONPATH" and (driver or name != "LD_LIBRARY_PATH")
    }
    found = BINDINGS if path is None else path
    if found:
        clean["PYTHONPATH"] = found
    return programs.python("-W", "error", "-c", program, cwd=tmp_path, env=clean, **environment)


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Why the backend is not available, as `gpuinterop info` says it too."""
    assert done.returncode == 0, done.stderr
    assert done.stdout != "None\n"
    return done.stdout


def test_info_explains_in_one_line(tmp_path: Path) -> None:
    done = python(
        "import sys; sys.argv = ['gpuinterop', 'info']; from gpuinterop.cli import main; main()",
        tmp_path,
        COLUMNS="400",
    )
    (line,) = (line for line in done.stdout.splitlines() if all(word in line for word in VENDOR.needs))
    assert VENDOR.name in line


def test_asked_for_by_name_it_raises_with_the_fix(tmp_path: Path) -> None:
    done = python(f"import gpuinterop as gi; gi.get_backend({VENDOR.name!r})", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gpuinterop.errors.BackendUnavailableError: ")
    assert all(word in last for word in VENDOR.missing), last
    chosen = python("import gpuinterop as gi; gi.device()", tmp_path, GPUINTEROP_BACKEND=VENDOR.name)
    assert "GPUINTEROP_BACKEND" in chosen.stderr.strip().splitlines()[-1]
    for shown in (done.stderr, chosen.stderr):  # no cause that says the same in other words
        assert shown.count("Traceback") == 1, shown


@pytest.mark.parametrize("path", [BINDINGS, ""], ids=["bindings", "none beside the environment's"])
def test_without_a_choice_the_host_serves_and_nobody_is_warned(tmp_path: Path, path: str) -> None:
    """-W error: no GPU and no driver is a machine without one, and no failure."""
    done = python("import gpuinterop as gi; print(gi.get_backend().name)", tmp_path, path=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "host\n", "")


def test_without_the_bindings(tmp_path: Path) -> None:
    """Others have packages of these names, too (AMD's hip-python-interop has `cuda`): they are not taken for them."""
    for package in ("cuda", "hip", "rocm"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "hip" / "hip.py").write_text("")
    (tmp_path / "hip" / "_version.py").write_text("__version__ = '1'")
    reason = reason_of(python(REASON, tmp_path, path=str(tmp_path)))
    assert all(word in reason for word in VENDOR.no_bindings), reason


@pytest.mark.parametrize(("environment", "words"), VENDOR.broken)
def test_a_driver_that_does_not_work(tmp_path: Path, environment: Any, words: tuple[str, ...]) -> None:
    reason = reason_of(python(REASON, tmp_path, driver=True, **environment))
    assert all(word in reason for word in words), reason


def test_looking_at_what_there_is_makes_nothing_current(tmp_path: Path) -> None:
    """`info`, the devices and their tables come from attributes and symbols alone."""
    program = (
        "import gpuinterop as gi; from tests.simulated.driver import Simulator; "
        f"device = gi.get_backend({VENDOR.name!r}).devices()[0]; "
        "assert device.capabilities.supports((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd)); "
        "assert gi.match_device(device.identity) is device; "
        f"simulator = Simulator.attach({VENDOR.name!r}); "
        f"calls = lambda: sum(map(simulator.calls, {VENDOR.makes_current})); "
        "print(calls()); device.create_stream().close(); print(calls() > 0)"
    )
    done = python(program, tmp_path, path=os.pathsep.join(filter(None, [str(ROOT), BINDINGS])), driver=True)
    assert (done.returncode, done.stdout) == (0, "0\nTrue\n"), done.stderr
