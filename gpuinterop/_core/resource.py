"""The base of the public classes that have a native part: `close`, `on_released`, and the warning of a finalizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

from .._arguments import NoCopy, check_timeout
from ..errors import ResourceBusyError, warn_leak
from .lifetime import LIVE, Lifetime, add_callback, dropped, interrupted, retire
from .release import call_back, drain, wait_for


def undo(what: str, release: Callable[[], None]) -> None:
    """Release what a failed call has made. If that fails too, only warn: the caller raises the first failure."""
    try:
        release()
    except Exception as error:
        warn_leak(f"releasing {what} failed: {error}")


class Resource(NoCopy):
    """An object with a native part. Functions and methods of gpuinterop return it; `close()` ends it.

    Examples
    --------
    >>> allocation = device.allocate(4096)
    >>> allocation.on_released(lambda: print("released"))
    >>> array = np.asarray(allocation.buffer.view(16))
    >>> allocation.close(timeout=0)
    Traceback (most recent call last):
        ...
    gpuinterop.errors.ResourceBusyError: ...
    >>> del array
    >>> allocation.close(timeout=10)
    released
    """

    def __init__(self, lifetime: Lifetime, *parents: Resource) -> None:
        self.lifetime = lifetime
        lifetime.warns = True
        self._parents = parents  # kept alive by their children

    @property
    def _handle(self) -> Any:
        return self.lifetime.handle

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.lifetime.label

    @property
    def closed(self) -> bool:
        """Whether the object or its parent was closed."""
        return self.lifetime.state is not LIVE

    def close(self, timeout: float | None = None) -> None:
        """End use at once. Idempotent. The native release happens by itself later; wait up to `timeout` seconds for it.

        Without `timeout`, the call does not block.

        Raises
        ------
        ResourceBusyError
            `timeout` seconds passed, but pending work or exported arrays still use the object. It stays closed, and the
            native release will still happen.
        """
        check_timeout(timeout)
        if interrupted():  # the caller is a signal handler inside a transition
            dropped.append(self.lifetime)
            return
        retire(self.lifetime)
        drain()
        self._wait(self.lifetime, timeout)

    def on_released(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the native release has happened, or at once if it already has.

        Only then can the exporter free its memory or semaphore. The callback runs on the thread that drains, and must
        not block. Its exceptions go to `sys.unraisablehook`. If the release fails, a `LeakedResourceWarning` is issued
        first, then the callback runs.
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
        if timeout is not None and not wait_for(lifetime, check_timeout(timeout)):
            after = f"close({float(timeout):g})"  # even for infinity, if the object can never be released
            raise ResourceBusyError(f"{self.label} is still in use after {after}: {lifetime.what_holds()}.")

    def _on_released(self, lifetime: Lifetime, callback: Callable[[], None]) -> None:
        add_callback(lifetime, callback)
        call_back()

    def _check_open(self) -> None:
        if self.lifetime.state is not LIVE:
            raise self.lifetime.refusal()
