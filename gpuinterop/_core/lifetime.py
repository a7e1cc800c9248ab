"""Lifetimes: the objects of drivers, and what the release of each has to wait for.

Invariants of this module and of those that stand on it (`known_stream`, `gate`, `drain`):

1. A call never uses a released handle, and a handle is never released while a call with it is under way.
2. An object is released only when it has no marks, nothing stands on it, and all its uses have passed.
3. A release that blocks the device runs only while no known wait is pending (`gate`).
4. A pipeline that is never idle still releases.
5. Work is ordered behind all earlier work on the same bytes.
6. A native call that fails in a drain is reported; the drain does not raise it, and it does not mask other errors.
7. After an exception at any point, no lock is held and no mark is left. What was being made or released may stay until
   the exit.
8. Objects made before a fork are dead in the child.
9. The exit takes two seconds in all; from then on finalizers do nothing.

A call takes no lock. It marks every object that it uses, then looks at their states, then calls::

    calls = lifetime.calls
    calls += MARK
    try:
        if lifetime.state is not LIVE: ...
        ...
    finally:
        del calls[-1]

`retire` changes the state, and a drain looks at the marks later: it sees a call that marked before that look, and a
call that marks after it sees the new state. Python makes no call between ``+=`` and ``try``, so no mark is left.

An exported array marks its mapping in the same way for as long as it lives (`memory.Hold`). Its end takes the mark off,
then looks at the state: if a drain still saw the mark, the mapping was closed by then, and the array's end queues it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from .._arguments import NoCopy, check_type
from ..backend import left_to_core
from ..errors import DEV_MODE, GpuInteropError, ResourceClosedError, place
from .monitor import after_fork, dropped, locked

if TYPE_CHECKING:
    from .gate import Gate
    from .known_stream import Fence, KnownStream, Streams

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
    """What the end of a parent means for an object that stands on it."""

    CHILD = "it is closed as well"
    HOLDS = "it keeps the object"
    YIELDS = "it goes when the object may be released"


_serials = itertools.count(1)
_alive: dict[Lifetime, None] = {}

waiting_for_a_look: dict[Lifetime, None] = {}
"""Retired objects that may be ready for release."""
endings: dict[Lifetime, object] = {}
"""Released objects whose callbacks the next drain runs, outside the monitor; and what each has kept, which it drops."""


def _name(noun: str, number: int, given: str | None, *_: object) -> str:
    return f'{noun} #{number} "{given}"' if given else f"{noun} #{number}"


class Lifetime(NoCopy):
    """One driver object, or an object of this library in its place.

    Parameters
    ----------
    noun : str
        Name in messages.
    release : callable, optional
        Called with the handle, once.
    parents : sequence of Lifetime
        Objects that it stands on; they are released later.
    how : Standing
        How it stands on them.
    gate : Gate, optional
        Given if the release blocks the device: says when it may run.
    keep : object
        Object that must live as long: another library's stream, a handle's owner.
    device : Streams, optional
        Device that it is an object of; without one, it is one of its parents' devices.
    label : str, optional
        The user's name for it.
    size : int
        Size in bytes, for messages.
    of : Lifetime, optional
        What it is made of, for messages; by default its first parent.
    """

    __slots__ = (
        "behind", "callbacks", "calls", "device", "ends_with_children", "gate", "handle", "how", "keep", "made_at",
        "naming", "parents", "problem", "release", "standing", "state", "tellers", "untracked", "uses", "warns",
        "written",
    )  # fmt: skip

    arrays: list[Any] = Marks()
    """One mark for each exported array, which keeps it. Only a mapping has any."""
    counter: Callable[[Any], int] | None = None
    """Reads the value of a timeline's handle; None if only the driver knows it, and for what is not one."""
    remark: Callable[[int | None], str] | None = None
    """What a message adds of a semaphore and the value that a stream waits for."""
    noted_of_closed: ClassVar[bool] = False
    """Whether a parent may be closed already, but not yet released."""

    def __init__(
        self,
        noun: str,
        release: Callable[[Any], None] | None = None,
        *,
        parents: Sequence[Lifetime] = (),
        how: Standing = Standing.CHILD,
        gate: Gate | None = None,
        keep: object = None,
        device: Streams | None = None,
        label: str | None = None,
        size: int = 0,
        of: Lifetime | None = None,
    ) -> None:
        if label is not None:
            check_type(label, str, "label", "a str")
        self.naming = noun, next(_serials), label, size, of or (parents[0] if parents else None)
        """The parts of its label. Few objects are ever told of, so the text is made then."""
        self.made_at = place() if DEV_MODE else ""
        self.warns = False
        """Whether a warning tells of its end without `close`: it is a user's."""
        self.release = release
        self.parents = parents
        self.how = how
        self.gate = gate
        self.keep = keep
        self.device = device
        self.ends_with_children = False
        """Whether the end of the last child closes the object."""
        self.state = BORN
        self.calls: list[Any] = Marks()
        self.standing: dict[Lifetime, Standing] = {}
        self.uses: dict[KnownStream, Any] = {}
        """Use by each stream: the bytes, or the last value signalled."""
        self.untracked: Sequence[Any] = ()
        """Devices (`Streams`) whose streams may all use the object: its address was handed out."""
        self.written = False
        """Whether a copy or a fill has been enqueued that writes its bytes or texels."""
        self.behind: list[Fence] | None = None
        """Fences that the release waits for, set once a drain has looked."""
        self.handle: Any = None
        self.callbacks: list[Callable[[], None]] = []
        self.problem = ""
        """Error of the failed release."""
        self.tellers: list[Any] = Marks()
        """One mark for each thread that runs the callbacks."""

    @property
    def label(self) -> str:
        """Name in messages. Without a user's label it says what the object is made of."""
        *_, given, size, of = self.naming
        made_of = " ".join([f"{size:,} bytes"] * bool(size) + [f"of {_name(*of.naming)}" for of in [of] if of])
        return _name(*self.naming) + (f" ({made_of})" if made_of and not given else "")

    def create(self, call: Callable[[], Any]) -> Any:
        """Make the object with a native call, outside the monitor. Return the call's result, which becomes the handle.

        Raises what `call` raises, and `ResourceClosedError` if a parent was closed meanwhile.
        """
        try:
            _begin(self, BORN)
            made = call()
            _came_up(self, made)
        except BaseException as error:
            _failed(self, error)
            raise
        if self.state is not LIVE:
            for one in (*self.parents, self):
                one.check()
        return made

    def open(self) -> None:
        """Open an object that needs no native call."""
        _begin(self, LIVE)

    def ending(self) -> None:
        """Change what must change before the children are closed. Called under the monitor."""

    def check(self) -> None:
        """Raise unless the object is open."""
        if self.state is not LIVE:
            raise self.refusal()

    def refusal(self) -> ResourceClosedError:
        """The error of a call with an object that is not open."""
        if self.state is DEAD:
            return ResourceClosedError(
                f"expected an object of this process, got {self.label} of its parent, made before the fork; make a new "
                "one here."
            )
        return ResourceClosedError(f"{self.label} is closed; make a new one, or close it later.")

    def ask(self, question: Callable[[Any], Any], gone: Any) -> Any:
        """Call the driver with the handle, even when closed; return `gone` once the release has begun."""
        calls = self.calls
        calls += MARK
        try:  # one look at the state: `revive` may come between two
            return question(self.handle) if self.state in (LIVE, RETIRED) else gone
        finally:
            del calls[-1]

    def use(self, call: Callable[[Any], T]) -> T:
        """Call the driver with the handle; raises unless the object is open."""
        calls = self.calls
        calls += MARK
        try:
            self.check()
            return call(self.handle)
        finally:
            del calls[-1]

    def is_of(self, device: Streams) -> bool:
        """Whether a device answers for the object."""
        return self.device is device or device in self.untracked or any(one.is_of(device) for one in self.parents)

    def streams(self) -> list[KnownStream]:
        """Streams whose work the release waits for."""
        found = self.uses.copy()
        for device in self.untracked:
            found.update(dict.fromkeys(device.known()))
        return list(found)

    @property
    def stays(self) -> bool:
        """Whether the object is never released, because one on it could not be."""
        return any(one.state is LEAKED or one.stays for one in self.standing.copy())

    def what_holds(self) -> str:
        """Why the object is not released yet, for messages."""
        if self.state is LEAKED:
            return f"it is {self.state.value}: {self.problem}"
        if self.tellers:
            return "another thread runs its callbacks"
        if arrays := len(self.arrays.copy()):
            return f"{arrays} exported array(s) are still alive"
        for one, how in self.standing.copy().items():
            state = one.state
            if state in (RETIRED, LEAKED):
                return f"{one.label} is still in use ({one.what_holds()})"
            if state in (BORN, RELEASING):
                return f"{one.label} is {state.value}"
            if how is Standing.HOLDS and not one.noted_of_closed:
                return f"{one.label} is still open"
        if self.calls.copy():
            return "a call is under way"
        if self.gate is not None and (waits := self.gate.blocked.get(self)):
            return (
                f"the driver's release waits for the whole device, and {waits} may be waiting for a semaphore: "
                "synchronize that first"
            )
        late = next(filter(None, (one.waiting_for() for one in self.streams())), "")
        return f"work enqueued before close() is still pending{late}"

    def __repr__(self) -> str:
        return f"<{self.label} {self.state.value}>"


