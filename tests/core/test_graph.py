"""Capture, launch, the values of each launch, and what must not happen to a stream that is being captured."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core.device import Device
from gpuinterop.backend import SemaphoreNode
from gpuinterop.capabilities import Operation
from tests.limits import LIMIT

from .fake import FakeEverything, FakeGraphs, fake_device, memory_of, semaphore_of


@pytest.fixture
def fake() -> tuple[Device, FakeGraphs]:
    backend = FakeGraphs()
    device, _ = fake_device(backend=backend)
    return device, backend


def binary(device: Device) -> gi.ExternalSemaphore[gi.Binary]:
    return device.import_semaphore(gi.OpaqueWin32(handle=8))


def buffer_of(device: Device) -> tuple[gi.ExternalMemory, gi.Buffer]:
    memory = device.import_memory(gi.OpaqueWin32(handle=8), size=4096)
    return memory, memory.map_buffer()


def test_each_launch_has_the_values_it_was_given(device: Device, backend: FakeGraphs) -> None:
    with semaphore_of(device) as semaphore, device.create_stream() as stream:
        with stream.capture() as graph:
            semaphore.wait(stream, 1)
            semaphore.signal(stream, 2)
        assert [call for call in backend.calls if call[0] in ("wait", "signal")] == []
        (wait,), (signal,) = graph.semaphores.waits, graph.semaphores.signals
        assert (wait.semaphores, wait.values) == ((semaphore,), (1,))
        assert (signal.semaphores, signal.values) == ((semaphore,), (2,))
        backend.calls.clear()
        graph.launch(stream)
        graph.semaphores.advance(2)
        graph.launch(stream)
        signal.set(11)
        executable = graph.executable_ptr
        native = semaphore._handle
        assert [call for call in backend.calls if call[0] in ("launch", "set_node")] == [
            ("launch", executable, stream._handle),
            ("set_node", executable, ("node", 0), (native,), (3,)),
            ("set_node", executable, ("node", 1), (native,), (4,)),
            ("launch", executable, stream._handle),
            ("set_node", executable, ("node", 1), (native,), (11,)),
        ]
        assert signal.values == (11,)
        graph.close()


def test_binary_semaphores_keep_no_value(device: Device) -> None:
    with binary(device) as one, semaphore_of(device) as other, device.create_stream() as stream:
        with stream.capture() as graph:
            gi.SemaphoreBatch(one, other).signal(stream, (None, 5))
        graph.semaphores.advance(3)
        assert graph.semaphores.steps[0].values == (0, 8)
        with pytest.raises(gi.InvalidArgumentError, match="value"):
            graph.semaphores.steps[0].set(1, 9)
        with pytest.raises(gi.InvalidArgumentError, match=r"expected 2, .*, got 1"):
            graph.semaphores.steps[0].set(9)
        graph.close()


@pytest.mark.parametrize("when", ["in the capture", "after it"])
def test_what_a_graph_uses_outlives_its_close_until_the_graph_goes(when: str) -> None:
    """Also the stream, which a capture needs to its end, and what its body alone has named; values can still be set."""
    backend = FakeEverything()
    device, _ = fake_device(backend=backend)
    stream, joined, launcher = (device.create_stream() for _ in range(3))
    semaphore, other = semaphore_of(device), semaphore_of(device)
    memory, buffer = buffer_of(device)
    image = (images := memory_of(device, 65536)).map_mipmapped_array("R8_UNORM", (16,))
    allocation = device.allocate(4096)
    wrapped = device.wrap_stream(stream.ptr)
    used = [semaphore, other, buffer, memory, image, images, allocation, wrapped, joined, stream]

    def close() -> None:
        for one in used:
            one.close()
        device.drain()

    with stream.capture() as graph:
        semaphore.wait(stream, 1)
        with binary(device) as flag:
            gi.SemaphoreBatch(other, flag).signal(wrapped, (5, None))
        del flag
        buffer.fill(1, stream=stream)
        joined.wait_stream(stream)
        allocation.buffer.fill(1, stream=joined)
        image.level(0).copy_from_buffer(buffer, stream=joined)
        stream.wait_stream(joined)
        if when == "in the capture":
            close()
    if when == "after it":
        close()
    kinds = ("semaphore", "mapping", "memory", "array", "allocation")
    assert [backend.count(kind) for kind in kinds] == [3, 2, 2, 1, 1]
    assert [step.semaphores[0] for step in graph.semaphores.steps] == [semaphore, other]
    graph.semaphores.advance(2)
    graph.semaphores.close()  # lets go of nothing that the graph needs
    device.drain()
    graph.launch(launcher)
    backend.blocked.add(launcher.ptr)
    assert ("set_node", graph.executable_ptr, ("node", 0), (semaphore._handle,), (3,)) in backend.calls
    graph.close()
    device.drain()
    assert [backend.count(kind) for kind in kinds] == [3, 2, 2, 1, 1], "the launch has not run"
    backend.blocked.clear()
    graph.close(timeout=LIMIT)
    device.drain(LIMIT)
    assert [backend.count(kind) for kind in (*kinds, "graph", "executable", "stream")] == [0] * 7 + [1]
    launcher.close()


def test_another_librarys_graph(device: Device, backend: FakeGraphs) -> None:
    """Its stream is captured by others, the values are baked in and set anew; its handles stay its own."""
    semaphore, foreign = semaphore_of(device), device.wrap_stream(99)
    backend.begin_capture(("adopted", 99))
    semaphore.wait(foreign, 1)
    semaphore.signal(foreign, 2)
    graph = backend.end_capture(("adopted", 99))
    executable = backend.instantiate(0, graph)
    with gi.GraphSemaphores(device, graph, executable) as semaphores:
        semaphores.advance(2)
        assert [step.values for step in semaphores.steps] == [(3,), (4,)]
        semaphore.close()
        device.drain()
        assert backend.count("semaphore") == 1
        launched = device.wrap_stream(98)
        backend.blocked.add(98)  # others launch it where they like
    device.drain()
    assert backend.count("semaphore") == 1
    backend.blocked.clear()
    device.drain()
    assert (backend.count("semaphore"), backend.count("graph"), backend.count("executable")) == (0, 1, 1)
    foreign.close()
    launched.close()


def test_a_node_of_somebody_elses_semaphore_is_left_alone(device: Device, backend: FakeGraphs) -> None:
    backend.graphs[7] = [SemaphoreNode(native="n", signals=True, semaphores=(4242,), values=(1,))]
    with gi.GraphSemaphores(device, 7, 8) as semaphores:
        assert semaphores.steps[0].semaphores == (None,)
        with pytest.raises(gi.InvalidArgumentError, match=r"^values: .*another library"):
            semaphores.advance(1)


def test_a_launch_tells_each_semaphore_its_own_value_beside_somebody_elses(device: Device, backend: FakeGraphs) -> None:
    """Another library captures a node that has a semaphore of its own before ours."""
    with semaphore_of(device) as semaphore, device.create_stream() as stream:
        with stream.capture() as graph:
            backend.captures[stream.ptr] += [
                SemaphoreNode(native="n", signals=signals, semaphores=(4242, semaphore._handle[1]), values=(100, value))
                for signals, value in ((False, 4), (True, 5))
            ]
        with graph:
            backend.blocked.add(stream.ptr)
            graph.launch(stream)
            with pytest.raises(gi.SemaphoreTimeoutError, match=f"for {semaphore.label} to reach 4[.]"):
                stream.synchronize(timeout=0)
            backend.blocked.clear()
            with pytest.raises(gi.InvalidArgumentError, match="5 after 5"):
                semaphore.signal(stream, 5)
            semaphore.signal(stream, 6)


@pytest.mark.parametrize("hidden", ["nothing", "another library's semaphore", "another owner of the executable"])
def test_a_launch_is_known_to_pass_only_if_all_it_waits_for_is_known(
    device: Device, backend: FakeGraphs, hidden: str
) -> None:
    with semaphore_of(device) as semaphore, device.create_stream() as stream:
        semaphore.lifetime.counter = lambda _: 4  # as of a backend that lets the CPU look
        with stream.capture() as graph:
            semaphore.wait(stream, 4)
            if hidden == "another library's semaphore":
                node = SemaphoreNode(
                    native="n", signals=False, semaphores=(4242, semaphore._handle[1]), values=(100, 3)
                )
                backend.captures[stream.ptr].append(node)
        with graph:
            if hidden == "another owner of the executable":
                with gi.GraphSemaphores(device, graph.ptr, graph.executable_ptr) as others:
                    others.advance(1)
            backend.blocked.add(stream.ptr)
            graph.launch(stream)
            (pending,) = stream._known_as().waits
            assert pending.is_there() == (hidden == "nothing")
            backend.blocked.clear()


def test_values_that_were_captured_are_not_the_streams_last(device: Device) -> None:
    with semaphore_of(device) as semaphore, device.create_stream() as stream:
        semaphore.signal(stream, 5)
        with stream.capture() as graph:
            semaphore.signal(stream, 3)  # whatever it says, the launch says it anew
            semaphore.signal(stream, 1000)
        semaphore.signal(stream, 6)
        graph.close()


def test_no_event_goes_into_a_capture(device: Device, backend: FakeGraphs) -> None:
    """Closing and dropping things during a capture releases nothing, records nothing, and is made up for afterwards."""
    semaphore, foreign = semaphore_of(device), device.wrap_stream(99)
    memory, buffer = buffer_of(device)
    buffer.fill(1, stream=foreign)  # real work, before the capture
    backend.begin_capture(("adopted", 99))
    with device.wrap_stream(99) as another:
        semaphore.signal(another, 2)
    memory.close()
    semaphore.close()
    device.drain()
    assert (backend.count("mapping"), backend.count("semaphore")) == (1, 1)
    assert backend.recorded_in_a_capture == 0
    backend.end_capture(("adopted", 99))
    backend.blocked.add(99)
    device.drain()
    assert (backend.count("mapping"), backend.count("semaphore")) == (1, 1), "the work before the capture is not done"
    backend.blocked.clear()
    device.drain()
    assert (backend.count("mapping"), backend.count("semaphore")) == (0, 0)
    foreign.close()


def test_what_a_capture_would_not_survive_is_refused(device: Device, backend: FakeGraphs) -> None:
    memory, buffer = buffer_of(device)
    with device.create_stream() as stream:
        with stream.capture() as graph:
            array = np.zeros(4096, np.uint8)
            for call in (
                stream.query,
                stream.synchronize,
                stream.record,
                lambda: buffer.copy_to_host(array, stream=stream),
                lambda: buffer.copy_from_host(array, stream=stream),
                lambda: stream.capture().__enter__(),
                lambda: graph.launch(stream),
            ):
                with pytest.raises(gi.InvalidArgumentError, match="captured"):
                    call()
            buffer.fill(3, stream=stream)
            backend.calls.clear()
            buffer.fill(4)  # on a stream of its own, and not behind the one that is being captured
            assert ("wait_event" in {call[0] for call in backend.calls}) is False
        assert backend.recorded_in_a_capture == 0
        graph.close()
    memory.close()


def test_a_capture_whose_body_fails_ends(device: Device, backend: FakeGraphs) -> None:
    with device.create_stream() as stream:
        with pytest.raises(KeyError), stream.capture() as graph:
            raise KeyError
        assert not stream.capturing
        assert (backend.count("graph"), backend.count("executable")) == (0, 0)
        with pytest.raises(gi.ResourceClosedError):
            graph.launch(stream)


def test_the_bytes_of_an_array_that_a_capture_takes_are_held() -> None:
    """Also where the stream had them before: the graph's launches use them, and each is waited for."""
    backend = FakeGraphs()
    device, _ = fake_device(backend=backend, dlpack=(2, 0))
    memory, buffer = buffer_of(device)
    with device.create_stream() as stream:
        buffer.fill(1, stream=stream)
        with stream.capture() as graph:
            capsule = buffer.view(16).__dlpack__(stream=stream.ptr)
            del capsule
        memory.close()
        gc.collect()
        device.drain()
        assert (backend.count("mapping"), backend.count("memory")) == (1, 1)
        graph.launch(stream)
        graph.close(timeout=LIMIT)
        device.drain()
        assert (backend.count("mapping"), backend.count("memory")) == (0, 0)


