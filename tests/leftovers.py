"""A plugin that fails the test which leaves something behind: a native, a thread, a descriptor, a mark, a late warning.

Each test is compared with the state that it found. A test that leaves something on purpose names it:
``@pytest.mark.leaves("ExternalMemory", "fence")``, by regular expressions. Each must be found in what is left, and all
that is left must be named. It is forgotten then, as is what a failed test has left, and the next test does not see it.

What a fixture of a wider scope makes may stay until its end. What a device keeps for later calls, its copy streams,
spare pages and another library's last stream, is let go of first: that is a cache.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing import forkserver, resource_sharer, resource_tracker
from types import FrameType
from typing import Any, Final, ParamSpec, Self, TypeVar

import numpy as _numpy  # noqa: F401 - its threads start with the import
import pytest

from gpuinterop import system
from gpuinterop._core import discovery, lifetime, streams
from gpuinterop._core.device import Device
from gpuinterop._core.release import drain
from gpuinterop.errors import report
from gpuinterop.opengl._context import Context
from gpuinterop.sharing.loop import Loop
from gpuinterop.sharing.server import Server
from gpuinterop.testing.exporters.vulkan.exporter import _Rescuer
from gpuinterop.testing.kit import Kit
from tests.limits import LIMIT
from tests.spare_pages import unpin_spare_pages

P = ParamSpec("P")
T = TypeVar("T")

_MOMENT: Final = 0.05
kept_by_drivers: Final = [
    r"descriptor \d+ of /memfd:(swiftshader_jit|gpuinterop\.simulated\.allocation)",
    r"thread \d+, simulated drive;",
]
"""Words for what is a driver's or a framework's: SwiftShader's code; a simulated driver's memory and streams, which it
counts."""
_PROC: Final = sys.platform == "linux"

_failed: Final = pytest.StashKey[bool]()
_skipped: Final = pytest.StashKey[bool]()
_devices: Final = weakref.WeakSet[Device]()
"""Those that are looked at: of installed backends, and of the running test."""
_before: Final[list[Things]] = []
"""What the running test has found, with what was made since that may stay."""
_wider: Final[dict[Any, Things]] = {}
"""What fixtures of a wider scope have made."""
_lasting: Final[list[Things]] = []
"""What is made once, also where a fixture needed it first."""


class Spec:
    @staticmethod
    @pytest.hookspec
    def pytest_count_left(config: pytest.Config) -> Counter[str]:
        """What else must not grow, by kind: a conftest's, for the tests of its folder."""
        raise NotImplementedError


def frames() -> dict[int, FrameType]:
    """Each thread's frame. CPython 3.11.8 stands still if its collector runs meanwhile (cpython #106883)."""
    on = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if on:
            gc.enable()


