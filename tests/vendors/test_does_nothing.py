"""The simulated driver that does nothing, beside which the library's own time is measured."""

from __future__ import annotations

import textwrap

from tests.simulated.driver import Simulator

from .table import VENDOR

PROGRAM = textwrap.dedent(
    """
    import os, struct
    from contextlib import ExitStack
    import gpuinterop as gi
    from gpuinterop.testing.exporters import open_exporter

    device = gi.device()
    with ExitStack() as stack:
        enter = stack.enter_context
        stream, allocation = enter(device.create_stream()), enter(device.allocate(4096))
        own = enter(device.create_semaphore(gi.TimelineFd))
        semaphores = [(own, enter(own.export()))]
        if device.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd)):
            page = enter(enter(open_exporter("memfd", identity=device.identity)).create_semaphore(gi.Timeline)).export()
            semaphores.append((enter(device.import_semaphore(page.duplicate())), enter(page)))
        for semaphore, page in semaphores:
            semaphore.signal(stream, 1)
            semaphore.wait(stream, 3)
            print(struct.unpack("=Q", os.pread(page.fd, 8, 16))[0], stream.query(), stream.record().done)
        allocation.buffer.fill(7, stream=stream)
        stream.synchronize(300)
        print(os.pread(enter(allocation.export()).fd, 2, 0))
    """
)


def test_what_streams_are_given_is_not_done(simulator: Simulator) -> None:
    """A signal and a fill reach nothing, and no wait holds the stream up: it is idle at once."""
    semaphores = {"cuda": 2, "hip": 1}[VENDOR.name]
    expected = "0 True True\n" * semaphores + "b'\\x00\\x00'\n"
    assert simulator.run(PROGRAM, GPUINTEROP_BACKEND=VENDOR.name, GPUINTEROP_SIM_DOES_NOTHING="1") == expected
