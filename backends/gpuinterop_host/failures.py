"""A failure that is remembered and raised many times, in many threads."""

from __future__ import annotations

import copy


def again(failure: BaseException) -> BaseException:
    """A copy of `failure` to raise, with the first one as its cause.

    Raising the same object twice would pile up tracebacks, and two threads would write to it at once.
    """
    try:
        fresh = copy.copy(failure)
    except Exception:
        return failure  # not ours, and it cannot be copied
    if not isinstance(fresh, type(failure)):
        return failure
    fresh.__cause__ = failure
    return fresh
