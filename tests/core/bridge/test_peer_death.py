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

from .scripted import LIMIT, Scripted, WordsBackend, blocked, end, lane_of, until, word_of


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
    with pytest.raises(gi.PeerError, match=rf"{peer.pid}, which was to signal {re.escape(semaphore.label)}, has died"):
        stream.synchronize(LIMIT)
    other = scope.enter_context(host.create_stream())
    with pytest.raises(gi.PeerError):
        semaphore.wait(other)
    end(semaphore)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_the_peer_signalled_before_it_died_counts(
    device: Device, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    endpoint = Scripted()
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint, peer=peer.pid))
    stream = scope.enter_context(device.create_stream())
    peer.kill()
    peer.wait()
    looks = itertools.count()

    def last_words() -> None:  # between the look and that for the process
        if next(looks) == 1:
            endpoint.reached = 3

    endpoint.on_wait = last_words
    semaphore.wait(stream, 3)
    until(lambda: word_of(semaphore) == 3)
    assert stream.query()


def test_a_peer_that_has_gone_may_still_be_told(
    device: Device, backend: WordsBackend, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    """It was to signal, and no stream waits for it: that it ends is no failure."""
    endpoint = Scripted()
    bridge = scope.enter_context(Bridge(device))
    semaphore = scope.enter_context(bridge.from_endpoint(endpoint, peer=peer.pid))
    waiting = scope.enter_context(bridge.from_endpoint(other := Scripted()))
    stream, second = (scope.enter_context(device.create_stream()) for _ in range(2))
    semaphore.signal(stream, 1)
    peer.kill()
    peer.wait()
    lane = lane_of(semaphore)
    for _ in range(3):  # each time past the pause between two looks for the process
        lane._peer_checked = 0.0
        other.reached += 1
        waiting.wait(second, other.reached)
        until(lambda: word_of(waiting) == other.reached)
    backend.run_writes()
    until(lambda: endpoint.told == [1])
    assert stream.query()


def test_a_thread_that_waits_hears_of_a_dead_peer(
    host: Device, scope: ExitStack, peer: subprocess.Popen[bytes]
) -> None:
    endpoint = Scripted()
    semaphore = scope.enter_context(scope.enter_context(Bridge(host)).from_endpoint(endpoint, peer=peer.pid))
    endpoint.reached = 1
    semaphore.host_wait(1, timeout=LIMIT)
    peer.kill()
    peer.wait()
    semaphore.host_wait(1, timeout=LIMIT)  # what it signalled counts
    with pytest.raises(gi.PeerError, match=f"process {peer.pid}, which was to signal"):
        semaphore.host_wait(2, timeout=LIMIT)


def test_a_peer_that_is_none(device: Device, backend: WordsBackend, scope: ExitStack) -> None:
    bridge = scope.enter_context(Bridge(device))
    gone = subprocess.Popen(["true"])
    gone.wait()
    fd = os.eventfd(0)
    handle = gi.EventFd(fd)
    endpoint = Scripted()
    before = len(os.listdir("/proc/self/fd"))
    for call in (
        lambda: bridge.import_semaphore(handle, peer=gone.pid),
        lambda: bridge.from_endpoint(endpoint, peer=gone.pid),
    ):
        with pytest.raises(gi.PeerError, match="has it died already"):
            call()
    assert handle.fd == fd
    assert endpoint.closed == 0
    assert backend.pins == {}
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)
