"""Tensors in memory that gpuinterop allocated, and those of a GPU, go through torch.multiprocessing in place.

The readers are processes of their own, which evaluate what a test asks them for.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop.backend import Block, MemoryKind
from gpuinterop.sharing import server
from gpuinterop.sharing.loop import loop
from tests.limits import LIMIT

from .claims import REQUIRED, load

SIZE: Final = 65536
TAKE: Final = "kept.append((lambda make, given: make(*given))(*pickle.loads({!r})))"
"""What a reader does with plain pickle's bytes."""

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="memfds")


def made(count: int = 16, dtype: str = "float32") -> Any:
    """A tensor in memory of its own, which another process can map."""
    with gi.get_backend("host").device().allocate(SIZE) as allocation:
        return load("torch").from_dlpack(allocation.buffer.view(count, dtype))


def both(first: bytes, second: bytes) -> int:
    """Receive two messages, the second in another thread while the first one's storage is made; count the storages."""
    import gpuinterop.sharing.torch

    ours: Any = gpuinterop.sharing.torch
    make, found = ours.capsule_of, list[Any]()

    def receive(message: bytes) -> None:
        rebuild, arguments = pickle.loads(message)
        found.append(rebuild(*arguments))

    other = threading.Thread(target=receive, args=(second,))

    def is_at_a_lock_or_over() -> bool:
        frame = sys._current_frames().get(other.ident or 0)
        return not other.is_alive() or (frame is not None and frame.f_code is system.under.__code__)

    def making(*arguments: Any) -> Any:
        ours.capsule_of = make
        other.start()
        assert system.until(is_at_a_lock_or_over, LIMIT)
        return make(*arguments)

    ours.capsule_of = making
    receive(first)
    other.join(LIMIT)
    return len({one.untyped_storage()._cdata for one in found})


def read(pipe: Any, queue: Any) -> None:
    """In a reader: evaluate what comes through the pipe, until that is None."""
    import torch

    import gpuinterop.sharing.torch  # noqa: F401 - what a user writes, and nothing else

    names = {"torch": torch, "kept": [], "pipe": pipe, "queue": queue, "pickle": pickle, "made": made, "both": both}
    names["costs"] = costs
    for asked in iter(pipe.recv, None):
        try:
            found = eval(asked, names)
            pipe.send(found if found is None or isinstance(found, torch.Tensor | tuple) else repr(found))
        except Exception as error:
            pipe.send(f"{type(error).__module__}.{type(error).__name__}: {error}")
        found = None


class Reader:
    def __init__(self, method: str) -> None:
        context = load("torch").multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self.queue = context.SimpleQueue()
        self.process = context.Process(target=read, args=(theirs, self.queue), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, asked: str, *then: object) -> Any:
        """The value of an expression there, in which `take` keeps the next thing of the pipe."""
        for one in (asked.replace("take", "kept.append(pipe.recv())"), *then):
            self.pipe.send(one)
        assert self.pipe.poll(LIMIT), "the reader does not answer"
        return self.pipe.recv()


@contextmanager
def reading(method: str = "spawn") -> Iterator[Reader]:
    reader = Reader(method)
    try:
        yield reader
    finally:
        if reader.process.is_alive():
            reader.pipe.send(None)
        reader.process.join(LIMIT)
        for one in (reader.process, reader.pipe, reader.queue):
            one.close()


@pytest.fixture(scope="module")
def torch() -> Any:
    found = load("torch")
    import gpuinterop.sharing.torch  # noqa: F401 - in torch's place from here on

    gi.device()  # a GPU's driver keeps some as well
    return found


@pytest.fixture(scope="module")
def one_reader(torch: Any) -> Iterator[Reader]:
    with reading() as reader:
        reader(TAKE.format(reduced(made())))  # the link stays
        reader("kept.clear()")
        assert is_over(sys.modules["gpuinterop.sharing.torch"]._state)
        yield reader


@pytest.fixture
def reader(one_reader: Reader, state: Any) -> Iterator[Reader]:
    yield one_reader
    one_reader("kept.clear()")


@pytest.fixture
def state(torch: Any) -> Iterator[Any]:
    """What the process has sent; the test's end ends it."""
    from gpuinterop.sharing import torch as ours

    yield (state := ours._state)
    gc.collect()
    while state.sent:
        server.server().withdraw(state.sent.popitem()[1])
    for clock in state.clocks.values():
        if clock.serial:  # another process was told of it
            server.server().withdraw(clock)
    state.clocks.clear()
    state.heard.clear()
    assert system.until(lambda: not (state.sent or loop()._repeated), LIMIT)


def is_over(state: Any) -> bool:
    """Whether all that was sent ends by itself."""
    return system.until(lambda: not state.sent, LIMIT)


