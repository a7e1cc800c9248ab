"""A file that another process serves, and does not answer for: FUSE by hand, in a mount namespace of its own.

``python fuse.py CONTROL FOLDER``: CONTROL is a Unix socket's descriptor, over which the open file comes, or the reason
why there is none; then, for each byte, what the kernel has asked since. The end of the connection is the end of the
server, at which the kernel gives up its questions.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import struct
import sys
import threading

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_LOOKUP, _OPEN, _RELEASE, _FLUSH, _INIT = 1, 14, 18, 25, 26
_UNANSWERED = {2: "FORGET", 36: "INTERRUPT", 42: "BATCH_FORGET"}
_NAMES = {
    3: "GETATTR", 15: "READ", 16: "WRITE", 17: "STATFS", _RELEASE: "RELEASE", _FLUSH: "FLUSH", 31: "GETLK", 39: "IOCTL",
    40: "POLL", 46: "LSEEK", 52: "STATX",
}  # fmt: skip
_NEWNS, _NEWUSER, _PRIVATE, _DETACH = 0x00020000, 0x10000000, (1 << 14) | (1 << 18), 2


class Server:
    """Answers what is needed to open a file, and from `mute` on nothing."""

    def __init__(self) -> None:
        self.device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self.asked: list[str] = []
        self._muted = False

    def mute(self) -> None:
        self.asked.clear()
        self._muted = True

    def run(self) -> None:
        while True:
            request = os.read(self.device, 1 << 20)
            _, operation, serial, *_ = _IN.unpack_from(request)
            if operation in _UNANSWERED:
                continue
            self.asked.append(_NAMES.get(operation, f"operation {operation}"))
            if not self._muted:
                answer = self._answer(operation)
                os.write(self.device, _OUT.pack(_OUT.size + len(answer), 0, serial) + answer)

    def _answer(self, operation: int) -> bytes:
        if operation == _INIT:  # protocol 7.31
            return struct.pack("<IIIIHHII32x", 7, 31, 1 << 16, 0, 16, 12, 1 << 16, 1)
        if operation == _LOOKUP:  # node 2; names and attributes are valid for no time
            attributes = struct.pack("<6Q3I7I", 2, 4096, 8, 0, 0, 0, 0, 0, 0, stat.S_IFREG | 0o666, 1, 0, 0, 0, 4096, 0)
            return struct.pack("<QQQQII", 2, 0, 0, 0, 0, 0) + attributes
        return bytes(16) if operation == _OPEN else b""


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}: {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)


def served(folder: str) -> tuple[Server, int]:
    """The file, opened; its mount is gone already, so that /proc calls it ``/dmabuf:``, like a GPU's memory."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEWNS if user == 0 else _NEWNS | _NEWUSER)
    if user != 0:
        for file, line in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{file}", "w", encoding="ascii") as mapping:
                mapping.write(line)
    _call("mount", None, b"/", None, ctypes.c_ulong(_PRIVATE), None)
    server = Server()
    options = f"fd={server.device},rootmode=40000,user_id=0,group_id=0".encode()
    _call("mount", b"test", folder.encode(), b"fuse", ctypes.c_ulong(0), options)
    threading.Thread(target=server.run, daemon=True).start()
    fd = os.open(f"{folder}/dmabuf:", os.O_RDWR | os.O_CLOEXEC)
    _call("umount2", folder.encode(), _DETACH)
    return server, fd


def main(control: socket.socket, folder: str) -> None:
    try:
        server, fd = served(folder)
    except OSError as error:
        control.sendall(str(error).encode())
        return
    socket.send_fds(control, [b"served"], [fd])
    os.close(fd)  # while it is answered: a process that serves a file of its own cannot end
    server.mute()
    control.sendall(b"mute")
    while control.recv(1):
        control.sendall(json.dumps(server.asked).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
