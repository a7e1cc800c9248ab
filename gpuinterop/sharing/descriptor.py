"""What travels: the descriptor as bytes, and the messages over the rendezvous' connections.

The descriptor, little-endian: magic ``GIPS``, u8 version, 16 bytes boot id, 16 bytes nonce of the exporting process,
u64 number of the share, 16 bytes token, u8 length and bytes of the rendezvous' address, u32 CRC of all before. It holds
no handle: a reader connects, and the connection is its lease.

A request is 64 bytes: magic ``GIPR``, u8 version, u8 verb, the nonce, the number, the token, u32 number, zeros. An
answer is magic ``GIPA``, u8 version, u8 status, u16 zero, u32 number; then handles as `gpuinterop.ipc` sends them, or
for a failure as many bytes of words. To ATTACH it is a sealed memfd with JSON, which says what is shared (`Contents`);
to BLOCKS, from that number on, the next handles of the memory; to ENROL the writer's timeline, the lease's own and the
board, and in the number the lease's slot. The receiver of any of it trusts nothing in it.
"""

from __future__ import annotations

import enum
import functools
import hmac
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from .. import system
from .._arguments import MAX_SIZE
from ..errors import (
    ArgumentTypeError,
    HandleError,
    InvalidArgumentError,
    PeerError,
    ResourceClosedError,
)
from ..handles import DeviceIdentity, FdHandle, Handle, IpcMemHandle, OpaqueFd, VmmFd

T = TypeVar("T")

VERSION: Final = 1
MAX_ADDRESS: Final = 107
"""Bytes of a Unix socket's path, without the zero."""
TOKEN: Final = 16
_HEAD: Final = struct.Struct(f"<4sB16s16sQ{TOKEN}sB")
_CHECK: Final = struct.Struct("<I")
REQUEST: Final = struct.Struct(f"<4sBB16sQ{TOKEN}sI14x")
ANSWER: Final = struct.Struct("<4sBB2xI")
MOST_WORDS: Final = 2048
_MOST_BYTES: Final = 16 << 20
_MOST_DIMENSIONS: Final = 64
_MOST_HANDLES: Final = 0xFFFF
_KINDS: Final[Mapping[str, type[Handle]]] = {kind.type_name: kind for kind in (IpcMemHandle, VmmFd, OpaqueFd)}


class Verb(enum.IntEnum):
    """What a reader asks for."""

    ATTACH = 1
    BLOCKS = 2
    ENROL = 3


class Status(enum.IntEnum):
    """What an answer says; anything but DONE comes with words."""

    DONE = 0
    CLOSED = 1
    REFUSED = 2
    FAILED = 3


STATUSES: Final[Mapping[type[Exception], Status]] = {
    ResourceClosedError: Status.CLOSED, PeerError: Status.REFUSED, HandleError: Status.FAILED
}  # fmt: skip
"""The status of each error that is told to the other side as what it is."""


@functools.cache
def boot_id() -> bytes:
    """What tells two hosts, or two boots of one, apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a share is, and the token that opens it."""

    boot: bytes
    process: bytes
    share: int
    token: bytes
    address: str

    def __bytes__(self) -> bytes:
        address = os.fsencode(self.address)
        head = _HEAD.pack(b"GIPS", VERSION, self.boot, self.process, self.share, self.token, len(address)) + address
        return head + _CHECK.pack(zlib.crc32(head))

    @classmethod
    def parse(cls, data: object) -> Self:
        """Read a descriptor, from anywhere."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentTypeError(
                "descriptor", f"expected the bytes of a share, bytes(share), got {type(data).__name__}."
            )
        raw = bytes(data)
        if raw[:4] != b"GIPS":
            raise InvalidArgumentError("descriptor", f"expected bytes(share), got {len(raw)} other bytes.")
        if len(raw) > 4 and raw[4] != VERSION:
            raise InvalidArgumentError(
                "descriptor",
                f"expected version {VERSION}, got {raw[4]}; install one version of gpuinterop on both sides.",
            )
        body, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
        if len(body) < _HEAD.size or _CHECK.pack(zlib.crc32(body)) != check:
            raise InvalidArgumentError(
                "descriptor", f"expected all bytes of a share, got {len(raw)}: they are damaged."
            )
        _, _, boot, process, share, token, length = _HEAD.unpack_from(body)
        if len(body) != _HEAD.size + length or not 0 < length <= MAX_ADDRESS:
            raise InvalidArgumentError("descriptor", f"expected an address of {length} bytes, got another length.")
        return cls(boot, process, share, token, os.fsdecode(body[_HEAD.size :]))

    def request(self, verb: Verb, number: int = 0) -> bytes:
        """The message that asks the exporter for something."""
        return REQUEST.pack(b"GIPR", VERSION, verb, self.process, self.share, self.token, number)

    def opens(self, token: bytes) -> bool:
        """Whether a token that came is this one's."""
        return hmac.compare_digest(self.token, token)


def parse_request(data: bytes) -> tuple[int, bytes, int, bytes, int]:
    """Verb, nonce, share, token and number."""
    magic, version, *asked = REQUEST.unpack(data)
    if (magic, version) != (b"GIPR", VERSION):
        raise PeerError(f"expected a request of version {VERSION}; install one version of gpuinterop on both sides.")
    return tuple(asked)


