"""How long a test waits for what must happen."""

from __future__ import annotations

from typing import Final

LIMIT: Final = 300.0
"""Seconds. It only ends a hang: a machine that does other work may need a minute for what takes a millisecond."""
