"""Which public calls may meet in two threads: all of them, made of the public methods by looking at the classes.

`METHODS` says of each public method how it is called here, or `REASONS` why it is in no pair. A method that stands in
neither fails `test_pairs.py`: whoever adds one says what it may meet.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gpuinterop as gi
from gpuinterop._core.device import Device
from tests.spare_pages import unpin_spare_pages

from .explored import Core, unsound
from .explorer import Explored, Run, explore
from .fake import FakeEverything, fake_team

CLASSES: tuple[type, ...] = (
    gi.Stream, gi.Event, gi.Buffer, gi.View, gi.ExternalMemory, gi.ExternalSemaphore, gi.SemaphoreBatch, gi.Allocation,
    gi.MipmappedArray, gi.ArrayLevel, gi.Graph, gi.GraphSemaphores, gi.GraphStep, gi.Device, gi.OpaqueFd,
)  # fmt: skip
ALLOWED = (
    gi.ResourceClosedError, gi.ResourceBusyError, gi.InvalidArgumentError, gi.HandleError, gi.SemaphoreTimeoutError,
)  # fmt: skip
LIMIT = 5.0
"""Seconds, of the explorer's clock."""


class World:
    """What the calls of a pair are made on: each thing is made when it is first asked for."""

    def __init__(self, devices: Sequence[Device], backend: FakeEverything) -> None:
        self.device, self.second = devices
        self.backend = backend
        self.made: list[Any] = []
        self.patience = 1.0
        """Seconds for what is closed in the end, where that was interrupted."""
        self.own_things = frozenset(vars(self)) | {"own_things"}

    @property
    def things(self) -> dict[str, Any]:
        """What was made so far."""
        return {name: thing for name, thing in vars(self).items() if name not in self.own_things}

    @functools.cached_property
    def stream(self) -> gi.Stream:
        return self.device.create_stream()

    @functools.cached_property
    def other(self) -> gi.Stream:
        return self.device.create_stream()

    @functools.cached_property
    def far(self) -> gi.Stream:
        """On the second device, as the next."""
        return self.second.create_stream()

    @functools.cached_property
    def far_memory(self) -> gi.ExternalMemory:
        return self.second.import_memory(gi.OpaqueWin32(handle=8), size=4096)

    @functools.cached_property
    def far_buffer(self) -> gi.Buffer:
        return self.far_memory.map_buffer()

    @functools.cached_property
    def wrapped(self) -> gi.Stream:
        return self.device.wrap_stream(64)

    @functools.cached_property
    def event(self) -> gi.Event:
        return self.stream.record()

    @functools.cached_property
    def memory(self) -> gi.ExternalMemory:
        return self.device.import_memory(gi.OpaqueWin32(handle=8), size=4096)

    @functools.cached_property
    def buffer(self) -> gi.Buffer:
        made = self.memory.map_buffer()
        made.fill(1, stream=self.stream)
        return made

    @functools.cached_property
    def view(self) -> gi.View:
        return self.buffer.view(16)

    @functools.cached_property
    def array(self) -> gi.MipmappedArray:
        return self.memory.map_mipmapped_array("R8_UNORM", (4, 4))

    @functools.cached_property
    def level(self) -> gi.ArrayLevel:
        return self.array.level(0)

    @functools.cached_property
    def allocation(self) -> gi.Allocation:
        return self.device.allocate(4096)

    @functools.cached_property
    def shared(self) -> gi.Buffer:
        return self.allocation.buffer

    @functools.cached_property
    def semaphore(self) -> Any:
        made = self.device.import_semaphore(gi.TimelineWin32(handle=8))
        made.signal(self.stream, 1)
        return made

    @functools.cached_property
    def own(self) -> Any:
        return self.device.create_semaphore(gi.TimelineFd)

    @functools.cached_property
    def exported(self) -> gi.TimelineFd:
        handle: gi.TimelineFd = self.own.export()
        return handle

    @functools.cached_property
    def batch(self) -> gi.SemaphoreBatch:
        return gi.SemaphoreBatch(self.semaphore)

    @functools.cached_property
    def graph(self) -> gi.Graph:
        with self.stream.capture() as graph:
            self.semaphore.wait(self.stream, 5)
            self.semaphore.signal(self.stream, 6)
        return graph

    @functools.cached_property
    def handle(self) -> gi.OpaqueFd:
        fd = os.memfd_create("memory")
        os.ftruncate(fd, 4096)
        return gi.OpaqueFd.adopt(fd)

    def make(self, thing: Any) -> Any:
        """What a call has made is closed in the end."""
        self.made.append(thing)
        return thing

    def capture(self) -> None:
        with self.stream.capture() as graph:
            self.made.append(graph)
            self.semaphore.signal(self.stream, 9)

    def _look(self) -> None:
        found = [*self.backend.violations, *unsound()]
        assert found == [], "; ".join(found)

    def _left(self) -> list[tuple[str, int]]:
        return sorted(native for native in self.backend.live if native[0] not in ("stream", "pin"))

    def end(self) -> None:
        """Everything is closed and released, and nothing dead was touched."""
        self._look()
        self.device.drain()  # while work is still pending
        self.backend.pass_all()
        things = self.things
        for thing in reversed([*things.values(), *self.made]):
            if hasattr(thing, "close"):
                thing.close()
        self.made.clear()
        for name in things:
            delattr(self, name)
        things.clear()
        with contextlib.suppress(UnboundLocalError):
            del thing
        self.device.synchronize(timeout=self.patience)
        if self._left():  # a cycle may keep it; without the GIL a collection takes longer than the schedule
            gc.collect()
            self.device.synchronize(timeout=self.patience)
        self._look()
        assert self._left() == [], f"not released: {self._left()}"
        assert self.backend.count("pin") <= 2, "pages are left that are not used again"
        assert self.backend.count("stream") <= 2, "streams are left"


