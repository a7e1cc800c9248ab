"""What each public call must mark, note and look at: written by hand, from docs/inside/lifetime.md.

`check` makes the call in a world of its own, and looks at the core while the driver is called. Then it makes the call
where the driver fails, and where another thread closes what the call uses, just before the call marks that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core.gate import waiting
from gpuinterop._core.known_stream import KnownStream
from gpuinterop._core.lifetime import BORN, LIVE, Lifetime, retire
from gpuinterop._core.stream_memory import OwnTimelines
from tests.spare_pages import unpin_spare_pages

from . import pairs
from .fake import RELEASES, FakeEverything, Handle, fake_team

_WORK = ("wait", "wait_value", "signal", "write_value", "copy", "fill", "copy_level", "launch", "wait_event")
"""Driver calls that give a stream work."""
_ASIDE = {"adopt_stream", "granularity", "open_device", "prepare", "semaphore_pointer", "stream_key", "stream_pointer"}
_ASIDE |= RELEASES | {"is_capturing", "is_done", "is_idle", "unbind"}
"""Calls that reach no driver, and those that a drain makes, too: they count where a row has them."""
_OWN = ("host_signal", "host_value", "host_wait", "export")
"""Calls of our own timelines, which reach memory alone."""
_SIZE = FakeEverything.GROUPS.minimum


@dataclass(frozen=True)
class Row:
    """What a public call does; things are named as `natives` names them."""

    during: dict[str, str]  # its driver calls, and what each finds kept: marked, or something is being made on it
    notes: str = ""  # what has noted the stream before that is given the work, and still has when the driver has failed
    later: str | None = None  # what has noted the stream afterwards, where that is something else
    gate: bool = False  # it notes the stream's wait, looks at the gate, calls the driver; other calls do not look there
    tells: int = 0  # the value that the semaphore has of the stream afterwards; before, and after a failure, 0
    asks: str = ""  # what it marks, and uses also when that is closed
    early: bool = False  # it notes before it looks: if it is refused, a release waits for the stream in vain
    inherits: bool = (
        False  # the waits are another stream's: when the driver has failed, they stay until they pass there
    )
    blocks: str = ""  # whose release blocks the device from then on, and stands at the gate
    call: Callable[[Any], object] | None = None  # if not that of `pairs`
    before: Callable[[Any], object] = lambda world: None


class Fresh(pairs.World):
    """No stream was given what it has made; and there is multicast."""

    buffer = functools.cached_property(lambda self: self.memory.map_buffer())
    semaphore = functools.cached_property(lambda self: self.device.import_semaphore(gi.TimelineWin32(handle=8)))
    group = functools.cached_property(lambda self: gi.create_multicast(1, _SIZE, gi.VmmFd, device=self.device))
    whole = functools.cached_property(lambda self: gi.create_multicast([self.device], _SIZE))
    half = functools.cached_property(lambda self: self.device.allocate(_SIZE))
    part = functools.cached_property(lambda self: self.half.buffer)

    @functools.cached_property
    def graph(self) -> gi.Graph:
        with self.stream.capture() as graph:
            self.semaphore.wait(self.stream, 5)
            self.buffer.fill(1, stream=self.stream)
            self.semaphore.signal(self.stream, 6)
        return graph

    def end(self) -> None:
        super().end()
        unpin_spare_pages(self.device)


def _used_elsewhere(world: Any) -> None:
    world.shared.fill(1, stream=world.other)
    world.backend.blocked.add(world.other.ptr)


ROWS: dict[str, Row] = {
    "Stream.capture": Row(
        {"begin_capture": "stream", "signal": "stream semaphore", "end_capture": "stream", "instantiate": "",
         "semaphore_nodes": ""},
        notes="semaphore",
    ),
    "Stream.capturing": Row({"is_capturing": "stream"}, asks="stream"),
    "Stream.query": Row({"is_idle": "stream"}),
    "Stream.record": Row({"record": "stream"}, asks="stream"),
    "Stream.synchronize": Row({"synchronize": "stream"}, asks="stream"),
    "Stream.synchronize, timed": Row({"record": "stream", "is_done": "stream"}, asks="stream"),
    "Stream.wait_stream": Row(
        {"record": "other", "wait_event": "stream other"}, gate=True, asks="other", inherits=True,
        before=lambda w: w.semaphore.wait(w.other, 9),
    ),
    "Event.done": Row({"is_done": "event"}, asks="event"),
    "Event.wait": Row({"is_done": "event"}, asks="event"),
    "Buffer.copy_from_host": Row(
        {"create_stream": "", "copy": "buffer buffer.mapping", "synchronize": ""},
        notes="buffer.mapping", later="", early=True,
    ),
    "Buffer.copy_from_host, on a stream": Row(
        {"copy": "stream buffer buffer.mapping"}, notes="buffer.mapping", early=True
    ),
    "Buffer.copy_to_host": Row(
        {"create_stream": "", "record": "other", "wait_event": "other", "copy": "shared shared.mapping",
         "synchronize": ""},
        notes="shared.mapping", later="", asks="other", early=True, before=_used_elsewhere,
    ),
    "Buffer.fill, on a stream": Row({"fill": "stream buffer buffer.mapping"}, notes="buffer.mapping", early=True),
    "View.__dlpack__": Row(
        {"record": "other shared.mapping", "wait_event": "other shared.mapping"}, later="shared.mapping",
        asks="other shared.mapping", call=lambda w: w.shared.view(16).__dlpack__(stream=64), before=_used_elsewhere,
    ),
    "ExternalMemory.map_buffer": Row({"map_buffer": "memory"}),
    "ExternalMemory.map_mipmapped_array": Row({"map_array": "memory"}),
    "ExternalSemaphore.export": Row({"export": "own"}, blocks="own"),
    "ExternalSemaphore.host_signal": Row({"host_signal": "own"}),
    "ExternalSemaphore.host_wait": Row({"host_wait": "own"}),
    "ExternalSemaphore.signal": Row({"signal": "stream semaphore"}, notes="semaphore", tells=2),
    "ExternalSemaphore.signal, of ours": Row({"write_value": "stream own"}, notes="own", tells=7),
    "ExternalSemaphore.value": Row({"host_value": "own"}),
    "ExternalSemaphore.wait": Row({"wait": "stream semaphore"}, notes="semaphore", gate=True),
    "ExternalSemaphore.wait, of ours": Row({"wait_value": "stream own"}, notes="own", gate=True),
    "SemaphoreBatch.signal": Row({"signal": "stream batch"}, notes="semaphore", tells=2),
    "SemaphoreBatch.wait": Row({"wait": "stream batch"}, notes="semaphore", gate=True),
    "Allocation.buffer": Row({"map_allocation": "allocation"}),
    "Allocation.export": Row({"export_allocation": "allocation"}),
    "Allocation.view": Row({"map_allocation": "allocation"}, call=lambda w: w.allocation.view(16)),
    "ArrayLevel.copy_from_buffer": Row(
        {"copy_level": "stream array shared.mapping"}, notes="array shared.mapping", early=True
    ),
    "ArrayLevel.copy_from_host": Row({"copy_level": "stream array"}, notes="array", early=True),
    "Graph.launch": Row(
        {"launch": "other graph.executable"}, notes="graph.executable semaphore buffer.mapping", gate=True, tells=6
    ),
    "GraphSemaphores.advance": Row({"set_node": "graph.semaphores"}),
    "GraphStep.set": Row({"set_node": "graph.semaphores"}, call=lambda w: w.graph.semaphores.signals[0].set(7)),
    "Device.allocate": Row({"allocate": ""}),
    "Device.create_semaphore": Row({"pin": ""}),
    "Device.create_stream": Row({"create_stream": ""}),
    "Device.import_memory": Row({"import_memory": ""}),
    "Device.import_semaphore": Row({"import_semaphore": ""}),
    "Device.synchronize": Row({"synchronize": "stream"}, asks="stream", before=lambda w: w.stream),
    "MulticastObject.add_device": Row({"add_device": "group"}, call=lambda w: w.group.add_device(w.device)),
    "MulticastObject.bind_address": Row(
        {"bind_address": "whole part"}, call=lambda w: w.whole.bind_address(w.device, w.part, _SIZE)
    ),
    "MulticastObject.bind_memory": Row({"bind_memory": "whole half"}, call=lambda w: w.whole.bind_memory(w.half)),
    "MulticastObject.export": Row({"export_multicast": "group"}, call=lambda w: w.group.export().close()),
    "MulticastObject.map": Row({"map_allocation": "whole"}, call=lambda w: w.make(w.whole.map())),
}  # fmt: skip
_MULTICAST = (gi.MulticastObject, gi.MulticastBinding, gi.MulticastMapping)
_PASSIVE = {
    "close": "retires it; what is called is the drain's", "drain": "the same", "unbind": "closes a binding",
    "hold": "marks, as an array does", "on_released": "notes a callback", "wrap_stream": "names one",
    "MulticastMapping.__dlpack__": "refuses", "__enter__": pairs.ENTER, "__exit__": pairs.ENTER,
}  # fmt: skip
"""Methods that have no row, and why. What else has none is in no pair for a reason that serves here, too."""


def without_a_row() -> list[str]:
    """The public methods that have neither a row nor a reason."""
    known = {name.partition(", ")[0] for name in ROWS} | pairs.excused()
    for cls in _MULTICAST:
        known |= {f"{cls.__name__}.{name}" for name, it in inspect.getmembers_static(cls) if type(it) is property}
    classes = [cls for cls in (*pairs.CLASSES, *_MULTICAST) if cls is not gi.OpaqueFd]
    methods = [method for method in pairs.public_methods(classes) if method not in known]
    return [method for method in methods if not {method, method.partition(".")[2]} & _PASSIVE.keys()]


def natives(world: pairs.World) -> dict[str, Lifetime]:
    """What the core has of a world's things, as rows call it."""
    found: dict[str, Lifetime] = {}
    for name, thing in world.things.items():
        native = thing._known_as() if isinstance(thing, gi.Stream) else getattr(thing, "lifetime", None)
        if isinstance(native, Lifetime):
            found[name] = native
        if isinstance(thing, gi.Buffer):
            found[f"{name}.mapping"] = thing.mapping
        if isinstance(thing, gi.Graph):
            found[f"{name}.executable"] = thing._captured()[1]
            found[f"{name}.semaphores"] = thing.semaphores.lifetime
    return found


