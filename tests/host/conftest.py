from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]

from gpuinterop_host.backend import Device, HostBackend
from tests.missing_vulkan import give_up

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


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of programs' rendezvous: its name is short, and each user can enter it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o755)
        monkeypatch.setenv("GPUINTEROP_SHARE_DIR", made)
        yield Path(made)


def pytest_count_left() -> Counter[str]:
    """Mappings of memfds, but for SwiftShader's code, which it keeps."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return Counter(re.findall(r"/memfd:(?!swiftshader_jit).*", maps))
