"""The same frames and calls in C, built where there is a compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

__all__ = ["Compute", "Graphics", "Launch", "Node", "compute", "load"]

_SOURCE: Final = Path(__file__).with_name("floor.c")


class Compute(ctypes.Structure):
    """``struct compute``: a signal or a wait."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("call", "semaphore", "params", "value", "stream")]


class Graphics(ctypes.Structure):
    """``struct graphics``: a submission, and the counter that tells its end."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("submit", "queue", "info", "waits", "signals", "counter", "device", "semaphore")
    ]


class Node(ctypes.Structure):
    """``struct node``: a node of a graph whose value is set."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("call", "executable", "node", "params", "value")]


class Launch(ctypes.Structure):
    """``struct launch``: a graph's launch."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("call", "executable", "stream")]


Addresses: TypeAlias = Sequence[int]


def compute(addresses: Addresses) -> Compute:
    """The addresses that a backend's yardstick gives, as the C code takes them."""
    return Compute(*addresses)


@cache
def load() -> Any:
    """The compiled functions; None where there is no C compiler, or it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        return None
    with tempfile.TemporaryDirectory(prefix="gpuinterop-bench-") as folder:
        library = Path(folder, "floor.so")
        built = subprocess.run(
            [*compiler.split(), "-O2", "-shared", "-fPIC", "-o", library, _SOURCE], capture_output=True, check=False
        )
        if built.returncode:
            return None
        found = ctypes.CDLL(str(library))
    count = ctypes.c_uint64
    found.calls.argtypes = [ctypes.POINTER(Compute), count, count, count]
    found.frames.argtypes = [*map(ctypes.POINTER, (Graphics, Compute, Compute)), count, count]
    found.launches.argtypes = [*map(ctypes.POINTER, (Graphics, Node, Node, Launch)), count, count]
    return found
