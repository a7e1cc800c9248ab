"""Where there is no runtime, no device, no binding, or too old a runtime: one line says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpuinterop as gi
from gpuinterop.testing.missing_vulkan import give_up

from .parties import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a runtime is there")

ROOT = Path(__file__).resolve().parents[2]
BINDINGS = os.environ.get("PYTHONPATH", "")


def python(
    program: str, tmp_path: Path, *, path: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """In a process without the simulated runtime; `path` is where it finds packages, and by default the bindings."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GPUINTEROP_") and name not in ("LD_LIBRARY_PATH", "PYTHONPATH")
    }
    found = BINDINGS if path is None else path
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**clean, **({"PYTHONPATH": found} if found else {}), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def hip_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = [one for one in json.loads(done.stdout)["backends"] if one["name"] == "hip"]
    return found[0]


INFO = "import sys; sys.argv = ['gpuinterop', 'info', '--json']; from gpuinterop.cli import main; main()"


def test_info_explains_in_one_line(tmp_path: Path) -> None:
    hip = hip_of(python(INFO, tmp_path))
    assert hip["available"] is False
    reason = str(hip["reason"])
    assert "\n" not in reason
    assert "libamdhip64.so" in reason
    assert "Install ROCm" in reason


def test_asked_for_by_name_it_raises_with_the_fix(tmp_path: Path) -> None:
    done = python("import gpuinterop as gi; gi.get_backend('hip')", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gpuinterop.errors.BackendUnavailableError: ")
    assert "no HIP runtime" in last
    chosen = python("import gpuinterop as gi; gi.device()", tmp_path, GPUINTEROP_BACKEND="hip")
    assert "GPUINTEROP_BACKEND" in chosen.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("bindings", [True, False])
def test_without_a_choice_the_host_serves_and_nobody_is_warned(tmp_path: Path, bindings: bool) -> None:
    """-W error: no GPU and no runtime is a machine without one, and no failure."""
    done = python("import gpuinterop as gi; print(gi.get_backend().name)", tmp_path, path=BINDINGS if bindings else "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "host\n", "")


def test_on_a_machine_with_an_amd_gpu_a_runtime_that_is_not_found_is_no_silence(tmp_path: Path) -> None:
    """/dev/kfd is there: ROCM's library is in no folder that is looked into, or has its versioned name only."""
    program = (
        "import sys, warnings, gpuinterop as gi; from gpuinterop_hip import driver; driver._KFD = sys.argv[1]; "
        "caught = warnings.catch_warnings(record=True); found = caught.__enter__(); warnings.simplefilter('always'); "
        "print(gi.get_backend().name, *[str(one.message) for one in found])"
    )
    there = tmp_path / "kfd"
    there.touch()
    versioned = tmp_path / "lib"
    versioned.mkdir()
    (versioned / "libamdhip64.so.7").touch()
    for path, warned in ((there, True), (tmp_path / "none", False)):
        done = python(
            f"import sys; sys.argv[1:] = [{str(path)!r}]; {program}", tmp_path, LD_LIBRARY_PATH=str(versioned)
        )
        assert done.returncode == 0, done.stderr
        name, _, message = done.stdout.strip().partition(" ")
        assert name == "host"
        assert bool(message) is warned, message
        if warned:
            assert "libamdhip64.so (amdhip64.dll on Windows) was not found" in message
            assert "a libamdhip64.so.7 only" in message
            assert "development package, or make a link" in message


def test_without_the_bindings(tmp_path: Path) -> None:
    """Others have packages named `hip` and `rocm`, too: only what has HIP's functions is taken."""
    for package in ("hip", "rocm"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "hip" / "hip.py").write_text("")
    (tmp_path / "hip" / "_version.py").write_text("__version__ = '1'")
    hip = hip_of(python(INFO, tmp_path, path=str(tmp_path)))
    assert hip["available"] is False
    assert "pip install 'gpuinterop[hip]'" in str(hip["reason"])
    assert "is not hip-python" in str(hip["reason"])


@pytest.mark.parametrize(("system", "machine"), [("Windows", "AMD64"), ("Linux", "aarch64")])
def test_no_advice_that_installs_nothing(tmp_path: Path, system: str, machine: str) -> None:
    """PyPI has hip-python for one system, and `gpuinterop[hip]` is empty on the others."""
    (tmp_path / "hip.py").touch()  # before .venv's own, whatever that has
    (tmp_path / "rocm.py").touch()
    said = f"import platform; platform.system = lambda: {system!r}; platform.machine = lambda: {machine!r}; "
    reason = str(hip_of(python(said + INFO, tmp_path, path=str(tmp_path)))["reason"])
    assert "PyPI has hip-python for Linux on x86-64 only" in reason
    assert "AMD's own package" in reason
    assert "pip install" not in reason


@pytest.mark.parametrize("code", [100, 101, 999])
def test_a_runtime_that_looks_for_devices_in_its_first_call(tmp_path: Path, code: int) -> None:
    program = (
        "from tests.simulated.driver import Simulator; "
        f"Simulator.attach('hip').fail('hipRuntimeGetVersion', code={code}); {INFO}"
    )
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}
    hip = hip_of(python(program, tmp_path, path=os.pathsep.join([str(ROOT), BINDINGS]), **libraries))
    assert hip["available"] is False
    words = ("hipRuntimeGetVersion failed with hipErrorUnknown (999)",) if code == 999 else ("no device", "/dev/kfd")
    assert all(word in str(hip["reason"]) for word in words), hip["reason"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"GPUINTEROP_SIM_INIT": "100"}, ("no device", "HIP_VISIBLE_DEVICES", "/dev/kfd")),
        ({"GPUINTEROP_SIM_INIT": "101"}, ("no device", "HIP_VISIBLE_DEVICES", "/dev/kfd")),
        ({"GPUINTEROP_SIM_INIT": "999"}, ("hipErrorUnknown (999)", "rocminfo")),
        ({"GPUINTEROP_SIM_HIP_VERSION": "50731921"}, ("5.7.31921", "before 6.0", "Install ROCm 6.0 or newer")),
    ],
)
def test_a_runtime_that_does_not_work(tmp_path: Path, environment: dict[str, str], words: tuple[str, ...]) -> None:
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}
    hip = hip_of(python(INFO, tmp_path, **libraries, **environment))
    assert hip["available"] is False
    assert all(word in str(hip["reason"]) for word in words), hip["reason"]


