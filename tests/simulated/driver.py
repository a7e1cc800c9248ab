"""The control of a simulated driver, for tests: faults, counts, what it was given and what it did.

Calls go by the names of the driver's functions, ``cuImportExternalMemory`` or ``hipImportExternalMemory``.

What a process has from its start, by ``GPUINTEROP_SIM_...``: ``DEVICES``, how many; ``MIG``; ``INIT``, the error of
cuInit; ``CUDA_VERSION`` and ``HIP_VERSION``; ``FABRIC``, the channel that fabric handles go by, and none without;
``TEAM_SECONDS``, after which a call is given up that waits for a multicast object's devices; ``IPC``, the folder by
which processes open each other's memory, by default that of temporary files; ``DOES_NOTHING``: what streams are given
is checked and counts as done at once, but is neither done nor written down, so that what a program takes is its own
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import gpuinterop as gi
from gpuinterop.testing.simulated.build import LIBRARIES
from tests.idle_streams import count_idle_streams
from tests.limits import LIMIT
from tests.programs import printed
from tests.spare_pages import unpin_spare_pages

_FD: Final = {"driver": 0, "open": 1, "closed": 2}
_FD_TYPES: Final = (1, 9)  # of memory and of semaphores
_MEMORY_BYTES: Final = 104  # a memory's descriptor; a semaphore's is shorter
_HIP_ARRAY_BYTES: Final = 64  # a mipmapped array's descriptor of HIP; CUDA's is longer
_ROOT: Final = Path(__file__).resolve().parents[2]

STAY: Final = frozenset(("context", "module", "function"))
"""Objects that are made when they are first needed, and stay."""


def loaded(*names: str) -> set[str]:
    """The libraries that this process has loaded and whose path has one of these in it."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if any(name in line for name in names)}


def preload(library: Path) -> None:
    """Child processes find it by name; this one has it by then, and glibc answers with what is loaded so named."""
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{library.parent}:{before}" if before else str(library.parent)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def hide_rocm(folder: Path) -> None:
    """Have hip-python 10, here and in child processes, find what is loaded: ROCM_PATH or /opt/rocm come first."""
    nothing = folder / "no_rocm"
    nothing.mkdir(exist_ok=True)
    os.environ["ROCM_PATH"] = str(nothing)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An operation that a stream has done."""

    operation: str
    device: int
    stream: int
    value: int
    """A semaphore's or a word's; a copy's source; what was filled with or stored; the number of a graph's nodes."""
    address: int
    """What was written to; a semaphore's handle."""
    size: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A struct that the driver was given. What does not belong to its kind is 0 or empty."""

    type: int = 0
    fd: int = 0
    handle: int = 0
    """The Win32 handle."""
    name: str | None = None
    """The Win32 name; None where there is none."""
    pointer: int = 0
    """The NvSci object."""
    size: int = 0
    offset: int = 0
    flags: int = 0
    width: int = 0
    height: int = 0
    depth: int = 0
    format: int = 0
    channels: int = 0
    levels: int = 0
    reserved: tuple[int, ...] = ()
    raw: bytes = b""
    """An array's of HIP, and nothing else."""


@dataclass(frozen=True, slots=True)
class SemaphoreParams:
    """The parameters of one semaphore in a signal or a wait."""

    stream: int
    """Its handle; for what sets a graph's node the node's."""
    semaphore: int
    value: int
    fence: int
    """The NvSciSync fence's address."""
    key: int
    timeout_ms: int
    flags: int
    reserved: tuple[int, ...]


class Gate:
    """A call that is held."""

    def __init__(self, simulator: Simulator, call: str) -> None:
        self._simulator = simulator
        self._call = call

    def entered(self, timeout: float) -> bool:
        """Whether a thread is held there; waits up to `timeout` seconds for it."""
        return self._simulator.held(self._call, timeout)

    def release(self) -> None:
        self._simulator._call("release", self._call.encode())


