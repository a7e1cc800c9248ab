"""Natives: the driver's objects, and what the release of each has to wait for.

Invariants of this module and of those that stand on it (`native_stream`, `gate`, `drain`):

1. A call never uses a released handle, and a handle is never released while a call with it is under way.
2. A native is released only when it has no marks, nothing stands on it, and all its uses have passed.
3. A release that blocks the device runs only while no known wait is pending (`gate`).
4. A pipeline that is never idle still releases.
5. Work is ordered behind all earlier work on the same bytes.
6. A native call that fails in a drain is reported; the drain does not raise it, and it does not mask other errors.
7. After an exception at any point, no lock is held and no mark is left. At most the object that was being made or
   released, and what it stands on, stays until the exit.
8. Objects made before a fork are dead in the child.
9. The exit takes two seconds in all; from then on finalizers do nothing.

A call takes no lock. It marks every native that it uses, then looks at their states, then calls::

    calls = native.calls
    calls += MARK
    try:
        if native.state is not LIVE: ...
        ...
    finally:
        del calls[-1]

`retire` changes the state, and a drain looks at the marks later: it sees a call that marked before that look, and a
call that marks after it sees the new state. Python makes no call between ``+=`` and ``try``, so no exception strikes
there.

An exported array marks its mapping in the same way for as long as it lives (`memory.Hold`). Its end takes the mark off,
then looks at the state: if a drain still saw the mark, the mapping was closed by then, and the array's end queues it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from .._arguments import Sole
from ..backend import left_to_core
from ..errors import GpuInteropError, ResourceClosedError
from .monitor import after_fork, dropped, locked

if TYPE_CHECKING:
    from .gate import Gate
    from .native_stream import NativeStream, Point, Streams

T = TypeVar("T")

MARK: Final = (None,)
Marks: type[list[Any]] = list
"""One entry per call under way, or per array."""


class State(Enum):
    __hash__ = object.__hash__  # C code: Enum's own runs Python code at each look whether a state is in GONE

    BORN = "being made"
    LIVE = "open"
    RETIRED = "closed"
    RELEASING = "being released"
    RELEASED = "released"
    LEAKED = "closed, and could not be released"
    DEAD = "of the parent process"


BORN, LIVE, RETIRED, RELEASING, RELEASED, LEAKED, DEAD = State
GONE: Final = frozenset({RELEASED, LEAKED, DEAD})


class Standing(Enum):
    """What happens to a native when one that it stands on is closed."""

    CHILD = "it is closed as well"
    HOLDS = "it keeps the native"
    YIELDS = "it goes when the native may be released"


_serials = itertools.count(1)
_alive: dict[Native, None] = {}

waiting_for_a_look: dict[Native, None] = {}
"""Retired natives that may be ready for release."""
endings: dict[Native, object] = {}
"""Released natives whose callbacks the next drain runs, outside the monitor; and what each has kept, which it drops."""
struck: list[Native] = []
"""Natives that an exception struck while they were made or released; nothing tells how far the driver got."""


class Native(Sole):
    """One driver object, or an object of this library in its place.

    Parameters
    ----------
    noun : str
        Name in messages.
    release : callable, optional
        Called with the handle, once.
    parents : sequence of Native
        Natives that it stands on; they are released later.
    how : Standing
        How it stands on them.
    gate : Gate, optional
        Given if the release blocks the device: says when it may run.
    keep : object
        Object that must live as long: another library's stream, a handle's owner.
    device : Streams, optional
        Device that it is an object of; without one, it is one of its parents' devices.
    """

    __slots__ = (
        "behind", "callbacks", "calls", "device", "ends_with_children", "gate", "handle", "how", "keep", "label",
        "parents", "problem", "release", "standing", "state", "tellers", "untracked", "uses",
    )  # fmt: skip

    arrays: list[Any] = Marks()
    """One mark for each exported array, which keeps it. Only a mapping has any."""
    looks: Callable[[Any, int], bool] | None = None
    """Tells whether a semaphore's handle has a value; None if only the driver knows, and for what is not one."""
    noted_of_closed: ClassVar[bool] = False
    """Whether it may be made of a native that is closed but not yet released."""

    def __init__(
        self,
        noun: str,
        release: Callable[[Any], None] | None = None,
        *,
        parents: Sequence[Native] = (),
        how: Standing = Standing.CHILD,
        gate: Gate | None = None,
        keep: object = None,
        device: Streams | None = None,
    ) -> None:
        self.label = f"{noun} #{next(_serials)}"
        self.release = release
        self.parents = parents
        self.how = how
        self.gate = gate
        self.keep = keep
        self.device = device
        self.ends_with_children = False
        """Whether it is closed with the last of its children."""
        self.state = BORN
        self.calls: list[Any] = Marks()
        self.standing: dict[Native, Standing] = {}
        self.uses: dict[NativeStream, Any] = {}
        """How each stream used it: the bytes, or the last value signalled."""
        self.untracked: Sequence[Any] = ()
        """Devices (`Streams`) whose streams may all use it, because its address was handed out."""
        self.behind: list[Point] | None = None
        """Points that its release waits for, set once a drain has looked at it."""
        self.handle: Any = None
        self.callbacks: list[Callable[[], None]] = []
        self.problem = ""
        """Error of its failed release."""
        self.tellers: list[Any] = Marks()
        """One mark for each thread that runs the callbacks."""

    def create(self, call: Callable[[], Any]) -> Any:
        """Make it with a native call, outside the monitor. Return the call's result, which becomes the handle.

        Raises what `call` raises, and `ResourceClosedError` if one of its parents was closed meanwhile.
        """
        _begin(self)
        try:
            made = call()
            _came_up(self, made)
        except BaseException as error:
            _failed(self, error)
            raise
        if self.state is not LIVE:
            for parent in self.parents:
                parent.check()
            self.check()
        return made

    def open(self) -> None:
        """Open a native that needs no native call."""
        _open(self)

    @property
    def is_bare(self) -> bool:
        """Whether it has nothing to release, to wait for or to report."""
        kept = self.release or self.keep or self.uses or self.untracked or self.standing or self.callbacks
        return not kept

    def ending(self) -> None:
        """Change what must change before its children are closed. Called under the monitor."""

    def check(self) -> None:
        """Raise unless it is open."""
        if self.state is LIVE:
            return
        if self.state is DEAD:
            raise ResourceClosedError(
                f"expected an object of this process, got {self.label} of its parent, made before the fork; make a new "
                "one here."
            )
        raise ResourceClosedError(f"{self.label} is closed; make a new one, or close it later.")

    @property
    def may_be_asked(self) -> bool:
        """Whether the handle exists and its release has not begun; a mark keeps it so."""
        state = self.state  # one look: `revive` may come between two
        return state is LIVE or state is RETIRED

    def ask(self, question: Callable[[Any], Any], gone: Any) -> Any:
        """Call the driver with its handle, even when closed; return `gone` once its release has begun."""
        calls = self.calls
        calls += MARK
        try:
            return question(self.handle) if self.may_be_asked else gone
        finally:
            del calls[-1]

    def use(self, call: Callable[[Any], T]) -> T:
        """Call the driver with its handle; raises unless it is open."""
        calls = self.calls
        calls += MARK
        try:
            self.check()
            return call(self.handle)
        finally:
            del calls[-1]

    def is_of(self, device: Streams) -> bool:
        """Whether a device answers for it."""
        mine = self.device is device or device in self.untracked
        return mine or any(parent.is_of(device) for parent in self.parents)

    def streams(self) -> list[NativeStream]:
        """Streams whose work the release waits for."""
        used = self.uses.copy()
        if not self.untracked:
            return list(used)
        return [*used, *(one for device in self.untracked for one in device.known() if one not in used)]

    @property
    def stays(self) -> bool:
        """Whether it is never released, because a native on it could not be."""
        return any(one.state is LEAKED or one.stays for one in self.standing.copy())

    def what_holds(self) -> str:
        """Why it is not released yet, for messages."""
        if self.state is LEAKED:
            return f"it is {self.state.value}: {self.problem}"
        if self.tellers:
            return "another thread runs its callbacks"
        if arrays := len(self.arrays.copy()):
            return f"{arrays} exported array(s) are still alive"
        for one, how in self.standing.copy().items():
            if one.state is LEAKED:
                return f"{one.label} is {one.state.value}: {one.problem}"
            if one.state is BORN:
                return f"{one.label} is {one.state.value}"
            if one.state is RETIRED:
                return f"{one.label} is still in use ({one.what_holds()})"
            if one.state is RELEASING:
                return f"{one.label} is {one.state.value}"
            if how is Standing.HOLDS:
                return one.holding()
        if self.calls.copy():
            return "a call is under way"
        if self.gate is not None and (waits := self.gate.blocked.get(self)):
            return (
                f"the driver's release waits for the whole device, and {waits} may be waiting for a semaphore: "
                "synchronize that first"
            )
        late = next(filter(None, (one.waiting_for() for one in self.streams())), "")
        return f"work enqueued before close() is still pending{late}"

    def holding(self) -> str:
        """Why what it holds is not released yet: `what_holds`."""
        return f"{self.label} is still open"

    def __repr__(self) -> str:
        return f"<{self.label} {self.state.value}>"


