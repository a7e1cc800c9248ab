"""The bytes that travel: the descriptor, and the messages over the rendezvous' connections.

The descriptor, little-endian: magic ``GIPS``, u8 version, 16 bytes boot id, 16 bytes nonce of the exporting process,
u64 number of the share, 16 bytes token, u8 length and bytes of the rendezvous' address. It holds no handle: a reader
connects, and the connection is its lease.

A request is 64 bytes: magic ``GIPR``, u8 version, u8 verb, the nonce, the number, the token, u32 number, zeros. An
answer is magic ``GIPA``, u8 version, u8 status, u16 zero, u32 number; then handles as `gpuinterop.ipc` sends them, or
for a failure as many bytes of words. To ATTACH it is a sealed memfd with JSON, which says what is shared (`Contents`),
and whose origin names the device; to BLOCKS, from that number on, the next descriptors of the memory; to ENROL the
writer's timeline, the lease's own and the board, and in the number the lease's slot. COUNT tells with 1 that the
descriptor goes to one more reader, and with 0 that it has come to one. The receiver trusts nothing.
"""

from __future__ import annotations

import functools
import hmac
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from .. import system
from .._arguments import MAX_SIZE
from .._core.interchange import TYPES
from ..errors import ArgumentTypeError, HandleError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import DeviceIdentity, Handle, HandleOrigin, IpcMemHandle, OpaqueFd, OriginKind, VmmFd

MAGIC: Final = b"GIPS"
"""The first bytes of a descriptor."""
VERSION: Final = 1
MAX_ADDRESS: Final = 107
"""Bytes of a Unix socket's path, without the zero."""
TOKEN: Final = 16
VERBS: Final = (1, 2, 3, 4)
ATTACH, BLOCKS, ENROL, COUNT = VERBS
ERRORS: Final = (ResourceClosedError, PeerError, HandleError)
"""What an answer's status from 1 on stands for."""
_HEAD: Final = struct.Struct(f"<4sB16s16sQ{TOKEN}sB")
REQUEST: Final = struct.Struct(f"<4sBB16sQ{TOKEN}sI14x")
ANSWER: Final = struct.Struct("<4sBB2xI")
MOST_WORDS: Final = 2048
_MOST_BYTES: Final = 16 << 20
_MOST_DIMENSIONS: Final = 64
_KINDS: Final[Mapping[str, type[Handle]]] = {kind.type_name: kind for kind in (IpcMemHandle, VmmFd, OpaqueFd)}


@functools.cache
def boot_id() -> bytes:
    """The kernel's number of this boot, which tells hosts, and boots of one host, apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (FileNotFoundError, PermissionError, ValueError):
        return bytes(16)
    except OSError as error:  # out of descriptors: it is there, and is read another time
        raise system.driver_error("open(boot_id)", error.errno or 0) from error


class Descriptor(NamedTuple):
    """The address of a share, and the token that opens it."""

    boot: bytes
    process: bytes
    share: int
    token: bytes
    address: str

    def __bytes__(self) -> bytes:
        address = os.fsencode(self.address)
        return _HEAD.pack(MAGIC, VERSION, *self[:-1], len(address)) + address

    @classmethod
    def parse(cls, data: object) -> Self:
        """Read a descriptor, from anywhere."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentTypeError("descriptor", f"expected bytes(share), got {type(data).__name__}.")
        raw = bytes(data)
        if len(raw) < 5 or not raw.startswith(MAGIC):
            raise InvalidArgumentError(
                "descriptor",
                f"expected bytes(share), got {len(raw)} other bytes; is the file written whole, by os.replace?",
            )
        if raw[4] != VERSION:
            raise InvalidArgumentError(
                "descriptor", f"expected version {VERSION}, got {raw[4]}; install one version on both sides."
            )
        if len(raw) <= _HEAD.size or len(raw) != _HEAD.size + raw[_HEAD.size - 1]:
            raise InvalidArgumentError("descriptor", f"expected all bytes of a share, got {len(raw)}.")
        boot, process, share, token = _HEAD.unpack_from(raw)[2:-1]
        return cls(boot, process, share, token, os.fsdecode(raw[_HEAD.size :]))

    def request(self, verb: int, number: int = 0) -> bytes:
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


def answer(number: int, error: type[Exception] | None = None) -> bytes:
    """The first part of an answer."""
    return ANSWER.pack(b"GIPA", VERSION, 0 if error is None else 1 + ERRORS.index(error), number)


def parse_answer(head: bytes) -> tuple[type[Exception] | None, int]:
    """The error that the answer tells of, if it does, and the number."""
    magic, version, status, number = ANSWER.unpack(head)
    if (magic, version) != (b"GIPA", VERSION) or status > len(ERRORS) or (status and number > MOST_WORDS):
        raise PeerError(f"expected an answer of version {VERSION}; install one version of gpuinterop on both sides.")
    return ERRORS[status - 1] if status else None, number


# -- what is shared ----------------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """Memory at consecutive addresses: one block, or several VMM allocations.

    Attributes
    ----------
    name : str
        Name of the type of the handles.
    keys : tuple of int
        The exporter's number of each allocation.
    sizes : tuple of int
        Its size in bytes.
    data : str
        The handle itself in hexadecimal digits, where it is not a descriptor.
    """

    name: str
    keys: tuple[int, ...]
    sizes: tuple[int, ...]
    data: str = ""

    @property
    def kind(self) -> type[Handle]:
        """Type of the handles."""
        return _KINDS[self.name]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def handles(self) -> list[Handle]:
        """The handles that came with it."""
        return [IpcMemHandle(bytes.fromhex(self.data))] if self.kind is IpcMemHandle else []


class Placed(NamedTuple):
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


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a reader is told of a share."""

    pid: int
    single: bool
    regions: tuple[Region, ...]
    arrays: Mapping[str, Placed]
    device: DeviceIdentity

    @property
    def way(self) -> str:
        """The types of its handles."""
        return ", ".join(sorted({region.kind.__name__ for region in self.regions}))

    def write(self) -> OpaqueFd:
        """Write the JSON into a memfd."""
        text = json.dumps((self.pid, self.single, self.regions, self.arrays), separators=(",", ":")).encode()
        fd = system.create_memfd("gpuinterop.contents", len(text))
        os.pwrite(fd, text, 0)
        return OpaqueFd.adopt(fd, origin=HandleOrigin(kind=OriginKind.OTHER, device=self.device))

    @classmethod
    def read(cls, handle: OpaqueFd) -> Self:
        """Read what an exporter says; `PeerError` for anything that it cannot mean."""
        try:
            device = None if handle.origin is None else handle.origin.device
            if device is None or (system.seals(handle.fd) or 0) & system.FIXED != system.FIXED:  # else this blocks
                raise ValueError(device)
            pid, single, regions, arrays = json.loads(os.pread(handle.fd, _MOST_BYTES, 0))
            memory = tuple(Region(kind, tuple(keys), tuple(sizes), data) for kind, keys, sizes, data in regions)
            placed = {
                name: Placed(at, offset, tuple(shape), tuple(strides), *more)
                for name, (at, offset, shape, strides, *more) in arrays.items()
            }
            found = cls(pid, single, memory, placed, device)
            fits = type(pid) is int and type(single) is bool and 0 < len(found.arrays) < (2 if single else MAX_SIZE)
            for region in found.regions:
                several = len(region.keys) != 1 and region.kind is not VmmFd
                fits = fits and not several and 0 < len(region.keys) == len(region.sizes) and min(region.sizes) > 0
                fits = fits and _are_ints((*region.keys, *region.sizes)) and len(region.handles) < 2
            for one in found.arrays.values():
                numbers = one.region, one.offset, *one.shape
                fits = fits and _are_ints((*numbers, *one.strides)) and min(numbers) >= 0
                fits = (
                    fits and one.region < len(found.regions) and len(one.strides) == len(one.shape) <= _MOST_DIMENSIONS
                )
                fits = fits and one.dtype in TYPES and type(one.read_only) is bool
                fits = fits and math.prod(one.shape) <= MAX_SIZE
            if not fits or sum(one.size for one in found.regions) > MAX_SIZE:
                raise ValueError("its parts do not fit together")
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PeerError(f"the exporter's answer cannot be meant: {str(error)[:200]}.") from None
        return found


def _are_ints(values: tuple[object, ...]) -> bool:
    return {*map(type, values)} == {int} and min(values) >= -MAX_SIZE and max(values) <= MAX_SIZE  # type: ignore[type-var, operator]