Call = Callable[[World], object]


@dataclass(frozen=True)
class Action:
    """A public call as a pair makes it.

    Attributes
    ----------
    ends : bool
        It closes, releases, drains or makes something: else it only marks, looks and enqueues.
    """

    name: str
    call: Call
    ends: bool = False


ENTER = "a look; leaving the block is close()"

_TARGET = bytes(16)

METHODS: dict[str, list[tuple[str, bool, Call]]] = {
    "Stream.capture": [("", True, World.capture)],
    "Stream.capturing": [("", False, lambda w: w.stream.capturing)],
    "Stream.close": [
        ("", True, lambda w: w.stream.close()),
        ("timed", True, lambda w: w.stream.close(timeout=LIMIT)),
        ("of another's", True, lambda w: w.wrapped.close()),
    ],
    "Stream.on_released": [("", True, lambda w: w.stream.on_released(lambda: None))],
    "Stream.query": [("", False, lambda w: w.stream.query())],
    "Stream.record": [("", True, lambda w: w.make(w.stream.record()))],
    "Stream.synchronize": [
        ("", True, lambda w: w.stream.synchronize()),
        ("timed", True, lambda w: w.stream.synchronize(timeout=LIMIT)),
    ],
    "Stream.wait_stream": [
        ("", False, lambda w: w.stream.wait_stream(w.other)),
        ("the other way", False, lambda w: w.other.wait_stream(w.stream)),
    ],
    "Event.done": [("", False, lambda w: w.event.done)],
    "Event.wait": [("", False, lambda w: w.event.wait(timeout=LIMIT))],
    "Buffer.close": [("", True, lambda w: w.buffer.close()), ("of an allocation", True, lambda w: w.shared.close())],
    "Buffer.copy_from_host": [
        ("", False, lambda w: w.buffer.copy_from_host(_TARGET)),
        ("on a stream", False, lambda w: w.buffer.copy_from_host(_TARGET, stream=w.stream)),
    ],
    "Buffer.copy_to_host": [("", False, lambda w: w.shared.copy_to_host(bytearray(16)))],
    "Buffer.fill": [("on a stream", False, lambda w: w.buffer.fill(1, stream=w.stream))],
    "Buffer.hold": [("", False, lambda w: w.buffer.hold())],
    "View.__dlpack__": [("", True, lambda w: w.view.__dlpack__(stream=-1 if w.device.info.dlpack[0] == 1 else 64))],
    "ExternalMemory.close": [
        ("", True, lambda w: w.memory.close()),
        ("timed", True, lambda w: w.memory.close(timeout=LIMIT)),
    ],
    "ExternalMemory.map_buffer": [("", True, lambda w: w.make(w.memory.map_buffer()))],
    "ExternalMemory.map_mipmapped_array": [
        ("", True, lambda w: w.make(w.memory.map_mipmapped_array("R8_UNORM", (4, 4))))
    ],
    "ExternalMemory.on_released": [("", True, lambda w: w.memory.on_released(w.stream.close))],
    "ExternalSemaphore.close": [
        ("", True, lambda w: w.semaphore.close()),
        ("of ours", True, lambda w: w.own.close()),
        ("timed", True, lambda w: w.semaphore.close(timeout=LIMIT)),
    ],
    "ExternalSemaphore.export": [("", False, lambda w: w.own.export().close())],
    "ExternalSemaphore.host_signal": [("", False, lambda w: w.own.host_signal(3))],
    "ExternalSemaphore.host_wait": [("", False, lambda w: w.own.host_wait(0, timeout=1.0))],
    "ExternalSemaphore.signal": [
        ("", False, lambda w: w.semaphore.signal(w.stream, 2)),
        ("of ours", False, lambda w: w.own.signal(w.stream, 7)),
    ],
    "ExternalSemaphore.value": [("", False, lambda w: w.own.value)],
    "ExternalSemaphore.wait": [
        ("", False, lambda w: w.semaphore.wait(w.stream, 9)),
        ("of ours", False, lambda w: w.own.wait(w.stream, 9)),
    ],
    "SemaphoreBatch.signal": [("", False, lambda w: w.batch.signal(w.stream, (2,)))],
    "SemaphoreBatch.wait": [("", False, lambda w: w.batch.wait(w.stream, (9,)))],
    "Allocation.buffer": [("", True, lambda w: w.allocation.buffer)],
    "Allocation.close": [("", True, lambda w: w.allocation.close())],
    "Allocation.export": [("", False, lambda w: w.allocation.export().close())],
    "MipmappedArray.close": [("", True, lambda w: w.array.close())],
    "ArrayLevel.copy_from_buffer": [("", False, lambda w: w.level.copy_from_buffer(w.shared, stream=w.stream))],
    "ArrayLevel.copy_from_host": [("", False, lambda w: w.level.copy_from_host(_TARGET, stream=w.stream))],
    "Graph.close": [("", True, lambda w: w.graph.close())],
    "Graph.launch": [("", False, lambda w: w.graph.launch(w.other))],
    "GraphSemaphores.advance": [("", False, lambda w: w.graph.semaphores.advance(2))],
    "GraphSemaphores.close": [("", True, lambda w: w.graph.semaphores.close())],
    "Device.allocate": [("", True, lambda w: w.make(w.device.allocate(4096)))],
    "Device.create_semaphore": [("", True, lambda w: w.make(w.device.create_semaphore(gi.TimelineFd)))],
    "Device.create_stream": [("", True, lambda w: w.make(w.device.create_stream()))],
    "Device.drain": [("", True, lambda w: w.device.drain())],
    "Device.import_memory": [
        ("", True, lambda w: w.make(w.device.import_memory(gi.OpaqueWin32(handle=8), size=64))),
        ("of a descriptor", True, lambda w: w.make(w.device.import_memory(w.handle, size=4096))),
    ],
    "Device.import_semaphore": [
        ("", True, lambda w: w.make(w.device.import_semaphore(gi.TimelineWin32(handle=8)))),
    ],
    "Device.synchronize": [
        ("", True, lambda w: w.device.synchronize()),
        ("timed", True, lambda w: w.device.synchronize(timeout=LIMIT)),
    ],
    "Device.wrap_stream": [("", True, lambda w: w.make(w.device.wrap_stream(64)))],
    "OpaqueFd.close": [("", True, lambda w: w.handle.close())],
    "OpaqueFd.detach": [("", True, lambda w: os.close(w.handle.detach()))],
    "OpaqueFd.duplicate": [("", False, lambda w: w.handle.duplicate().close())],
}
"""A method's calls, each with a word for what is special, whether it `Action.ends` something, and how it is made."""