def test_amds_own_old_runtime_is_refused(tmp_path: Path) -> None:
    """Debian's libamdhip64-5: a real one of AMD's, which loads without a GPU, and whose structs are others.

    Before anything is passed to it: it is asked for its version, and for nothing else.
    """
    root = Path(os.environ.get("GPUINTEROP_VULKAN_ROOT") or ROOT / ".vulkan")
    library = root / "tree" / "hip5" / "libamdhip64.so.5"
    if not library.is_file():
        give_up("HIP 5 is not here: tools/fetch_vulkan.py --hip5 fetches it on Debian and Ubuntu")
    (tmp_path / "libamdhip64.so").symlink_to(library)
    libraries = {"LD_LIBRARY_PATH": f"{tmp_path}{os.pathsep}{library.parent}"}
    hip = hip_of(python(INFO, tmp_path, **libraries))
    assert hip["available"] is False
    reason = str(hip["reason"])
    assert "the HIP runtime is 5." in reason, reason
    assert "Install ROCm 6.0 or newer" in reason
    done = python("import gpuinterop as gi; gi.get_backend('hip')", tmp_path, **libraries)
    assert "BackendUnavailableError" in done.stderr.strip().splitlines()[-1]


def test_a_runtime_that_lacks_a_library_is_not_taken_for_none(tmp_path: Path) -> None:
    """It is a broken installation: without an explicit choice a warning says so, and the host serves.

    No runtime needs that library: AMD's would find what it needs where ROCm's packages are installed.
    """
    (tmp_path / "other.c").write_text("int other(void) { return 0; }")
    (tmp_path / "runtime.c").write_text("int other(void); int hipInit(void) { return other(); }")
    needed = tmp_path / "libgpuinterop-is-not-there.so.1"
    compiler = os.environ.get("CC", "cc")
    for output, sources in (
        (needed, ["other.c", f"-Wl,-soname,{needed.name}"]),
        (tmp_path / "libamdhip64.so", ["runtime.c", needed.name]),
    ):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(output), *sources], cwd=tmp_path, check=True)
    needed.unlink()
    hip = hip_of(python(INFO, tmp_path, LD_LIBRARY_PATH=str(tmp_path)))
    assert hip["available"] is False
    assert "cannot be used" in str(hip["reason"])
    assert needed.name in str(hip["reason"])


def test_looking_at_what_there_is_makes_no_device_current(tmp_path: Path) -> None:
    """`info`, the devices and their tables come from attributes and symbols alone."""
    program = (
        "import gpuinterop as gi; from tests.simulated.driver import Simulator; "
        "device = gi.get_backend('hip').devices()[0]; "
        "assert device.capabilities.supports((gi.Operation.IMPORT_MEMORY, gi.OpaqueFd)); "
        "assert gi.match_device(device.identity) is device; "
        "simulator = Simulator.attach('hip'); "
        "print(sum(map(simulator.calls, ('hipSetDevice', 'hipStreamCreateWithPriority', 'hipMalloc'))))"
    )
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}
    done = python(program, tmp_path, path=os.pathsep.join([str(ROOT), BINDINGS]), **libraries)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_the_backend_is_installed() -> None:
    assert "hip" in gi.backends()