class Simulator:
    """The driver at `path`, which the process has loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        text, number, size, real = ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_double
        long, pointer = ctypes.c_uint64, ctypes.c_void_p
        signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "live": (ctypes.c_int64, (text,)),
            "implicit_streams": (ctypes.c_int64, ()),
            "kinds": (size, (pointer, size)),
            "fail": (None, (text, long, long, number, number)),
            "delay": (None, (text, real)),
            "block": (None, (text, long, real)),
            "blocked": (number, (text, real)),
            "release": (None, (text,)),
            "clear": (number, ()),
            "clear_operations": (None, ()),
            "fail_operation": (number, (long, long, number)),
            "calls": (long, (text,)),
            "set_attribute": (None, (number, number, number)),
            "reset_attributes": (None, ()),
            "set_windows": (None, (number,)),
            "set_peer": (None, (number, number, number)),
            "multimem_store": (number, (long, pointer, long)),
            "trace_count": (long, ()),
            "trace": (text, (long,)),
            "settle": (number, (number, real)),
            "violations": (size, (pointer, size, number)),
            "log_count": (long, ()),
            "log": (number, (long, pointer)),
            "record_count": (long, ()),
            "record": (number, (long, pointer, pointer, size, pointer, pointer)),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, f"gis_control_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}", function)
        self._kinds_known = self._text(lambda room, length: self._call("kinds", room, length)).split()
        self._log_start = self._record_start = self._trace_start = 0
        self.forget_log()
        self.forget_descriptors()

    @classmethod
    def attach(cls, vendor: Literal["cuda", "hip"] = "cuda") -> Simulator:
        """The control of the vendor's simulated driver that this process finds by its usual name."""
        return cls(Path(LIBRARIES[vendor].soname))

    def environment(self, **variables: str) -> dict[str, str]:
        """For a child process that is to have this driver: the environment, with `variables`."""
        environment = {**os.environ, **variables}
        for name, entry in (("LD_LIBRARY_PATH", str(self.path.parent)), ("PYTHONPATH", str(_ROOT))):
            entries = [one for one in environment.get(name, "").split(os.pathsep) if one]
            if entry not in entries:
                environment[name] = os.pathsep.join([entry, *entries])
        return environment

    def run(self, program: str, **variables: str) -> str:
        """What a Python program has printed that has this driver; it must succeed, without a warning."""
        return printed("-X", "faulthandler", "-W", "error", "-c", program, env=self.environment(**variables))

    @contextlib.contextmanager
    def kept_rules(self, backend: str) -> Iterator[None]:
        """Round what runs without pytest: no fault outlives it, nothing is left over or against the documentation."""
        self.begin()
        before = self.left()
        yield
        self.reset()
        gc.collect()
        for device in gi.get_backend(backend).devices():
            device._last_stream = None
            while device._copiers:
                device._copiers.pop().close()
            device.drain()
            unpin_spare_pages(device)
        assert (left := self.left() - before) == Counter(), left

    def begin(self) -> None:
        """Forget what was noted and written down before a test."""
        self.violations()
        self.forget_log()
        self.forget_descriptors()

    def left(self) -> Counter[str]:
        """The objects that a test must not leave, and what was noted against the documentation."""
        live = Counter({kind: count for kind, count in self.live().items() if kind not in STAY})
        return live + Counter(self.violations(take=False))

    # -- faults --------------------------------------------------------------------------------------------------

    def fail(
        self,
        call: str,
        *,
        code: int,
        nth: int = 1,
        every: int = 0,
        fd: Literal["driver", "open", "closed"] = "driver",
    ) -> None:
        """Let the `nth` call from now on fail with `code`; with `every`, that many calls apart for ever.

        `fd` is what an import does with the descriptor: left open, or closed ("driver": open).
        """
        self._call("fail", call.encode(), every or nth, every, code, _FD[fd])

    def delay(self, call: str, microseconds: float) -> None:
        """Let every call sleep before it looks at its arguments."""
        self._call("delay", call.encode(), microseconds / 1e6)

    @contextlib.contextmanager
    def block(self, call: str, *, nth: int = 1, limit: float = LIMIT) -> Iterator[Gate]:
        """Hold the `nth` call from now on, before it looks at its arguments, until the block ends.

        `limit` seconds at most.
        """
        self._call("block", call.encode(), nth, limit)
        gate = Gate(self, call)
        try:
            yield gate
        finally:
            gate.release()

    def fail_stream(self, stream: Any, *, code: int) -> None:
        """Let the next operation on `stream` fail when its turn comes.

        From then on every call on the stream returns `code`, and nothing more runs there.
        """
        if not self._call("fail_operation", int(stream), 1, code):
            raise ValueError(f"{int(stream):#x} is no stream of the simulated driver.")

    def clear_faults(self) -> int:
        """Take away all faults; returns how many had not struck."""
        self._call("clear_operations")
        return int(self._call("clear"))

    def note_passed(self, device: int = 0, timeout: float = LIMIT) -> bool:
        """Wait until the device has done all that was enqueued."""
        return bool(self._call("settle", device, timeout))

    # -- personality ---------------------------------------------------------------------------------------------

    def set_attribute(self, device: int, number: int, value: int) -> None:
        """What ``cuDeviceGetAttribute`` or ``hipDeviceGetAttribute`` answers; until `reset`."""
        self._call("set_attribute", device, number, value)

    def set_platform(self, platform: Literal["linux", "windows"]) -> None:
        """Windows: handles of Win32, Direct3D and NvSci are taken, and stand for objects that do nothing."""
        self._call("set_windows", platform == "windows")

    def set_peer_access(self, device: int, peer: int, can: bool) -> None:
        """Whether `device` may use the memory of `peer`, and not the other way round; until `reset`."""
        self._call("set_peer", device, peer, can)

    def reset(self) -> None:
        """No faults, Linux, the devices' own attributes, peer access between all."""
        self.clear_faults()
        self.set_platform("linux")
        self._call("reset_attributes")

    # -- what it did ---------------------------------------------------------------------------------------------

    def calls(self, call: str) -> int:
        """How often a function was called since the process began."""
        return int(self._call("calls", call.encode()))

    def live(self) -> dict[str, int]:
        """How many objects there are, by kind, ``bytes`` of device memory, and how often handles were ``retained``.

        Default streams are not counted, nor HIP's address ranges and closed streams, which the backend keeps: see
        `count`.
        """
        counts = {kind: self.count(kind) for kind in (*self._kinds_known, "bytes", "retained")}
        if self.path.name == LIBRARIES["hip"].soname:
            counts.pop("reservation", None)
            counts.pop("context", None)  # a device has one, from its first call on
            counts["stream"] -= count_idle_streams()
        counts["stream"] -= int(self._call("implicit_streams"))
        return counts

    def count(self, kind: str) -> int:
        return int(self._call("live", kind.encode()))

    def violations(self, *, take: bool = True) -> list[str]:
        """What was done against the documentation; `take` forgets it."""
        return self._text(lambda room, length: self._call("violations", room, length, take)).splitlines()

    @contextlib.contextmanager
    def expect_violation(self, text: str) -> Iterator[None]:
        """There is exactly such a violation in the block, and it is forgotten."""
        before = self.violations()
        yield
        found = self.violations()
        assert not before, before
        assert found, f"nothing was noted; expected: {text}"
        assert all(text in entry for entry in found), found

    def forget_log(self) -> None:
        """Forget what `log` and `trace` tell."""
        self._log_start = int(self._call("log_count"))
        self._trace_start = int(self._call("trace_count"))

    def trace(self, *calls: str) -> list[str]:
        """The calls since `forget_log`, in their order: only these, or all."""
        names = (self._call("trace", index) for index in range(self._trace_start, int(self._call("trace_count"))))
        made = [name.decode() for name in names if name is not None]
        return [name for name in made if not calls or name in calls]

    def held(self, call: str, timeout: float) -> bool:
        """Whether a thread is held in a call, by `block` or by the driver; waits up to `timeout` seconds for it."""
        return bool(self._call("blocked", call.encode(), timeout))

    # -- multicast -----------------------------------------------------------------------------------------------

    def multimem_store(self, address: int, words: Sequence[int]) -> None:
        """Store 32-bit words to a mapped multicast object, and so to all memory bound, of other processes too.

        What ``multimem.st`` does, at once and of no stream.
        """
        if code := self._call("multimem_store", address, (ctypes.c_uint32 * len(words))(*words), len(words)):
            raise ValueError(f"{len(words)} words at {address:#x} are not all bound, or not mapped: error {code}")

    def forget_descriptors(self) -> None:
        self._record_start = int(self._call("record_count"))

    def log(self) -> list[LogEntry]:
        """What the streams have done since `forget_log`, but ``event_record`` and ``event_wait``."""
        entries = []
        layout = struct.Struct("24siI4Q")
        room = ctypes.create_string_buffer(layout.size)
        for index in range(self._log_start, int(self._call("log_count"))):
            if self._call("log", index, room):
                name, device, _, *rest = layout.unpack(room.raw)
                operation = name.rstrip(b"\0").decode()
                if not operation.startswith("event_"):
                    entries.append(LogEntry(operation, device, *rest))
        return entries

    def descriptors(self, call: str) -> list[Any]:
        """The structs that `call` was given since `forget_descriptors`.

        A `Descriptor` each; for signals and waits, and what sets those of a graph, a tuple of `SemaphoreParams`.
        """
        found = []
        for name, head, body, count in self._records():
            if name == call:
                found.append(_parse(call, head, body, count))
        return found

    def _records(self) -> Iterator[tuple[str, bytes, bytes, int]]:
        name = ctypes.create_string_buffer(64)
        sizes = (ctypes.c_size_t * 2)()
        count = ctypes.c_uint32()
        room = ctypes.create_string_buffer(4096)
        for index in range(self._record_start, int(self._call("record_count"))):
            arguments = (index, name, room, len(room), sizes, ctypes.byref(count))
            if not self._call("record", *arguments):
                continue
            if sum(sizes) > len(room):
                room = ctypes.create_string_buffer(sum(sizes))
                self._call("record", index, name, room, len(room), sizes, ctypes.byref(count))
            yield name.value.decode(), room.raw[: sizes[0]], room.raw[sizes[0] : sum(sizes)], count.value

    def _call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, f"_{name}")(*arguments)

    @staticmethod
    def _text(read: Any) -> str:
        room = ctypes.create_string_buffer(4096)
        while (used := int(read(room, len(room)))) > len(room):
            room = ctypes.create_string_buffer(used)
        return room.raw[:used].decode()