REASONS: dict[str, str] = {
    "reads what was set at birth, and nothing else": """
        *.label Buffer.offset Buffer.size View.dtype View.nbytes View.ndim ExternalMemory.size Allocation.size
        ExternalSemaphore.takes_timeout GraphSemaphores.signals GraphSemaphores.waits
        OpaqueFd.owned OpaqueFd.trusted OpaqueFd.type_name""",
    "one look at the state; every call has that look as a point": """
        *.closed Stream.__cuda_stream__ Stream.ptr Buffer.ptr Buffer.view View.ptr MipmappedArray.level
        Graph.executable_ptr Graph.ptr Graph.semaphores OpaqueFd.fd OpaqueFd.fileno""",
    ENTER: "*.__enter__ *.__exit__",
    "polls `done`": "Event.__await__",
    "as of the memory": "*.on_released",
    "as `buffer`, which calls it or is called by it": "Allocation.buffer_on Allocation.view",
    "as the other copies of a level, but for the direction": "ArrayLevel.copy_to_buffer ArrayLevel.copy_to_host",
    "as `advance`, which sets every step": "GraphStep.set",
    "asks the driver, and changes nothing": """
        Device.allocation_granularity Device.can_access Device.multicast_granularity Device.peers""",
    "as `import_memory`": "Device.import_allocation",
    "makes one": "OpaqueFd.adopt OpaqueFd.adopt_duplicate",
}
"""Why other methods are in no pair; those with an asterisk, of every class."""

