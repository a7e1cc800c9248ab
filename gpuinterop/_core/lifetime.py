"""The states of driver objects, and what the release of each has to wait for (docs/inside/lifetime.md).

A call takes no lock. It marks every object that it uses, then checks their states, then calls the driver. `retire`
changes the state, and a drain checks the marks later. So the drain sees every call that has marked before its check,
and a call that marks later sees the new state. After an interrupt, a mark of `marked` may stay, and keeps its object
until the exit. Hot paths write the mark out, as do gates and callbacks, because other threads wait for their marks to
go::

    calls = lifetime.calls
    calls += MARK  # no call between this line and `try`, so no interrupt comes between them
    try:
        if lifetime.state is not LIVE: ...
    finally:
        del calls[-1]

The monitor is the only lock under which objects change their state. No native call, wait, callback or I/O happens under
it. An interrupt may end a function under it at any point, and leave an object that is never released, but no object
that is released too early. So of two writes, the one that keeps the object comes first.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, TypeVarTuple

from .._arguments import NoCopy, check_type
from ..backend import left_to_core
from ..errors import DEV_MODE, GpuInteropError, ResourceBusyError, ResourceClosedError, place

if TYPE_CHECKING:
    from .streams import Fence, Gate, KnownStream, Streams

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# -- the lock of all state, and what finalizers queue ------------------------------------------------------------------

_lock = threading.RLock()  # a signal handler may enter again in the same thread, see `refuse_reentry`
_resets: list[Callable[[], None]] = []
_generation = 0

dropped: deque[Lifetime] = deque()
"""Dropped objects, and closed mappings that have lost an array. Finalizers append them for the next drain."""
lingering: deque[object] = deque(maxlen=64)
"""Wrapped streams of array libraries, kept until the next drain for reuse by arrays made before then."""


def locked(transition: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Run a function under the monitor, like `system.under`, but without its frame because this is a hot path."""

    @functools.wraps(transition)
    def entered(*arguments: *Ts) -> T:
        lock = _lock
        try:
            lock.acquire()
            return transition(*arguments)
        finally:
            try:  # noqa: SIM105 - see system.under
                lock.release()
            except RuntimeError:
                pass

    return entered


def interrupted() -> bool:
    """Whether the caller is a signal handler or finalizer that interrupted a transition of its thread."""
    return _lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def refuse_reentry() -> None:
    """Raise if `interrupted`: the handler cannot change objects now, and waiting for the transition would never end."""
    if interrupted():
        raise ResourceBusyError(
            "a signal handler made this call inside a gpuinterop state change; set a flag there and make the call in "
            "the program, or call close(), which is queued."
        )


def generation() -> int:
    """Return how often this process and its ancestors were forked after the import of gpuinterop."""
    return _generation


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """Run `reset` in every forked child, to replace what a thread of the parent may have held."""
    _resets.append(reset)
    return reset


def _after_fork() -> None:
    global _generation, _lock  # noqa: PLW0603 - a thread of the parent may hold the lock
    _lock = threading.RLock()
    _generation += 1
    dropped.clear()
    for reset in _resets:
        reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

# -- one object --------------------------------------------------------------------------------------------------------

MARK: Final = (None,)
Marks: type[list[Any]] = list  # one entry per call in progress, or per array


class marked:
    """Mark objects in a `with` block."""

    __slots__ = ("_each",)

    def __init__(self, *each: list[Any]) -> None:
        self._each = each

    def __enter__(self) -> None:
        for marks in self._each:
            marks.append(None)

    def __exit__(self, *_: object) -> None:
        for marks in self._each:
            marks.pop()


class State(Enum):
    __hash__ = object.__hash__  # in C: Enum's own would run Python code in each `state in GONE`

    BORN = "being made"
    LIVE = "open"
    RETIRED = "closed"
    RELEASING = "being released"
    RELEASED = "released"
    LEAKED = "closed, and could not be released"
    OF_PARENT = "of the parent process"


BORN, LIVE, RETIRED, RELEASING, RELEASED, LEAKED, OF_PARENT = State
FINAL: Final = frozenset({RELEASED, LEAKED, OF_PARENT})


