"""HIP's bindings and the GIL, its default streams, and each call on its own GPU, whatever device is current."""

from __future__ import annotations

import textwrap
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

from ..parties import SIMULATED, open_party
from .runtime import Runtime

pytestmark = pytest.mark.skipif(not SIMULATED, reason="needs the simulated runtime")


def test_other_threads_run_while_one_synchronises(simulator: Simulator) -> None:
    """HIP's calls block behind another thread's synchronise (rocm-systems #11678), and 7.2 keeps the GIL in it, too.

    So streams are asked and never synchronised: here one waits for another thread's store, beside calls of HIP.
    """
    device = gi.get_backend("hip").device()
    gate: Any = device.create_semaphore(gi.TimelineFd)
    calls = ("hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize")
    before = [simulator.calls(call) for call in calls]
    with device.create_stream() as stream:
        gate.wait(stream, 1)
        thread = threading.Thread(target=stream.synchronize)
        thread.start()
        asked = simulator.calls("hipEventQuery") + simulator.calls("hipStreamQuery")
        while simulator.calls("hipEventQuery") + simulator.calls("hipStreamQuery") < asked + 3:
            assert thread.is_alive()
        device.create_stream().close()
        gate.host_signal(1)
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert [simulator.calls(call) for call in calls] == before
    gate.close(timeout=LIMIT)


@pytest.mark.parametrize("waits", ["the default stream", "a blocking one"])
def test_a_default_stream_waits_for_the_others(scope: ExitStack, device: gi.Device, waits: str) -> None:
    """A pageable copy behind a wait on the other blocks as well, with 7.2 for ever: it keeps the GIL."""
    hip = Runtime("libamdhip64.so")
    blocking = hip.object("hipStreamCreateWithFlags", 0)
    scope.callback(hip.ok, "hipStreamDestroy", blocking)
    exporter = scope.enter_context(open_party("memfd", device))
    theirs = scope.enter_context(exporter.create_memory(4096))
    memory = scope.enter_context(device.import_memory(theirs.export(), size=4096))
    buffer = scope.enter_context(memory.map_buffer())
    semaphore: Any = scope.enter_context(device.create_semaphore(gi.TimelineFd))
    numbers = (0, blocking) if waits == "the default stream" else (blocking, 0)
    first, second = (scope.enter_context(device.wrap_stream(number)) for number in numbers)
    semaphore.wait(first, 1)
    with pytest.raises(gi.ResourceBusyError, match=first._known_as().label):
        buffer.copy_to_host(np.zeros(32, np.uint8), stream=second)
    semaphore.host_signal(1)
    first.synchronize(LIMIT)
    buffer.copy_to_host(np.zeros(32, np.uint8), stream=second)
    second.synchronize(LIMIT)


