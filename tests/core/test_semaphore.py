"""Which calls fit which semaphore; batches; what reaches the driver."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.backend import DriverHandle, HostSemaphoreBackend
from gpuinterop.handles import OriginKind
from tests.limits import LIMIT

from .fake import FakeBackend, FakeDriver, Handle, fake_device, memory_of, semaphore_of

Call = Callable[[], object]

BINARY = gi.OpaqueWin32
TIMELINE = gi.TimelineWin32


def test_every_kind_has_its_calls(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as stream:
        for kind, value in ((BINARY, None), (TIMELINE, 3), (gi.D3D12Fence, 3), (gi.KeyedMutex, 3)):
            with semaphore_of(device, kind) as semaphore:
                arguments = () if value is None else (value,)
                semaphore.signal(stream, *arguments)
                semaphore.wait(stream, *arguments)
                assert [call[2] for call in backend.calls[-2:]] == [(value or 0,)] * 2
                wrong: tuple[int, ...] = (1,) if value is None else ()
                for call in (semaphore.signal, semaphore.wait):
                    count = len(backend.calls)
                    with pytest.raises(gi.InvalidArgumentError, match=r"^value: .*(TimelineFd|OpaqueFd)"):
                        call(stream, *wrong)
                    assert len(backend.calls) == count


def test_a_timeline_does_not_go_back_on_its_stream(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as one, device.create_stream() as two, semaphore_of(device) as semaphore:
        semaphore.signal(one, 5)
        for value in (3, 5):
            with pytest.raises(gi.InvalidArgumentError, match="only grows; signal 6"):
                semaphore.signal(one, value)
        assert backend.calls[-1] == ("signal", one._handle, (5,))
        semaphore.signal(two, 3)  # across streams an order may be legal
        with semaphore_of(device, gi.D3D12Fence) as fence:
            fence.signal(one, 5)
            fence.signal(one, 3)  # Direct3D fences may go back


def test_streams_must_be_open_and_of_the_device(device: gi.Device) -> None:
    other, _ = fake_device()
    closed = device.create_stream()
    closed.close()
    with other.create_stream() as foreign, semaphore_of(device) as semaphore:
        for stream, error in (
            (None, gi.ArgumentTypeError),
            (1.5, gi.ArgumentTypeError),
            (foreign, gi.InvalidArgumentError),
            (closed, gi.ResourceClosedError),
        ):
            with pytest.raises(error, match=r"stream|Stream"):
                semaphore.wait(stream, 1)
            with pytest.raises(error, match=r"stream|Stream"):
                semaphore.signal(stream, 1)


def test_gaps_are_refused_per_operation() -> None:
    device, backend = fake_device(gi.Operation.SIGNAL_SEMAPHORE, gi.Operation.WAIT_TIMEOUT)
    with device.create_stream() as stream, semaphore_of(device) as semaphore:
        semaphore.wait(stream, 1)
        with pytest.raises(gi.UnsupportedError) as caught:
            semaphore.signal(stream, 1)
        assert caught.value.capability is device.capabilities[gi.Operation.SIGNAL_SEMAPHORE, TIMELINE]
        with pytest.raises(gi.UnsupportedError, match="wait_timeout"):
            semaphore.wait(stream, 1, timeout=1)
        assert len([call for call in backend.calls if call[0] in ("wait", "signal")]) == 1


def test_timeouts_reach_the_driver_in_milliseconds(device: gi.Device, backend: FakeBackend) -> None:
    with device.create_stream() as stream, semaphore_of(device, gi.KeyedMutex) as mutex:
        mutex.wait(stream, 7, timeout=1.5)
        assert backend.calls[-1] == ("wait", stream._handle, (7,), 1500)


def test_batches_are_one_call_or_none(device: gi.Device, backend: FakeBackend) -> None:
    with (
        device.create_stream() as stream,
        semaphore_of(device) as one,
        semaphore_of(device) as two,
        semaphore_of(device, BINARY) as flag,
    ):
        batch = gi.SemaphoreBatch(one, two, flag)
        batch.wait(stream, (1, 2, None))
        batch.signal(stream, (2, 3, None))
        assert [call[0] for call in backend.calls[-2:]] == ["wait", "signal"]
        assert list(backend.calls[-1][2]) == [2, 3, 0]
        count = len(backend.calls)
        for values in ((3, 3, None), (3, 4), None, (3, 4, 5), (None, 4, None)):
            with pytest.raises(gi.InvalidArgumentError, match=r"^values?:"):
                batch.signal(stream, values)
        assert len(backend.calls) == count
        with pytest.raises(gi.InvalidArgumentError, match="only grows"):
            one.signal(stream, 2)  # the batch counts for its members
        for wrong in ((), (one, one), (one, stream), (one, semaphore_of(fake_device()[0]))):
            with pytest.raises(gi.InvalidArgumentError, match=r"^semaphores:"):
                gi.SemaphoreBatch(*wrong)
            if len(wrong) == 2 and wrong[1] not in (one, stream):
                wrong[1].close()
        two.close()
        with pytest.raises(gi.ResourceClosedError):
            batch.wait(stream, (4, 4, None))
        with pytest.raises(gi.ResourceClosedError):
            gi.SemaphoreBatch(one, two)


@pytest.mark.parametrize("value", [-1, 2**64, "3", 1.5, True, None])
def test_impossible_values_in_a_batch_are_refused(device: gi.Device, backend: FakeBackend, value: Any) -> None:
    """Among values that fit: a batch looks at all at once."""
    with device.create_stream() as stream, semaphore_of(device) as one, semaphore_of(device) as two:
        batch = gi.SemaphoreBatch(one, two)
        for call in (batch.signal, batch.wait):
            for values in ((5, value), (value, 5)):
                with pytest.raises(gi.InvalidArgumentError, match=r"^value:"):
                    call(stream, values)
        assert not [call for call in backend.calls if call[0] in ("wait", "signal")]
        batch.signal(stream, (2**63, 2**63 + 1))  # each fits, and their sum would not
        assert list(backend.calls[-1][2]) == [2**63, 2**63 + 1]


_TOLD = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=40
)


@settings(deadline=None)
@given(_TOLD)
def test_batches_and_their_semaphores_know_what_each_other_signalled(told: list[tuple[int, int, int, int]]) -> None:
    """Batches share semaphores, also in another order. A model says what two streams refuse."""
    device, backend = fake_device()
    streams = [device.create_stream(), device.create_stream()]
    semaphores = [semaphore_of(device) for _ in range(3)]
    batches = {3: (0, 1), 4: (1, 2), 5: (1, 0)}
    made = {which: gi.SemaphoreBatch(*(semaphores[one] for one in members)) for which, members in batches.items()}
    last: dict[tuple[int, int], int] = {}
    for which, stream, value, more in told:
        members = batches.get(which, (which,))
        values = [value + more * place for place in range(len(members))]
        grows = all(number > last.get((stream, one), 0) for one, number in zip(members, values, strict=True))
        count = len(backend.calls)
        try:
            if which in made:
                made[which].signal(streams[stream], values)
            else:
                semaphores[which].signal(streams[stream], value)
        except gi.InvalidArgumentError:
            assert not grows
            assert len(backend.calls) == count
        else:
            assert grows
            last.update(((stream, one), number) for one, number in zip(members, values, strict=True))
    for one, semaphore in enumerate(semaphores):
        assert semaphore._last_signalled() == max(last.get((stream, one), 0) for stream in (0, 1))
        semaphore.close()
    for each in streams:
        each.close()


def test_a_batch_of_parts_of_others_tells_each_semaphore_its_value(device: gi.Device) -> None:
    """Also where the others have signalled the same: what is equal is not one."""
    one, two, three, four = (semaphore_of(device) for _ in range(4))
    with device.create_stream() as stream:
        gi.SemaphoreBatch(one, two).signal(stream, (1, 1))
        gi.SemaphoreBatch(three, four).signal(stream, (1, 1))
        gi.SemaphoreBatch(one, four).signal(stream, (5, 7))
        two.signal(stream, 2)
        for semaphore, told in ((one, 5), (two, 2), (three, 1), (four, 7)):
            with pytest.raises(gi.InvalidArgumentError, match=f"{told} after {told}"):
                semaphore.signal(stream, told)
    for semaphore in (one, two, three, four):
        semaphore.close()


def test_a_wait_that_the_driver_refused_is_not_awaited(
    device: gi.Device, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is late for another reason does not name it."""

    def refuses(*_: object) -> None:
        raise gi.DriverError("wait", 1, "INVALID", "the test says so")

    with device.create_stream() as stream, semaphore_of(device) as refused, monkeypatch.context() as patch:
        patch.setattr(refused, "_call_wait", refuses)
        with pytest.raises(gi.DriverError, match="the test says so"):
            refused.wait(stream, 5)
        backend.blocked.add(stream.ptr)
        with pytest.raises(gi.SemaphoreTimeoutError) as late:
            stream.synchronize(timeout=0)
        assert refused.label not in str(late.value)
        backend.blocked.clear()


