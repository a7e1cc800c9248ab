"""Lifetime: close, retire, warn.

`close()` ends use at once and never blocks. The native release is *retired*: it happens once the events recorded at
close are done, the children are released and no exported array is left. Retired releases drain at the next import,
close, synchronize and at exit.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, Self

from ..errors import (
    GpuInteropError,
    InvalidArgumentError,
    LeakedResourceWarning,
    ResourceBusyError,
    ResourceClosedError,
)

if TYPE_CHECKING:
    from ..backend import Backend, Native
    from .stream import Stream

_EXIT_GRACE_S = 2.0  # at exit pending work gets this long; what is still busy then is left to the process's end


class Exports:
    """Counts the arrays that others hold over one mapping."""

    def __init__(self) -> None:
        self._tokens: weakref.WeakSet[ExportToken] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._tokens)

    def token(self, keep: object) -> ExportToken:
        token = ExportToken(keep)
        self._tokens.add(token)
        return token


class ExportToken:
    """Alive as long as one exported array."""

    __slots__ = ("__weakref__", "keep")

    def __init__(self, keep: object) -> None:
        self.keep = keep


class Retirement:
    """One native release that waits for its time."""

    def __init__(
        self,
        label: str,
        release: Callable[[], None],
        *,
        streams: Iterable[Stream],
        after: Iterable[Retirement] = (),
        exports: Exports | None = None,
    ) -> None:
        self.label = label
        self.done = False
        self._release = release
        self._streams = list(streams)
        self._after = [earlier for earlier in after if not earlier.done]
        self._exports = exports
        self._events: list[Native] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._callback_lock = threading.RLock()

    def record(self, backend: Backend) -> None:
        """Take the events, unless exported arrays can still cause work that they would miss."""
        if self._events is not None or (self._exports is not None and len(self._exports)):
            return
        self._events = []
        for stream in self._streams:
            if (native := stream._native_if_alive()) is not None:
                try:
                    self._events.append(backend.record(native))
                except GpuInteropError:
                    continue  # a stream that cannot record an event any more runs nothing either
        self._streams.clear()

    def ready(self, backend: Backend) -> bool:
        self.record(backend)
        if self._events is None:
            return False
        while self._events:
            try:
                if not backend.is_done(self._events[-1]):
                    return False
            except GpuInteropError:
                pass  # the stream has failed: nothing behind the failure will ever run
            backend.destroy_event(self._events.pop())
        self._after = [earlier for earlier in self._after if not earlier.done]
        return not self._after

    def blockers(self) -> str:
        """What the release waits for, for messages."""
        if self._exports is not None and len(self._exports):
            return f"{len(self._exports)} exported array(s) are still alive"
        for earlier in self._after:
            if not earlier.done:
                return f"{earlier.label} is still in use ({earlier.blockers()})"
        return "work enqueued before close() is still pending"

    def finish(self) -> None:
        try:
            self._release()
        except GpuInteropError as error:
            warnings.warn(f"releasing {self.label} failed: {error}", LeakedResourceWarning, stacklevel=2)
        with self._callback_lock:
            self.done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        with self._callback_lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()


class Reclaimer:
    """The retired releases of one device, and its live streams."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._pending: deque[Retirement] = deque()
        self._draining = threading.Lock()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        _reclaimers.add(self)

    def add_stream(self, stream: Stream) -> None:
        self._streams.add(stream)

    def streams(self) -> list[Stream]:
        return list(self._streams)

    def retiring_streams(self) -> list[Retirement]:
        """Closed streams whose work is not done: memory closed after them must wait for it too."""
        return [entry for entry in list(self._pending) if isinstance(entry, StreamRetirement)]

    def retire(self, retirement: Retirement) -> None:
        retirement.record(self.backend)
        self._pending.append(retirement)

    def drain(self) -> None:
        """Release whatever is ready; never blocks.

        Not re-entered: a finalizer that runs while this thread drains, or a second thread, leaves the work to the one
        that is at it.
        """
        if not self._draining.acquire(blocking=False):
            return
        try:
            progress = True
            while progress:
                progress = False
                for _ in range(len(self._pending)):
                    entry = self._pending.popleft()
                    if entry.ready(self.backend):
                        entry.finish()
                        progress = True
                    else:
                        self._pending.append(entry)
        finally:
            self._draining.release()

    def wait(self, retirement: Retirement | None, timeout: float) -> bool:
        """Drain until `retirement` (None: everything) is done; False when `timeout` seconds passed."""
        deadline = time.monotonic() + timeout
        pause = 20e-6
        while True:
            self.drain()
            if retirement.done if retirement is not None else not self._pending:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)


