"""The core as the explorer runs it: its locks, sleeps, marks and looks are points. All that knows the core's names."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
import time
import warnings
from collections import deque
from typing import Any

import pytest

from gpuinterop import _core, system
from gpuinterop._core import gate, lifetime, monitor
from gpuinterop._core.device import Device
from gpuinterop._core.known_stream import KnownStream
from gpuinterop._core.memory import Mapping
from tests.spare_pages import unpin_spare_pages

from . import explorer
from .explorer import Lock, Notes, Queue, Run, Watched
from .fake import FakeBackend, table

_QUIET = frozenset({"stream_pointer", "stream_key", "prepare", "open_device", "granularity"})
"""Calls that reach no driver, or once in a process."""
_QUESTIONS = frozenset({"is_idle", "is_done", "is_capturing"})
"""Calls that change nothing: what comes inside and at the end is found at the start, or at the next point."""


_REGISTRIES = {
    "lifetime": ("_alive", "waiting_for_a_look", "endings"),
    "known_stream": ("fenced",),
    "gate": ("waiting", "blocking"),
    "monitor": ("dropped", "lingering"),
}  # fmt: skip


def forget() -> None:
    """What is still to be released, in the whole process, is nobody's any more: a test that has failed left it."""
    for module, names in _REGISTRIES.items():
        found = sys.modules.get(f"{_core.__name__}.{module}")
        for name in names:
            getattr(found, name, {}).clear()


def unsound() -> list[str]:
    """What is wrong when no call is under way."""
    found = [] if not monitor.interrupted() else ["the monitor is held"]
    for one in lifetime.alive():
        if one.gate is not None and list.__len__(one.gate.shut):
            found.append(f"the gate of {one!r} is shut")
        if list.__len__(one.calls):
            found.append(f"{one!r} is marked")
        if one.state not in (lifetime.LIVE, lifetime.RETIRED, lifetime.LEAKED):
            found.append(f"{one!r} is left so")
        if isinstance(one, KnownStream) and deque.__len__(one.waits) and one not in gate.waiting:
            found.append(f"{one!r} waits, and is not noted")
        for parent in one.parents:
            if parent.state in lifetime.GONE and parent.state is not lifetime.LEAKED:
                found.append(f"{one!r} stands on {parent!r}")
            how = parent.standing.get(one)
            if how is None:
                found.append(f"{parent!r} does not know of {one!r}")
            if how is lifetime.Standing.CHILD and one.state is lifetime.LIVE and parent.state is not lifetime.LIVE:
                found.append(f"{one!r} stands on {parent!r}")
    return found


class Core:
    """Fits the explorer into the core by monkeypatch: nothing in the core knows of it.

    What it expects: modules that say ``import threading`` and ``import time``; `monitor._lock`, looked up at each use;
    `native.Lifetime` with `state`, `calls`, `standing` and `uses`; `memory.Mapping.arrays`; `gate.Gate.shut` and
    `gate.waiting`; `known_stream.KnownStream.waits`; `monitor.dropped`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._modules = [
            importlib.import_module(f"{_core.__name__}.{found.name}") for found in pkgutil.iter_modules(_core.__path__)
        ]
        self._locks: list[Lock] = []
        self._ended: list[Device] = []
        monkeypatch.setattr(system, "pauses", explorer.pauses)
        for module in [*self._modules, system]:
            for name, value in list(vars(module).items()):
                if value is threading or value is time:
                    monkeypatch.setattr(module, name, explorer.stand_in(value))
                elif isinstance(value, type(threading.Lock()) | type(threading.RLock())):
                    again = isinstance(value, type(threading.RLock()))
                    ends = not module.__name__.endswith(".monitor")
                    self._locks.append(Lock(f"{module.__name__}.{name}", again=again, ends=ends))
                    monkeypatch.setattr(module, name, self._locks[-1])
        self._watch()
        warnings.simplefilter("ignore")

    def _watch(self) -> None:
        guarded = explorer.guarded_by(self.holds)
        self._see(lifetime.Lifetime, "state", holds=self.holds)
        self._see(lifetime.Lifetime, "standing", holds=self.holds, wrap=guarded, looks=False)
        grows = explorer.guarded_by(self.holds, fixed=False)
        self._see(lifetime.Lifetime, "uses", holds=self.holds, wrap=grows, looks=False)
        self._see(lifetime.Lifetime, "calls", wrap=explorer.marks_of, looks=False)
        self._see(Mapping, "arrays", wrap=explorer.marks_of, looks=False)
        self._see(gate.Gate, "shut", wrap=explorer.marks_of, looks=False)
        self._see(KnownStream, "waits", wrap=lambda _, value: Queue(value, value.maxlen), looks=False)
        self._replace(gate.waiting, Notes(gate.waiting))
        self._replace(monitor.dropped, Queue())
        for name in _REGISTRIES["lifetime"]:
            self._replace(getattr(lifetime, name), guarded(name, {}))

    def _see(self, cls: type, name: str, **how: Any) -> None:
        self._patch.setattr(cls, name, Watched(cls, name, **how), raising=False)

    def _replace(self, old: object, new: object) -> None:
        """In every module that has imported it by name."""
        for module in self._modules:
            for name, value in list(vars(module).items()):
                if value is old:
                    self._patch.setattr(module, name, new)

    def holds(self) -> bool:
        """Whether the running thread may write what is shared. What no run is about may."""
        run = explorer._now
        return run is None or monitor.interrupted() or run.me() is None

    def devices(self, run: Run, backend: FakeBackend) -> list[Device]:
        """The devices of a scripted backend, whose calls are points of the run."""
        for lock in self._locks:
            lock.owner, lock.depth = None, 0
        forget()
        for device in self._ended:  # or each schedule would leave its pages
            device.driver.at = lambda call, place, handles: None  # type: ignore[attr-defined]
            unpin_spare_pages(device)
        self._take_over(run, backend)
        self._ended = known = list[Device]()
        known += (Device(backend, info, table(), lambda: known) for info in backend.devices())
        return known

    @staticmethod
    def _take_over(run: Run, backend: FakeBackend) -> None:
        def at(call: str, place: str, handles: Any) -> None:
            if call not in _QUIET and (place == "start" or call not in _QUESTIONS):
                run.point(f"{call} {place}", handles)

        def block(condition: Any, what: str) -> None:
            run.block_until(condition, what)

        backend.at = at
        if hasattr(backend, "block"):
            backend.block = block