class Dependency(Enum):
    """How an object depends on a parent: what happens to it when the parent is closed, or may be released."""

    CHILD = "it is closed as well"
    HOLDS = "it keeps the object"
    YIELDS = "it goes when the object may be released"


_serials = itertools.count(1)
_alive: dict[Lifetime, None] = {}

to_release: dict[Lifetime, None] = {}  # closed objects that may be ready for release
callbacks_due: dict[
    Lifetime, object
] = {}  # released objects: the next drain runs their callbacks, and drops what they kept


def _name(noun: str, number: int, given: str | None, *_: object) -> str:
    return f'{noun} #{number} "{given}"' if given else f"{noun} #{number}"


class Lifetime(NoCopy):
    """One driver object, or an object of gpuinterop in its place."""

    __slots__ = (
        "awaits", "callback_runs", "callbacks", "calls", "dependency", "dependents", "device", "ends_with_children",
        "gate", "handle", "keep", "made_at", "naming", "parents", "problem", "release", "state", "untracked", "uses",
        "warns", "written",
    )  # fmt: skip

    arrays: list[Any] = Marks()  # one mark for each exported array; only mappings have them
    counter: Callable[[Any], int] | None = None  # reads a timeline's value; None if only the driver can
    remark: Callable[[int | None], str] | None = None  # what messages add to a semaphore and the awaited value
    unsignalled: Callable[[int, int], GpuInteropError | None] | None = None  # why a counter is no signal of a value
    allows_closed_parent: ClassVar[bool] = False  # a parent may already be closed, but not yet released

    def __init__(
        self,
        noun: str,  # name in messages
        release: Callable[[Any], None] | None = None,  # called once, with the handle
        *,
        parents: Sequence[Lifetime] = (),  # objects that it depends on; they are released later
        dependency: Dependency = Dependency.CHILD,  # how it depends on them
        gate: Gate | None = None,  # decides when a release may run that blocks the device
        keep: object = None,  # must stay alive as long: another library's stream, a handle's owner
        device: Streams | None = None,  # by default the devices of its parents
        label: str | None = None,  # the user's name for it
        size: int = 0,  # in bytes, for messages
        of: Lifetime | None = None,  # what it is part of, for messages; by default its first parent
    ) -> None:
        if label is not None:
            check_type(label, str, "label", "a str")
        # The parts of its label, which is rarely needed.
        self.naming = noun, next(_serials), label, size, of or (parents[0] if parents else None)
        self.made_at = place() if DEV_MODE else ""
        self.warns = False  # a user's object: a warning is issued if it ends without `close`
        self.release = release
        self.parents = parents
        self.dependency = dependency
        self.gate = gate
        self.keep = keep
        self.device = device
        self.ends_with_children = False  # it is closed with its last child
        self.state = BORN
        self.calls: list[Any] = Marks()
        self.dependents: dict[Lifetime, Dependency] = {}  # the objects that depend on it
        self.uses: dict[KnownStream, Any] = {}  # per stream: the bytes used, or the last value signalled
        self.untracked: Sequence[Any] = ()  # devices (`Streams`) whose streams may all use it: a caller has its address
        self.written = False  # a copy or fill into it has been enqueued
        self.awaits: list[Fence] | None = None  # fences that the release waits for; a drain sets them
        self.handle: Any = None
        self.callbacks: list[Callable[[], None]] = []
        self.problem = ""  # error of the failed release
        self.callback_runs: list[Any] = Marks()  # one mark for each thread that runs the callbacks

    @property
    def label(self) -> str:
        """Name in messages. Without a user's label, it includes the size and what the object is part of."""
        *_, given, size, of = self.naming
        made_of = " ".join([f"{size:,} bytes"] * bool(size) + [f"of {_name(*of.naming)}" for of in [of] if of])
        return _name(*self.naming) + (f" ({made_of})" if made_of and not given else "")

    def create(self, call: Callable[[], Any]) -> Any:
        """Make the object with a native call, outside the monitor. Store its result as the handle, and return it.

        Raises what `call` raises, and `ResourceClosedError` if a parent was closed meanwhile.
        """
        try:
            _begin(self, BORN)
            handle = call()
            _created(self, handle)
        except BaseException as error:
            _failed(self, error)
            raise
        if self.state is not LIVE:
            for lifetime in (*self.parents, self):
                lifetime.check()
        return handle

    def open(self) -> None:
        _begin(self, LIVE)

    def ending(self) -> None:
        """Prepare for the closing of the children. Called under the monitor."""

    def check(self) -> None:
        if self.state is not LIVE:
            raise self.refusal()

    def refusal(self) -> ResourceClosedError:
        if self.state is OF_PARENT:
            return ResourceClosedError(
                f"expected an object of this process, got {self.label} of its parent, made before the fork; make a new "
                "one here."
            )
        return ResourceClosedError(f"{self.label} is closed; make a new one, or close it later.")

    def try_use(self, call: Callable[[Any], Any], default: Any) -> Any:
        """Call the driver with the handle, even if the object is closed; `default` once the release has begun."""
        calls = self.calls
        calls += MARK
        try:  # check the state only once, because `revive` may change it
            return call(self.handle) if self.state in (LIVE, RETIRED) else default
        finally:
            del calls[-1]

    def use(self, call: Callable[[Any], T]) -> T:
        """Call the driver with the handle. Raises unless the object is open."""
        with marked(self.calls):
            self.check()
            return call(self.handle)

    def is_of(self, device: Streams) -> bool:
        """Whether the object belongs to the device, or the device's streams may use it."""
        return self.device is device or device in self.untracked or any(parent.is_of(device) for parent in self.parents)

    def streams(self) -> list[KnownStream]:
        streams = self.uses.copy()
        for device in self.untracked:
            streams.update(dict.fromkeys(device.known()))
        return list(streams)

    @property
    def stays(self) -> bool:
        """Whether the object is never released, because an object that depends on it could not be released."""
        return any(dependent.state is LEAKED or dependent.stays for dependent in self.dependents.copy())

    def what_holds(self) -> str:
        """Describe why the object is not released yet, for messages."""
        if self.state is LEAKED:
            return f"it is {self.state.value}: {self.problem}"
        if self.callback_runs:
            return "another thread runs its callbacks"
        if arrays := len(self.arrays.copy()):
            return f"{arrays} exported array(s) are still alive"
        for dependent, dependency in self.dependents.copy().items():
            state = dependent.state
            if state in (RETIRED, LEAKED):
                return f"{dependent.label} is still in use ({dependent.what_holds()})"
            if state in (BORN, RELEASING):
                return f"{dependent.label} is {state.value}"
            if dependency is Dependency.HOLDS and not dependent.allows_closed_parent:
                return f"{dependent.label} is still open"
        if self.calls.copy():
            return "a call is under way"
        if self.gate is not None and (waits := self.gate.blocked.get(self)):
            return (
                f"the driver's release waits for the whole device, and {waits} may be waiting for a semaphore: "
                "synchronize that first"
            )
        late = next(filter(None, (stream.waiting_for() for stream in self.streams())), "")
        return f"work enqueued before close() is still pending{late}"

    def __repr__(self) -> str:
        return f"<{self.label} {self.state.value}>"