def test_what_a_batch_waits_for_is_named(device: gi.Device, backend: FakeBackend) -> None:
    """Also behind another stream, which waits for it no more than that one does."""
    with device.create_stream() as stream, device.create_stream() as behind:
        one, two, flag = semaphore_of(device), semaphore_of(device), semaphore_of(device, BINARY)
        gi.SemaphoreBatch(one, two).wait(stream, (42, 7))
        gi.SemaphoreBatch(two, flag).wait(stream, (8, None))
        behind.wait_stream(stream)
        backend.blocked.update({stream.ptr, behind.ptr})
        for each in (stream, behind):
            with pytest.raises(gi.SemaphoreTimeoutError) as error:
                each.synchronize(timeout=0)
            assert f"{one.label} to reach 42, {two.label} to reach 7" in str(error.value)
            assert f"{two.label} to reach 8, {flag.label}." in str(error.value)
        backend.blocked.clear()
        for each in (one, two, flag):
            each.close()


class Readable(FakeDriver, HostSemaphoreBackend):
    """The CPU reads its semaphores. A thread's wait lets time pass, until each is signalled when it is `due`."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.due = 0.0, dict[Handle, float]()

    def create_semaphore(self, device: DriverHandle, handle_type: type[Any]) -> DriverHandle:
        raise NotImplementedError

    def export_semaphore(self, semaphore: DriverHandle) -> Any:
        raise NotImplementedError

    def host_value(self, semaphore: DriverHandle) -> int:
        return self.values.get(semaphore, 0)

    def host_signal(self, semaphore: DriverHandle, value: int) -> None:
        self.arrive(semaphore, value)

    def host_wait(self, semaphore: DriverHandle, value: int, timeout: float | None) -> bool:
        assert timeout is not None
        self.now = max(self.now, min(self.now + timeout, self.due[semaphore]))
        return self.now >= self.due[semaphore]


@pytest.mark.parametrize("arrived", [0, 1])
def test_a_batch_of_which_one_has_arrived_waits_for_the_other(arrived: int) -> None:
    """Only that one is named, also after a stream that waits for it; and nothing that blocks is released."""
    device, backend = fake_device(backend=Readable())
    pair, values = [semaphore_of(device), semaphore_of(device)], [5, 6]
    here, there, value, awaited = pair[arrived], pair[1 - arrived], values[arrived], values[1 - arrived]
    with device.create_stream() as stream, device.create_stream() as behind:
        gi.SemaphoreBatch(*pair).wait(stream, values)
        behind.wait_stream(stream)
        here.host_signal(value)
        memory = memory_of(device)
        _held = memory.map_buffer()
        memory.close()
        device.drain()
        assert backend.count("mapping") == 1
        for each in (stream, behind):
            with pytest.raises(gi.SemaphoreTimeoutError, match=rf"{there.label} to reach {awaited}\b") as late:
                each.synchronize(timeout=0)
            assert not re.search(rf"{here.label}\b", str(late.value))
        there.host_signal(awaited)
        device.drain()
        assert backend.count("mapping") == 0
        behind.synchronize(timeout=0)
    for each in pair:
        each.close()


def test_a_batch_has_one_time_out_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is signalled within the limit after the first, and not within the limit."""
    device, _ = fake_device(backend=(backend := Readable()))
    monkeypatch.setattr(system, "time", SimpleNamespace(monotonic=lambda: backend.now))
    one, two = semaphore_of(device), semaphore_of(device)
    with device.create_stream() as stream:
        backend.due = {one._handle: 6.0, two._handle: 12.0}
        batch = gi.SemaphoreBatch(one, two)
        with pytest.raises(gi.SemaphoreTimeoutError, match=rf"{two.label}\b"):
            batch.wait(stream, (1, 1), timeout=10.0)
        batch.wait(stream, (1, 1), timeout=3.0)
    backend.pass_all()
    monkeypatch.undo()
    for each in (one, two):
        each.close()


