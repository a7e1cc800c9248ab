"""The core as the explorer runs it: its locks, sleeps, marks and looks are points. All that knows the core's names."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
import time
import warnings
from typing import Any

import pytest

from gpuinterop import _core, system
from gpuinterop._core.device import Device

from . import explorer
from .explorer import Lock, Notes, Queue, Run, Watched
from .fake import FakeBackend, fake_info, table

_QUIET = frozenset({"stream_pointer", "stream_key", "prepare", "open_device", "granularity"})
"""Calls that reach no driver, or once in a process."""
_QUESTIONS = frozenset({"is_idle", "is_done", "is_capturing"})
"""Calls that change nothing: what comes at their end comes at the next point as well."""


_REGISTRIES = {
    "native": ("_alive", "waiting_for_a_look", "endings"),
    "native_stream": ("pointed",),
    "gate": ("waiting", "blocking"),
    "monitor": ("dropped",),
}  # fmt: skip


def forget() -> None:
    """What is still to be released, in the whole process, is nobody's any more: a test that has failed left it."""
    for module, names in _REGISTRIES.items():
        found = sys.modules.get(f"{_core.__name__}.{module}")
        for name in names:
            getattr(found, name, {}).clear()


class Core:
    """Fits the explorer into the core by monkeypatch: nothing in the core knows of it.

    What it expects: modules that say ``import threading`` and ``import time``; `monitor._lock`, looked up at each use;
    `native.Native` with `state`, `calls`, `standing` and `uses`; `gate.Gate.shut` and `gate.waiting`;
    `native_stream.NativeStream.waits`; `monitor.dropped`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._modules = [
            importlib.import_module(f"{_core.__name__}.{found.name}") for found in pkgutil.iter_modules(_core.__path__)
        ]
        self._locks: list[Lock] = []
        self._table = table()
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
        self._monitor = sys.modules.get(f"{_core.__name__}.monitor")
        if self._monitor is not None:
            self._watch()
        warnings.simplefilter("ignore")

    def _watch(self) -> None:
        native, gate, streams = (
            sys.modules[f"{_core.__name__}.{name}"] for name in ("native", "gate", "native_stream")
        )
        guarded = explorer.guarded_by(self.holds)
        self._see(native.Native, "state", holds=self.holds)
        self._see(native.Native, "standing", holds=self.holds, wrap=guarded, looks=False)
        grows = explorer.guarded_by(self.holds, fixed=False)
        self._see(native.Native, "uses", holds=self.holds, wrap=grows, looks=False)
        self._see(native.Native, "calls", wrap=explorer.marks_of, looks=False)
        self._see(gate.Gate, "shut", wrap=explorer.marks_of, looks=False)
        self._see(streams.NativeStream, "waits", wrap=lambda _, value: Queue(value, value.maxlen), looks=False)
        self._replace(gate.waiting, Notes(gate.waiting))
        assert self._monitor is not None
        self._replace(self._monitor.dropped, Queue())
        for name in _REGISTRIES["native"]:
            self._replace(getattr(native, name), guarded(name, {}))

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
        assert self._monitor is not None
        return explorer._now is None or explorer._now.me() is None or bool(self._monitor._lock._is_owned())

    def device(self, run: Run, backend: FakeBackend, ordinal: int = 0) -> Device:
        """A device of a scripted backend whose calls are points of the run."""
        for lock in self._locks:
            lock.owner, lock.depth = None, 0
        forget()
        self._take_over(run, backend)
        known: list[Device] = []
        infos = backend.devices()
        info = infos[ordinal] if ordinal < len(infos) else fake_info()
        known.append(Device(backend, info, self._table, lambda: known))
        return known[0]

    @staticmethod
    def _take_over(run: Run, backend: FakeBackend) -> None:
        def at(call: str, place: str, handles: Any) -> None:
            if call not in _QUIET and not (place == "end" and call in _QUESTIONS):
                run.point(f"{call} {place}", handles)

        def block(condition: Any, what: str) -> None:
            run.block_until(condition, what)

        backend.at = at
        if hasattr(backend, "block"):
            backend.block = block