class StreamRetirement(Retirement):
    """A closed stream."""


_reclaimers: weakref.WeakSet[Reclaimer] = weakref.WeakSet()


@atexit.register
def _drain_at_exit() -> None:
    for reclaimer in list(_reclaimers):
        reclaimer.wait(None, _EXIT_GRACE_S)


class Resource:
    """Something with a native half. Made by factories only; ends with `close()`."""

    _noun: ClassVar[str] = "resource"
    _warns: ClassVar[bool] = True
    _serial: ClassVar[int] = 0

    def __init__(self, reclaimer: Reclaimer, *, parent: Resource | None = None) -> None:
        Resource._serial += 1
        self._label = f"{self._noun} #{Resource._serial}"
        self._reclaimer = reclaimer
        self._parent = parent  # children hold parents
        self._children: weakref.WeakSet[Resource] = weakref.WeakSet()
        self._retirement: Retirement | None = None
        self._on_released: list[Callable[[], None]] = []
        self._closed = False
        self._once = [True]  # popped by the one close that counts: list.pop is atomic, and safe in a finalizer
        if parent is not None:
            parent._children.add(self)

    # -- what a subclass says ----------------------------------------------------------------------------------

    def _make_retirement(self, after: list[Retirement]) -> Retirement | None:
        """The native release; None where there is nothing native."""
        raise NotImplementedError

    # -- public ------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return self._label

    @property
    def closed(self) -> bool:
        """Whether `close` was called, here or on the parent."""
        return self._closed

    def close(self, timeout: float | None = None) -> None:
        """End use at once. Idempotent; never blocks unless `timeout` is given.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the native release; without it the release happens later, by itself.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and pending work or exported arrays still use the object. It stays closed, and is
            released later all the same.
        """
        if timeout is not None and not timeout >= 0:
            raise InvalidArgumentError("timeout", f"must be 0 or more seconds, not {timeout!r}.")
        self._retire()
        self._reclaimer.drain()
        if timeout is not None and self._retirement is not None:
            self._await_release(timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the native release has happened; at once if it has.

        For owners of the memory or semaphore on the other side, who may free theirs only afterwards. The callback
        runs on whichever thread drains; it must not block.
        """
        if self._retirement is not None:
            self._retirement.when_done(callback)
        elif self._closed:
            callback()
        else:
            self._on_released.append(callback)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        once = getattr(self, "_once", None)
        if not once or sys.is_finalizing():
            return
        if self._warns:
            warnings.warn(
                f"{self._label} was dropped without close()", LeakedResourceWarning, stacklevel=2, source=self
            )
        self._retire()

    def __repr__(self) -> str:
        return f"<{self._label}{' closed' if self._closed else ''}>"

    # -- inside --------------------------------------------------------------------------------------------------

    def _await_release(self, timeout: float) -> None:
        assert self._retirement is not None
        if not self._reclaimer.wait(self._retirement, timeout):
            raise ResourceBusyError(
                f"{self._label} is still in use {timeout:g} s after close(): {self._retirement.blockers()}."
            )

    def _retire(self) -> None:
        try:
            self._once.pop()
        except IndexError:
            return
        self._closed = True
        after = []
        for child in list(self._children):
            child._retire()
            if child._retirement is not None:
                after.append(child._retirement)
        retirement = self._make_retirement(after)
        callbacks, self._on_released = self._on_released, []
        if retirement is None:
            for callback in callbacks:
                callback()
            return
        self._retirement = retirement
        for callback in callbacks:
            retirement.when_done(callback)
        self._reclaimer.retire(retirement)

    def _check_open(self) -> None:
        if self._closed:
            raise ResourceClosedError(f"{self._label} is closed; make a new one, or close it later.")
