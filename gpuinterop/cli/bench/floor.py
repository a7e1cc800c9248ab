"""Build ``floor.c``, the same frames and calls in C, and define its structs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...errors import BackendUnavailableError
from ...testing.simulated.build import compiler
from ..console import note

__all__ = ["Compute", "Graphics", "Launch", "Memory", "Node", "load"]

_SOURCE: Final = Path(__file__).with_name("floor.c")


class Compute(ctypes.Structure):
    """``struct compute``: a signal or a wait."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("call", "semaphore", "params", "value", "stream")]


class Graphics(ctypes.Structure):
    """``struct graphics``: a submission, and the counter that shows its end."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("submit", "queue", "info", "waits", "signals", "counter", "device", "semaphore")
    ]


class Node(ctypes.Structure):
    """``struct node``: a node of a graph whose value is set."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("call", "executable", "node", "params", "value")]


class Memory(ctypes.Structure):
    """``struct memory``: a memory that is imported, mapped and released."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("load", "desc", "fd", "map", "range", "unmap", "destroy")]


class Launch(ctypes.Structure):
    """``struct launch``: a graph's launch."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("call", "executable", "stream")]


@cache
def load() -> Any:
    """Build and load the functions. If that fails, print a note and return None."""
    if sys.platform == "win32":
        return _left_out("it is written for POSIX systems.")
    with tempfile.TemporaryDirectory(prefix="gpuinterop-bench-") as folder:
        library = Path(folder, "floor.so")
        try:
            command = [*compiler(), "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            found = ctypes.CDLL(str(library))
        except subprocess.CalledProcessError as error:
            return _left_out(f"the C compiler failed: {error.stderr.strip()}")
        except (BackendUnavailableError, OSError) as error:
            return _left_out(str(error))
    count = ctypes.c_uint64
    found.calls.argtypes = [ctypes.POINTER(Compute), count, count, count]
    found.frames.argtypes = [*map(ctypes.POINTER, (Graphics, Compute, Compute)), count, count]
    found.launches.argtypes = [*map(ctypes.POINTER, (Graphics, Node, Node, Launch)), count, count]
    found.memories.argtypes = [ctypes.POINTER(Memory), ctypes.c_int, count]
    return found


def _left_out(why: str) -> None:
    note(f"there are no times in C: {why}")
