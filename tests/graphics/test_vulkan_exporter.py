from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import gpuinterop as gi
from gpuinterop.handles import Binary, OriginKind, Timeline
from gpuinterop.testing.exporters.base import Fill
from gpuinterop.testing.exporters.vulkan import VulkanExporter, VulkanSemaphore, list_drivers
from tests.limits import LIMIT
from tests.validation import descriptors

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import (
        Application,
        open_exporter,
    )
else:
    from vulkan_application import Application, open_exporter


@pytest.fixture(params=["mapped", "staged"])
def writing(driver: str, request: pytest.FixtureRequest) -> Iterator[VulkanExporter]:
    with open_exporter(driver, staged=request.param == "staged") as exporter:
        yield exporter


def test_memory_is_written_and_read(writing: VulkanExporter) -> None:
    shuffled = random.Random(7)
    with writing.create_memory(10_000) as memory:
        assert memory.size >= 10_000
        expected = bytearray(shuffled.randbytes(memory.size))
        memory.write(0, bytes(expected))
        for offset, size in ((0, 1), (1, 4096), (4095, 2), (memory.size - 1, 1), (17, 0)):
            data = shuffled.randbytes(size)
            memory.write(offset, data)
            expected[offset : offset + size] = data
            assert memory.read(offset, size) == data
        assert memory.read(0, memory.size) == expected
        for offset, size in ((memory.size, 1), (-1, 1), (0, memory.size + 1)):
            with pytest.raises(gi.InvalidArgumentError, match=rf"^offset: .*{memory.size}"):
                memory.read(offset, size)
    with pytest.raises(gi.ResourceClosedError):
        memory.read(0, 1)


def test_exported_memory_says_where_it_came_from(exporter: VulkanExporter) -> None:
    for size in (0, -1):
        with pytest.raises(gi.InvalidArgumentError, match="size"):
            exporter.create_memory(size)
    with exporter.create_memory(4096) as memory, memory.export() as handle:
        assert handle.origin is not None
        assert handle.origin.kind is OriginKind.MEMORY
        assert handle.origin.device == exporter.identity
        assert handle.origin.size == memory.size
        assert handle.origin.dedicated == memory.dedicated
        assert type(handle) is gi.OpaqueFd
        assert handle.owned


def test_fill(writing: VulkanExporter) -> None:
    with writing.create_memory(4096) as memory:
        memory.write(0, bytes(4096))
        fills = [
            Fill(memory=memory, offset=4, size=8, word=0x01020304),
            Fill(memory=memory, offset=4092, size=4, word=0xFFFFFFFF),
        ]
        with writing.submit(fill=fills) as submission:
            assert submission.done(LIMIT)
        expected = bytearray(4096)
        expected[4:12] = bytes([4, 3, 2, 1] * 2)
        expected[4092:] = b"\xff" * 4
        assert memory.read(0, 4096) == expected
        with pytest.raises(gi.InvalidArgumentError, match="multiples of 4"):
            writing.submit(fill=[Fill(memory=memory, offset=2, size=4, word=0)])
        with pytest.raises(gi.InvalidArgumentError, match="offset"):
            writing.submit(fill=[Fill(memory=memory, offset=memory.size // 4 * 4, size=4, word=0)])


def test_semaphores_that_the_driver_does_not_export_are_refused(exporter: VulkanExporter) -> None:
    """SwiftShader crashes when asked to export a timeline; it is not asked."""
    for kind, handle_type in ((Binary, gi.OpaqueFd), (Timeline, gi.TimelineFd)):
        if exporter.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, handle_type)):
            continue
        with pytest.raises(gi.UnsupportedError, match=r"VK_KHR_external_semaphore_fd|no exportable handle types"):
            exporter.create_semaphore(kind)
    with pytest.raises(gi.ArgumentTypeError, match="kind"):
        exporter.create_semaphore(int)


def test_a_binary_semaphore_carries_one_signal(signalling: VulkanExporter) -> None:
    with signalling.create_semaphore(Binary) as semaphore:
        with semaphore.export() as handle:
            assert type(handle) is gi.OpaqueFd
            assert handle.origin is not None
            assert handle.origin.kind is OriginKind.BINARY
        for _ in range(3):
            semaphore.signal()
            assert semaphore.wait(timeout=LIMIT)
        assert not semaphore.wait(timeout=0.05)
        semaphore.signal()  # past the queue that the wait above holds up
        assert signalling.submit().done(LIMIT)
        assert semaphore.wait(timeout=LIMIT)  # that wait has taken the signal, and is this one
        assert not semaphore.wait(timeout=0.05)


def test_a_wait_that_ran_out_of_time_keeps_its_place(signalling: VulkanExporter) -> None:
    with signalling.create_semaphore(Binary) as semaphore, signalling.create_memory(64) as memory:
        for _ in range(3):
            assert not semaphore.wait(timeout=0.02)  # "not signalled yet": that must not cost the next signal
        semaphore.signal()
        assert semaphore.wait(timeout=LIMIT)
        assert not semaphore.wait(timeout=0.02)
        memory.write(0, bytes(64))
        work = signalling.submit(wait=[(semaphore, 0)], fill=[Fill(memory=memory, offset=0, size=4, word=1)])
        assert not work.done(0.02)
        semaphore.signal()  # one signal, for the wait of the submission
        assert work.done(LIMIT)
        assert memory.read(0, 4) == b"\1\0\0\0"
        assert not semaphore.wait(timeout=0.02)
        (left,) = semaphore.unheard
    assert left.done()  # the close has taken the wait over


def test_a_failed_submission_takes_nothing(signalling: VulkanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    with signalling.create_memory(4096) as memory, signalling.create_semaphore(Binary) as semaphore:
        gone = signalling.create_semaphore(Binary)
        gone.close()
        assert not semaphore.wait(timeout=0.02)
        before = list(signalling._pending)
        monkeypatch.setitem(signalling.vk.functions.__dict__, "vkQueueSubmit", lambda *_: -1)
        with pytest.raises(gi.OutOfMemoryError, match="vkQueueSubmit"):
            signalling.submit(wait=[(semaphore, 0)], fill=[Fill(memory=memory, offset=0, size=4, word=1)])
        monkeypatch.undo()
        assert signalling._pending == before
        signalling.vk.functions.__dict__.pop("vkQueueSubmit", None)
        with pytest.raises(gi.ResourceClosedError):
            signalling.submit(wait=[(semaphore, 0)], signal=[(gone, 0)])
        assert len(signalling._fences) == 1
        semaphore.signal()
        assert semaphore.wait(timeout=LIMIT)


def test_a_timeline_orders_submissions(exporter: VulkanExporter) -> None:
    """In this process alone: neither software driver exports timelines."""
    with VulkanSemaphore(exporter, Timeline, exportable=False) as semaphore, exporter.create_memory(4096) as memory:
        memory.write(0, bytes(4096))
        fill = [Fill(memory=memory, offset=0, size=4, word=5)]
        submission = exporter.submit(wait=[(semaphore, 3)], fill=fill, signal=[(semaphore, 7)])
        assert not submission.done(0.05)
        semaphore.signal(2)
        assert semaphore.wait(2, timeout=LIMIT)
        assert not submission.done(0.05)
        semaphore.signal(3)
        assert semaphore.wait(7, timeout=LIMIT)
        assert submission.done(LIMIT)
        assert memory.read(0, 4) == b"\5\0\0\0"
        assert not semaphore.wait(8, timeout=0.05)


def test_closing_an_exporter_with_a_timeline_wait_pending_returns(driver: str) -> None:
    exporter = open_exporter(driver)
    semaphore = VulkanSemaphore(exporter, Timeline, exportable=False)
    submission = exporter.submit(wait=[(semaphore, 3)])
    exporter.close()
    assert submission.done()


def test_the_objects_of_another_exporter_are_refused(exporter: VulkanExporter, driver: str) -> None:
    """They are of another VkDevice, whose driver takes them for its own and crashes, or writes anywhere."""
    with open_exporter(driver) as other, other.create_memory(64) as memory:
        exportable = other.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))
        kind = Binary if exportable else Timeline
        with VulkanSemaphore(other, kind, exportable=exportable) as semaphore:
            fill = [Fill(memory=memory, offset=0, size=4, word=1)]
            for wrong in (
                {"fill": [Fill(memory=object(), offset=0, size=4, word=0)]},
                {"fill": fill},
                {"wait": [(semaphore, 1)]},
                {"signal": [(semaphore, 1)]},
            ):
                with pytest.raises(gi.ArgumentTypeError, match=r"of another|objects of this exporter") as caught:
                    exporter.submit(**wrong)
                assert caught.value.argument == "submit"
        assert exporter.submit().done(LIMIT)


