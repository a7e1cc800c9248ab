"""The folder of sockets and names, and the users whose processes may reach it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeVar, TypeVarTuple

from .. import system
from .._arguments import check_int
from ..errors import ArgumentTypeError, InvalidArgumentError, PeerError
from ..ipc import peer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

VARIABLE: Final = "GPUINTEROP_SHARE_DIR"
_OVERFLOW: Final = 65534
"""The user id that the kernel shows for users of other user namespaces."""


def check_peer(link: socket.socket, users: Collection[int]) -> None:
    """Refuse the other side's user, unless it is this process's own or one of `users`."""
    (_, user), mine = peer(link), os.geteuid()
    if user == _OVERFLOW or (user != mine and user not in users):
        got = f"{user}, the id of users in other namespaces" if user == _OVERFLOW else user
        way_out = "run both as one user, or name it in users= on both sides."
        raise PeerError(f"expected a process of user {mine}, got one of user {got}; {way_out}")


def users_of(users: Iterable[int]) -> frozenset[int]:
    """Check ``users=``."""
    if not isinstance(users, Iterable):
        raise ArgumentTypeError("users", f"expected user ids, got {type(users).__name__}; pass a list of int.")
    return frozenset(check_int(user, "users", minimum=0) for user in users)


def folder() -> str:
    """The folder of this process's socket and names, which no other user can write."""
    for name in (VARIABLE, "XDG_RUNTIME_DIR"):
        if path := os.environ.get(name):
            if not os.path.isdir(path):
                raise InvalidArgumentError(name, f"expected a folder, got {path!r}; make it, or set {VARIABLE}.")
            return _checked(VARIABLE, os.path.realpath(path))
    return private_folder(VARIABLE)


def private_folder(variable: str) -> str:
    """Make and check this user's own folder in the temporary folder. `variable` can set another folder."""
    private = os.path.join(in_folder(variable, "tempdir", tempfile.gettempdir), f"gpuinterop-{os.geteuid()}")
    in_folder(variable, f"mkdir({private})", os.makedirs, private, 0o700, True)  # True: it may exist
    return _checked(variable, private)


def _checked(variable: str, path: str) -> str:
    status, user = in_folder(variable, f"lstat({path})", os.lstat, path), os.geteuid()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o022:
        expected = f"expected {path!r} to be a folder of user {user} that no other user can write"
        got = f"{stat.filemode(status.st_mode)} of user {status.st_uid}"
        raise InvalidArgumentError(variable, f"{expected}, got {got}; fix both, or set {variable} to another folder.")
    return path


def in_folder(variable: str, name: str, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Make a system call in the folder that `variable` can set."""
    return system.call(name, function, *arguments, advice=f"set {variable} to a folder that this user can write")


def _is_our_socket(status: os.stat_result) -> bool:
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def remove_old_sockets(place: str) -> None:
    """Remove the sockets of this user's killed processes.

    The probe does not disturb running ones: a stream socket refuses a datagram socket without its listener's notice.
    """
    with contextlib.suppress(OSError), os.scandir(place) as files:
        for file in files:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                named = file.name.startswith("gpuinterop-") and file.name.endswith(".sock")
                ours = named and _is_our_socket(file.stat(follow_symlinks=False))
                if ours and probe.connect_ex(file.path) == errno.ECONNREFUSED:
                    os.unlink(file.path)


def open_to_all(path: str) -> None:
    """Let every user connect; `check_peer` refuses the wrong ones. The path's folder may be another user's."""
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_our_socket(os.fstat(file)):
            raise InvalidArgumentError(VARIABLE, f"expected this process's socket at {path}, got another file.")
        os.chmod(f"/proc/self/fd/{file}", 0o666)
    finally:
        os.close(file)