class Things:
    """Natives that are not released, threads and descriptors by their numbers, and what the folder counts."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self.natives = set(lifetime._alive)
        self.threads = threads()
        self.running = set(frames())
        self.fds = fds()
        self.counts = self.count()

    def __iadd__(self, made: Things) -> Self:
        self.natives |= made.natives
        self.threads |= made.threads
        self.running |= made.running
        self.fds |= made.fds
        self.counts += made.counts
        return self

    def __isub__(self, gone: Things) -> Self:
        self.natives -= gone.natives
        self.threads -= gone.threads
        self.running -= gone.running
        self.fds -= gone.fds
        self.counts -= gone.counts
        return self

    def count(self) -> Counter[str]:
        return sum(self.item.ihook.pytest_count_left(config=self.item.config), Counter())

    def are_all(self) -> bool:
        """Whether there is nothing new: cheap, for every test asks."""
        return (
            lifetime._alive.keys() <= self.natives
            and threads() <= self.threads
            and fds() <= self.fds
            and self.count() <= self.counts
            and not any(_marks())
        )

    def new(self) -> list[str]:
        """What is new, in words."""
        new = [_said(one) for one in lifetime.alive() if one not in self.natives and not _warned_of(one)]
        new += _marks()
        looks = [partial(_thread, one, self.running) for one in sorted(threads() - self.threads, key=int)]
        looks += [partial(_file, one) for one in sorted(fds() - self.fds, key=int)]
        for look in looks:
            with contextlib.suppress(OSError):  # it ends while we look
                new += [one for one in [look()] if not any(re.match(words, one) for words in kept_by_drivers)]
        return new + [f"{count} more of: {kind}" for kind, count in (self.count() - self.counts).items()]

    def may_end(self) -> bool:
        """Whether there is something new that may end by itself."""
        retired = any(one.state is lifetime.RETIRED for one in lifetime._alive.keys() - self.natives)
        return retired or not (threads() <= self.threads and fds() <= self.fds and self.count() <= self.counts)

    def forget_others(self) -> None:
        """Take what is new out of the core: no later test comes upon it."""
        for one in lifetime._alive.keys() - self.natives:
            if one.gate is not None:
                one.gate.blocked.pop(one, None)
            for parent in self.natives.intersection(one.parents):
                parent.dependents.pop(one, None)
            for known in _REGISTRIES:
                known.pop(one, None)
        for one in lifetime.alive():
            one.calls.clear()
        for device in list(_devices):
            device.gate.shut.clear()


_REGISTRIES: Final[tuple[dict[Any, Any], ...]] = (
    lifetime._alive, lifetime.to_release, lifetime.callbacks_due, streams.fenced, streams.waiting,
)  # fmt: skip


def threads() -> set[str]:
    """By the system's number: also those that a driver has started."""
    return set(os.listdir("/proc/self/task")) if _PROC else {str(one.native_id) for one in threading.enumerate()}