def test_what_a_launch_waits_for_is_named(device: Device, backend: FakeGraphs) -> None:
    """As it was when it was launched: the next launch waits for more."""
    with semaphore_of(device) as one, semaphore_of(device) as two, device.create_stream() as stream:
        with stream.capture() as graph:
            one.wait(stream, 1)
            gi.SemaphoreBatch(one, two).wait(stream, (7, 8))
        graph.launch(stream)
        graph.semaphores.advance(100)
        backend.blocked.add(stream.ptr)
        with pytest.raises(gi.SemaphoreTimeoutError) as error:
            stream.synchronize(timeout=0)
        assert f"{one.label} to reach 1, {one.label} to reach 7, {two.label} to reach 8." in str(error.value)
        backend.blocked.clear()
        graph.close()


def test_advance_sets_all_or_nothing(device: Device) -> None:
    with semaphore_of(device) as semaphore, device.create_stream() as stream:
        with stream.capture() as graph:
            semaphore.wait(stream, 1)
            semaphore.signal(stream, 2**64 - 2)
        for by, why in ((2, "2\\*\\*64"), (-2, "-1")):
            with pytest.raises(gi.InvalidArgumentError, match=why):
                graph.semaphores.advance(by)
        assert [step.values for step in graph.semaphores.steps] == [(1,), (2**64 - 2,)]
        graph.close()


