"""The lifetime of multicast objects, step by step; ``gpuinterop selftest multicast`` runs this in a child process.

Only a user starts this: it can block for ever, or disturb a host whose fabric is broken. After an error it stops, and
leaves the cleanup to the driver.

The oracle does not use multicast: it fills and reads each device's own allocation with ordinary copies.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt

from .._core import discovery
from .._core.memory import round_up
from .._core.multicast import create_multicast
from ..capabilities import Cell, Operation
from ..errors import GpuInteropError
from ..handles import VmmFd
from .failed_releases import leaks_raised
from .multimem import multimem_add, multimem_store
from .peer import BackendPeer

if TYPE_CHECKING:
    from .._core.allocation import Allocation
    from .._core.device import Device
    from .._core.memory import Buffer
    from .._core.multicast import MulticastMapping, MulticastObject
    from .._core.stream import Stream
    from ..handles import AllocationHandle

__all__ = ["CELLS", "START", "Life", "Wrong", "open_life"]

CELLS: Final = (
    Cell(Operation.CREATE_MULTICAST),
    Cell(Operation.EXPORT_MULTICAST, VmmFd),
    Cell(Operation.IMPORT_MULTICAST, VmmFd),
)
"""The capabilities that all steps need of each device."""

START: Final = "start a second process"
"""The step in which an interpreter and a driver start."""

Words = npt.NDArray[np.uint32]

_CLOSE: Final = math.inf
_MARGIN: Final = 7
"""Words at both ends that a store must not change."""


class Wrong(Exception):
    """A device's memory or an object is not what it must be."""


