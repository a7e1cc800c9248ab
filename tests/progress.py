"""Says every ten seconds how far a run is, where GPUINTEROP_TEST_PROGRESS is set: make holds back what pytest prints.

That variable is a descriptor. The workers of pytest-xdist have no such plugin.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sized

import pytest

EVERY_S = 10.0


class Progress:
    """A plugin; its thread ends with the session."""

    def __init__(self, to: int, name: str) -> None:
        self._to, self._name, self._begin = to, name, time.monotonic()
        self._tests = self._done = 0
        self._last = "collecting"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            seconds = time.monotonic() - self._begin
            with contextlib.suppress(OSError):
                os.write(
                    self._to, f"{self._name}: {self._done} of {self._tests}, {seconds:.0f} s: {self._last}\n".encode()
                )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests = max(self._tests, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sized) -> None:
        self._tests = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._done += report.when == "teardown"
        self._last = report.nodeid

    def pytest_unconfigure(self) -> None:
        self._ended.set()
        self._thread.join()
