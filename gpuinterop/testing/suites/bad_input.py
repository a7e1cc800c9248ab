"""A descriptor of something else is refused by the driver or the backend, and stays the caller's."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from typing import Any

import pytest

from ..._core.device import Device
from ...capabilities import Operation
from ...errors import GpuInteropError
from ...handles import OpaqueFd
from ..requirements import KIND, requires
from .base import HANDLE_TYPES, KINDS, Suite, fds, raises, same_file

WRONG = pytest.mark.parametrize("what", ["pipe", "file", "device", "directory"])


class BadInputSuite(Suite):
    """Imports of descriptors of neither memory nor a semaphore."""

    @WRONG
    @requires((Operation.IMPORT_MEMORY, OpaqueFd))
    def test_memory(self, device: Device, what: str) -> None:
        """An import of memory refuses it, leaves it open and unchanged, and leaks nothing."""
        _refuses(lambda handle: device.import_memory(handle, size=4096), OpaqueFd, what)

    @KINDS
    @WRONG
    @requires((Operation.IMPORT_SEMAPHORE, KIND))
    def test_semaphore(self, device: Device, kind: type, what: str) -> None:
        """So does an import of a semaphore."""
        _refuses(device.import_semaphore, HANDLE_TYPES[kind], what)


def _refuses(take: Any, handle_type: Any, what: str) -> None:
    with ExitStack() as stack:
        fd = _open(what, stack)
        before = os.fstat(fd)
        handle = handle_type(fd)
        raises(GpuInteropError, lambda: take(handle))
        open_before = fds()  # not earlier: the first call may open something that the driver keeps
        for _ in range(3):
            raises(GpuInteropError, lambda: take(handle))
        assert not handle.closed
        assert same_file(fd, before)
        assert fds() == open_before, "the duplicate was left open"


def _open(what: str, stack: ExitStack) -> int:
    if what == "pipe":
        fd, other = os.pipe()
        stack.callback(os.close, other)
    elif what == "file":
        fd, name = tempfile.mkstemp()
        os.unlink(name)
        os.truncate(fd, 1 << 16)
    else:
        fd = os.open(os.devnull if what == "device" else os.curdir, os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd
