"""Parts of the sharing room by themselves: bounds of what a peer sends, and one order for several shares."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core.device import Device
from gpuinterop._core.interchange import CAPSULES, DLTensor, pointer_of
from gpuinterop.handles import HandleOrigin, OriginKind
from gpuinterop.sharing import arrays
from gpuinterop.sharing.descriptor import ANSWER, MOST_WORDS, Contents, parse_answer
from gpuinterop.sharing.order import LET_GO, SLOTS, Board
from gpuinterop.sharing.origin import describe
from gpuinterop.sharing.rendezvous import here

ADD_SEALS = 1033


def test_a_board_has_so_many_slots() -> None:
    with Board.make() as board:
        board.slot(SLOTS - 1)
        with pytest.raises(gi.PeerError, match="number of a slot"):
            board.slot(SLOTS)


@pytest.mark.parametrize("size", [2048, 8192])
def test_a_board_of_another_size_is_refused(size: int) -> None:
    with Board.make() as board:
        content = os.pread(board.fd, 16, 0)
    fd = os.memfd_create("board", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, ADD_SEALS, system.FIXED)
    with gi.OpaqueFd.adopt(fd) as handle, pytest.raises(gi.HandleError, match="the board of a share"):
        Board.load(handle)


def test_another_reader_has_noticed_the_death_first(host: Device) -> None:
    with host.allocate(4096) as memory, gi.share(memory.buffer.view(4)) as shared, gi.attach(bytes(shared)) as attached:
        attached.acquire(timeout=5)
        attached.release()
        shared._turns().own.host_signal(LET_GO)
        with pytest.raises(gi.PeerError, match="has ended"):
            attached.acquire(timeout=5)


def test_several_are_acquired_in_one_order(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []
    monkeypatch.setattr(arrays, "acquire_all", lambda turns, *_: seen.append([one for one, _ in turns]))
    with host.allocate(4096) as memory, gi.share(view := memory.buffer.view(4)) as one, gi.share(view) as other:
        gi.sharing.acquire([one, other])
        gi.sharing.acquire([other, one, other])
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]


def test_a_share_that_is_over_lets_nothing_in(host: Device) -> None:
    with host.allocate(4096) as memory:
        shared = gi.share(memory.buffer.view(4))
        offer: Any = here().offers[shared.key[1]]
        shared.close(timeout=10)
        with pytest.raises(gi.ResourceClosedError, match="share was closed"):
            offer.attach_here()


def test_an_answer_has_so_many_words() -> None:
    parse_answer(ANSWER.pack(b"GIPA", 1, 3, MOST_WORDS))
    with pytest.raises(gi.PeerError, match="an answer of version"):
        parse_answer(ANSWER.pack(b"GIPA", 1, 3, MOST_WORDS + 1))


WRONG = [(0, 0, 1, "uint8"), (4096, 1, 1, "uint8"), (4096, 0, -1, "uint8"), (4096, 0, 1, "int4")]


@pytest.mark.parametrize(("size", "region", "length", "dtype"), WRONG)
def test_contents_that_cannot_be_meant(host: Device, size: int, region: int, length: int, dtype: str) -> None:
    placed = {"": [region, 0, [length], [1], dtype, False]}
    text = json.dumps((1, True, [["opaque_fd", [1], [size], ""]], placed)).encode()
    fd = system.create_memfd("contents", len(text))
    os.pwrite(fd, text, 0)
    origin = HandleOrigin(kind=OriginKind.OTHER, device=host.identity)
    with gi.OpaqueFd.adopt(fd, origin=origin) as told, pytest.raises(gi.PeerError, match="cannot be meant"):
        Contents.read(told)


def test_an_offset_in_a_capsule() -> None:
    given = np.arange(8, dtype=np.uint8)
    capsule: Any = given.__dlpack__()
    name, offset = next((one[0], one[1]) for one in CAPSULES if f'"{one[0].decode()}"' in repr(capsule))
    tensor = DLTensor.from_address(pointer_of(capsule, name) + offset)
    tensor.data -= 16
    tensor.byte_offset += 16

    class Array:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: object) -> object:
            return capsule

    assert describe(Array(), "array").pointer == given.ctypes.data


@pytest.mark.parametrize("array", [
    SimpleNamespace(__dlpack_device__=lambda: (2, 99), __dlpack__=lambda **_: np.zeros(4).__dlpack__()),
    SimpleNamespace(__cuda_array_interface__={"data": (64, False), "shape": (4,), "typestr": "<f8"}),
])  # fmt: skip
def test_memory_of_no_device_here_is_named_with_those_that_are(array: object) -> None:
    got = r"(that of CUDA, DLPack's device \(2, 99\)|0x40 by __cuda_array_interface__.*)"
    with pytest.raises(gi.DeviceNotFoundError, match=f"^field: expected memory of .*, got {got}; devices: .*host:0 "):
        gi.share({"field": array})


def test_the_one_array_of_a_share_is_called_array() -> None:
    with gi.OpaqueFd.adopt(os.memfd_create("no sealing")) as file:
        os.ftruncate(file.fd, 4096)
        with pytest.raises(gi.InvalidArgumentError, match=r"^array: expected memory that can be shared, got some "):
            gi.share(np.frombuffer(mmap.mmap(file.fd, 4096), np.uint8))
