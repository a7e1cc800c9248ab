"""Exceptions at random, in all public operations; and Ctrl-C at many points of what others depend on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.simulated import interrupts

from .shells import Shell, pair

STEP: Final = int(os.environ.get("GPUINTEROP_TEST_STEP", "31"))
"""Every so many instructions there is an interrupt."""
INTERRUPTED: Final = """
def interrupted(call, at=0):
    # Ctrl-C before that instruction of the library; return the number of instructions.
    count = 0

    def trace(frame, event, _):
        nonlocal count
        name = frame.f_code.co_filename
        # Python itself never strikes between a call under a lock and the lock's release (system.under, locked).
        if "/gpuinterop/" not in name or name.endswith("/system.py") or frame.f_code.co_name == "entered":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return count

sys.unraisablehook = lambda _: None  # finalizers are interrupted, too
"""
READS: Final = """
import warnings
warnings.simplefilter("ignore")

def reads():
    with gi.attach(descriptor, timeout=300) as attached, attached.read(timeout=300) as array:
        return int(array.to_numpy()[0])
"""


def test_interrupts_at_random() -> None:
    found = interrupts.run("host", seconds=5, seed=1)
    assert found["failures"] == []
    assert found["interrupts"]


def test_interrupts_in_the_requests_of_a_reader() -> None:
    """It goes on, and so do the writer and another reader, which get no error and the right bytes."""
    with pair() as (writer, reader), Shell() as other:
        for one in (reader, other):
            one(READS)
            one(f"descriptor = {writer.descriptor('share')}; reads()")
        reader(INTERRUPTED)
        for at in range(1, reader("interrupted(reads)"), STEP):
            reader(f"interrupted(reads, {at})")
            writer(f"with share.write(timeout=300): array[:] = {at % 256}")
            assert [other("reads()"), reader("reads()")] == [at % 256] * 2


def test_a_write_right_after_an_interrupt_in_write(sockets: Path) -> None:
    with Shell() as writer, Shell() as reader:
        writer(INTERRUPTED)
        writer("""
camera = gi.publish("camera", 64, "uint8")

def write():
    with camera.write(timeout=300) as frame:
        np.asarray(frame)[:] = 7

def writes(at):
    count = interrupted(write, at)
    write()
    return count
""")
        reader("camera = gi.subscribe('camera', timeout=300)")
        for at in range(1, writer("writes(0)"), STEP):
            writer(f"writes({at})")
            reader("frame = camera.next(timeout=300)\nwith frame.read(timeout=300) as array: found = array.to_numpy()")
            assert reader("[int(found.min()), int(found.max())]") == [7, 7]
