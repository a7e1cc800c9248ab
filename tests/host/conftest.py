from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]

from gpuinterop.testing.missing_vulkan import give_up
from gpuinterop_host.backend import Device, HostBackend

if TYPE_CHECKING:
    from .software_vulkan import Driver


@pytest.fixture
def backend() -> HostBackend:
    return HostBackend()


@pytest.fixture
def device(backend: HostBackend) -> Device:
    return backend.open_device(0)


@pytest.fixture
def stream(backend: HostBackend, device: Device) -> Iterator[Any]:
    made = backend.create_stream(device)
    yield made
    backend.destroy_stream(made)


def _driver(name: str) -> Driver:
    try:
        from .software_vulkan import Driver

        return Driver(name)
    except Exception as error:
        give_up(f"there is no {name}: {error!r}")


@pytest.fixture(params=["SwiftShader", "llvmpipe"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = _driver(request.param)
    yield made
    made.close()


@pytest.fixture
def swiftshader() -> Iterator[Driver]:
    made = _driver("SwiftShader")
    yield made
    made.close()


@pytest.fixture
def lavapipe() -> Iterator[Driver]:
    made = _driver("llvmpipe")
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Callable[..., SpawnProcess]]:
    """Start a function of `peers` in a process of its own; it is dead when the test ends."""
    started: list[SpawnProcess] = []

    def begin(target: Callable[..., None], *arguments: Any) -> SpawnProcess:
        process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()
        process.close()


@contextmanager
def _no_leak() -> Iterator[None]:
    def held() -> tuple[set[str], int]:
        gc.collect()
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            return set(os.listdir("/proc/self/fd")), sum("/memfd:" in line for line in maps)

    fds, maps = held()
    yield
    left, mapped = held()
    assert (len(left), mapped) == (len(fds), maps)


@pytest.fixture
def no_leak() -> Callable[[], AbstractContextManager[None]]:
    """Compares open descriptors and memfd mappings before and after."""
    return _no_leak