def _is_kept(native: Lifetime) -> bool:
    return bool(native.calls or native.arrays or any(one.state is BORN for one in native.standing))


class _Closes(list[Any]):
    """Marks, the first of which comes just behind another thread's close of the native."""

    native: Lifetime

    def __iadd__(self, marks: Any) -> _Closes:  # type: ignore[misc]
        retire(self.native)
        return super().__iadd__(marks)


class Made:
    """A row's call, made once in a world of its own, and what was seen meanwhile."""

    def __init__(self, name: str, *, fails: str = "", closes: str = "") -> None:
        self.row = ROWS[name]
        self.fails = fails
        self.kept: dict[str, list[str]] = {}
        """What each driver call has found kept."""
        self.gated: list[str] = []
        self.at_work: tuple[list[str], bool, int] = [], False, 0
        """As the last that gave a stream work has found it: what had noted the stream, whether the gate was looked at
        behind the note of its wait, and what the semaphore had of it."""
        self.error: gi.GpuInteropError | None = None
        self.looks: list[set[object]] = []
        world = _world(name, _things(name))
        self.natives = natives(world)
        self._before = {name: set(native.uses) for name, native in self.natives.items()}
        self._gated_before = {name for name, native in self.natives.items() if native.gate}
        pending = self._waiting()
        if closes:
            marks = self.natives[closes].calls = _Closes()
            marks.native = self.natives["semaphore" if closes == "batch" else closes]  # which closes the batch
        world.backend.at = self._at
        gate = world.device.gate
        gate.shut.append(None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gate, "let_releases_end", lambda: self.looks.append({one.handle for one in waiting}))
            for method in _OWN:
                patch.setattr(OwnTimelines, method, self._watched(method))
            try:
                _call(name)(world)
            except gi.GpuInteropError as error:
                self.error = error.with_traceback(None)  # whose frames keep arrays
            finally:
                world.backend.at = lambda call, place, handles: None
                gate.shut.pop()
        self.closed = closes and self.natives[closes].state is not LIVE
        self.left = self.noted(), self._waiting() - pending, self._told()
        world.end()

    def noted(self, handles: Sequence[Handle] | None = None) -> list[str]:
        """What has noted a new stream; that of a driver call, if its handles are given."""
        users = {name: set(native.uses) - self._before[name] for name, native in self.natives.items()}
        return sorted(name for name, new in users.items() if any(handles is None or u.handle in handles for u in new))

    def _told(self) -> int:
        semaphores = [self.natives[name] for name in ("semaphore", "own") if name in self.natives]
        return max((told[at] for one in semaphores for told, at in one.uses.values()), default=0)

    def _waiting(self) -> set[str]:
        return {name for name, one in self.natives.items() if isinstance(one, KnownStream) and one.pending()}

    def _watched(self, method: str) -> Callable[..., Any]:
        own = getattr(OwnTimelines, method)

        def call(*arguments: Any) -> Any:
            self._at(method, "inside", [])
            return own(*arguments)

        return call

    def _at(self, call: str, place: str, handles: Sequence[Handle]) -> None:
        if place != "inside" or (call in _ASIDE and call not in self.row.during):
            return
        self.kept.setdefault(call, sorted(name for name, native in self.natives.items() if _is_kept(native)))
        self.gated = [name for name, native in self.natives.items() if native.gate and name not in self._gated_before]
        if call in _WORK:
            looked = any(not looks.isdisjoint(handles) for looks in self.looks)
            self.at_work = self.noted(handles), looked, self._told()
        if call == self.fails:
            self.fails = ""
            raise gi.DriverError(call, 1, "CUDA_ERROR_INVALID_VALUE")