@locked
def _begin(lifetime: Lifetime, state: State) -> None:
    for parent in lifetime.parents:
        if parent.state is not LIVE and not (lifetime.noted_of_closed and parent.state is RETIRED):
            parent.check()
    lifetime.state = state
    for parent in lifetime.parents:
        parent.standing[lifetime] = lifetime.how
    _alive[lifetime] = None


@locked
def _came_up(lifetime: Lifetime, made: Any) -> None:
    if lifetime.state is BORN:  # else the object is the parent process's
        lifetime.handle = made
        lifetime.state = LIVE
    for parent in lifetime.parents:
        if parent.state is not LIVE and not lifetime.noted_of_closed:
            _retire(lifetime)


@locked
def _failed(lifetime: Lifetime, error: BaseException) -> None:
    """End an object that the caller does not get."""
    if lifetime.state is BORN:
        if (release := left_to_core(error)) is not None:  # the object exists, and is released as a closed one
            lifetime.handle, lifetime.release = release, operator.call
            lifetime.state = LIVE
        elif isinstance(error, GpuInteropError):  # the driver has said that it made nothing
            lifetime.release = lifetime.gate = None
            lifetime.behind = []
            lifetime.state = LIVE
        else:  # nothing tells how far the driver got: the object stays until the exit, and its parents
            lifetime.problem = repr(error)
            lifetime.state = LEAKED
    _retire(lifetime)