OBJECTS = textwrap.dedent(
    """
    import ctypes, mmap, os
    import gpuinterop as gi
    from gpuinterop.testing.exporters import open_exporter
    from tests.idle_streams import destroy_idle_streams
    from tests.simulated.driver import Simulator
    try:
        from rocm.bindings import hip
    except ImportError:
        from hip import hip

    simulator = Simulator.attach("hip")
    library = ctypes.CDLL("libamdhip64.so")  # asked past the code under test

    def current():
        found = ctypes.c_int(-1)
        assert library.hipGetDevice(ctypes.byref(found)) == 0
        return found.value

    class Recorder:  # the library, and what is called through it: with which device, with what
        calls = []

        def __init__(self, api):
            self._api = api

        def __getattr__(self, name):
            found = getattr(self._api, name)
            if not name.startswith("hip") or isinstance(found, type):
                return found

            def call(*arguments):
                self.calls.append((name, current(), arguments))
                return found(*arguments)

            return call

    backend = gi.get_backend("hip").driver
    recorder = backend._driver.library = Recorder(backend._driver.library)
    backend._driver._functions.clear()
    devices = gi.get_backend("hip").devices()

    # Of no device, or of the one that is said, or of a stream or event, which have one.
    ANYWHERE = {
        "hipGetDevice", "hipSetDevice", "hipGetLastError", "hipGetErrorString", "hipDeviceGetAttribute",
        "hipMemGetAllocationGranularity", "hipStreamGetDevice", "hipEventQuery", "hipStreamQuery",
        "hipStreamWriteValue64", "hipStreamWaitValue64", "hipDeviceGetName", "hipDeviceGetPCIBusId",
        "hipGetDeviceCount", "hipMemAddressReserve",
    }
    THERE = {
        "hipImportExternalMemory", "hipExternalMemoryGetMappedBuffer", "hipFree", "hipDestroyExternalMemory",
        "hipHostRegister", "hipHostGetDevicePointer", "hipHostUnregister", "hipMemCreate", "hipMemMap",
        "hipMemSetAccess", "hipMemUnmap", "hipMemRelease",
        "hipMemExportToShareableHandle", "hipMemImportFromShareableHandle", "hipStreamCreateWithPriority",
        "hipStreamDestroy", "hipEventCreateWithFlags", "hipEventRecord", "hipEventDestroy", "hipMemsetD8Async",
        "hipMemcpyAsync", "hipStreamQuery",
    }

    class Location(ctypes.Structure):
        _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))

    def lies_on(address):
        found = ctypes.c_int(-1)
        assert library.hipPointerGetAttribute(ctypes.byref(found), 9, ctypes.c_void_p(address)) == 0
        return found.value

    def reaches(address, device):
        flags = ctypes.c_uint64(9)
        assert library.hipMemGetAccess(
            ctypes.byref(flags), ctypes.byref(Location(1, device)), ctypes.c_void_p(address)
        ) == 0
        return flags.value

    def use(device):
        simulator.forget_log()
        with open_exporter("memfd", identity=device.identity) as exporter:
            theirs = exporter.create_memory(8192)
            memory = device.import_memory(theirs.export(), size=theirs.size)
            buffer = memory.map_buffer()
            assert lies_on(buffer.ptr) == device.ordinal
            with device.create_stream() as stream:
                flags = ctypes.c_uint(9)
                assert library.hipStreamGetFlags(ctypes.c_void_p(stream.ptr), ctypes.byref(flags)) == 0
                assert flags.value == int(hip.hipStreamNonBlocking) == 1
                buffer.fill(3, stream=stream)
                event = stream.record()
                event.wait(300)
                stream.synchronize(300)
                room = bytearray(8192)
                buffer.copy_to_host(room)
                assert room == b"\\x03" * 8192
                # Host memory, and a word of it.
                page = mmap.mmap(-1, 4096)
                address = ctypes.addressof(ctypes.c_char.from_buffer(page))
                pin, there = backend.pin(device._handle, address, 4096)
                assert lies_on(there) == device.ordinal
                backend.write_value(backend.adopt_stream(device._handle, stream.ptr), there, 7)
                stream.synchronize(300)
                assert page[:8] == (7).to_bytes(8, "little")
                assert backend.is_idle(backend.adopt_stream(device._handle, stream.ptr))
                backend.unpin(pin)
            buffer.close()
            memory.close(timeout=300)
            theirs.close()
        with device.allocate(1) as allocation:
            assert lies_on(allocation.buffer.ptr) == device.ordinal
            assert [reaches(allocation.buffer.ptr, other.ordinal) for other in devices] == [
                3 if other is device else 0 for other in devices
            ]
            handle = allocation.export()
            assert not os.get_inheritable(handle.fd), "a child process would keep the memory alive"
            with device.import_allocation(handle, allocation.size) as imported:
                assert lies_on(imported.buffer.ptr) == device.ordinal
        # What raises in between leaves the caller's device as well.
        def struck():
            assert current() == device.ordinal
            raise KeyError

        for relaxed in (False, True):
            try:
                device._handle.run(struck, relaxed=relaxed)
            except KeyError:
                pass
            assert current() != device.ordinal
        device.drain()
        assert {entry.device for entry in simulator.log()} == {device.ordinal}, simulator.log()

    for device, other in (devices, devices[::-1]):
        assert library.hipSetDevice(other.ordinal) == 0
        recorder.calls.clear()
        use(device)
        destroy_idle_streams(backend)
        assert current() == other.ordinal, "the caller's device is left as it was"
        wrong = {name for name, where, _ in recorder.calls if where != device.ordinal} - ANYWHERE
        assert not wrong, f"with the other device current: {wrong}"
        made = {name for name, _, _ in recorder.calls}
        assert made >= THERE, f"not called: {THERE - made}"
        arguments = {name: found for name, _, found in recorder.calls}
        assert arguments["hipHostRegister"][2].value == hip.hipHostRegisterPortable | hip.hipHostRegisterMapped == 3
        assert arguments["hipEventCreateWithFlags"][1].value == hip.hipEventDisableTiming == 2
    assert simulator.violations() == [], simulator.violations()
    print("ok")
    """
)


def test_objects_are_made_used_and_ended_on_their_gpu(simulator: Simulator) -> None:
    """While the other one is current; each is then where it belongs, whom the runtime itself is asked."""
    assert simulator.run(OBJECTS, GPUINTEROP_SIM_DEVICES="2") == "ok\n"


IMPORTS = """
import gpuinterop as gi
device = gi.get_backend("hip").device()
there = bytearray(1)
with device.allocate(1) as ours, device.import_allocation(ours.export(), ours.size) as imported:
    ours.buffer.fill(0x5A)
    imported.buffer.copy_to_host(there)
print(there.hex())
"""


@pytest.mark.parametrize("version", ["60342134", "70000000", "70100000", "70253211"])
def test_the_descriptor_by_pointer_and_by_value(simulator: Simulator, version: str) -> None:
    """``hipMemImportFromShareableHandle`` takes the number itself from 7.1 on, before a pointer to it."""
    assert simulator.run(IMPORTS, GPUINTEROP_SIM_HIP_VERSION=version) == "5a\n"