def costs() -> tuple[int, int]:
    """Descriptors and threads, once the loop has done what it was at: a reader has an answer before that is closed."""
    done = threading.Event()
    loop().repeat(done.set)
    assert done.wait(LIMIT)
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def reduced(tensor: Any) -> bytes:
    """As Ray and vLLM call it."""
    return pickle.dumps(load("torch").multiprocessing.reductions.reduce_tensor(tensor))


@pytest.mark.parametrize("way", ["pipe", "queue", "plain pickle"])
def test_a_tensor_is_the_same_memory_there(torch: Any, reader: Reader, state: Any, way: str) -> None:
    tensor = made().fill_(1)
    if way == "pipe":
        reader("take", tensor)
    elif way == "queue":
        reader.queue.put(tensor)
        reader("kept.append(queue.get())")
    else:
        reader(TAKE.format(reduced(tensor)))
    assert reader("kept[0].sum().item()") == "16.0"
    tensor.fill_(2)
    assert reader("kept[0].add_(1).sum().item()") == "48.0"
    assert tensor.tolist() == [3.0] * 16
    assert len(state.sent) == 1
    reader("kept.clear()")
    assert is_over(state)


def test_a_process_of_a_fork_server_takes_an_argument(torch: Any, state: Any) -> None:
    tensor = made()
    process = torch.multiprocessing.get_context("forkserver").Process(target=torch.Tensor.fill_, args=(tensor, 7))
    process.start()
    process.join(LIMIT)
    process.close()
    assert tensor.tolist() == [7.0] * 16
    assert is_over(state)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_sent_nothing(torch: Any, state: Any) -> None:
    from gpuinterop.sharing import torch as ours

    reduced(tensor := made())
    if not (child := os.fork()):
        os._exit(len(ours._state.sent) + len(ours._state.received) + 10 * (ours._state is state))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(state.sent) == 1
    del tensor


def test_tensors_of_one_storage_have_one_storage_there(torch: Any, reader: Reader, state: Any) -> None:
    tensor = made()
    views = [tensor, tensor[3:], tensor.view(4, 4).T[1:, ::2], tensor[:0]]
    reader("take", views)
    reader("take", tensor[5:6])
    assert reader("len({one.untyped_storage()._cdata for one in kept[0] + kept[1:]})") == "1"
    facts = "(one.shape, one.stride(), one.storage_offset())"
    assert reader(f"[{facts} for one in kept[0]]") == repr([eval(facts, {"one": one}) for one in views])
    reader("kept[0].clear()")
    tensor[5] = 4
    assert reader("kept[1].item()") == "4.0"
    reader("kept.clear()")
    assert is_over(state)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_storage_is_sent_again_before_it_is_received(torch: Any, reader: Reader, state: Any, keeps: bool) -> None:
    """The second message finds it, whether the reader has the first one's tensor or has dropped it."""
    tensor = made()
    for _ in range(2):
        reader.queue.put(tensor)
    for _ in range(2):
        reader("kept.append(queue.get())" if keeps else "kept.clear() or kept.append(queue.get())")
        assert len(state.sent) == 1
    assert reader("kept[-1].sum().item()") == "0.0"
    reader("kept.clear()")
    assert is_over(state)


def test_two_threads_that_receive_a_storage_have_one(torch: Any, reader: Reader, state: Any) -> None:
    tensor = made()
    assert reader(f"both({reduced(tensor)!r}, {reduced(tensor)!r})") == "1"
    assert is_over(state)


def test_gradients_and_parameters(torch: Any, reader: Reader) -> None:
    leaf, Parameter = made().requires_grad_(), torch.nn.Parameter
    reader("take", [leaf, Parameter(made()), Parameter(made(dtype="int64"), requires_grad=False)])
    expected = [("Tensor", True), ("Parameter", True), ("Parameter", False)]
    assert reader("[(type(one).__name__, one.requires_grad) for one in kept[0]]") == repr(expected)
    for part_of_a_graph in (leaf * 1, leaf[2:]):
        with pytest.raises(RuntimeError, match="non-leaf"):
            reduced(part_of_a_graph)


