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


def as_c(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of bindings that CPython's profiler is not told of: what comes back from it is struck as well."""

    def c_call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return c_call


_C_CALL = as_c(print).__code__


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


def strike(
    call: Callable[[], object], first: int, second: int | None = None, *, roots: tuple[str, ...] = (_OURS,)
) -> Struck:
    """Raise KeyboardInterrupt at the `first` place of the call, and at the `second` one behind that.

    The second strikes at entries and loops only: CPython takes a profiler that has raised away. `roots` are the folders
    whose code is struck.
    """
    struck = Struck()
    left = [first, -1 if second is None else second]

    def _is_ours(code: CodeType) -> bool:
        return code.co_filename.startswith(roots)

    def _is_called_by_us(frame: FrameType) -> bool:
        return frame.f_back is not None and _is_ours(frame.f_back.f_code)

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            backends = code.co_qualname == "_strict.<locals>.call" and _is_called_by_us(frame)
            what = "at" if _is_ours(code) or backends else ""
        elif event == "c_return":
            what = f"behind {arg.__name__} in" if _is_ours(code) else ""
        else:
            what = (
                "behind a call of C's by" if code is _C_CALL and event == "return" and _is_called_by_us(frame) else ""
            )
            frame = frame.f_back or frame
        if what and arg is not sys.setprofile:
            left[0] -= 1
            if left[0] == 0:
                struck.first = _place(frame, what)
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
        struck.error = error.with_traceback(None)  # whose frames would keep alive what is to be released
        error.__context__ = None
    finally:
        sys.unraisablehook = hook
    return struck


def strikes(
    make: Callable[[], W],
    call: Callable[[W], object],
    *,
    second: int | None = None,
    step: int = 1,
    roots: tuple[str, ...] = (_OURS,),
) -> Iterator[tuple[W, Struck]]:
    """Everything made anew, and struck at the first place, the second, ... until there are no more."""
    for first in range(1, _MOST, step):
        world = make()
        struck = strike(lambda world=world: call(world), first, second, roots=roots)  # type: ignore[misc]
        if not struck.first:
            return
        yield world, struck
    raise AssertionError(f"more than {_MOST} places")