def test_a_close_ends_the_wait_of_a_thread() -> None:
    device, _ = fake_device(backend=Readable())
    semaphore = semaphore_of(device)

    def close_meanwhile(*_: object) -> bool:
        semaphore.close()
        return False

    semaphore._calls.host_wait = close_meanwhile
    with pytest.raises(gi.ResourceClosedError, match="was closed while this thread waited"):
        semaphore.host_wait(1, timeout=0)


def test_a_binary_batch_that_is_late_gives_back_the_signals_that_it_took(host: gi.Device) -> None:
    """The next one takes them all in the calling thread, and the stream gets no wait."""
    with host.create_semaphore(gi.OpaqueFd) as one, host.create_semaphore(gi.OpaqueFd) as two:
        batch = gi.SemaphoreBatch(one, two)
        one.host_signal()
        with host.create_stream() as stream:
            with pytest.raises(gi.SemaphoreTimeoutError, match=rf"{two.label}\b"):
                batch.wait(stream, timeout=0)
            two.host_signal()
            batch.wait(stream, timeout=LIMIT)
            stream.synchronize(timeout=0)
        for each in (one, two):
            with pytest.raises(gi.SemaphoreTimeoutError):
                each.host_wait(timeout=0)


@pytest.mark.parametrize("gaps", [(), (gi.Operation.CREATE_SEMAPHORE,)], ids=["creates timelines", "creates none"])
def test_without_host_semaphores_the_host_calls_are_gaps(gaps: tuple[gi.Operation, ...]) -> None:
    device, _ = fake_device(*gaps)
    with semaphore_of(device) as semaphore:
        calls: list[Call] = [
            lambda: semaphore.host_wait(1), lambda: semaphore.host_signal(1), lambda: semaphore.value,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(gi.UnsupportedError, match="fake has no call") as caught:
                call()
            assert not caught.value.capability
            assert caught.value.capability.handle_type is TIMELINE
        with pytest.raises(gi.InvalidArgumentError, match="duplicate"):
            semaphore.export()
    with pytest.raises(gi.UnsupportedError if gaps else gi.ArgumentTypeError):
        device.create_semaphore(gi.OpaqueFd)
    with pytest.raises(gi.ArgumentTypeError, match="handle_type"):
        device.create_semaphore(gi.DmaBufFd)  # type: ignore[arg-type]
    with pytest.raises(gi.ArgumentTypeError, match="handle_type"):
        device.allocate(4096, gi.OpaqueFd)  # type: ignore[arg-type]


def test_bare_numbers_and_wrong_types_are_no_handles(device: gi.Device, backend: FakeBackend) -> None:
    with pytest.raises(TypeError, match=r"handle: .*OpaqueFd\(fd\)") as caught:
        device.import_memory(7, size=4096)  # type: ignore[arg-type]
    assert isinstance(caught.value, gi.InvalidArgumentError)
    calls: list[Call] = [
        lambda: device.import_semaphore(7),  # type: ignore[arg-type]
        lambda: device.import_semaphore(gi.D3D12Heap(handle=8)),  # type: ignore[arg-type]
        lambda: device.import_memory(TIMELINE(handle=8), size=8),  # type: ignore[arg-type]
        lambda: device.import_allocation(None, size=8),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(gi.ArgumentTypeError, match=r"^handle:"):
            call()
    assert not backend.calls


def test_exported_handles_say_where_they_came_from() -> None:
    device = gi.get_backend("host").device()
    kinds: list[Any] = [(gi.OpaqueFd, OriginKind.BINARY), (gi.TimelineFd, OriginKind.TIMELINE)]
    for kind, origin in kinds:
        with device.create_semaphore(kind) as semaphore, semaphore.export() as handle:
            assert handle.origin is not None
            assert handle.origin.kind is origin
            assert handle.origin.device == device.identity
            assert handle.origin.trusted
    with device.allocate(5000) as allocation, allocation.export() as shared:
        assert shared.origin is not None
        assert (shared.origin.kind, shared.origin.size) == (OriginKind.ALLOCATION, allocation.size)