@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn", "bfloat16", "complex64", "uint16"])
def test_element_types(torch: Any, reader: Reader, dtype: str) -> None:
    kind = getattr(torch, dtype)
    data = made(64, "uint8")
    data.copy_(torch.ones(64 // kind.itemsize).to(kind).view(torch.uint8))
    reader("take", data.view(kind))
    assert reader("str(kept[0].dtype), kept[0].to(torch.complex64).real.unique().tolist()") == (f"torch.{dtype}", [1.0])


def test_the_bits_of_a_conjugate_go_along(torch: Any, reader: Reader) -> None:
    tensor = made(8, "complex64").fill_(1 + 2j)
    assert reader("take or kept[0].tolist()[0]", tensor.conj()) == "(1-2j)"
    assert reader("take or kept[1].tolist()[0]", tensor.conj().imag) == "-2.0"


@pytest.mark.parametrize("make", [
    "torch.ones(3)", "torch.from_numpy(__import__('numpy').ones(3))", "torch.eye(3).to_sparse()", "torch.ones(0)",
    "torch.empty(3, device='meta')", "torch.ones(3).share_memory_()", "torch.nested.nested_tensor([torch.ones(2)])",
    "torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8)",
])  # fmt: skip
def test_others_go_torchs_own_way(torch: Any, state: Any, make: str) -> None:
    function, _ = torch.multiprocessing.reductions.reduce_tensor(eval(make, {"torch": torch}))
    assert function.__module__ == "torch.multiprocessing.reductions"
    assert not state.sent


def test_the_arguments_are_where_torch_has_them(torch: Any, state: Any) -> None:
    reductions, tensor = torch.multiprocessing.reductions, made()
    function, arguments = reductions.reduce_tensor(tensor)
    changed = (*arguments[:6], 3, *arguments[7:])  # as vLLM and Ray write their own number of the GPU there
    assert function is reductions.rebuild_cuda_tensor
    assert function(*changed).data_ptr() == tensor.data_ptr()
    torchs = (torch.Tensor, (0,), (1,), 0, torch.storage.TypedStorage, torch.float32, "cpu", None, 0, 0, False)
    assert function(*torchs, None, 0, None, False).shape == (0,)


def test_a_tensor_comes_back_as_the_same_memory(torch: Any, reader: Reader, state: Any) -> None:
    tensor = made()
    address, storage = tensor.data_ptr(), tensor.untyped_storage()._cdata
    reader("take", tensor)
    back = reader("kept[0][4:]")
    assert (back.data_ptr(), back.untyped_storage()._cdata) == (address + 16, storage)
    del tensor, back
    back = reader("kept.pop()")  # the only one that is left, on its way
    assert back.data_ptr() == address
    assert is_over(state)


def test_a_message_that_comes_back_last_ends_what_it_brings(torch: Any, reader: Reader, state: Any) -> None:
    """Nobody holds the storage when it comes, and nobody rings after that."""
    reader("take", made())
    rebuild, arguments = reader("torch.multiprocessing.reductions.reduce_tensor(kept.pop())")
    (slot,) = [sent.slot for sent in state.sent.values()]
    assert system.until(lambda: not server.server().holders(slot), LIMIT)
    reader("costs()")  # its loop has rung
    assert system.until(lambda: not loop()._repeated, LIMIT)  # this one listens
    costs()  # and has looked
    assert len(state.sent) == 1
    assert rebuild(*arguments).sum().item() == 0.0
    assert is_over(state)


def test_a_received_tensor_goes_on_to_a_third_process(torch: Any, reader: Reader, state: Any) -> None:
    with reading() as third:
        reader("take", made().fill_(5))
        message = reader("torch.multiprocessing.reductions.reduce_tensor(kept.pop())")
        third(TAKE.format(pickle.dumps(message)))
        assert len(state.sent) == 1
        assert third("kept[0].sum().item()") == "80.0"
        third("kept.clear()")
        assert is_over(state)


def test_two_receive_one_message_and_one_dies(torch: Any, reader: Reader, state: Any) -> None:
    take = TAKE.format(reduced(tensor := made().fill_(5)))
    with reading() as other:
        assert reader(take) is other(take) is None
        again = TAKE.format(reduced(tensor))  # counted, though the first was received twice
        assert reader("kept.pop().sum().item()") == other("kept[0].sum().item()") == "80.0"
        other.process.kill()
        other.process.join(LIMIT)
    assert not system.until(lambda: not state.sent, 0.1)
    assert reader(again) is None
    reader("kept.clear()")
    assert is_over(state)
    assert reader(take).startswith("gpuinterop.errors.ResourceClosedError: expected a tensor that its sender still has")


def test_the_receiver_keeps_what_its_sender_has_dropped(torch: Any, reader: Reader, state: Any) -> None:
    reader("take", made().fill_(5))
    gc.collect()
    assert reader("kept[0].sum().item()") == "80.0"
    with reading() as sender:
        tensor = sender("made().fill_(6)")
    assert tensor.sum().item() == 96.0  # the process that made it has ended
    assert reader("take or kept[1].sum().item()", tensor) == "96.0"  # a copy: torch's own way


def test_many_cost_neither_descriptors_nor_threads_nor_requests(torch: Any, reader: Reader, state: Any) -> None:
    """All of 3,000 tensors wait for their reader, which asks once for their block."""
    with gi.get_backend("host").device().allocate(SIZE) as allocation:
        view = allocation.buffer.view
        reader(TAKE.format(reduced(torch.from_dlpack(view(4, "int32")))))  # the link, and the block
        before = costs()
        asked = "sum(one._number for one in gpuinterop.sharing.link.links.values())"
        requests = reader(asked)
        messages = [reduced(torch.from_dlpack(view(4, "int32")).fill_(number)) for number in range(3000)]
        assert len(state.sent) == 3001
        assert costs() == before
        for at in range(0, 3000, 500):
            for message in messages[at : at + 500]:
                reader(TAKE.format(message))
        assert reader("len(kept), len({one.data_ptr() for one in kept}), kept[2999][0].item()") == (3001, 1, 2999)
        assert reader(asked) == requests
        reader("kept.clear()")
        assert is_over(state)


@pytest.mark.parametrize("count", [1, 2])
def test_a_block_of_its_own_is_asked_for_once(
    torch: Any, state: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """One of several may be freed, and be other memory, while a storage in the others is still there."""
    from gpuinterop.sharing import torch as ours

    blocks = tuple(Block(kind=MemoryKind.VMM, address=at << 21, size=1 << 21, key=at, ordinal=0) for at in range(count))
    asked: list[object] = []

    def find_runs(*arguments: object) -> Any:
        asked.append(arguments)
        return [blocks], {"": 0}

    monkeypatch.setattr(ours, "find_runs", find_runs)
    place = ours._Place(torch.device("cpu"))
    runs = [place.use(1 << 20, 1 << 21) for _ in range(2)]
    assert len(asked) == count
    for run in runs:
        place.drop(run)
    place.drop(place.use(1 << 20, 1 << 21))  # nothing is left of it
    assert len(asked) == count + 1
    costs()  # the loop closes the socket, which the blocks' source names


def test_a_receiver_waits_for_the_stream_of_its_sender(torch: Any, state: Any) -> None:
    """On the host, where the calling thread is the receiver's stream."""
    from gpuinterop.sharing import torch as ours

    device, tensor = gi.get_backend("host").device(), made()
    with (
        reading() as reader,  # it keeps the clock of the stream
        device.create_stream() as stream,
        device.create_semaphore(gi.TimelineFd) as gate,
    ):
        reader("setattr(torch.cuda, 'current_stream', lambda index: 0)")
        gate.wait(stream, 1)
        clock = state.clocks[0, 0] = ours._Clock(stream)
        rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
        reader.pipe.send(TAKE.format(pickle.dumps((rebuild, (*arguments[:-2], *clock.tick(tensor.device))))))
        assert not reader.pipe.poll(0.1)
        tensor.fill_(3)
        gate.host_signal(1)
        assert reader("kept[0].sum().item()") is None  # the answer to the message
        assert reader.pipe.recv() == "48.0"
        reader("kept.clear()")
        assert is_over(state)


def needs_gpu(torch: Any) -> None:
    if not torch.cuda.is_available():
        (pytest.fail if "cuda" in REQUIRED else pytest.skip)("torch has no GPU")


def test_a_storage_that_was_resized_is_another_one(torch: Any, state: Any) -> None:
    """The reader still has what it was before, and gets where it is now. tests/host has a stand-in's."""
    needs_gpu(torch)
    tensor = torch.ones(1 << 20, device="cuda")
    storage, before = tensor.untyped_storage(), tensor.data_ptr()
    with reading() as reader:
        assert reader("take or kept[0].min().item()", tensor) == "1.0"
        storage.resize_(64 << 20)
        tensor.set_(storage, 0, (16 << 20,)).fill_(2)
        assert tensor.data_ptr() != before
        reader("take", tensor)
        found = reader("kept[1].numel(), kept[1].min().item(), kept[1].add_(1).max().item()")
        assert found == (16 << 20, 2.0, 3.0)
        assert tensor.min().item() == 3.0
        reader("kept.clear()")
        assert is_over(state)


def test_on_a_gpu(torch: Any, state: Any) -> None:
    """The receiver's stream waits for the sender's, and the memory is torch's, in place."""
    needs_gpu(torch)
    with reading() as reader:  # it keeps the clock of the sender's stream
        _on_a_gpu(torch, reader, state)


def _on_a_gpu(torch: Any, reader: Reader, state: Any) -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    reader("take or kept[0].sum().item()", tensor)  # all is loaded
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1 << 30)
        tensor.fill_(1)
        message = reduced(tensor[4:])
        assert not torch.cuda.current_stream().query()
    reader(TAKE.format(message))
    assert reader("kept[1].sum().item(), kept[0].data_ptr() + 16 == kept[1].data_ptr()") == ((1 << 20) - 4, True)
    reader("kept[0].fill_(3).sum().item()")
    assert tensor.sum().item() == 3 << 20
    reader("torch.cuda._sleep(1 << 30), kept[0].add_(1), kept.clear()")
    assert is_over(state)
    assert reader("torch.cuda.current_stream().query()") == "True"  # a reader's work keeps what the reader drops
