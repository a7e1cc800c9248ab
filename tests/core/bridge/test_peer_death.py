"""A peer that dies: the streams that wait for it are let go."""

from __future__ import annotations

import itertools
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.bridge import Bridge
from tests.limits import LIMIT

from .scripted import WordsBackend, blocked, bridged, end, lane_of, until, word_of


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_dead_peer_lets_the_stream_go(host: Device, scope: ExitStack, peer: subprocess.Popen[bytes]) -> None:
    mine = os.eventfd(0, os.EFD_NONBLOCK)
    scope.callback(os.close, mine)
    bridge = scope.enter_context(Bridge(host))
    before = len(os.listdir("/proc/self/fd"))
    semaphore = bridge.import_semaphore(gi.EventFd(os.dup(mine)), peer=peer.pid)
    stream = scope.enter_context(host.create_stream())
    semaphore.wait(stream)
    assert blocked(stream)
    os.write(mine, struct.pack("=Q", 1))
    stream.synchronize(LIMIT)
    semaphore.wait(stream)
    os.kill(peer.pid, signal.SIGKILL)
    with pytest.raises(gi.PeerError, match=rf"{peer.pid}\b.*{re.escape(semaphore.label)}"):
        stream.synchronize(LIMIT)
    other = scope.enter_context(host.create_stream())
    with pytest.raises(gi.PeerError):
        semaphore.wait(other)
    end(semaphore)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_peer_signalled_before_it_died_counts(
    device: Device, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    """It signals, and dies, in the moment in which it was seen not to have signalled yet."""
    endpoint, semaphore, stream = bridged(device, scope, peer=peer.pid)
    look = endpoint.wait

    def last_words(value: int, timeout: float) -> bool:
        found = look(value, timeout)
        endpoint.reached = 3
        peer.kill()
        peer.wait()
        return found

    endpoint.wait = last_words  # type: ignore[method-assign]
    semaphore.wait(stream, 3)
    until(lambda: word_of(semaphore) == 3)
    assert stream.query()


def test_a_peer_that_has_gone_may_still_be_told(
    device: Device, backend: WordsBackend, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    """It was to signal, and no stream waits for it: that it ends is no failure."""
    endpoint, semaphore, stream = bridged(device, scope, peer=peer.pid)
    steps, step = itertools.count(), lane_of(semaphore).step
    lane_of(semaphore).step = lambda: (next(steps), step())[1]  # type: ignore[method-assign]
    semaphore.signal(stream, 1)
    peer.kill()
    peer.wait()
    seen = next(steps)
    until(lambda: next(steps) > seen + 100)
    backend.run_writes()
    until(lambda: endpoint.told == [1])
    assert stream.query()


def test_a_thread_that_waits_hears_of_a_dead_peer(
    host: Device, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    endpoint, semaphore, _ = bridged(host, scope, peer=peer.pid)
    endpoint.reached = 1
    semaphore.host_wait(1, timeout=LIMIT)
    peer.kill()
    peer.wait()
    semaphore.host_wait(1, timeout=LIMIT)  # what it signalled counts
    with pytest.raises(gi.PeerError, match=rf"process {peer.pid}\b"):
        semaphore.host_wait(2, timeout=LIMIT)