class Life:
    """Two objects: the first is only this process's, the second has its last device in a second process.

    `devices` are two or more of one backend.
    """

    remote_attributes = ()

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = list(devices)
        self._size = 0
        self._streams: list[Stream] = []
        self._memory: list[Allocation] = []
        self._sums: list[Allocation] = []
        self._object: MulticastObject
        self._mapping: MulticastMapping
        self._handle: AllocationHandle
        self._peer: BackendPeer
        self._value = 0xA5000000
        self._generator = np.random.default_rng(5)

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        """The steps in order: a name, and a function that returns what it did."""
        return [
            ("open the devices", self._open),
            ("granularity", self._granularity),
            ("create", self._create),
            ("add the devices", self._add),
            ("bind memory", self._bind),
            ("map", self._map),
            ("multimem store", self._store),
            ("multimem add", self._sum),
            ("unmap and unbind", self._unbind),
            ("bind addresses", self._bind_addresses),
            ("close", self._close),
            (START, self._start),
            ("export", self._export),
            ("import in the second process", self._import),
            ("add the devices of both", self._add_both),
            ("bind in both", self._bind_both),
            ("map in both", self._map_both),
            ("multimem store from both", self._store_both),
            ("close in both", self._close_both),
        ]

    def step(self, name: str) -> tuple[bool, str]:
        """Do a step; return whether it was right, and what it did or why it was wrong."""
        try:
            with leaks_raised():
                return True, dict(self.steps())[name]()
        except (GpuInteropError, Wrong) as error:
            return False, f"{type(error).__name__}: {error}"
        except Exception:
            return False, traceback.format_exc().strip()

    def shown(self, index: int) -> list[Cell]:
        """The cells that the device at `index` has exercised when all steps were right."""
        create, export, imports = CELLS
        return [create] + [export] * (index == 0) + [imports] * (index == len(self.devices) - 1)

    # -- in this process -----------------------------------------------------------------------------------------

    def _open(self) -> str:
        self._streams = [device.create_stream() for device in self.devices]
        return ", ".join(f"{device.backend}:{device.ordinal} {device.name}" for device in self.devices)

    def _granularity(self) -> str:
        first = self.devices[0]
        found = first.multicast_granularity(self.devices, 1, VmmFd)
        if found.minimum <= 0 or found.recommended % found.minimum:
            raise Wrong(f"expected a recommended granularity that is a multiple of the minimum, got {found}.")
        self._size = found.minimum
        for one in self.devices:  # memory has its own granularity
            step = one.allocation_granularity(VmmFd).minimum
            self._size = round_up(self._size, step)
        return f"minimum {found.minimum}, recommended {found.recommended} bytes; {self._size} are used"

    def _create(self) -> str:
        self._object = create_multicast(len(self.devices), self._size, VmmFd, device=self.devices[0])
        return f"{self._size} bytes for {len(self.devices)} devices"

    def _add(self) -> str:
        for device in self.devices:
            self._object.add_device(device)
        return f"{len(self.devices)} devices"

    def _bind(self) -> str:
        for device in self.devices:
            self._memory.append(device.allocate(self._size))
            self._object.bind_memory(self._memory[-1])
        return f"{self._size} bytes of each device"

    def _map(self) -> str:
        self._mapping = self._object.map()
        return f"at {self._mapping.ptr:#x}"

    def _store(self) -> str:
        """Each device stores a word; every device's memory is checked, including words that no store wrote."""
        for device, stream in zip(self.devices, self._streams, strict=True):
            before = self._fill()
            value = self._next()
            multimem_store(stream, self._mapping, value, self._words - 2 * _MARGIN, first=_MARGIN, timeout=None)
            self._expect(before, value, f"after a store by {device!r}")
        return f"from each of {len(self.devices)} devices, found in the memory of all"

    def _sum(self) -> str:
        """Each device has different random words; every device adds them up."""
        total = np.zeros(self._words, np.uint32)
        for allocation in self._memory:
            words = self._generator.integers(0, 1 << 32, self._words, np.uint32)
            allocation.buffer.copy_from_host(words)
            total += words
        for device, stream in zip(self.devices, self._streams, strict=True):
            self._sums.append(device.allocate(self._size))
            target = self._sums[-1].buffer
            target.fill(0)
            multimem_add(stream, target, self._mapping, self._words, timeout=None)
            _compare(_words(target), total, f"the sums that {device!r} has made")
        return f"{self._words} sums by each of {len(self.devices)} devices"

    def _unbind(self) -> str:
        self._mapping.close(timeout=_CLOSE)
        for binding in self._object.bindings:
            binding.close(timeout=_CLOSE)
        return f"{len(self.devices)} bindings"

    def _bind_addresses(self) -> str:
        for device, allocation in zip(self.devices, self._memory, strict=True):
            self._object.bind_address(device, allocation.buffer, self._size)
        with self._object.map() as self._mapping:
            self._store()
        for device in self.devices:
            self._object.unbind(device, 0, self._size)
        return f"{self._size} mapped bytes of each device"

    def _close(self) -> str:
        for one in (self._object, *self._memory, *self._sums):
            one.close(timeout=_CLOSE)
        self._memory.clear()
        self._sums.clear()
        return "everything was released"

    # -- in two processes ----------------------------------------------------------------------------------------

    def _start(self) -> str:
        self._peer = BackendPeer(self.devices[-1], reply_limit=None)
        if not self._peer.idle(_CLOSE):  # waits for an answer: the process has opened its device
            raise Wrong(f"a fresh stream of {self.devices[-1]!r} has something to do.")
        return f"process {self._peer.process.pid} has {self.devices[-1]!r}"

    def _export(self) -> str:
        self._object = create_multicast(len(self.devices), self._size, VmmFd, device=self.devices[0])
        self._handle = self._object.export()
        return f"a {type(self._handle).__name__}"

    def _import(self) -> str:
        self._peer.import_multicast(cast(VmmFd, self._handle), len(self.devices), self._size)
        return f"{self._size} bytes for {len(self.devices)} devices"

    def _add_both(self) -> str:
        for device in self._ours:
            self._object.add_device(device)
        self._peer.add_device()
        return f"{len(self._ours)} here, 1 there"

    def _bind_both(self) -> str:
        self._peer.bind_memory(self._size)
        for device in self._ours:
            self._memory.append(device.allocate(self._size))
            self._object.bind_memory(self._memory[-1], assume_all_added=True)
        return f"{self._size} bytes of each device"

    def _map_both(self) -> str:
        self._peer.map_multicast()
        self._mapping = self._object.map(assume_all_added=True)
        return f"at {self._mapping.ptr:#x} here"

    def _store_both(self) -> str:
        ours = functools.partial(multimem_store, self._streams[0], self._mapping, timeout=None)
        for who, store in (("this process", ours), ("the second process", self._peer.multimem_store)):
            before = self._fill()
            self._peer.fill(_byte(len(self._ours)), 0, self._size)
            value = self._next()
            store(value, self._words - 2 * _MARGIN, first=_MARGIN)
            self._expect(before, value, f"after a store by {who}")
            found = np.frombuffer(self._peer.read(0, self._size), np.uint32)
            expected = _stored(_filled(len(self._ours), self._words), value)
            _compare(found, expected, f"the memory of {self.devices[-1]!r} after a store by {who}")
        return "from each process, found in the memory of both"

    def _close_both(self) -> str:
        self._peer.close_multicast(_CLOSE)
        self._close()
        self._peer.end(None)
        for stream in self._streams:
            stream.close(timeout=_CLOSE)
        return "everything was released"

    # -- the oracle ----------------------------------------------------------------------------------------------

    @property
    def _ours(self) -> list[Device]:
        return self.devices[:-1]

    @property
    def _words(self) -> int:
        return self._size // 4

    def _next(self) -> int:
        """Return an unused word."""
        self._value += 0x010203
        return self._value

    def _fill(self) -> list[Words]:
        """Fill the memory of each device in this process with different bytes, and return them."""
        for index, allocation in enumerate(self._memory):
            allocation.buffer.fill(_byte(index))
        return [_filled(index, self._words) for index in range(len(self._memory))]

    def _expect(self, before: Sequence[Words], value: int, when: str) -> None:
        for allocation, words in zip(self._memory, before, strict=True):
            _compare(_words(allocation.buffer), _stored(words, value), f"the memory of {allocation.device!r} {when}")


def _byte(index: int) -> int:
    return 0x11 + index


def _filled(index: int, count: int) -> Words:
    return np.full(count, _byte(index) * 0x01010101, np.uint32)


def _stored(before: Words, value: int) -> Words:
    expected = before.copy()
    expected[_MARGIN : len(expected) - _MARGIN] = value
    return expected


def _words(buffer: Buffer) -> Words:
    return cast(Words, buffer.view(buffer.size // 4, "uint32").to_numpy())


def _compare(found: Words, expected: Words, what: str) -> None:
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        at = int(wrong[0])
        raise Wrong(
            f"{what}: word {at} is {int(found[at]):#010x}, and must be {int(expected[at]):#010x}; "
            f"{wrong.size} of {found.size} words are wrong."
        )


def open_life(backend: str, ordinals: Sequence[int]) -> Life:
    """The steps with these devices, for a process that stays in them."""
    loaded = discovery.get_backend(backend)
    return Life([loaded.device(ordinal) for ordinal in ordinals])
