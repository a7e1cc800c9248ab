"""GPU backends belong to the process's first interpreter: in another they say so, before a binding is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = '''
import importlib
for name in ("_interpreters", "_xxsubinterpreters"):  # from 3.13 on, before
    try:
        interpreters = importlib.import_module(name)
        break
    except ModuleNotFoundError:
        pass
interpreters.run_string(interpreters.create(), """
from gpuinterop.errors import BackendUnavailableError
try:
    from gpuinterop_{vendor} import backend
    backend.{name}Backend()
except BackendUnavailableError as error:
    print(error)
except ImportError as error:  # 3.12 loads no ctypes there
    print("this is a sub-interpreter:", error)
""")
'''


@pytest.mark.parametrize(("vendor", "name"), [("cuda", "Cuda"), ("hip", "Hip")])
def test_a_sub_interpreter_is_refused(vendor: str, name: str) -> None:
    program = PROGRAM.replace("{vendor}", vendor).replace("{name}", name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("this is a sub-interpreter:"), done.stdout + done.stderr
