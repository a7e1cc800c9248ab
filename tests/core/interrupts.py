"""Ctrl-C where CPython lets it in: behind every call of C, at the entry of every function and at the end of a loop.

`strike` raises at the k-th such place of a call, and once more where a second one is asked for. `strikes` goes through
all of them. Only the library's own code is struck, and the entry of its backend's methods: what is behind that is the
backend's, and a hook of the scripted one (`FakeBackend.at`) raises there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dis import opmap
from types import CodeType, FrameType
from typing import Any, TypeVar

import gpuinterop

W = TypeVar("W")

_OURS = os.path.dirname(gpuinterop.__file__) + os.sep
_JUMPS = {number for name, number in opmap.items() if "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name}
_MOST = 5000


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def _is_backends_entry(frame: FrameType) -> bool:
    back = frame.f_back
    return frame.f_code.co_qualname == "_strict.<locals>.call" and back is not None and _is_ours(back.f_code)


@dataclass
class Struck:
    """What has happened to a call."""

    first: str = ""
    """Where; empty when the call has fewer places."""
    second: str = ""
    error: BaseException | None = None
    result: Any = None


def _place(frame: FrameType, what: str) -> str:
    return f"{what} {frame.f_code.co_qualname}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def strike(call: Callable[[], object], first: int, second: int | None = None) -> Struck:
    """Raise KeyboardInterrupt at the `first` place of the call, and at the `second` one behind that.

    The second strikes at entries and loops only: CPython takes a profiler that has raised away.
    """
    struck = Struck()
    left = [first, -1 if second is None else second]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        entry = event == "call" and (_is_ours(frame.f_code) or _is_backends_entry(frame))
        if (entry or (event == "c_return" and _is_ours(frame.f_code))) and arg is not sys.setprofile:
            left[0] -= 1
            if left[0] == 0:
                struck.first = _place(frame, "at" if entry else f"behind {arg.__name__} in")
                raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not _is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if struck.first:
            again(frame, "at")
        return look

    def look(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _JUMPS:
            if struck.first:
                again(frame, "loop in")
            else:
                left[0] -= 1
                if left[0] == 0:
                    struck.first = _place(frame, "loop in")
                    raise KeyboardInterrupt
        return look

    def again(frame: FrameType, what: str) -> None:
        left[1] -= 1
        if left[1] == 0:
            struck.second = _place(frame, what)
            raise KeyboardInterrupt

    before, traced, hook = sys.getprofile(), sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None  # of finalizers, which lose an interrupt
    try:
        sys.settrace(trace)
        sys.setprofile(profile)
        try:
            struck.result = call()
        finally:
            sys.setprofile(before)
            sys.settrace(traced)
    except BaseException as error:
        struck.error = error
    finally:
        sys.unraisablehook = hook
    return struck


def strikes(
    make: Callable[[], W], call: Callable[[W], object], *, second: int | None = None, step: int = 1
) -> Iterator[tuple[W, Struck]]:
    """Everything made anew, and struck at the first place, the second, ... until there are no more."""
    for first in range(1, _MOST, step):
        world = make()
        struck = strike(lambda world=world: call(world), first, second)  # type: ignore[misc]
        if not struck.first:
            return
        yield world, struck
    raise AssertionError(f"more than {_MOST} places")