def _parse(call: str, head: bytes, body: bytes, count: int) -> Descriptor | tuple[SemaphoreParams, ...]:
    """The structs of CUDA, and of HIP, which are laid out alike but for one."""
    what = call.removeprefix("cu").removeprefix("hip")
    if what in ("ImportExternalMemory", "ImportExternalSemaphore"):
        return _imported(head, body)
    if what == "ExternalMemoryGetMappedBuffer":
        offset, size, flags, *reserved = struct.unpack("QQI16I4x", head)
        return Descriptor(offset=offset, size=size, flags=flags, reserved=tuple(reserved))
    if what == "ExternalMemoryGetMappedMipmappedArray" and len(head) == _HIP_ARRAY_BYTES:
        return Descriptor(raw=head)
    if what == "ExternalMemoryGetMappedMipmappedArray":
        offset, width, height, depth, texel, channels, flags, levels, *reserved = struct.unpack("QQQQIII4xI16I4x", head)
        return Descriptor(
            offset=offset,
            width=width,
            height=height,
            depth=depth,
            format=texel,
            channels=channels,
            flags=flags,
            levels=levels,
            reserved=tuple(reserved),
        )
    stream, *semaphores = struct.unpack(f"{count + 1}Q", head)
    size = len(body) // count
    return tuple(_params(stream, it, body[i * size : (i + 1) * size]) for i, it in enumerate(semaphores))


def _imported(head: bytes, body: bytes) -> Descriptor:
    """Only the union's arm that belongs to the type is read; a semaphore has no size behind it."""
    kind, first, second = struct.unpack_from("I4xQQ", head)
    memory = len(head) == _MEMORY_BYTES
    size, flags, *reserved = (
        struct.unpack_from("QI16I", head, 24) if memory else (0, *struct.unpack_from("I16I", head, 24))
    )
    fd = handle = pointer = 0
    name = None
    if kind in _FD_TYPES:
        (fd,) = struct.unpack_from("i", head, 8)
    elif kind == (8 if memory else 6):
        pointer = first
    else:
        handle = first
        name = body.decode("utf-16-le") if second else None
    return Descriptor(kind, fd, handle, name, pointer, size, flags=flags, reserved=tuple(reserved))


def _params(stream: int, semaphore: int, raw: bytes) -> SemaphoreParams:
    value, fence, key, timeout, *rest = struct.unpack("QQQI11II16I4x", raw)
    return SemaphoreParams(
        stream=stream,
        semaphore=semaphore,
        value=value,
        fence=fence,
        key=key,
        timeout_ms=timeout,
        flags=rest[11],
        reserved=(*rest[:11], *rest[12:]),
    )
