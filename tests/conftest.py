"""What holds for all tests: they are interrupted as in a shell, and may run side by side."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import sysconfig
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests import leftovers
from tests.limits import LIMIT
from tests.missing_vulkan import WITHOUT
from tests.progress import Progress

# A run by plain pytest after `. .vulkan/env` has the fetched drivers and no others, as make's runs have.
if "GPUINTEROP_TEST_DRIVERS" not in os.environ:
    if added := os.environ.pop("VK_ADD_DRIVER_FILES", ""):
        os.environ.setdefault("VK_DRIVER_FILES", added)
        os.environ.setdefault("VK_ICD_FILENAMES", added)
    # The fetched Mesa is the last of EGL's vendors, and its drivers come first.
    if vendors := os.environ.get("__EGL_VENDOR_LIBRARY_FILENAMES"):
        os.environ["__EGL_VENDOR_LIBRARY_FILENAMES"] = vendors.rpartition(":")[2]
        os.environ["LIBGL_DRIVERS_PATH"] = os.environ.get("LIBGL_DRIVERS_PATH", "").partition(":")[0]
        os.environ.update(__GLX_VENDOR_LIBRARY_NAME="mesa", LIBGL_ALWAYS_SOFTWARE="1")

# Here too a limit only ends a hang.
os.environ.setdefault("GPUINTEROP_KIT_LIMIT", f"{LIMIT:g}")

_ORDER = os.environ.get("GPUINTEROP_TEST_ORDER")
"""The seed of a random order; without one, tests run as they are collected."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and sys.platform == "linux":
        _end_children_with_this_worker()
    elif to := os.environ.pop("GPUINTEROP_TEST_PROGRESS", ""):  # for this process, and not for those that tests start
        paths = os.path.commonpath([os.path.abspath(one) for one in config.args])
        name = os.environ.get("GPUINTEROP_TEST_VENDOR") or os.path.relpath(paths, config.rootpath)
        config.pluginmanager.register(Progress(int(to), name), "progress")
    config.pluginmanager.register(leftovers, "leftovers")
    config.addinivalue_line("markers", "unjustified(*names): the validation layer says so, and nothing is wrong")
    config.addinivalue_line(
        "markers",
        "signals_beside: one thread signals a Vulkan timeline while another waits, or polls a fence. Synchronization "
        "validation (1.3.239) has one lock for both and blocks for ten seconds: it is off, other validation is on",
    )
    config.addinivalue_line("markers", "whole_run: the test looks at what those before it did, in whichever process")


def _end_children_with_this_worker() -> None:
    """Whatever ends it: a guard kills its process group when it is gone, with the children of the test that hung."""
    os.setpgid(0, 0)
    command = f"tail --pid={os.getpid()} -f /dev/null && kill -9 -{os.getpid()}"
    none = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, 0, 2)]
    os.posix_spawnp("sh", ["sh", "-c", command], os.environ, setsid=True, file_actions=none)


def pytest_report_header() -> str | None:
    return f"random order: GPUINTEROP_TEST_ORDER={_ORDER}" if _ORDER else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say once what tests lacked; each says it in its own reason, which pytest does not show."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if WITHOUT in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped {WITHOUT}: `make drivers` says why there is none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker of pytest-xdist knows its own part of the run, and leaves such tests to the controller."""
    if _ORDER:  # every worker has to find the same
        random.Random(_ORDER).shuffle(items)
        items.sort(key=lambda item: item.get_closest_marker("whole_run") is not None)
    if hasattr(config, "workerinput"):
        items[:] = [item for item in items if not item.get_closest_marker("whole_run")]


_parents: list[pytest.Item | pytest.Collector | None] = []
"""The module or class of the test before."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Thousands of tests collect garbage: else each goes through all that was loaded before its module or class."""
    if _parents != [item.parent]:
        _parents[:] = [item.parent]
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """When all workers have ended, their controller's kit has counted what they have done."""
    done = yield
    if session.config.pluginmanager.hasplugin("dsession"):
        for item in session.perform_collect():
            if item.get_closest_marker("whole_run"):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return done


@pytest.fixture(scope="session", autouse=True)
def _signals_arrive() -> Iterator[None]:
    """A shell without job control ignores SIGINT in background jobs, nohup SIGHUP; children inherit that."""
    before = [(signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))]
    if hasattr(signal, "SIGHUP"):
        before.append((signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL)))
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _without_the_gil() -> Iterator[None]:
    """An import may turn it on; on a free-threaded Python a run with it would prove nothing."""
    yield
    if sysconfig.get_config_var("Py_GIL_DISABLED") and sys._is_gil_enabled():  # type: ignore[attr-defined, unused-ignore]
        pytest.fail("expected a run without the GIL, got one with it; PYTHON_GIL=0 keeps it off", pytrace=False)


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    """What a test enters into it ends with the test."""
    with ExitStack() as stack:
        yield stack
