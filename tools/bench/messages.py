"""Send small frames to another process and back: with `gpuinterop.publish` and with iceoryx2."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np

from gpuinterop import DeviceNotFoundError, get_backend, publish, subscribe

from .clock import OURS, Figure
from .device import Bench
from .processes import LIFE_S, Process

SIZE: Final = 1024
_COUNT: Final = 20
"""Round trips per time."""
_SENT: Final = bytes(range(256)) * (SIZE // 256)


class _Ours(ExitStack):
    """One end with gpuinterop. On a GPU, the frames are in its memory, and the ends copy them to and from the host."""

    def __init__(self, backend: str, out: str, back: str) -> None:
        super().__init__()
        device = get_backend(backend).device()
        self._stream = None if device.info.is_cpu else self.enter_context(device.create_stream())
        self._writer = self.enter_context(publish(out, SIZE, device=device, slots=4))
        self._reader = self.enter_context(subscribe(back, timeout=LIFE_S))

    def send(self, data: bytes) -> None:
        with self._writer.write(self._stream) as frame:
            frame.copy_from(np.frombuffer(data, np.uint8), stream=self._stream)

    def receive(self) -> bytes:
        with self._reader.next().read(self._stream) as view:
            if self._stream is not None:
                self._stream.synchronize()
            return bytes(view.to_numpy())


class _Iceoryx2(ExitStack):
    """One end with iceoryx2, as its examples ``publish_subscribe_dynamic_data`` and ``event`` write it."""

    def __init__(self, backend: str, out: str, back: str) -> None:
        import iceoryx2 as iox2  # type: ignore[import-not-found,unused-ignore]

        super().__init__()
        iox2.set_log_level(iox2.LogLevel.Error)
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)

        def services(name: str) -> tuple[Any, Any]:
            frames, events = (node.service_builder(iox2.ServiceName.new(name)) for _ in range(2))
            return frames.publish_subscribe(
                iox2.Slice[ctypes.c_uint8]
            ).open_or_create(), events.event().open_or_create()

        (frames_out, events_out), (frames_back, events_back) = services(out), services(back)
        self._publisher = frames_out.publisher_builder().initial_max_slice_len(SIZE).create()
        self._notifier = events_out.notifier_builder().create()
        self._subscriber = frames_back.subscriber_builder().create()
        self._listener = events_back.listener_builder().create()
        for port in (self._publisher, self._notifier, self._subscriber, self._listener):
            self.callback(port.delete)

    def send(self, data: bytes) -> None:
        sample = self._publisher.loan_slice_uninit(SIZE)
        ctypes.memmove(sample.payload().as_ptr(), data, SIZE)
        sample.assume_init().send()
        self._notifier.notify()

    def receive(self) -> bytes:
        while (sample := self._subscriber.receive()) is None:
            self._listener.blocking_wait()
        return ctypes.string_at(sample.payload().as_ptr(), SIZE)


_KINDS: Final[Mapping[str, type[_Ours | _Iceoryx2]]] = {OURS: _Ours, "iceoryx2": _Iceoryx2}
_ends: dict[str, _Ours | _Iceoryx2] = {}
"""The ends of the other process."""


def round_trips(bench: Bench) -> Iterator[Figure]:
    """Both ends wait for each frame."""
    if not bench.works:
        raise DeviceNotFoundError(f"expected a driver that does its work, got {bench.stand_in}, which does nothing")
    comparison = bench.compare(200)
    ping, pong = f"bench-{os.getpid()}-ping", f"bench-{os.getpid()}-pong"
    with ExitStack() as scope:
        other = scope.enter_context(Process())
        scope.callback(other, _close)
        for name, kind in _KINDS.items():
            with comparison.noting(name):
                opened = other.ask(_open, bench.backend.name, name, pong, ping)
                end: Any = scope.enter_context(kind(bench.backend.name, ping, pong))
                opened.result()
                comparison.add(name, partial(_round_trips, end, other, name), partial(_check, end, other, name))
        yield comparison.measure().figure(f"frame of {SIZE:,} bytes to another process and back", "round trip")


def _round_trips(end: _Ours | _Iceoryx2, other: Process, name: str) -> Mapping[str, float]:
    answer = other.ask(_echo, name, _COUNT + 1)
    end.send(_SENT)
    end.receive()  # the other process is awake
    began = time.perf_counter_ns()
    for _ in range(_COUNT):
        end.send(_SENT)
        end.receive()
    took = time.perf_counter_ns() - began
    answer.result()
    return {"": took / _COUNT / 1000}


def _check(end: _Ours | _Iceoryx2, other: Process, name: str) -> None:
    other.ask(_echo, name, 1)
    end.send(sent := _SENT[::-1])
    if (received := end.receive()) != sent:
        raise ValueError(f"expected the bytes that were sent, got {received[:8]!r}...")


# -- in the other process ----------------------------------------------------------------------------------------------


def _open(backend: str, name: str, out: str, back: str) -> None:
    _ends[name] = _KINDS[name](backend, out, back)


def _echo(name: str, count: int) -> None:
    for _ in range(count):
        _ends[name].send(_ends[name].receive())


def _close() -> None:
    while _ends:
        _ends.popitem()[1].close()


PARTS: Final = {"sharing frames": round_trips}