def fds() -> set[str]:
    """The descriptors that are open, without the look's own and those that multiprocessing keeps."""
    if not _PROC:
        return set()
    own = os.open("/proc/self/fd", os.O_RDONLY)  # the lowest number, which the listing takes again
    os.close(own)
    kept = (own, resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    return set(os.listdir("/proc/self/fd")).difference(map(str, kept))


def _marks() -> Iterator[str]:
    for one in lifetime.alive():
        if one.calls.copy():
            yield f"a mark of a call with {one!r}"
    for device in list(_devices):
        if device.gate.shut.copy():
            yield f"a mark at the gate of {device!r}"


def _warned_of(one: lifetime.Lifetime) -> bool:
    """Whether it stays because a release has failed: a warning says so, and fails a test that does not expect it."""
    return one.state is lifetime.LEAKED or one.stays


def _said(one: lifetime.Lifetime) -> str:
    return f"{one!r}: {one.what_holds()}" if one.state is lifetime.RETIRED else repr(one)


def _thread(task: str, before: set[int]) -> str:
    """A thread in words, those of Python that ran `before` left out."""
    running = {thread.native_id: thread for thread in threading.enumerate()}
    if thread := running.get(int(task)):
        return f"thread {thread.name}"
    with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
        name = file.read().strip()
    known = before.union(thread.ident for thread in running.values())
    others = [frame.f_code.co_qualname for ident, frame in frames().items() if ident not in known]
    return f"thread {task}, {name}; threading does not know it, nor what runs {', '.join(others)}"


def _file(fd: str) -> str:
    """A descriptor in words."""
    return f"descriptor {fd} of {os.readlink(f'/proc/self/fd/{fd}')}"


def _loaded_devices() -> set[Device]:
    """The devices of installed backends, which last as long as the process; a test makes others for itself."""
    backends = [one for one in discovery._loaded.values() if isinstance(one, discovery.LoadedBackend)]
    return {device for backend in backends for device in backend._devices.values()}


def _let_go() -> None:
    """Empty the caches, and release whatever can be released."""
    for device in list(_devices):
        device._last_stream = None
        while device._copiers:
            device._copiers.pop().close()
        try:
            unpin_spare_pages(device)
        except Exception as error:  # a scripted backend's
            report(error)
    for one in lifetime.alive():
        if isinstance(one, streams.KnownStream) and one.thread is not None:
            lifetime.retire(one)  # a thread's own default stream, which no caller can close
    resource_sharer.stop(LIMIT)  # multiprocessing's thread, which hands out descriptors
    drain()


def _left(before: Things, named: list[str], limit: float) -> list[str]:
    """What is left once all has ended that ends by itself; it is forgotten."""
    if not named and before.are_all():
        return []
    told: list[str] = []
    hook = sys.unraisablehook
    sys.unraisablehook = lambda error: told.append(f"{error.exc_type.__name__}: {error.exc_value}")
    try:
        _let_go()
        system.until(lambda: threads() <= before.threads, _MOMENT)  # most often it is a thread that is about to end
        if named or not before.are_all():
            gc.collect()
            _let_go()
            deadline = time.monotonic() + limit
            while _differ(before.new(), named) and before.may_end() and time.monotonic() < deadline:
                time.sleep(0.001)
                _let_go()
    finally:
        sys.unraisablehook = hook
    left = before.new() + told
    before.forget_others()
    return left


def _differ(left: list[str], named: list[str]) -> list[str]:
    """What is left and not named, and what is named and not left."""
    differ = [one for one in left if not any(re.search(words, one) for words in named)]
    return differ + [f"not {words!r}" for words in named if not any(re.search(words, one) for one in left)]


@contextmanager
def keeping() -> Iterator[Things | None]:
    """What is made in the block may stay when the test ends."""
    if not _before:  # before the first test
        yield None
        return
    made, before = Things.__new__(Things), Things(_before[0].item)
    try:
        yield made
    finally:
        made.__init__(before.item)  # type: ignore[misc]
        made -= before
        _before[0] += made


def _kept(call: Callable[P, T]) -> Callable[P, T]:
    @wraps(call)
    def keep(*arguments: P.args, **keywords: P.kwargs) -> T:
        with keeping() as made:
            result = call(*arguments, **keywords)
        if made is not None:
            _lasting.append(made)
        return result

    return keep


# -- hooks -------------------------------------------------------------------------------------------------------------


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Spec)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves(*words): the test leaves this behind on purpose, and nothing else")
    # The kit's exporters, and what they make when they first need it: tests share them.
    made_once = (
        (Kit, "exporter"), (_Rescuer, "__init__"), (Server, "__init__"), (Loop, "__init__"), (Loop, "_start"),
        (Context, "_make_device"),
    )  # fmt: skip
    for owner, name in made_once:
        setattr(owner, name, _kept(getattr(owner, name)))
    made = Device.__init__

    @wraps(made)
    def make(device: Device, *arguments: Any, **keywords: Any) -> None:
        made(device, *arguments, **keywords)
        _devices.add(device)

    setattr(Device, "__init__", make)  # noqa: B010 - mypy


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    _before[:] = [Things(item)]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    with keeping() as made:
        if made is not None:
            _wider[fixturedef] = made
        return (yield)


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    if (made := _wider.pop(fixturedef, None)) is not None:
        _before[0] -= made
        for one in _lasting:
            _before[0] += one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed or hasattr(report, "wasxfail")
    item.stash[_skipped] = item.stash.get(_skipped, False) or report.skipped
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    try:
        result = yield
    except BaseException:
        item.stash[_failed] = True
        raise
    finally:
        skipped = item.stash.get(_skipped, False)  # one that was skipped leaves nothing on purpose
        named = [words for mark in item.iter_markers("leaves") for words in mark.args if not skipped]
        failed = item.stash.get(_failed, False)
        differ = _differ(_left(_before[0], named, 0.0 if failed else LIMIT), named)
        _devices.intersection_update(_loaded_devices())
    if differ and not failed:
        pytest.fail("it leaves behind:" + "\n    ".join(["", *differ]), pytrace=False)
    return result
