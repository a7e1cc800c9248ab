"""Streams that the HIP backend keeps for the next ones: a test that counts streams, or their calls, knows of them."""

from typing import Any

from gpuinterop._core.discovery import _loaded


def count_idle_streams() -> int:
    backend: Any = getattr(_loaded.get("hip"), "driver", None)
    return sum(map(len, backend._driver.idle_streams.values())) if backend else 0


def destroy_idle_streams(backend: Any) -> None:
    """Let the next stream be a new one. No other thread may call HIP."""
    for kept in backend._driver.idle_streams.values():
        while kept:
            kept.pop()[1].release()
