"""A second process of the bench, which runs functions of this package."""

from __future__ import annotations

import faulthandler
import gc
import resource
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

from .clock import NotMeasured, explain

LIFE_S: Final = 1800.0
"""Longest life of a process. One that hangs prints its stacks and exits."""


class Process(ProcessPoolExecutor):
    """A process with a Python of its own, in which functions keep what they keep in their modules."""

    def __init__(self) -> None:
        super().__init__(1, get_context("spawn"), _start)

    def ask(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Start a function; the result of the future raises `NotMeasured` if it fails."""
        return self.submit(_run, function, arguments)

    def __call__(self, function: Callable[..., Any], *arguments: object) -> Any:
        return self.ask(function, *arguments).result()


def _start() -> None:
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # on the host, tensors are descriptors
    gc.disable()


def _run(function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    gc.collect()
    try:
        return function(*arguments)
    except Exception as error:  # sent as text: not every error can be pickled
        raise NotMeasured(*explain(error)) from None