@locked
def _begin(lifetime: Lifetime, state: State) -> None:
    for parent in lifetime.parents:
        if parent.state is not LIVE and not (lifetime.allows_closed_parent and parent.state is RETIRED):
            parent.check()
    lifetime.state = state
    for parent in lifetime.parents:
        parent.dependents[lifetime] = lifetime.dependency
    _alive[lifetime] = None


@locked
def _created(lifetime: Lifetime, handle: Any) -> None:
    if lifetime.state is BORN:  # after a fork, the child's state is DEAD
        lifetime.handle = handle
        lifetime.state = LIVE
    for parent in lifetime.parents:
        if parent.state is not LIVE and not lifetime.allows_closed_parent:
            _retire(lifetime)


@locked
def _failed(lifetime: Lifetime, error: BaseException) -> None:
    """End an object whose creation has failed."""
    if lifetime.state is BORN:
        if (release := left_to_core(error)) is not None:  # the object exists, so release it like a closed one
            lifetime.handle, lifetime.release = release, operator.call
            lifetime.state = LIVE
        elif isinstance(error, GpuInteropError):  # the driver has made nothing
            lifetime.release = lifetime.gate = None
            lifetime.awaits = []
            lifetime.state = LIVE
        else:  # the driver may have made it, so it stays until the exit, with its parents
            lifetime.problem = repr(error)
            lifetime.state = LEAKED
    _retire(lifetime)


