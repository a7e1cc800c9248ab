"""The base of the public classes: `close` and its meaning. See `lifetime` for the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

from .._arguments import NoCopy, check_timeout
from ..errors import ResourceBusyError, warn_leak
from .drain import call_back, drain, wait_for
from .lifetime import LIVE, Lifetime, add_callback, retire
from .monitor import dropped, interrupted


def undo(what: str, release: Callable[[], None]) -> None:
    """Release what a failed call had made. If this fails too, warn: the caller still raises the first failure."""
    try:
        release()
    except Exception as error:
        warn_leak(f"releasing {what} failed: {error}")


class Resource(NoCopy):
    """An object with a native half. Only factories make it; `close()` ends it."""

    def __init__(self, lifetime: Lifetime, *parents: Resource) -> None:
        self.lifetime = lifetime
        lifetime.warns = True
        self._parents = parents  # children hold parents

    @property
    def _handle(self) -> Any:
        """The backend's handle."""
        return self.lifetime.handle

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.lifetime.label

    @property
    def closed(self) -> bool:
        """Whether `close` was called on the object or its parent."""
        return self.lifetime.state is not LIVE

    def close(self, timeout: float | None = None) -> None:
        """End use at once. Idempotent; never blocks unless `timeout` is given.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the native release. Without it, the release happens later by itself.

        Raises
        ------
        ResourceBusyError
            `timeout` passed, and pending work or exported arrays still use the object. It stays closed, and the
            native release still happens later.

        Examples
        --------
        >>> allocation = device.allocate(4096)
        >>> array = np.asarray(allocation.buffer.view(16))
        >>> allocation.close(timeout=0)
        Traceback (most recent call last):
            ...
        gpuinterop.errors.ResourceBusyError: ...
        >>> del array
        >>> allocation.close(timeout=10)
        """
        check_timeout(timeout)
        if interrupted():  # in a signal handler that struck inside a transition
            dropped.append(self.lifetime)
            return
        retire(self.lifetime)
        drain()
        self._wait(self.lifetime, timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the native release has happened; at once if it already has.

        The exporter of the memory or semaphore may free its own only then. The callback also runs where the release
        has failed, of which a `LeakedResourceWarning` tells before. It runs on the thread that drains, and must not
        block. Its exceptions go to `sys.unraisablehook`.

        Examples
        --------
        >>> memory = device.import_memory(gi.OpaqueFd(fd), size=65536)
        >>> memory.on_released(lambda: print("released"))
        >>> memory.close()
        released
        """
        self._on_released(self.lifetime, callback)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # by then there may be no `sys`
        lifetime = getattr(self, "lifetime", None)
        if lifetime is None or lifetime.state is not LIVE or _ending():
            return
        dropped.append(lifetime)  # before the warning, which may be an error
        if lifetime.warns:
            warn_leak(f"{lifetime.label}{lifetime.made_at} was dropped without close()")

    def __repr__(self) -> str:
        return f"<{self.label}{' closed' if self.closed else ''}>"

    def _wait(self, lifetime: Lifetime, timeout: float | None) -> None:
        """Wait for a release, as `close` does."""
        if timeout is not None and not wait_for(lifetime, check_timeout(timeout)):
            after = f"close({float(timeout):g})"  # infinity, too: what cannot be released ends the wait
            raise ResourceBusyError(f"{self.label} is still in use after {after}: {lifetime.what_holds()}.")

    def _on_released(self, lifetime: Lifetime, callback: Callable[[], None]) -> None:
        add_callback(lifetime, callback)
        call_back()

    def _check_open(self) -> None:
        if self.lifetime.state is not LIVE:
            raise self.lifetime.refusal()