def _enter(native: Native) -> None:
    for parent in native.parents:
        if parent.state is not LIVE and not (native.noted_of_closed and parent.state is RETIRED):
            parent.check()
    for parent in native.parents:
        parent.standing[native] = native.how
    _alive[native] = None


_begin = locked(_enter)


@locked
def _open(native: Native) -> None:
    _enter(native)
    native.state = LIVE


@locked
def _came_up(native: Native, made: Any) -> None:
    if native.state is BORN:  # else it is the parent process's
        native.handle = made
        native.state = LIVE
    closed = any(parent.state is not LIVE for parent in native.parents)
    if closed and not native.noted_of_closed:
        _retire(native, None)


@locked
def _failed(native: Native, error: BaseException) -> None:
    """End a native that the caller does not get."""
    if native.state is BORN:
        if (release := left_to_core(error)) is not None:  # it is made after all, and released as what is closed
            native.handle, native.release = release, operator.call
            native.state = LIVE
        elif isinstance(error, GpuInteropError):  # the driver has said that it made nothing
            native.release = native.gate = None
            native.behind = []
            native.state = LIVE
        else:
            strike(native, "made")
    _retire(native, None)


def strike(native: Native, what: str) -> None:
    """Give up a native that an exception struck while it was made or released. Called under the monitor."""
    native.problem = f"an exception struck while it was {what}"
    struck.append(native)
    native.state = LEAKED  # its parents stay: the driver may have it


