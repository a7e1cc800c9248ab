"""The bytes that processes exchange: a share's descriptor, the requests over a link, and a share's contents.

The descriptor, little-endian: magic ``GIPS``, u8 version, 16 bytes boot id, 16 bytes number of the sharing process, u64
serial and u32 slot of the share, 16 bytes token, u8 length and bytes of the socket's address. It contains no handle. As
text it is base64 with ``-`` and ``_``, without padding.

A link carries messages of `gpuinterop.ipc`. The attaching process asks; an answer repeats the request's number.

======  =================================================  ==========================================================
kind    body and descriptors                               answer
======  =================================================  ==========================================================
HELLO   the sharing process's number; a page of counts     nothing; its page of counts, and the eventfd that rings
ATTACH  serial, slot, token                                `Contents`; descriptors of the first blocks that have
                                                           them, unless the process has blocks of the share already
BLOCKS  u64 numbers of blocks                              nothing; a descriptor for each
ENROL   serial, slot, token, the reader's number           u32 place; the writer's timeline, the reader's, the page
======  =================================================  ==========================================================

The answer to a request that failed has kind FAILED plus the number of the error's type, and the error's text.

**Counts.** Each share, and each tensor that `gpuinterop.sharing.torch` has sent, has a slot. The sharing process's page
of counts contains each slot's current serial, 0 if the slot is closed. In its own page, the attaching process writes
how often it holds each slot, and how many messages it has received for it, minus those that it has sent. Only one
process writes a word, so counting needs no lock across processes; the sharing process adds up. A slot ends once no
process holds it and as many messages were received as sent. When a process's link ends, its holds end too; messages
that it has sent can still arrive.
"""

from __future__ import annotations

import base64
import functools
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, Self

from .. import ipc, system
from .._core.layout import TYPES, Layout, layout_of
from ..errors import ArgumentTypeError, HandleError, InvalidArgumentError, PeerError, ResourceClosedError
from ..handles import DeviceIdentity, Handle, IpcMemHandle, OpaqueFd, VmmFd

MAGIC: Final = b"GIPS"
VERSION: Final = 2
MAX_ADDRESS: Final = 107
"""Bytes of a Unix socket's path, without the zero."""
SLOTS: Final = 1 << 20
"""Number of shares, plus tensors sent and not dropped, that a process can have at once."""
HELLO, ATTACH, BLOCKS, ENROL, DONE, FAILED = range(1, 7)
_ERRORS: Final = (ResourceClosedError, PeerError, HandleError)
SHARE: Final = struct.Struct("<QI16s")
_MAX_ERROR: Final = 2048
_HEAD: Final = struct.Struct("<4sB16s16sQI16sB")
_KINDS: Final[tuple[type[Handle], ...]] = (IpcMemHandle, VmmFd, OpaqueFd)
_TYPES: Final = tuple(TYPES)