_PROTOCOLS = {"__dlpack__", "__enter__", "__exit__", "__cuda_stream__", "__await__"}


def public_methods(classes: Sequence[type] = CLASSES) -> Iterator[str]:
    """Every public method and property of the classes, as `METHODS` calls it."""
    for cls in classes:
        for name, value in inspect.getmembers_static(cls):
            known = name in _PROTOCOLS or not name.startswith("_")
            code = isinstance(value, property | staticmethod | classmethod) or inspect.isfunction(value)
            if known and (code or not callable(value)):
                yield f"{cls.__name__}.{name}"


def excused() -> set[str]:
    """The public methods that are in no pair for a reason."""
    names = {name for some in REASONS.values() for name in some.split()}
    methods = set(public_methods()) - METHODS.keys()
    return {name for name in names if name[0] != "*"} | {
        method for method in methods if f"*.{method.partition('.')[2]}" in names
    }


def actions() -> list[Action]:
    found: list[Action] = []
    for method, calls in METHODS.items():
        for special, ends, call in calls:
            found.append(Action(f"{method}{', ' if special else ''}{special}", call, ends))
    return found


EVERYWHERE = frozenset({"Allocation.close", "Device.drain", "Device.import_memory", "Device.synchronize"})
"""A release that blocks, a drain, a birth and a look at every stream: each call meets these, whatever it is made on."""


def exclusion(one: Action, other: Action) -> str:
    """Why two calls are not run beside each other; empty where they are."""
    if not (one.ends or other.ends):
        return "neither closes, releases, drains or makes anything: each marks, looks and enqueues"
    if not EVERYWHERE & {one.name, other.name} and not needs(one) & needs(other):
        return "they have the monitor, the gate and the drain in common, and no object: as with those that meet all"
    return ""


@functools.cache
def needs(action: Action) -> frozenset[str]:
    """What a call is made on: found by making it, alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = FakeEverything()
        world = World(fake_team(backend=backend)[0], backend)
        action.call(world)
        found = frozenset(world.things)
        world.end()
        unpin_spare_pages(world.device)
    return found


def preemptions(one: Action, other: Action) -> int:
    """How many a pair is searched with: two where a close meets a call on its own object, else one.

    One as well for a call's variants, such as those that wait: each is the plain call, and something behind it.
    """
    names = [action.name.partition(", ")[::2] for action in (one, other)]
    plain = not any(special or ".copy_" in method for method, special in names)  # a copy waits, too
    ends = any(".close" in method for method, _ in names)
    one_class = len({method.partition(".")[0] for method, _ in names}) == 1
    return 2 if plain and ends and one_class and needs(one) & needs(other) else 1


def meet(core: Core, one: Action, other: Action, **how: Any) -> Explored:
    """Two threads, in every order."""
    return play(core, sorted(needs(one) | needs(other)), [one.call, other.call], **how)


def play(
    core: Core, things: Sequence[str], calls: Sequence[Call], *, backend: type[FakeEverything] = FakeEverything,
    begin: Call = lambda world: None, **how: Any,
) -> Explored:  # fmt: skip
    """A thread for each call, in every order; `things` are there already, and `begin` has been called."""

    def build(run: Run) -> Callable[[], None]:
        driver = backend()
        world = World(core.devices(run, driver), driver)
        for thing in things:
            getattr(world, thing)
        begin(world)

        def other_side() -> bool:
            waits = bool(driver.waiting)
            driver.pass_all()
            return waits

        run.idle = other_side
        for call in calls:
            run.thread(functools.partial(call, world))
        return world.end

    return explore(build, allowed=ALLOWED, **how)