def test_closing_one_thing_leaves_the_work_of_others_alone(signalling: VulkanExporter) -> None:
    with signalling.create_semaphore(Binary) as semaphore, signalling.create_memory(64) as memory:
        submission = signalling.submit(wait=[(semaphore, 0)], fill=[Fill(memory=memory, offset=0, size=4, word=1)])
        signalling.create_memory(64).close()
        signalling.create_semaphore(Binary).close()
        assert not submission.done(0.05)
        semaphore.signal()
        assert submission.done(LIMIT)


def test_closing_what_is_stuck_behind_another_wait_returns(
    signalling: VulkanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuinterop.testing.exporters.vulkan.exporter._PATIENCE", 0.2)
    first, second = signalling.create_semaphore(Binary), signalling.create_semaphore(Binary)
    submissions = [signalling.submit(wait=[(semaphore, 0)]) for semaphore in (first, second)]
    second.close()
    assert all(submission.done() for submission in submissions)
    first.close()


def test_closing_a_semaphore_ends_every_wait_for_it(signalling: VulkanExporter) -> None:
    semaphore = signalling.create_semaphore(Binary)
    submissions = [signalling.submit(wait=[(semaphore, 0)]) for _ in range(4)]
    assert not submissions[0].done(0.02)
    semaphore.close()
    assert all(submission.done(LIMIT) for submission in submissions)


def test_each_driver_is_opened_by_its_place(driver: str) -> None:
    for found in list_drivers():
        with VulkanExporter(device_index=found.index) as exporter:
            assert exporter.device == found.name
            assert exporter.identity.uuid == found.identity.uuid


# -- nothing is left over ----------------------------------------------------------------------------------------------


def test_exporters_come_and_go(driver: str) -> None:
    open_exporter(driver).close()
    before = descriptors()
    for _ in range(5):
        exporter = open_exporter(driver)
        exporter.create_memory(4096)
        exporter.close()
        exporter.close()
        with pytest.raises(gi.ResourceClosedError):
            exporter.create_memory(4096)
    gc.collect()
    assert descriptors() <= before + 1


def test_the_default_prefers_what_exports_semaphores(application: Application) -> None:
    with VulkanExporter() as exporter:
        drivers = [gi.vulkan.capabilities(d) for d in application.api.vkEnumeratePhysicalDevices(application.instance)]
        if any(table.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd)) for table in drivers):
            assert exporter.capabilities.supports((gi.Operation.IMPORT_SEMAPHORE, gi.OpaqueFd))