def _call(name: str) -> Callable[[Any], object]:
    return ROWS[name].call or {action.name: action.call for action in pairs.actions()}[name]


def _world(name: str, things: Sequence[str] = ()) -> Fresh:
    driver = FakeEverything()
    world = Fresh(fake_team(backend=driver)[0], driver)
    for thing in things:
        getattr(world, thing)
    ROWS[name].before(world)
    return world


@functools.cache
def _things(name: str) -> list[str]:
    """What a call is made on: found by making it."""
    world = _world(name)
    _call(name)(world)
    found = list(world.things)
    world.end()
    return found


def check(name: str) -> None:
    """Compare a row with what the call does."""
    row, made = ROWS[name], Made(name)
    during = {call: sorted(things.split()) for call, things in row.during.items()}
    work = next((call for call in reversed(during) if call in _WORK), "")
    notes, asks = sorted(row.notes.split()), set(row.asks.split())
    later = notes if row.later is None else sorted(row.later.split())
    waits = {"stream", "other"} & set(during[work]) - asks if row.gate else set()
    _same("the driver calls, and what each has found kept", made.kept, during)
    _same("the notes, the look at the gate and the value, before the work", made.at_work, (notes, row.gate, 0))
    _same(
        "how often it looks at the gate, and what it puts there",
        (len(made.looks), made.gated),
        (row.gate, row.blocks.split()),
    )
    _same("the notes, the waits and the value that are left", made.left, (later, waits, row.tells))
    for call in during:
        made = Made(name, fails=call)
        if made.error is not None:  # else the call can do without
            left = notes if work in made.kept else [], waits if row.inherits and call == work else set(), 0
            _same(f"what is left after {call} has failed", made.left, left)
    for thing in sorted({thing for things in during.values() for thing in things} - asks):
        made = Made(name, closes=thing)
        if made.closed:  # else something is being made on it
            _same(f"the error when {thing} is closed", type(made.error), gi.ResourceClosedError)
            _same(f"the calls when {thing} is closed", [call for call in made.kept if thing in during[call]], [])
            _same(f"the notes when {thing} is closed", [] if row.early else made.left[0], [])


def _same(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what}: expected {expected}, got {found}"
