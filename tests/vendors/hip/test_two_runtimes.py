"""Two HIP runtimes in one process: torch's ROCm wheel brings one, and hip-python may load another."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

from tests.programs import python
from tests.simulated.driver import Simulator

from ..parties import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED or sys.platform != "linux", reason="needs the simulated runtime")

THEIRS = """
import ctypes, os
ctypes.CDLL(os.environ["THEIRS"])
"""

PROGRAM = textwrap.dedent(
    """
    import ctypes, os
    import gpuinterop as gi
    from tests.simulated.driver import Simulator

    backend = gi.get_backend("hip")
    mine = backend.libraries["libamdhip64"]
    print(mine)
    device = backend.device()
    for number in (0, 1):
        device.wrap_stream(number).close()
    stream = device.create_stream()
    device.wrap_stream(stream.ptr).close()

    import theirs  # as `import torch` would

    other = ctypes.CDLL(os.environ["THEIRS"])
    foreign = ctypes.c_void_p()
    assert other.hipStreamCreateWithFlags(ctypes.byref(foreign), 1) == 0
    asked = Simulator(mine).calls("hipStreamGetDevice")
    for number in (0, 1, 2, foreign.value, stream.ptr):
        try:
            device.wrap_stream(number)
        except gi.InvalidArgumentError as error:
            assert str(error).startswith("stream: expected one HIP runtime in this process, got two"), error
            assert mine in str(error) and os.environ["THEIRS"] in str(error), error
            assert "ROCM_PATH=" in str(error) or "LD_LIBRARY_PATH" in str(error), error
        else:
            raise AssertionError(f"{number:#x} was taken")
    assert Simulator(mine).calls("hipStreamGetDevice") == asked
    # What is called is the one that is named, and the other is in the process and not called.
    before = [Simulator(path).calls("hipMemsetD8Async") for path in (mine, os.environ["THEIRS"])]
    with device.allocate(1) as allocation:
        allocation.buffer.fill(1, stream=stream)
        stream.synchronize(300)
    after = [Simulator(path).calls("hipMemsetD8Async") for path in (mine, os.environ["THEIRS"])]
    assert after == [before[0] + 1, before[1]], (before, after)
    assert backend.libraries == {"libamdhip64": mine}
    stream.close()
    device.drain()
    """
)


def test_streams_of_others_are_refused_where_there_are_two(simulator: Simulator, tmp_path: Path) -> None:
    """Also 0, which names the default stream of either; both paths are told, and what makes one of them."""
    folders = []
    for name in ("one", "two"):
        (tmp_path / name / "lib").mkdir(parents=True)
        shutil.copy(simulator.path, tmp_path / name / "lib")
        folders.append(tmp_path / name)
    mine, theirs = (folder / "lib" / simulator.path.name for folder in folders)
    (tmp_path / "theirs.py").write_text(THEIRS)
    environment = simulator.environment()
    environment["LD_LIBRARY_PATH"] = str(mine.parent)  # how 7.2 finds it; 10 by ROCM_PATH
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    done = python("-W", "error", "-c", PROGRAM, env=environment, ROCM_PATH=str(folders[0]), THEIRS=str(theirs))
    assert (done.returncode, done.stdout) == (0, f"{mine}\n"), done.stdout + done.stderr


def test_the_library_that_is_named_is_the_one_that_is_called(simulator: Simulator, tmp_path: Path) -> None:
    """Among three that are mapped: neither the first nor the last of them. hip-python 7.2 takes what has the name."""
    paths = []
    for name in ("before", "rocm", "after"):
        (tmp_path / name / "lib").mkdir(parents=True)
        paths.append(Path(shutil.copy(simulator.path, tmp_path / name / "lib")))
    program = (
        "import ctypes, os; paths = os.environ['PATHS'].split(os.pathsep); first = ctypes.CDLL(paths[0]); "
        "import gpuinterop as gi; from tests.simulated.driver import Simulator; "
        "backend = gi.get_backend('hip'); ctypes.CDLL(paths[2]); "
        "called = [path for path in paths if Simulator(path).calls('hipRuntimeGetVersion')]; "
        "assert called == [backend.libraries['libamdhip64']], (called, backend.libraries)"
    )
    simulator.run(program, ROCM_PATH=str(tmp_path / "rocm"), PATHS=os.pathsep.join(map(str, paths)))