@functools.cache
def boot_id() -> bytes:
    """The kernel's id of this boot, which differs between hosts and between boots of a host."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return bytes.fromhex(file.read().decode().strip().replace("-", ""))
    except (FileNotFoundError, PermissionError, ValueError):
        return bytes(16)
    except OSError as error:  # out of descriptors; the file exists, so a later call can read it
        raise system.driver_error("open(boot_id)", error.errno or 0) from error


class Descriptor(NamedTuple):
    """The address of a share, and the token that grants access to it."""

    boot: bytes
    process: bytes
    serial: int
    slot: int
    token: bytes
    address: str

    def __bytes__(self) -> bytes:
        address = os.fsencode(self.address)
        return _HEAD.pack(MAGIC, VERSION, *self[:-1], len(address)) + address

    @classmethod
    def parse(cls, data: object) -> Self:
        """Read a descriptor from an untrusted source."""
        if isinstance(data, str):
            try:
                data = base64.b64decode(data.strip() + "=" * (-len(data.strip()) % 4), b"-_", validate=True)
            except ValueError:  # not base64, or one character too many
                raise _cut(data) from None
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentTypeError("descriptor", f"expected bytes(share) or str(share), got {type(data).__name__}.")
        descriptor, rest = cls.split(raw := bytes(data))
        if rest:
            raise _cut(raw)
        return descriptor

    @classmethod
    def split(cls, raw: bytes) -> tuple[Self, bytes]:
        """The descriptor at the start of the bytes, and the rest of the bytes."""
        if len(raw) < 5 or not raw.startswith(MAGIC):
            raise _cut(raw)
        if raw[4] != VERSION:
            problem = f"expected version {VERSION}, got {raw[4]}; install one version on both sides."
            raise InvalidArgumentError("descriptor", problem)
        end = _HEAD.size + raw[_HEAD.size - 1] if len(raw) >= _HEAD.size else 0
        if not end or len(raw) < end:
            raise _cut(raw)
        boot, process, serial, slot, token = _HEAD.unpack_from(raw)[2:-1]
        if slot >= SLOTS:
            raise _cut(raw)
        return cls(boot, process, serial, slot, token, os.fsdecode(raw[_HEAD.size : end])), raw[end:]

    @property
    def request(self) -> bytes:
        return SHARE.pack(self.serial, self.slot, self.token)


def _cut(raw: bytes | str) -> InvalidArgumentError:
    got = f"got {len(raw)}; is the file written by os.replace?"
    return InvalidArgumentError("descriptor", f"expected all of bytes(share) or str(share), {got}")


def failure(error: BaseException, number: int) -> tuple[int, int, bytes]:
    """Kind, number and body of the answer to a request that failed."""
    kind = type(error) if type(error) in _ERRORS else PeerError
    text = str(error) if kind is type(error) else f"in the sharing process: {type(error).__name__}: {error}"
    return FAILED + _ERRORS.index(kind), number, text.encode(errors="replace")[:_MAX_ERROR]


def failure_of(kind: int, body: bytes) -> Exception:
    """The error that a `failure` contains."""
    if not 0 <= kind - FAILED < len(_ERRORS):
        return PeerError(f"expected an answer of this version, got one of kind {kind}.")
    return _ERRORS[kind - FAILED](body.decode(errors="replace"))


# -- what is shared ----------------------------------------------------------------------------------------------------

_CONTENTS: Final = struct.Struct("<I??16s8s16sIII")
_LAYOUT: Final = struct.Struct("<BB")
_REGION: Final = struct.Struct("<BI")
_ARRAY: Final = struct.Struct("<iqIBI")


class Region(NamedTuple):
    """Blocks at consecutive addresses, mapped together: handle type, the sharing process's numbers, sizes in bytes.

    `data` is the handle, if it is not a descriptor.
    """

    kind: type[Handle]
    numbers: tuple[int, ...]
    sizes: tuple[int, ...]
    data: bytes = b""

    @property
    def size(self) -> int:
        return sum(self.sizes)


class Placed(NamedTuple):
    """An array: its region's number (-1 if it has no elements), and its first element's offset there in bytes."""

    region: int
    offset: int
    layout: Layout
    read_only: bool


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Contents:
    """The answer to a reader: everything that it needs about a share."""

    pid: int
    single: bool
    device: DeviceIdentity
    regions: Sequence[Region]
    arrays: Mapping[str, Placed]

    def __bytes__(self) -> bytes:
        device, layouts, names = self.device, dict[Layout, int](), [name.encode() for name in self.arrays]
        arrays = [
            _ARRAY.pack(region, offset, layouts.setdefault(layout, len(layouts)), read_only, len(name))
            for (region, offset, layout, read_only), name in zip(self.arrays.values(), names, strict=True)
        ]
        ids = device.uuid or b"", device.luid or b"", (device.pci_bus_id or "").encode()
        counts = len(layouts), len(self.regions), len(arrays)
        parts = [_CONTENTS.pack(self.pid, self.single, device.is_cpu, *ids, *counts)]
        for layout in layouts:
            count = len(layout.shape)
            parts.append(_LAYOUT.pack(_TYPES.index(layout.dtype.name), count))
            parts.append(struct.pack(f"<{2 * count}q", *layout.shape, *layout.strides))
        for kind, numbers, sizes, data in self.regions:
            parts.append(_REGION.pack(_KINDS.index(kind), len(numbers)))
            parts.append(struct.pack(f"<{2 * len(numbers)}Q64s", *numbers, *sizes, data))
        encoded = b"".join(parts + arrays + names)
        if len(encoded) > ipc.MAX_BODY:
            expected = f"expected arrays whose names and layouts take {ipc.MAX_BODY} bytes or fewer"
            raise InvalidArgumentError("arrays", f"{expected}, got {len(encoded)}; share them in parts.")
        return encoded

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a sharing process's answer; raise `PeerError` if it is invalid."""
        try:
            pid, single, is_cpu, uuid, luid, pci, *counts = _CONTENTS.unpack_from(data)
            at, layouts, regions = _CONTENTS.size, list[Layout](), list[Region]()
            for _ in range(counts[0]):
                dtype, count = _LAYOUT.unpack_from(data, at)
                numbers = struct.unpack_from(f"<{2 * count}q", data, at + _LAYOUT.size)
                layouts.append(layout_of(numbers[:count], _TYPES[dtype], numbers[count:]))
                at += _LAYOUT.size + 16 * count
            for _ in range(counts[1]):
                kind, count = _REGION.unpack_from(data, at)
                parts = struct.unpack_from(f"<{2 * count}Q64s", data, at + _REGION.size)
                regions.append(Region(_KINDS[kind], parts[:count], parts[count:-1], parts[-1]))
                at += _REGION.size + 16 * count + 64
            end = at + counts[2] * _ARRAY.size
            arrays = list(_ARRAY.iter_unpack(data[at:end]))
            ends = list(accumulate((length for *_, length in arrays), initial=end))
            if ends[-1] != len(data):
                raise ValueError(f"expected {ends[-1]} bytes, got {len(data)}")
            names = [data[start:stop].decode() for start, stop in pairwise(ends)]
            placed = {
                name: Placed(region, offset, layouts[layout], bool(read_only))
                for name, (region, offset, layout, read_only, _) in zip(names, arrays, strict=True)
            }
        except (struct.error, LookupError, ValueError, InvalidArgumentError) as error:
            raise PeerError(f"the sharing process's answer is invalid: {str(error)[:200]}.") from None
        uuid, luid = (identifier if any(identifier) else None for identifier in (uuid, luid))
        bus = pci.rstrip(b"\0").decode("ascii", "replace") or None
        device = DeviceIdentity(name="a device of another process", uuid=uuid, luid=luid, pci_bus_id=bus, is_cpu=is_cpu)
        return cls(pid, single, device, regions, placed)