@locked
def retire(native: Native) -> None:
    """End use of it, of its children, and of natives that close with their last child."""
    _retire(native, None)


def _retire(native: Native, under: Native | None) -> None:
    """Retire it, and, unless that is `under`, which is being retired, a parent that ends with it."""
    if native.state is not LIVE:
        return
    native.ending()
    for one, how in list(native.standing.items()):
        if how is Standing.CHILD:
            _retire(one, native)
    waiting_for_a_look[native] = None
    native.state = RETIRED
    if native.is_bare and not native.calls.copy():  # it needs no drain
        leave(native)
        native.state = RELEASED
    if native.how is not Standing.CHILD:
        return
    for parent in native.parents:
        if parent is under or not parent.ends_with_children:
            continue
        if not any(
            how is Standing.CHILD and one.state in (BORN, LIVE) for one, how in reversed(parent.standing.items())
        ):  # the latest first: those are open
            _retire(parent, None)


@locked
def add_callback(native: Native, callback: Callable[[], None]) -> None:
    """Call `callback` when the native is released."""
    native.callbacks.append(callback)
    if native.state in GONE:
        endings.setdefault(native)


@locked
def revive(native: Native) -> bool:
    """Reopen a native that has no driver object of its own; False if it is too late."""
    if native.state in (RELEASING, LEAKED, DEAD):
        return False
    native.behind = None
    _alive[native] = None
    native.state = LIVE
    return True


@locked
def retire_dropped() -> None:
    """Retire the natives that finalizers queued, and look again at those that are: their last array may be gone."""
    while dropped:
        native = dropped.popleft()
        _retire(native, None)
        if native.state is RETIRED:
            waiting_for_a_look[native] = None


def leave(native: Native) -> None:
    """Note that it is released, so that its parents may be. Called under the monitor."""
    _alive.pop(native, None)
    for parent in native.parents:
        parent.standing.pop(native, None)
        if parent.state is RETIRED:
            waiting_for_a_look[parent] = None


@locked
def hold(native: Native, user: Native) -> None:
    """Keep an open native until its user is released, as a graph keeps what its work uses."""
    if user not in native.standing:
        native.check()
        user.parents = (*user.parents, native)
        native.standing[user] = Standing.HOLDS


@locked
def note_use(native: Native, stream: NativeStream, value: Any) -> None:
    """Note that a stream's work uses it. Forget streams that are gone."""
    if stream not in native.uses:
        for known in [known for known in native.uses if known.forgotten]:
            del native.uses[known]
    native.uses[stream] = value


@locked
def forget_use(native: Native, stream: NativeStream) -> None:
    """Note that a stream has finished all its work with it."""
    native.uses.pop(stream, None)


def count_alive() -> int:
    """Count the natives that are not released."""
    return len(_alive)


def alive() -> list[Native]:
    """All natives that are not released."""
    return list(_alive)


@after_fork
def _forked() -> None:
    for native in _alive:
        native.state = DEAD
    for shared in (_alive, waiting_for_a_look, endings, struck):
        shared.clear()
