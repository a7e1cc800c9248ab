"""A child process whose calls go wrong: the caller gets the reason, and the child keeps nothing."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuinterop.errors import ArgumentTypeError, InvalidArgumentError, PeerError
from gpuinterop.handles import EventFd
from gpuinterop.ipc import MAX_BODY
from gpuinterop.testing.child import Child, Remote
from gpuinterop.testing.multicast import Life
from tests.limits import LIMIT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child has Unix sockets, and these tests read /proc")


class Unreadable:
    """What a process can send, and no other can read."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def make(child: Child) -> Remote:
    """Make an object that stays in the child."""
    made: Remote = child.run("gpuinterop.testing.multicast:Life", [])
    return made


@pytest.fixture
def child() -> Iterator[Child]:
    with Child("the child", __name__) as opened:
        yield opened


def test_a_failed_call_leaves_nothing_in_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the objects that were dropped before it, nor its handles, which the child closes by itself."""
    failures: dict[type[Exception], tuple[object, str]] = {
        TypeError: (sys, "cannot pickle"),
        InvalidArgumentError: (bytes(MAX_BODY), "expected at most"),
        PeerError: (Unreadable(), "ValueError.*no number"),
    }
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    with (tmp_path / "output").open("w") as output, Child("the child", __name__, output=output) as child:
        for error, (argument, text) in failures.items():
            make(child)  # and drop it at once
            with EventFd.adopt(os.eventfd(0)) as handle, pytest.raises(error, match=text):
                child.run("builtins:print", handle, argument)
            assert child.run("gpuinterop.testing.child:_objects.__len__") == 0, error
    assert (tmp_path / "output").read_text() == ""


def test_objects_of_another_process_are_refused(child: Child) -> None:
    with Child("the other child", __name__) as other:
        for thing in (make(other), Life([])):
            with pytest.raises(ArgumentTypeError, match="expected objects of the child"):
                child.run("builtins:bool", thing)
        assert child.run("builtins:bool", make(child))


def test_a_default_timeout_of_the_program_does_not_reach_the_child() -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(LIMIT)
    try:
        with Child("the child", __name__) as child:
            make(child)  # takes long enough for the child to wait for another connection
            child.end()
    finally:
        socket.setdefaulttimeout(before)


def test_no_room_for_another_connection(tmp_path: Path) -> None:
    """The child exits with an error, and prints the reason."""
    with (tmp_path / "output").open("w+") as output, Child("the child", __name__, output=output) as child:
        child.run("resource:setrlimit", resource.RLIMIT_NOFILE, (1, 1))
        with pytest.raises(TypeError):
            child.run("builtins:bool", sys)  # the connection is closed: the next call needs another one
        with pytest.raises(PeerError, match="exit status 1"):
            child.run("builtins:bool", 1)
        assert "Too many open files" in Path(output.name).read_text()


def test_a_closed_connection_of_a_child_that_does_not_exit(child: Child) -> None:
    """As one that hangs in a driver while it exits."""
    child.run("builtins:bool", 1)
    control = child.process.args[3]  # type: ignore[index]
    (connection,) = set(os.listdir(f"/proc/{child.process.pid}/fd")) - {"0", "1", "2", control}
    child.limit = 1.0
    with pytest.raises(PeerError, match="closed its connection but did not exit in 1 s"):
        child.run("os:close", int(connection))


def test_a_call_that_ends_after_its_child_was_closed_keeps_no_connection(child: Child) -> None:
    child.run("builtins:bool", 1)
    receive, channel = child._idle[0].receive, child._idle[0]

    def end_then_return(limit: float | None) -> Any:
        answer = receive(limit)
        child.end()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "receive", end_then_return)
        assert child.run("builtins:bool", 1)
    assert not child._idle
