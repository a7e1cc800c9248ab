"""A process that closes and exits at once: nothing is reported, the share ends, and its readers know why."""

from __future__ import annotations

import pytest

import gpuinterop as gi
from tests.limits import LIMIT
from tests.programs import python

from .shells import Raised, Shell

BEGIN = """
import atexit, sys, gpuinterop as gi
attached = gi.attach(bytes.fromhex(sys.argv[1]))
stream = attached.device.create_stream()
"""
AT_ONCE = (
    "attached.acquire(stream); stream.synchronize(300); attached.release(stream); attached.close(); stream.close()"
)
BY_THE_EXIT = """
gate = attached.device.create_semaphore(gi.TimelineFd)
attached.acquire(stream)
gate.wait(stream, 1)
attached._place("")[0].fill(1, stream=stream)
attached.release(stream)
attached.close()
stream.close()
atexit.register(gate.close)
atexit.register(gate.host_signal, 1)  # before the exit ends the library's threads, and releases what is closed
"""


@pytest.mark.parametrize("program", [AT_ONCE, BY_THE_EXIT], ids=["at once", "by the exit"])
def test_an_attachment_ends_with_its_process(program: str) -> None:
    with gi.get_backend("host").device().allocate(4096) as memory, gi.share(memory.buffer.view(8)) as shared:
        done = python("-W", "error", "-c", BEGIN + program, bytes(shared).hex(), GPUINTEROP_BACKEND="host")
        assert (done.returncode, done.stderr) == (0, "")
        shared.close(timeout=LIMIT)


def test_a_writer_that_closes_and_exits_has_not_died() -> None:
    """It leaves nothing open for the readers that are attached; they know that it has closed, and attach no more."""
    strict = {"PYTHONWARNINGS": "error::ResourceWarning"}
    with Shell(**strict) as reader:
        with Shell(**strict) as writer:
            writer("share = gi.share(np.arange(4), copy=True)")
            descriptor = writer.descriptor("share")
            reader(f"attached = gi.attach({descriptor}); attached.wait(newer_than=-1, timeout=300)")
            writer("share.close()")
        reader.until("attached.lifetime.handle.link.ended")
        with pytest.raises(Raised, match=r"ResourceClosedError: .*writer"):
            reader("attached.wait(newer_than=0, timeout=300)")
        with pytest.raises(Raised, match=r"PeerError: .*(ended|not there|has this address)"):
            reader(f"gi.attach({descriptor})")
        reader("attached.close()")
