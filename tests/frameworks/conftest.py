"""Runs whatever is importable; GPUINTEROP_REQUIRE_FRAMEWORKS=numpy,torch,cuda makes the absence of these a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests import leftovers

from .claims import REQUIRED, loaded
from .parties import CudaParty, HostParty, Party, cuda_gap

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes most of a GPU's memory otherwise


# What a framework starts and opens when it is first used stays.
leftovers.kept_by_drivers.extend([r"thread \d+, ", r"descriptor \d+ of /dev/"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "frameworks" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))  # theirs are not ours to mend
            item.add_marker(pytest.mark.filterwarnings("error::gpuinterop.LeakedResourceWarning"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "party" in metafunc.fixturenames:
        metafunc.parametrize("party", metafunc.function.claim.memory, indirect=True)


@pytest.fixture(scope="session", autouse=True)
def share_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder of this process's socket, from its first share on: others look into the folder that is the default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUINTEROP_SHARE_DIR", str(tmp_path_factory.mktemp("share")))
        yield


@pytest.fixture
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    with ExitStack() as scope:
        if request.param == "host":
            yield HostParty(scope)
            return
        if gap := cuda_gap():
            (pytest.fail if "cuda" in REQUIRED else pytest.skip)(gap)
        yield CudaParty(scope)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ran = ", ".join(f"{name} {version}" for name, version in sorted(loaded.items()))
    terminalreporter.write_line(f"frameworks that ran: {ran or 'none'}")
