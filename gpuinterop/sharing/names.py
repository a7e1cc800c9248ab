"""The names of publishers: a locked file for each, which its process makes again if it was removed."""

from __future__ import annotations

import os
import re
import stat
import threading
from contextlib import suppress
from fcntl import LOCK_UN, flock
from functools import partial
from glob import escape, glob
from typing import Final

from .. import system
from .._arguments import NoCopy, check_type
from .._core.lifetime import after_fork
from ..errors import InvalidArgumentError, ResourceBusyError
from ..timeline import take_lock
from .folder import VARIABLE, folder, in_folder
from .loop import loop

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_PATIENCE_S: Final = 10.0
"""Seconds until a file is opened again, while readers check the lock of this one."""
_files: Final[dict[int, None]] = {}


def path_of(name: str) -> str:
    """The file of a name."""
    if not _NAME.fullmatch(check_type(name, str, "name", "a str")):
        raise InvalidArgumentError("name", f"expected up to 100 letters, digits, '-', '_' and '.', got {name!r}.")
    return os.path.join(folder(), f"gpuinterop-{name}.frames")


class Name(NoCopy):
    """A name's file, which its writer keeps locked. The loop makes it again if it was removed."""

    problem = ""
    """Why the name is another process's now."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self.path_of, self._descriptor, self._lock = name, path, b"", threading.RLock()
        on_pass = loop().on_pass  # first, because the loop can fail
        self._file = self._locked()
        on_pass[self._check_file] = None

    def write(self, descriptor: bytes) -> None:
        self._write(self._file, descriptor)
        self._descriptor = descriptor

    @system.locked
    def _check_file(self) -> None:
        if self._descriptor and not (self.problem or os.fstat(self._file).st_nlink):
            try:
                file = self._locked()
            except ResourceBusyError as error:
                self.problem = str(error)
                return
            try:
                self._write(file, self._descriptor)
            except BaseException:
                _unlock(file, self.path_of)
                raise
            before, self._file = self._file, file
            _close(before)

    def _write(self, file: int, descriptor: bytes) -> None:
        in_folder(VARIABLE, f"write({self.path_of})", os.pwrite, file, descriptor, 0)
        os.ftruncate(file, len(descriptor))

    def _locked(self) -> int:
        while True:
            file = in_folder(VARIABLE, f"open({self.path_of})", _opened, self.path_of, os.O_RDWR | os.O_CREAT)
            try:
                if system.until(partial(self._takes, file), _PATIENCE_S) and os.fstat(file).st_nlink:
                    return file
            except BaseException:
                _close(file)
                raise
            _close(file)  # another process has just removed it

    def _takes(self, file: int) -> bool:
        """Lock the file; False while others check its lock. Raise if a writer has locked it."""
        if not (taken := take_lock(file)):
            if not take_lock(file, shared=True):
                raise ResourceBusyError(f"{self._name!r} is published already; take another name, or end that writer.")
            flock(file, LOCK_UN)
        return taken

    @system.locked
    def close(self) -> None:
        self._descriptor = b""  # the loop may be about to check the file
        loop().on_pass.pop(self._check_file, None)
        _unlock(self._file, self.path_of)


def _opened(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a name's file. Raise if it is not a file that this user has made."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    _files[file], status = None, os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return file
    _close(file)
    got = f"{stat.filemode(status.st_mode)} of user {status.st_uid}"
    raise InvalidArgumentError("name", f"expected {path} to be a file of user {os.geteuid()}, got {got}; remove it.")


def published(path: str) -> bytes:
    """The descriptor of the process that publishes a name; nothing if there is none."""
    try:
        file = _opened(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise system.driver_error(f"open({path})", error.errno or 0) from error
    try:
        return b"" if take_lock(file, shared=True) else os.read(file, system.PAGE)
    finally:
        _close(file)


def remove_unlocked(place: str) -> None:
    """Remove the names of this user's killed processes from a folder."""
    for path in glob(os.path.join(escape(place), "gpuinterop-*.frames")):
        with suppress(OSError, InvalidArgumentError):
            file = _opened(path)
            _unlock(file, path) if take_lock(file, shared=True) else _close(file)


def _unlock(file: int, path: str) -> None:
    """Remove a file that this process has locked."""
    with suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(file)):  # else the path is another writer's file by now
            os.unlink(path)
    _close(file)


def _close(file: int) -> None:
    del _files[file]
    os.close(file)


@after_fork
def _forked() -> None:
    """Close the child's copies, which would keep the names locked after the parent exits."""
    for file in _files:
        os.close(file)
    _files.clear()
