from __future__ import annotations

from typing import Any, Final

from tests.programs import printed

from .claims import claim, load
from .in_place import check_in_place
from .parties import COUNT, HostParty, Party


def elements(tensor: Any) -> Any:
    return tensor.cpu().numpy().copy()


@claim("torch", "torch.from_dlpack(view)", access="reads and writes",
       note="on a GPU, torch's current stream waits for the streams that used the bytes")  # fmt: skip
def test_from_dlpack(party: Party) -> None:
    torch = load("torch")

    def add_one(tensor: Any) -> None:
        tensor.add_(1)
        tensor.sum().item()  # waits for it

    check_in_place(party, torch.from_dlpack, read=elements, add_one=add_one)


@claim("torch", "torch.from_dlpack(view_of_bfloat16)", access="reads and writes")
def test_bfloat16(party: Party) -> None:
    torch = load("torch")
    tensor = torch.from_dlpack(party.buffer.view(COUNT, torch.bfloat16))
    assert tensor.dtype == torch.bfloat16
    party.write(b"\x80\x3f" * COUNT)  # 1.0: the upper half of a float32
    assert tensor.float().sum().item() == COUNT
    tensor.mul_(2)
    assert tensor.float().sum().item() == 2 * COUNT
    assert party.read(2 * COUNT) == b"\x00\x40" * COUNT
    party.buffer.view(COUNT, torch.bfloat16).copy_from(torch.ones(COUNT, dtype=torch.bfloat16))
    assert party.read(2 * COUNT) == b"\x80\x3f" * COUNT


SHARES: Final = """
import gpuinterop as gi, torch
tensor = torch.from_dlpack(gi.get_backend("host").device().empty((2, 3), torch.int16))
with gi.share(tensor) as shared, gi.attach(str(shared)) as attached:
    torch.from_dlpack(attached).copy_(torch.arange(6).view(2, 3))
    print(tensor.tolist(), torch.from_dlpack(shared).tolist())
"""


def test_an_array_of_a_device_and_an_attachment() -> None:
    """A tensor keeps the bytes of an array that was dropped; an attachment of one array is a tensor by itself."""
    load("torch")  # in a process of its own, which shares before and after no other test
    assert printed("-W", "error", "-c", SHARES) == "[[0, 1, 2], [3, 4, 5]] [[0, 1, 2], [3, 4, 5]]\n"


@claim("torch", "device.wrap_stream(torch.cuda.current_stream())", access="stream",
       note="on the host, pass torch.cpu.current_stream(), which is the calling thread")  # fmt: skip
def test_stream(party: Party) -> None:
    torch = load("torch")
    tensor = torch.from_dlpack(party.buffer.view(COUNT, "int32"))
    if isinstance(party, HostParty):
        party.check_stream(torch.cpu.current_stream(), lambda: tensor.add_(1))
        return
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        party.check_stream(torch.cuda.current_stream(), lambda: tensor.add_(1))
    stream.synchronize()
