"""Where there is no driver, no device or no binding: one line says what is missing, and nothing else breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuinterop as gi

from .parties import REAL

pytestmark = pytest.mark.skipif(REAL, reason="a driver is there")


def python(program: str, tmp_path: Path, *, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process without the simulated driver."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GPUINTEROP_") and name not in ("LD_LIBRARY_PATH", "PYTHONPATH")
    }
    paths = [entry for entry in (path, os.environ.get("PYTHONPATH", "")) if entry]
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**clean, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def cuda_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    found: list[dict[str, object]] = [one for one in json.loads(done.stdout)["backends"] if one["name"] == "cuda"]
    return found[0]


INFO = "import sys; sys.argv = ['gpuinterop', 'info', '--json']; from gpuinterop.cli import main; main()"


def test_info_explains_in_one_line(tmp_path: Path) -> None:
    cuda = cuda_of(python(INFO, tmp_path))
    assert cuda["available"] is False
    reason = str(cuda["reason"])
    assert "\n" not in reason
    assert "libcuda.so.1" in reason
    assert "Install the NVIDIA driver" in reason


def test_asked_for_by_name_it_raises_with_the_fix(tmp_path: Path) -> None:
    done = python("import gpuinterop as gi; gi.get_backend('cuda')", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gpuinterop.errors.BackendUnavailableError: ")
    assert "no NVIDIA driver" in last
    assert "--gpus all" in last
    chosen = python("import gpuinterop as gi; gi.device()", tmp_path, GPUINTEROP_BACKEND="cuda")
    assert "GPUINTEROP_BACKEND" in chosen.stderr.strip().splitlines()[-1]


def test_without_a_choice_the_host_serves_and_nobody_is_warned(tmp_path: Path) -> None:
    """-W error: no GPU and no driver is a machine without one, and no failure."""
    done = python("import gpuinterop as gi; print(gi.get_backend().name)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "host\n", "")


def test_without_the_bindings(tmp_path: Path) -> None:
    """AMD's hip-python-interop has a package named `cuda`, too: it is not taken for NVIDIA's."""
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("")
    cuda = cuda_of(python(INFO, tmp_path, path=str(tmp_path)))
    assert cuda["available"] is False
    assert "pip install 'gpuinterop[cuda]'" in str(cuda["reason"])


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"GPUINTEROP_SIM_DEVICES": "0"}, ("no device", "CUDA_VISIBLE_DEVICES")),
        ({"GPUINTEROP_SIM_INIT": "803"}, ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "nvidia-smi")),
    ],
)
def test_a_driver_that_does_not_work(tmp_path: Path, environment: dict[str, str], words: tuple[str, ...]) -> None:
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}
    cuda = cuda_of(python(INFO, tmp_path, **libraries, **environment))
    assert cuda["available"] is False
    assert all(word in str(cuda["reason"]) for word in words), cuda["reason"]


def test_looking_at_what_there_is_makes_no_context(tmp_path: Path) -> None:
    """`info`, the devices and their tables come from attributes and symbols alone."""
    program = (
        "import gpuinterop as gi; from tests.simulated.driver import Simulator; "
        "device, = gi.get_backend('cuda').devices(); "
        "assert device.capabilities.supports((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd)); "
        "assert gi.match_device(device.identity) is device; "
        "simulator = Simulator.attach(); print(simulator.calls('cuDevicePrimaryCtxRetain')); "
        "device.create_stream().close(); print(simulator.calls('cuDevicePrimaryCtxRetain'))"
    )
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}
    done = python(program, tmp_path, path=str(Path(__file__).parents[2]), **libraries)
    assert (done.returncode, done.stdout) == (0, "0\n1\n"), done.stderr


def test_the_backend_is_installed() -> None:
    assert "cuda" in gi.backends()
