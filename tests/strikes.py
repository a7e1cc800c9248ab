"""Interrupts at every place where CPython looks for them, one after the other.

A signal is sent before a bytecode instruction of what is tested, or of what that calls: the first, then the next one
after that at which it was noticed before, until it was not noticed any more. So its handler raises once at each place
where CPython looks at signals: after each call of C's, at the entry of each function, where each loop turns back; also
in Python's code that C calls, as the bindings do. In `folder` alone, where one is given: what the code of others, a
scripted backend's, would lose is not the library's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar

import gpuinterop
from tests.simulated.build import build

T = TypeVar("T")

OURS: Final = os.path.dirname(gpuinterop.__file__) + os.sep
"""The library's own code."""


class Struck(KeyboardInterrupt):
    """What the signal's handler raises."""


class Strikes:
    """Where the latest call was struck; with `second`, once more that many instructions behind the first."""

    def __init__(self, folder: str = "", second: int = 0) -> None:
        library = ctypes.CDLL(str(build("strike")))
        self._steps = ctypes.c_long.in_dll(library, "strike_steps")
        self._at = ctypes.c_long.in_dll(library, "strike_at")
        self._entered = ctypes.c_long.in_dll(library, "strike_entered")
        self._folder = folder.encode()
        self._within = ctypes.c_char_p.in_dll(library, "strike_folder")
        self._second = second
        self._trace = library.strike_trace
        self._set_trace = ctypes.pythonapi.PyEval_SetTrace
        self._set_trace.argtypes, self._set_trace.restype = (ctypes.c_void_p, ctypes.py_object), None
        sys._getframe().f_trace_opcodes = True  # 3.12 traces instructions where a frame wanted that before
        self._noticed = 0
        self.where = ""
        self.raised = Struck()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._noticed:
            self._noticed = self._entered.value  # how many instructions there were when this function was entered
            self._at.value = self._steps.value + self._second
        assert frame is not None
        self.where += f" {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        raise Struck(self.where)

    @contextmanager
    def _armed(self) -> Iterator[None]:
        before = signal.signal(signal.SIGUSR1, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)

    def at(self, step: int, act: Callable[[], T]) -> tuple[bool, T | None]:
        """Do it, with the signal before that instruction; whether the signal was noticed, and what it returned."""
        self._steps.value, self._at.value, self._within.value = 0, step, self._folder
        self._noticed, self.where, self.raised = 0, "", Struck()
        made: list[T] = []
        with self._armed():
            try:
                self._set_trace(ctypes.cast(self._trace, ctypes.c_void_p), None)
                try:
                    made.extend(map(_called, (act,)))
                finally:
                    self._set_trace(None, None)
            except Struck as raised:
                assert self._noticed >= step
                self.raised = raised.with_traceback(None)  # which would keep what the call has made
        return self._noticed > 0, made[0] if made else None  # a finalizer loses an interrupt

    def everywhere(self, prepare: Callable[[], Any], act: Callable[[Any], Any], finish: Callable[..., object]) -> int:
        """Strike `act`, of what `prepare` returns, at each place; `finish` is told whether, of what, and what it made.

        Returns how many places there were; fewer where `finish` returns True, which is the end.
        """
        step = places = 0
        struck = True
        while struck:
            given = prepare()
            struck, made = self.at(step + 1, lambda given=given: act(given))  # type: ignore[misc]
            places += struck
            step = self._noticed
            if finish(struck, given, made) is True:
                break
        return places


def _called(act: Callable[[], T]) -> T:
    return act()