def test_a_launch_counts_for_the_guard_and_an_aborted_capture_does_not(device: Device) -> None:
    with semaphore_of(device) as semaphore, device.create_stream() as stream:

        def fail() -> None:
            with stream.capture():
                semaphore.signal(stream, 50)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        semaphore.signal(stream, 2)
        with stream.capture() as graph:
            semaphore.signal(stream, 11)
        graph.launch(stream)
        with pytest.raises(gi.InvalidArgumentError, match="only grows"):
            semaphore.signal(stream, 3)
        semaphore.signal(stream, 12)
        with stream.capture() as outer, pytest.raises(gi.InvalidArgumentError, match="inside a graph"):
            graph.launch(stream)
        outer.close()
        graph.close()


def test_a_launch_that_signals_less_takes_nothing_from_the_guard(device: Device) -> None:
    """Its values are the application's; what the stream was told to signal, it still signals."""
    with semaphore_of(device) as semaphore, device.create_stream() as stream:
        with stream.capture() as graph:
            semaphore.signal(stream, 3)
        with graph:
            semaphore.signal(stream, 9)
            graph.launch(stream)
            with pytest.raises(gi.InvalidArgumentError, match="5 after 9"):
                semaphore.signal(stream, 5)
            semaphore.signal(stream, 10)


def test_without_graphs_it_is_a_gap() -> None:
    device, _ = fake_device(Operation.GRAPH_CAPTURE)
    with device.create_stream() as stream:
        assert not stream.capturing
        with pytest.raises(gi.UnsupportedError, match="graph_capture"), stream.capture():
            pass
        with pytest.raises(gi.UnsupportedError, match="graph_capture"):
            gi.GraphSemaphores(device, 1, 2)


def test_a_stream_of_another_gpu_is_refused() -> None:
    """torch's default stream has the number 0 on every GPU: what tells them apart is the stream's own word."""

    class TorchDevice:
        index = 1

    class TorchStream:
        cuda_stream = 0
        device = TorchDevice()

    class CupyStream:
        ptr = 0
        device_id = 1

    device, _ = fake_device(dlpack=(2, 0))
    for stream in (TorchStream(), CupyStream()):
        with pytest.raises(gi.InvalidArgumentError, match=r"device 1.*gpuinterop\.device\(1\)"):
            device.wrap_stream(stream)
    TorchDevice.index = 0
    CupyStream.device_id = -1
    for stream in (TorchStream(), CupyStream()):
        device.wrap_stream(stream).close()