def _retire(lifetime: Lifetime, under: Lifetime | None = None) -> None:
    """Retire an object, and a parent that ends with it, unless that is `under`, which is being retired."""
    if lifetime.state is not LIVE:
        return
    lifetime.ending()
    for one, how in list(lifetime.standing.items()):
        if how is Standing.CHILD:
            _retire(one, lifetime)
    waiting_for_a_look[lifetime] = None
    lifetime.state = RETIRED
    keeps = lifetime.release or lifetime.keep or lifetime.uses or lifetime.untracked or lifetime.callbacks
    if not (keeps or lifetime.standing or lifetime.calls.copy()):  # no drain is needed
        leave(lifetime)
        lifetime.state = RELEASED
    if lifetime.how is not Standing.CHILD:
        return
    for parent in lifetime.parents:
        if parent is under or not parent.ends_with_children:
            continue
        if not any(
            how is Standing.CHILD and one.state in (BORN, LIVE) for one, how in reversed(parent.standing.items())
        ):  # the latest first: those are open
            _retire(parent)


retire: Callable[[Lifetime], None] = locked(_retire)
"""End use of an object, of its children, and of objects that close with their last child."""


@locked
def add_callback(lifetime: Lifetime, callback: Callable[[], None]) -> None:
    """Call `callback` when the object is released."""
    lifetime.callbacks.append(callback)
    if lifetime.state in GONE:
        endings.setdefault(lifetime)


@locked
def revive(lifetime: Lifetime) -> bool:
    """Reopen an object that has no driver object of its own; False if it is too late."""
    if lifetime.state in (RELEASING, LEAKED, DEAD):
        return False
    _alive[lifetime] = None
    lifetime.state = LIVE
    return True


@locked
def retire_dropped() -> None:
    """Retire the objects that finalizers queued, and look again at those that are: their last array may be gone."""
    while dropped:
        lifetime = dropped[0]
        _retire(lifetime)
        if lifetime.state is RETIRED:
            waiting_for_a_look[lifetime] = None
        dropped.popleft()


def leave(lifetime: Lifetime) -> None:
    """Note that an object is released, so that its parents may be. Called under the monitor."""
    for parent in lifetime.parents:
        if parent.state is RETIRED:
            waiting_for_a_look[parent] = None
        parent.standing.pop(lifetime, None)
    _alive.pop(lifetime, None)


@locked
def hold(lifetime: Lifetime, user: Lifetime) -> None:
    """Keep an object until its user is released, as a graph keeps what it uses, also what was closed meanwhile."""
    if user not in lifetime.standing:
        if lifetime.state is not RETIRED:
            lifetime.check()
        user.parents = (*user.parents, lifetime)
        lifetime.standing[user] = Standing.HOLDS


@locked
def note_use(lifetime: Lifetime, stream: KnownStream, value: Any) -> None:
    """Note that a stream's work uses the object. Forget streams that are over: a batch or a graph may know others."""
    if stream not in lifetime.uses:
        for known in [known for known in lifetime.uses if known.is_over]:
            del lifetime.uses[known]
    lifetime.uses[stream] = value


@locked
def forget_use(lifetime: Lifetime, stream: KnownStream) -> None:
    """Note that a stream has finished all its work with the object."""
    lifetime.uses.pop(stream, None)


def alive() -> list[Lifetime]:
    """All objects that are not released."""
    return list(_alive)


@after_fork
def _forked() -> None:
    for lifetime in _alive:
        lifetime.state = DEAD
    for shared in (_alive, waiting_for_a_look, endings):
        shared.clear()
