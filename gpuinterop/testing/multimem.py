"""The instructions that can access a multicast mapping, as a backend offers them for the kit's check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from ..backend import MulticastBackend

if TYPE_CHECKING:
    from .._core.memory import Buffer
    from .._core.multicast import MulticastMapping
    from .._core.stream import Stream

__all__ = ["multimem_add", "multimem_store"]

_LIMIT: Final = 300.0


def multimem_store(
    stream: Stream,
    mapping: MulticastMapping,
    value: int,
    count: int,
    *,
    first: int = 0,
    timeout: float | None = _LIMIT,
) -> None:
    """Store a word `count` times, from the word `first` on, to all bound memory.

    Returns when that is done, or raises `SemaphoreTimeoutError` after `timeout` seconds (None waits for ever).
    """
    _backend(stream).multimem_store(stream._handle, mapping.ptr + 4 * first, value, count)
    stream.synchronize(timeout)


def multimem_add(
    stream: Stream, target: Buffer, mapping: MulticastMapping, count: int, *, timeout: float | None = _LIMIT
) -> None:
    """Write the sums of `count` words over all bound memory to `target`; returns as `multimem_store` does."""
    _backend(stream).multimem_add(stream._handle, target.ptr, mapping.ptr, count)
    stream.synchronize(timeout)


def _backend(stream: Stream) -> MulticastBackend:
    return cast(MulticastBackend, stream.device.driver)  # the caller has required the capabilities