def answer(status: Status, number: int) -> bytes:
    """The first part of an answer."""
    return ANSWER.pack(b"GIPA", VERSION, status, number)


def parse_answer(head: bytes) -> tuple[type[Exception] | None, int]:
    """The error that the answer tells of, if it does, and the number."""
    magic, version, status, number = ANSWER.unpack(head)
    if (magic, version) != (b"GIPA", VERSION) or (status and number > MOST_WORDS):
        raise PeerError(f"expected an answer of version {VERSION}; install one version of gpuinterop on both sides.")
    return next((kind for kind, one in STATUSES.items() if one == status), PeerError) if status else None, number


# -- what is shared ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Memory at consecutive addresses: one block, or several VMM allocations.

    Attributes
    ----------
    kind : type
        Type of the handles.
    keys : tuple of int
        The exporter's number of each allocation.
    sizes : tuple of int
        Its size in bytes.
    """

    kind: type[Handle]
    keys: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An array in a region.

    Attributes
    ----------
    region : int
        Number of the region.
    offset : int
        Bytes from the region's start to the first element.
    shape, strides : tuple of int
        Elements, and bytes.
    dtype : str
        Name of the element type.
    read_only : bool
        Whether its library treats it as immutable.
    """

    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a reader is told of a share."""

    pid: int
    single: bool
    device: DeviceIdentity
    regions: tuple[Region, ...]
    arrays: Mapping[str, Placed]

    @property
    def way(self) -> str:
        """The types of its handles."""
        return ", ".join(sorted({region.kind.__name__ for region in self.regions}))

    def write(self) -> OpaqueFd:
        """Write it into a memfd."""
        device = self.device
        told = {
            "pid": self.pid,
            "single": self.single,
            "device": [device.name, _hex(device.uuid), device.pci_bus_id, _hex(device.luid), device.is_cpu],
            "regions": [[one.kind.type_name, one.keys, one.sizes] for one in self.regions],
            "arrays": [
                [name, one.region, one.offset, one.shape, one.strides, one.dtype, one.read_only]
                for name, one in self.arrays.items()
            ],
        }
        text = json.dumps(told, separators=(",", ":")).encode()
        fd = system.create_memfd("gpuinterop.contents", len(text))
        os.pwrite(fd, text, 0)
        return OpaqueFd.adopt(fd)

    @classmethod
    def read(cls, handle: FdHandle) -> Self:
        """Read what an exporter says; `PeerError` for anything that it cannot mean."""
        try:
            if (system.seals(handle.fd) or 0) & system.FIXED != system.FIXED:  # else reading it might block
                raise ValueError("not a sealed memfd")
            body: Any = json.loads(os.pread(handle.fd, _MOST_BYTES, 0))
            name, uuid, pci, luid, is_cpu = body["device"]
            device = DeviceIdentity(
                name=_text(name)[:200],
                uuid=uuid and bytes.fromhex(uuid),
                pci_bus_id=pci and _text(pci),
                luid=luid and bytes.fromhex(luid),
                is_cpu=_flag(is_cpu),
            )
            regions = tuple(
                Region(kind=_KINDS[kind], keys=_numbers(keys, 0), sizes=_numbers(sizes, 1))
                for kind, keys, sizes in body["regions"]
            )
            arrays = {
                _text(name): Placed(
                    region=_number(region, 0, len(regions) - 1),
                    offset=_number(offset),
                    shape=_numbers(shape, 1),
                    strides=_numbers(strides, -MAX_SIZE),
                    dtype=_text(dtype),
                    read_only=_flag(read_only),
                )
                for name, region, offset, shape, strides, dtype, read_only in body["arrays"]
            }
            found = cls(
                pid=_number(body["pid"]),
                single=_flag(body["single"]),
                device=device,
                regions=regions,
                arrays=arrays,
            )
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PeerError(f"the exporter's answer cannot be meant: {error!r}.") from None
        found._check(len(body["arrays"]))
        return found

    def _check(self, arrays: int) -> None:
        wrong = not self.arrays or len(self.arrays) != arrays or (self.single and arrays != 1)
        for region in self.regions:
            several = len(region.keys) != 1 and region.kind is not VmmFd
            wrong = wrong or several or not 0 < len(region.keys) == len(region.sizes) or region.size > MAX_SIZE
        for one in self.arrays.values():
            many = len(one.shape) > _MOST_DIMENSIONS or len(one.shape) != len(one.strides)
            wrong = wrong or many or math.prod(one.shape) > MAX_SIZE
        if wrong or sum(len(region.keys) for region in self.regions) > _MOST_HANDLES:
            raise PeerError("the exporter's answer cannot be meant: its parts do not fit together.")


def _hex(data: bytes | None) -> str | None:
    return data.hex() if data else None


def _number(value: object, least: int = 0, most: int = MAX_SIZE) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(value)
    return value


def _numbers(values: Iterable[object], least: int) -> tuple[int, ...]:
    return tuple(_number(value, least) for value in values)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value