def _retire(lifetime: Lifetime, under: Lifetime | None = None) -> None:
    """Close an object, and each parent that ends with it, except `under`, which is being closed."""
    if lifetime.state is not LIVE:
        return
    lifetime.ending()
    for child, dependency in list(lifetime.dependents.items()):
        if dependency is Dependency.CHILD:
            _retire(child, lifetime)
    to_release[lifetime] = None
    lifetime.state = RETIRED
    keeps = lifetime.release or lifetime.keep or lifetime.uses or lifetime.untracked or lifetime.callbacks
    if not (keeps or lifetime.dependents or lifetime.calls.copy()):  # no need to wait for a drain
        note_released(lifetime)
        lifetime.state = RELEASED
    if lifetime.dependency is not Dependency.CHILD:
        return
    for parent in lifetime.parents:
        if parent is under or not parent.ends_with_children:
            continue
        if not any(
            dependency is Dependency.CHILD and child.state in (BORN, LIVE)
            for child, dependency in reversed(parent.dependents.items())
        ):  # newest first, because open children are usually new
            _retire(parent)


retire: Callable[[Lifetime], None] = locked(_retire)
"""Close an object, its children, and parents that end with their last child."""


@locked
def add_callback(lifetime: Lifetime, callback: Callable[[], None]) -> None:
    lifetime.callbacks.append(callback)
    if lifetime.state in FINAL:
        callbacks_due.setdefault(lifetime)


@locked
def revive(lifetime: Lifetime) -> bool:
    """Reopen an object without a driver object; return False if it is too late."""
    if lifetime.state in (RELEASING, LEAKED, OF_PARENT):
        return False
    _alive[lifetime] = None
    lifetime.state = LIVE
    return True


@locked
def retire_dropped() -> None:
    """Close the objects that finalizers have queued. Check the closed ones again: their last array may be gone."""
    while dropped:
        lifetime = dropped[0]
        _retire(lifetime)
        if lifetime.state is RETIRED:
            to_release[lifetime] = None
        dropped.popleft()


def note_released(lifetime: Lifetime) -> None:
    """Note that an object is released, so that its parents can be. Called under the monitor."""
    for parent in lifetime.parents:
        if parent.state is RETIRED:
            to_release[parent] = None
        parent.dependents.pop(lifetime, None)
    _alive.pop(lifetime, None)


@locked
def hold(lifetime: Lifetime, user: Lifetime) -> None:
    """Keep an object, even if it is closed, until its user is released. Graphs do this for what they use."""
    if user not in lifetime.dependents:
        if lifetime.state is not RETIRED:
            lifetime.check()
        user.parents = (*user.parents, lifetime)
        lifetime.dependents[user] = Dependency.HOLDS


@locked
def note_use(lifetime: Lifetime, stream: KnownStream, value: Any) -> None:
    """Note that a stream's work uses the object. Forget streams that are over."""
    if stream not in lifetime.uses:
        for known in [known for known in lifetime.uses if known.is_over]:
            del lifetime.uses[known]
    lifetime.uses[stream] = value


@locked
def forget_use(lifetime: Lifetime, stream: KnownStream) -> None:
    lifetime.uses.pop(stream, None)


def alive() -> list[Lifetime]:
    return list(_alive)


@after_fork
def _forked() -> None:
    for lifetime in _alive:
        lifetime.state = OF_PARENT
    for shared in (_alive, to_release, callbacks_due):
        shared.clear()
