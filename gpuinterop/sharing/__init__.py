"""Arrays that exist, shared with any process of the host."""

from __future__ import annotations

from .attachment import AttachedArrays, acquire, attach
from .offer import ArrayShare, share

__all__ = ["ArrayShare", "AttachedArrays", "acquire", "attach", "share"]
