"""The calls that people try first: an array of a device, copies, a share as an array. The host's tests import them."""

from __future__ import annotations

import gc
import inspect
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop._core.layout import layout_of
from gpuinterop._core.lifetime import alive
from tests.limits import LIMIT

DATA: Final = np.arange(64, dtype=np.uint8)
LAYOUTS: Final[dict[str, tuple[tuple[int, ...], str, int, tuple[int, ...] | None]]] = {
    "contiguous": ((4, 4), "float32", 0, None),
    "a part": ((3, 2), "uint16", 4, (16, 4)),
    "transposed": ((4, 3), "uint8", 0, (1, 4)),
    "backwards": ((3, 5), "int8", 63, (-16, -1)),
    "broadcast": ((5, 4), "uint32", 8, (0, 4)),
    "odd strides": ((3,), "uint32", 4, (9,)),
    "no dimension": ((), "float64", 16, None),
    "no element": ((3, 0), "int64", 8, None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_on_the_host_is_what_numpy_sees_there(name: str, device: gi.Device) -> None:
    shape, dtype, offset, strides = LAYOUTS[name]
    wanted: Any = np.ndarray(shape, dtype, DATA, offset, strides)
    with device.allocate(64) as memory:
        memory.buffer.copy_from_host(DATA)
        found = memory.view(shape, dtype, offset, strides).to_numpy()
        memory.buffer.fill(0)
    assert (found.shape, found.dtype, found.tobytes()) == (shape, np.dtype(dtype), wanted.tobytes())
    assert found.flags.c_contiguous
    assert found.flags.writeable


def test_a_copy_comes_after_what_a_stream_waits_for(device: gi.Device) -> None:
    with (
        device.allocate(64) as memory,
        device.create_semaphore(gi.TimelineFd) as semaphore,
        device.create_stream() as stream,
    ):
        source, target = memory.view(4), memory.view(4, offset=8)
        memory.buffer.fill(0)
        semaphore.wait(stream, 1)
        memory.buffer.fill(7, size=4, stream=stream)
        if device.driver.pageable_copies_block:  # the thread that has yet to signal
            with pytest.raises(gi.ResourceBusyError, match=r"to reach 1\b"):
                source.to_numpy()
        thread = threading.Thread(target=target.copy_from, args=[source])
        thread.start()
        semaphore.host_signal(1)
        thread.join(LIMIT)
        assert (target.to_numpy().tolist(), source.to_numpy().tolist()) == ([7] * 4, [7] * 4)


def test_views_are_copied_that_fill_their_bytes_alike(device: gi.Device) -> None:
    with device.allocate(256) as memory, device.create_stream() as stream:

        def view(at: int, strides: tuple[int, ...] | None = None, dtype: str = "uint8") -> gi.View:
            return memory.view((3, 4), dtype, at, strides)

        wanted = DATA[:12].reshape(3, 4)
        memory.buffer.fill(0)
        view(0).copy_from(wanted)
        view(64).copy_from(np.asfortranarray(wanted), stream=stream)
        view(128, (1, 3)).copy_from(view(64, (1, 3)), stream=stream)
        stream.synchronize(LIMIT)
        view(192).copy_from(view(128))
        for at in (0, 64, 128, 192):
            assert (view(at).to_numpy() == wanted).all()
        memory.view((0, 4)).copy_from(memory.view((0, 4)))
        calls: list[Callable[[], None]] = [
            lambda: view(64).copy_from(view(0, (1, 3))),
            lambda: view(64, (8, 1)).copy_from(view(128, (8, 1))),
            lambda: view(64, (1, 3)).copy_from(wanted),
            lambda: view(64).copy_from(memory.view((4, 3))),
            lambda: view(64).copy_from(view(0, None, "int8")),
            lambda: view(64).copy_from(memory.view((1, 4))),
            lambda: view(64).copy_from(view(70)),
            lambda: view(64).copy_from([1, 2]),
        ]
        for call in calls:
            with pytest.raises(gi.InvalidArgumentError, match=r"^source: expected "):
                call()
        fixed = memory.buffer._view(layout_of(4, "uint8", None), 200, read_only=True)
        with pytest.raises(gi.InvalidArgumentError, match=r"^view: .* of immutable bytes"):
            fixed.copy_from(memory.view(4))
        assert not memory.view(52, offset=76).to_numpy().any()


def test_an_array_that_is_dropped_frees_its_memory(device: gi.Device) -> None:
    """Without a warning, and without the collector; an array that was made of it keeps the bytes."""

    def natives() -> int:
        device.drain()
        return sum(one.label.startswith("Allocation") for one in alive())

    before = natives()
    gc.disable()
    try:
        array = device.empty((2, 3), "float32")
        kept, buffer = array.__dlpack__(stream=-1), weakref.ref(array._buffer)
        with pytest.raises(gi.ResourceBusyError, match="1 exported array"):
            array.close(timeout=0)
        with pytest.raises(gi.ResourceClosedError):
            array.to_numpy()
        other = device.empty(5, "int8").__dlpack__(stream=-1)
        assert natives() == before + 2
        del array, kept, other
        assert (natives(), buffer()) == (before, None)
    finally:
        gc.enable()
    with device.empty((0, 3), "float64") as nothing, gi.share(nothing) as shared, gi.attach(str(shared)) as attached:
        assert (nothing.to_numpy().shape, attached.view.to_numpy().shape, nothing.nbytes) == ((0, 3), (0, 3), 0)


def test_a_share_of_one_array_is_an_array(device: gi.Device) -> None:
    array = device.empty((2, 3), "uint8")
    array.copy_from(DATA[:6].reshape(2, 3))
    shared = gi.share(array)
    with shared, gi.share({"a": array, "b": array}) as several:
        attached = gi.attach(str(shared))
        for one in (shared, attached):
            assert one.__dlpack_device__() == array.__dlpack_device__()
            if device.info.is_cpu:
                assert np.asarray(one).tolist() == np.from_dlpack(one).tolist() == [[0, 1, 2], [3, 4, 5]]
            else:
                found = one.__cuda_array_interface__
                assert (found["data"], found["shape"]) == ((array.ptr, False), (2, 3))
                assert repr(one.__dlpack__(stream=-1)).startswith('<capsule object "dltensor"')
        for call in (np.asarray, lambda one: one.__dlpack__(), lambda one: one.__cuda_array_interface__):
            with pytest.raises(gi.InvalidArgumentError, match=r"view: expected a single array, got 2 .* as \['a'\]"):
                call(several)
        attached.close()
        looked = len([one for one in alive() if one.label.startswith("AttachedArrays")])
        assert looked == (not device.info.is_cpu), (
            "a library keeps the attachment, and nothing else that keeps the bytes"
        )


def test_a_descriptor_is_text(device: gi.Device) -> None:
    with device.empty(4, "uint8", label="text") as array, gi.share(array) as shared:
        text = str(shared)
        assert re.fullmatch(r"\w[\w-]+", text, re.ASCII)
        assert repr(shared).startswith("<ArrayShare #")
        gi.attach(f"{text}\n").close()
        for bad in (
            text[:-1],
            text[:-4],
            f"{text}AAAA",
            f"!{text[1:]}",
            f"B{text[1:]}",
            f"{text[:9]}    {text[9:]}",
            "",
            "é",
        ):
            with pytest.raises(gi.InvalidArgumentError, match="descriptor: expected all of"):
                gi.attach(bad)


def test_errors_name_the_right_call(device: gi.Device) -> None:
    any_: Any = device
    with device.empty(4, "uint8") as array, gi.share(array) as shared:
        calls: dict[str, Callable[[], object]] = {
            "pass a mapping of names to arrays": lambda: gi.share([array, array]),
            r"send bytes\(shared\) or str\(shared\)": lambda: pickle.dumps(shared),
            r"call device.empty\(shape, dtype\)": lambda: any_.allocate((3, 4), "float32"),
        }
        for words, call in calls.items():
            with pytest.raises(gi.ArgumentTypeError, match=words):
                call()


def documented(kind: type) -> set[str]:
    """Names with a docstring, or in the list of attributes of one."""
    found = {"device"}
    for one in kind.__mro__[:-1]:
        found |= {name for name, member in vars(one).items() if getattr(member, "__doc__", "")}
        text = inspect.cleandoc(one.__doc__ or "")  # from Python 3.13 on it is dedented
        found |= set(re.findall(r"\w+", " ".join(re.findall(r"^([\w, ]+) : ", text, re.MULTILINE))))
    return found


def test_dir_lists_what_users_call(device: gi.Device) -> None:
    with (
        device.empty(4, "uint8") as array,
        device.allocate(4) as allocation,
        device.create_stream() as stream,
        device.create_semaphore(gi.TimelineFd) as semaphore,
        gi.share(array) as shared,
        gi.attach(bytes(shared)) as attached,
    ):
        batch, handoff, event = gi.SemaphoreBatch(semaphore), gi.Handoff(semaphore), stream.record()
        things = [array, allocation, allocation.buffer, stream, semaphore, shared, attached, batch, handoff, event]
        for one in [device, *things]:
            names = {name for name in dir(one) if not re.fullmatch("__.*__", name)}
            assert names <= documented(type(one)), type(one)
            assert not {name for name in names if name.startswith("_")}
        assert {"info", "empty", "wrap_stream"} <= set(dir(device))
        assert {"to_numpy", "close", "shape", "__dlpack__"} <= set(dir(array))
