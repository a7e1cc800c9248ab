"""Calls that tests make in other threads."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.limits import LIMIT


@contextlib.contextmanager
def beside(*calls: Callable[[], Any]) -> Iterator[None]:
    """While the block runs, threads make the calls; behind it they have ended, and what one raised is raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread does not end"
    for error in failures:
        raise error


def elsewhere(call: Callable[..., Any], *arguments: Any) -> None:
    """Make a call in another thread, and wait for its end."""
    with beside(functools.partial(call, *arguments)):
        pass
