"""GPU backends belong to the process's first interpreter, and say so. The host's work elsewhere, and end with it."""

from __future__ import annotations

import sys

import pytest

from tests.programs import python

RUN = '''
import importlib
for name in ("_interpreters", "_xxsubinterpreters"):  # from 3.13 on, before
    try:
        interpreters = importlib.import_module(name)
        break
    except ModuleNotFoundError:
        pass
one = interpreters.create()
failure = interpreters.run_string(one, """{script}""")
assert not failure, failure
interpreters.destroy(one)
'''

REFUSED = """
from gpuinterop.errors import BackendUnavailableError
try:
    from gpuinterop_{vendor} import backend
    backend.{name}Backend()
except BackendUnavailableError as error:
    print(error)
except ImportError as error:  # 3.12 loads no ctypes there
    print("expected the process's first interpreter:", error)
"""


def run(program: str) -> str:
    done = python("-W", "ignore", "-c", program)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize(("vendor", "name"), [("cuda", "Cuda"), ("hip", "Hip")])
def test_a_sub_interpreter_is_refused(vendor: str, name: str) -> None:
    script = REFUSED.replace("{vendor}", vendor).replace("{name}", name)
    assert run(RUN.replace("{script}", script)).startswith("expected the process's first interpreter")


# Threads and descriptors, before and after.
COUNTED = """
import os, time
def left():
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
before = left()
{run}
deadline = time.monotonic() + 20
while left() != before and time.monotonic() < deadline:
    time.sleep(0.001)
assert left() == before, (before, left())
print("the first one goes on")
"""

# A fill without a stream goes the way of a copy, and loads no NumPy, which is for one interpreter of a process.
WORK = """
import ctypes
import gpuinterop as gi
device = gi.get_backend('host').device()
with device.allocate(4096) as allocation:
    allocation.buffer.fill(7)
    assert ctypes.string_at(allocation.buffer.ptr, 4096) == bytes([7]) * 4096
"""

OPEN = """
from gpuinterop.exporters import open_exporter
idle, waiting, behind, bridged, closed = (device.create_stream() for _ in range(5))
semaphore = device.create_semaphore(gi.TimelineFd)
semaphore.wait(waiting, 1)
behind.wait_stream(waiting)
semaphore.close()
class Never(gi.bridge.Endpoint):
    kind, label = gi.Timeline, 'never'
    def wait(self, value, timeout):
        return False
    def signal(self, value): ...
    def close(self): ...
bridge = gi.bridge.Bridge(device)
bridge.from_endpoint(Never()).wait(bridged, 1)
exporter = open_exporter('memfd')
closed.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the host backend runs on Linux")
def test_a_copy_leaves_no_thread_behind() -> None:
    """CPython 3.11 neither runs nor destroys an interpreter that has a second thread."""
    flavour = "'legacy'" if sys.version_info >= (3, 13) else "isolated=False"  # another lacks ctypes in 3.12
    script = RUN.replace("create()", f"create({flavour})").replace("{script}", WORK)
    assert run(COUNTED.replace("{run}", script)) == "the first one goes on\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the host backend runs on Linux")
def test_its_end_ends_the_threads_of_what_is_open() -> None:
    """CPython aborts the process if one is left: `Py_EndInterpreter: not the last thread`."""
    pytest.importorskip("_testcapi", reason="this Python cannot end an interpreter that has threads")
    script = f'import _testcapi\nassert _testcapi.run_in_subinterp("""{WORK}{OPEN}""") == 0'
    assert run(COUNTED.replace("{run}", script)) == "the first one goes on\n"
