"""A process without a free descriptor: each call that needs one says so, and works once there is room."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator

import pytest

import gpuinterop as gi

from .shells import Raised, Shell

GIVEN = """
from gpuinterop.testing.exporters import open_exporter
device = gi.device()
party, (here, there) = open_exporter("memfd").__enter__(), socket.socketpair()
memory, allocation, timeline = party.create_memory(4096), device.allocate(4096), device.create_semaphore(gi.TimelineFd)
bridge, shared = gi.bridge.Bridge(device), gi.share(allocation.view(8))
here.settimeout(300)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))
"""
CALLS = {
    "import memory": ("memory.export()", "device.import_memory(argument, size=4096)"),
    "import a semaphore": ("timeline.export()", "device.import_semaphore(argument)"),
    "export an allocation": ("", "allocation.export()"),
    "duplicate": ("timeline.export()", "argument.duplicate()"),
    "allocate": ("", "device.allocate(4096)"),
    "create a timeline": ("", "device.create_semaphore(gi.TimelineFd)"),
    "signal": ("device.create_semaphore(gi.TimelineFd)", "argument.host_signal(1)"),
    "share": ("", "gi.share(allocation.view(8))"),
    "order": ("gi.share(allocation.view(8))", "argument.acquire()"),
    "bridge": ("gi.EventFd.adopt(os.eventfd(0))", "bridge.import_semaphore(argument, peer=os.getpid())"),
    "receive": ("gi.ipc.send_handle(there, h := timeline.export()) or h", "gi.ipc.receive_handle(here, gi.TimelineFd)"),
    "a rank in a folder": ("", "gi.exchange.SocketTransport(folder, 0, 1)"),
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with Shell() as program:
        program(f"{GIVEN}\nfolder = {os.fspath(tmp_path_factory.mktemp('ranks'))!r}")
        for argument, call in CALLS.values():  # what is made once, and imported
            program(f"argument = {argument or None}\nmade = {call}\nfor one in (made, argument): one and one.close()")
        yield program


@pytest.mark.parametrize("name", CALLS)
def test_it_says_so(shell: Shell, name: str) -> None:
    argument, call = CALLS[name]
    before = shell("left()")
    refusals: list[str] = []
    for room in itertools.takewhile(lambda room: room == len(refusals), itertools.count()):
        shell(f"argument, made = {argument or None}, None; fill({room})")
        try:
            shell(f"made = {call}")
        except Raised as error:
            refusals.append(str(error))
        shell("clear()\nfor one in (made, argument): one and one.close()")
    shell.until(f"grown({before}) == []")
    words = r"DriverError: .*: out of file descriptors \(limit 64\); close some, or raise the limit: ulimit -n"
    assert refusals
    assert [one for one in refusals if not re.match(words, one)] == []


def test_the_systems_table_has_another_limit() -> None:
    assert "sysctl fs.file-max" in str(gi.DriverError("dup", 23, "ENFILE"))
