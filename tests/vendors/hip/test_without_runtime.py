"""HIP runtimes that are not found, fail in their first call, are too old or lack a library: one line says what is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuinterop.testing.simulated.build import compiler
from tests.missing_vulkan import give_up

from ..parties import SIMULATED
from ..test_without_driver import BINDINGS, REASON, ROOT, python, reason_of

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a runtime is there")


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
            assert "only libamdhip64.so.7" in message
            assert "development package, or make a link" in message


@pytest.mark.parametrize(("system", "machine"), [("Windows", "AMD64"), ("Linux", "aarch64")])
def test_no_advice_that_installs_nothing(tmp_path: Path, system: str, machine: str) -> None:
    """PyPI has hip-python for one system, and `gpuinterop[hip]` is empty on the others."""
    (tmp_path / "hip.py").touch()  # before .venv's own, whatever that has
    (tmp_path / "rocm.py").touch()
    said = f"import platform; platform.system = lambda: {system!r}; platform.machine = lambda: {machine!r}; "
    reason = reason_of(python(said + REASON, tmp_path, path=str(tmp_path)))
    assert "x86-64" in reason
    assert "AMD's" in reason
    assert "pip install" not in reason


@pytest.mark.parametrize("code", [100, 101, 999])
def test_a_runtime_that_looks_for_devices_in_its_first_call(tmp_path: Path, code: int) -> None:
    program = (
        "from tests.simulated.driver import Simulator; "
        f"Simulator.attach('hip').fail('hipRuntimeGetVersion', code={code}); {REASON}"
    )
    path = os.pathsep.join([str(ROOT), BINDINGS])
    reason = reason_of(python(program, tmp_path, path=path, driver=True))
    words = ("hipRuntimeGetVersion failed with hipErrorUnknown (999)",) if code == 999 else ("no device", "/dev/kfd")
    assert all(word in reason for word in words), reason


def test_amds_own_old_runtime_is_refused(tmp_path: Path) -> None:
    """Debian's libamdhip64-5: a real one of AMD's, which loads without a GPU, and whose structs are others.

    Before anything is passed to it: it is asked for its version, and for nothing else.
    """
    library = ROOT / ".vulkan" / "tree" / "hip5" / "libamdhip64.so.5"
    if not library.is_file():
        give_up("HIP 5 is not here: tools/fetch_vulkan.py hip5 fetches it on Debian and Ubuntu")
    (tmp_path / "libamdhip64.so").symlink_to(library)
    libraries = f"{tmp_path}{os.pathsep}{library.parent}"
    reason = reason_of(python(REASON, tmp_path, LD_LIBRARY_PATH=libraries))
    assert "the HIP runtime is 5." in reason, reason
    assert "Install ROCm 6.0 or newer" in reason
    done = python("import gpuinterop as gi; gi.get_backend('hip')", tmp_path, LD_LIBRARY_PATH=libraries)
    assert "BackendUnavailableError" in done.stderr.strip().splitlines()[-1]


def test_a_runtime_that_lacks_a_library_is_not_taken_for_none(tmp_path: Path) -> None:
    """It is a broken installation: without an explicit choice a warning says so, and the host serves.

    No runtime needs that library: AMD's would find what it needs where ROCm's packages are installed.
    """
    (tmp_path / "other.c").write_text("int other(void) { return 0; }")
    (tmp_path / "runtime.c").write_text("int other(void); int hipInit(void) { return other(); }")
    needed = tmp_path / "libgpuinterop-is-not-there.so.1"
    for output, sources in (
        (needed, ["other.c", f"-Wl,-soname,{needed.name}"]),
        (tmp_path / "libamdhip64.so", ["runtime.c", needed.name]),
    ):
        subprocess.run([*compiler(), "-shared", "-fPIC", "-o", str(output), *sources], cwd=tmp_path, check=True)
    needed.unlink()
    reason = reason_of(python(REASON, tmp_path, LD_LIBRARY_PATH=str(tmp_path)))
    assert "cannot be used" in reason
    assert needed.name in reason
