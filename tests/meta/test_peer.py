"""The second process of the suites: what is asked of it, and that it is not left behind."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

import gpuinterop as gi
from gpuinterop.testing.peer import BackendPeer
from tests.programs import python, runs

LEFT = """
import os, signal
import gpuinterop as gi
from gpuinterop.testing.peer import BackendPeer

peer = BackendPeer(gi.get_backend("host").device())
assert peer.idle(10)
os.kill(peer.process.pid, signal.SIGSTOP)
print(peer.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A process that is killed, and whose peer does nothing by then, as one that hangs in a driver."""


def test_a_command_that_there_is_not() -> None:
    """It is refused; the process goes on."""
    with BackendPeer(gi.get_backend("host").device()) as peer:
        with pytest.raises(gi.PeerError, match="no command 'map_multicats'"):
            peer._send("map_multicats")
        assert peer.idle(10)


def test_a_limit_for_answers() -> None:
    """It is held to, by whoever asks for one."""
    with BackendPeer(gi.get_backend("host").device(), reply_limit=0.5) as peer:
        os.kill(peer.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(gi.PeerError, match="did not answer"):
                peer.idle(0)
        finally:
            os.kill(peer.process.pid, signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with its parent, where it is asked to")
def test_it_ends_with_its_parent() -> None:
    """Also where it cannot notice that itself."""
    done = python("-c", LEFT, seconds=50)
    assert done.returncode == -signal.SIGKILL, done.stderr
    peer = int(done.stdout)
    deadline = time.monotonic() + 20
    while runs(peer) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = runs(peer)
    if left:
        os.kill(peer, signal.SIGKILL)
    assert not left, "it is still there"
