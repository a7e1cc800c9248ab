"""The ranks as a team: votes, handles for all, and multicast objects of all."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn, TypeVar

from .._arguments import NoCopy, check_int, check_type
from .._core.allocation import Allocation
from .._core.device import Device
from .._core.memory import Buffer
from .._core.multicast import MulticastBinding, MulticastMapping, MulticastObject, create_multicast, import_multicast
from ..errors import (
    ArgumentTypeError,
    DriverError,
    GpuInteropError,
    HandleError,
    InvalidArgumentError,
    PeerError,
    again,
)
from ..handles import AllocationHandle, FabricHandle, FdHandle, Handle, VmmFd
from ..ipc import check_sendable
from .delivery import Inbox, host, post
from .transport import Transport, check_seconds
from .votes import at, cast, decide, disagreement, given_up, hear, listed, pack, pack_outcome, placed

H = TypeVar("H", bound=Handle)
T = TypeVar("T")

_STEP: Final = 1000
"""Characters of a step's name."""

_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)
"""The pause between attempts to bind memory, while a driver is not ready for it."""


class Team(NoCopy):
    """The ranks of a transport, which make the same calls in the same order.

    Parameters
    ----------
    transport : Transport
        Used by this team alone, and still the caller's to close.
    timeout : float
        Seconds that a vote takes at most, the same on every rank: how much later than another a rank may come to a
        step.

    Attributes
    ----------
    rank : int
        The rank of this process, from 0.
    size : int
        How many ranks there are.
    timeout : float
        The seconds that a vote takes at most.

    Notes
    -----
    Every call has one outcome for all ranks. Failure: on every rank the same error, of the same class and with the same
    attributes and text, which begins with the rank and the step; ``.rank`` and ``.step`` have them as well. On the rank
    that failed, its own error is the cause. A rank that has died, or does not answer in time, is a `PeerError`. What
    a call has made is closed before it raises, and the team is broken: each later call raises the error again. The
    module's page says how far this goes. One thread at a time.

    Examples
    --------
    >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
    ...     team = gi.exchange.Team(transport, timeout=10)
    ...     team
    ...     with device.allocate(65536) as mine:
    ...         (same,) = team.gather_allocations(mine)  # with more ranks: those of all, by rank
    ...         same is mine
    <Team rank 0 of 1>
    True
    """

    def __init__(self, transport: Transport, *, timeout: float = 30.0) -> None:
        self._transport = check_type(transport, Transport, "transport", "a gpuinterop.exchange.Transport")
        self.rank, self.size = transport.rank, transport.size
        if not 0 <= self.rank < self.size:
            raise InvalidArgumentError(
                "transport", f"expected a rank below the size, got rank {self.rank} of {self.size}."
            )
        self.timeout = check_seconds(timeout)
        self._broken: GpuInteropError | None = None
        """A copy without traceback and cause, which would keep alive the callers' frames, and all in them."""

    def __repr__(self) -> str:
        return f"<Team rank {self.rank} of {self.size}{', broken' if self._broken else ''}>"

    # -- votes ---------------------------------------------------------------------------------------------------

    def vote(self, step: str, error: Exception | None = None) -> None:
        """Tell the others how this rank's part of a step went, and raise unless it went well everywhere.

        Parameters
        ----------
        step : str
            The same on every rank.
        error : Exception, optional
            Why this rank has failed.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
        ...     gi.exchange.Team(transport).vote("load", ValueError("no scene"))
        Traceback (most recent call last):
            ...
        gpuinterop.errors.PeerError: rank 0, step 'load': ValueError: no scene
        """
        _check_step("step", step)
        with self._present(step):
            self._vote(step, None, error)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run the body of a ``with``, and vote: it succeeds on all ranks, or raises on all.

        An exception that is not an ``Exception``, such as Ctrl-C, leaves at once; to the others this rank is silent.

        Parameters
        ----------
        name : str
            Name of the step in errors, the same on every rank.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
        ...     with gi.exchange.Team(transport).step("load"):
        ...         buffer.copy_from_host(np.zeros(16))
        """
        _check_step("name", name)
        with self._present(name):
            error = None
            try:
                yield
            except Exception as raised:
                error = raised
            self._vote(name, None, error)

    def _do(self, step: str, action: Callable[[], Any]) -> list[Any]:
        """Run an action, vote, and return what it returned on each rank: JSON."""
        with self._present(step):
            value = error = None
            try:
                value = action()
            except Exception as raised:
                error = raised
            return self._vote(step, value, error)

    @contextmanager
    def _present(self, step: str) -> Iterator[None]:
        """Take part in a step. What ends it without an outcome ends this rank's part: the others find it silent."""
        if self._broken is not None:
            raise again(self._broken)
        try:
            yield
        except BaseException as reason:
            if self._broken is None:
                text = f"this rank, {self.rank}, has left the team in step {step!r}: {type(reason).__name__} {reason}"
                self._broken = placed(PeerError(text.rstrip() + "."), self.rank, step)
            raise

    def _vote(self, step: str, value: Any, error: Exception | None) -> list[Any]:
        end = time.monotonic() + self.timeout
        known = {self.rank: cast(step, value, error, self.timeout)}
        for deadline in (end - self.timeout / 2, end):
            for rank, message in enumerate(self._transport.exchange(pack(known), deadline)):
                if message is not None:
                    hear(known, rank, message, step)
        outcome = decide(known, self.size)
        # A rank that goes on waits for the others' word that they do; one that has failed waits for none.
        told = self._transport.exchange(pack_outcome(outcome), end if outcome is None else time.monotonic())
        if outcome := outcome or given_up(told):
            self._break(outcome, error)
        return [known[rank]["value"] for rank in range(self.size)]

    def _break(self, outcome: GpuInteropError, cause: BaseException | None = None) -> NoReturn:
        self._broken = copy.copy(outcome)
        raise outcome from cause

    def _make(self, step: str, make: Callable[[], T]) -> T:
        """Do a step, and return what this rank has made, of which the others hear nothing."""
        made: list[T] = []
        self._do(step, lambda: made.append(make()))
        return made[0]

    def _agree(self, step: str, votes: Sequence[Sequence[Any]], *same: tuple[str, str]) -> list[Sequence[Any]]:
        """The columns of the votes. The first ones, of which `same` has the argument and what it is, have one value.

        All ranks have the same votes, so they all find out alike where a value differs.
        """
        columns: list[Sequence[Any]] = list(zip(*votes, strict=True))
        for (argument, what), values in zip(same, columns, strict=False):
            if any(value != values[0] for value in values):
                self._break(disagreement(step, argument, what, dict(enumerate(values))))
        return columns

    def _refuse(self, step: str, error: GpuInteropError) -> NoReturn:
        """Fail for a reason that every rank sees by itself, so that there is nothing to vote on."""
        self._break(at(error, step))

    # -- handles -------------------------------------------------------------------------------------------------

    def share_handle(self, handle: Handle | None = None, root: int = 0, *, expect: type[H]) -> H:
        """Give the handle of one rank to all.

        Parameters
        ----------
        handle : Handle, optional
            Given by the rank `root` only; it stays the caller's.
        root : int
            Whose it is; the same on every rank.
        expect : type
            The handle's type; the same on every rank, so that none chooses what another takes its descriptor for.

        Returns
        -------
        Handle
            Owned by the caller; on `root` a duplicate.

        Raises
        ------
        HandleError
            Descriptors do not leave their host: take `FabricHandle` where the ranks are on several.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, gi.OpaqueFd(fd) as handle:
        ...     team = gi.exchange.Team(transport)
        ...     shared = team.share_handle(handle if team.rank == 0 else None, expect=gi.OpaqueFd)
        ...     with device.import_memory(shared, size=65536) as memory:
        ...         buffer = memory.map_buffer()
        """
        call = "share_handle"

        def check() -> list[int]:
            check_sendable(expect, "expect")
            check_int(root, "root", minimum=0, maximum=self.size - 1)
            if (handle is None) == (self.rank == root):
                raise InvalidArgumentError(
                    "handle", f"expected one from the root, rank {root}, alone, got {handle!r} on rank {self.rank}."
                )
            if handle is not None and type(handle) is not expect:
                raise ArgumentTypeError("handle", f"expected {expect.__name__}, got {type(handle).__name__}.")
            return [int(root)]

        step = f"{call}: arguments"
        self._agree(step, self._do(step, check), ("root", "roots"))
        return self._distribute(call, handle, expect, [root])[0]

    def gather_handles(self, handle: H) -> list[H]:
        """Give each rank's handle to all; they must be of one type.

        Returns
        -------
        list of Handle
            By rank, owned by the caller; this rank's own is a duplicate. `handle` is still the caller's.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, gi.OpaqueFd(fd) as handle:
        ...     for each in gi.exchange.Team(transport).gather_handles(handle):
        ...         each.close()
        """
        return self._distribute("gather_handles", handle, type(handle), range(self.size))

    def _distribute(self, call: str, handle: Handle | None, expect: type[H], senders: Sequence[int]) -> list[H]:
        """The handles of `senders`, in their order."""
        step = f"{call}: address"
        others = [rank for rank in senders if rank != self.rank]
        received: dict[int, Any] = {}
        with ExitStack() as scope, ExitStack() as undo:
            inbox: list[Inbox] = []

            def offer() -> list[str]:
                """The type, the host, and the inbox; or a fabric handle's bytes, which go as they are."""
                check_sendable(expect, "handle")
                if issubclass(expect, FdHandle):
                    inbox.append(scope.enter_context(Inbox()))
                    return [expect.type_name, host(), inbox[0].name]
                return [expect.type_name, "", handle.data.hex() if isinstance(handle, FabricHandle) else ""]

            _, hosts, offers = self._agree(step, self._do(step, offer), ("handle", "types"))
            if len(set(hosts)) > 1:
                problem = (
                    "handle: file descriptors do not go from one host or network namespace to another: "
                    f"{listed(dict(enumerate(hosts)))}; FabricHandle does, where the hosts have one NVLink domain."
                )
                self._refuse(step, HandleError(problem))

            def send() -> None:
                if handle is not None:
                    deadline = time.monotonic() + self.timeout / 2
                    for rank in range(self.size):
                        if rank != self.rank:
                            post(handle, offers[rank], self.rank, rank, deadline)

            def take() -> None:
                if isinstance(handle, FdHandle | FabricHandle):
                    received[self.rank] = undo.enter_context(handle.duplicate())
                if inbox:
                    received.update(inbox[0].take(others, expect, undo))
                else:
                    received.update((rank, FabricHandle(bytes.fromhex(offers[rank]))) for rank in others)

            if inbox:
                self._do(f"{call}: send", send)
            self._do(f"{call}: receive", take)
            undo.pop_all()  # the caller's now
        return [received[rank] for rank in senders]

    # -- multicast -----------------------------------------------------------------------------------------------

    def create_multicast(
        self, device: Device, size: int, handle_type: type[AllocationHandle] = VmmFd, *, label: str | None = None
    ) -> MulticastObject:
        """Make a multicast object of the devices of all ranks, one each.

        Rank 0 creates it, all others import it, each rank adds its device; when this returns, all were added.

        Parameters
        ----------
        device : Device
            This rank's; no two ranks have the same.
        size : int
            Size in bytes, the same on every rank; a multiple of the minimum of `Device.multicast_granularity`.
        handle_type : type
            How it is shared, the same on every rank: `VmmFd` on one host, `FabricHandle` across hosts.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Raises
        ------
        InvalidArgumentError
            The ranks disagree, or have the same device; the message names them.
        UnsupportedError, DriverError, PeerError
            As `gpuinterop.create_multicast`, `gpuinterop.import_multicast` and `MulticastObject.add_device`, of any
            rank.

        Examples
        --------
        On CUDA (here a simulated driver):

        >>> size = 4 << 20
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, device.allocate(size) as memory:
        ...     team = gi.exchange.Team(transport)
        ...     with team.create_multicast(device, size) as multicast:
        ...         binding = team.bind_memory(multicast, memory)
        ...         mapping = team.map(multicast)
        ...         mapping.size
        ...         mapping.close()
        4194304
        """
        self._check_devices("create_multicast", device, size, handle_type)
        with ExitStack() as undo, ExitStack() as handles:

            def create() -> MulticastObject | None:
                if self.rank != 0:
                    return None
                return undo.enter_context(create_multicast(self.size, size, [handle_type], device=device, label=label))

            def export() -> AllocationHandle | None:
                return None if first is None else handles.enter_context(first.export(handle_type))

            def load() -> MulticastObject:
                return first or undo.enter_context(
                    import_multicast(handle, self.size, size, device=device, label=label)
                )

            first = self._make("create_multicast: create", create)
            own = self._make("create_multicast: export", export)
            handle = handles.enter_context(self._distribute("create_multicast", own, handle_type, [0])[0])
            # Rank 0 keeps its object open at least until this vote, when all have imported it.
            multicast = self._make("create_multicast: import", load)
            self._do("create_multicast: add device", lambda: multicast.add_device(device))
            undo.pop_all()
        return multicast

    def _check_devices(self, call: str, device: Device, size: int, handle_type: type[AllocationHandle]) -> None:
        """The ranks agree on the arguments of a multicast object, and each has a device of its own."""

        def check() -> list[Any]:
            check_type(device, Device, "device", "a Device")
            check_sendable(handle_type, "handle_type")
            device.multicast_granularity(self.size, size, [handle_type])  # refuses where there is no multicast
            mark = device.identity.uuid or device.identity.luid
            return [int(size), handle_type.type_name, mark.hex() if mark else None]

        step = f"{call}: arguments"
        _, _, devices = self._agree(step, self._do(step, check), ("size", "sizes"), ("handle_type", "types"))
        marks = {rank: mark for rank, mark in enumerate(devices) if mark}
        if len(set(marks.values())) < len(marks):
            self._refuse(
                step, InvalidArgumentError("device", f"expected another device from each rank, got {listed(marks)}.")
            )

    def bind_memory(
        self,
        multicast: MulticastObject,
        allocation: Allocation,
        offset: int = 0,
        *,
        start: int = 0,
        size: int | None = None,
    ) -> MulticastBinding:
        """Bind memory of this rank's device, on all ranks or on none: `MulticastObject.bind_memory`.

        Every rank binds the same bytes of the object. The votes find out first that all devices were added. A driver
        that is not ready yet (``CUDA_ERROR_SYSTEM_NOT_READY``) is asked again, by all ranks together, five times at
        most.

        Parameters
        ----------
        multicast : MulticastObject
            The object, to which the ranks have added all devices.
        allocation, offset, start, size
            See `MulticastObject.bind_memory`.

        Raises
        ------
        InvalidArgumentError
            Not all devices were added; or the ranks' objects or bytes differ, or a rank's arguments are wrong.
        ResourceBusyError
            A driver was not ready, and a rank's pending work did not let it unbind within half the time-out.
        DriverError, PeerError
            A driver refused, or a rank has died.
        """
        return self._bind(
            "bind_memory",
            multicast,
            lambda: multicast.bind_memory(allocation, offset, start=start, size=size, assume_all_added=True),
        )

    def bind_address(
        self, multicast: MulticastObject, device: Device, address: int | Buffer, size: int, offset: int = 0
    ) -> MulticastBinding:
        """Bind mapped memory of this rank's device, on all ranks or on none: `MulticastObject.bind_address`.

        The rest is as in `bind_memory`.
        """
        return self._bind(
            "bind_address",
            multicast,
            lambda: multicast.bind_address(device, address, size, offset, assume_all_added=True),
        )

    def _ready(self, call: str, multicast: MulticastObject) -> None:
        """All devices were added, so that no driver will block: those of all ranks together are the whole team."""

        def look() -> list[int]:
            check_type(multicast, MulticastObject, "multicast", "a MulticastObject")
            multicast._check_open()
            return [multicast.size, multicast.device_count, len(multicast.devices)]

        step = f"{call}: ready"
        same = ("multicast", "sizes of their objects"), ("multicast", "numbers of devices in their objects")
        _, counts, added = self._agree(step, self._do(step, look), *same)
        if sum(added) != counts[0]:
            problem = (
                f"expected all {counts[0]} devices of the object to be added, else the driver would block, got "
                f"{listed(dict(enumerate(added)))}; Team.create_multicast() adds all."
            )
            self._refuse(step, InvalidArgumentError("multicast", problem))

    def _bind(self, call: str, multicast: MulticastObject, bind: Callable[[], MulticastBinding]) -> MulticastBinding:
        self._ready(call, multicast)
        for pause in _PAUSES_S:
            if binding := self._try(call, bind, last=False):
                return binding
            time.sleep(pause)
        binding = self._try(call, bind, last=True)
        assert binding is not None  # else `_try` has raised
        return binding

    def _try(self, call: str, bind: Callable[[], MulticastBinding], *, last: bool) -> MulticastBinding | None:
        """Bind on all ranks; None, and bound on none, where a driver is not ready yet."""
        bound: list[MulticastBinding] = []
        with ExitStack() as undo:

            def once() -> list[int] | None:
                try:
                    bound.append(undo.enter_context(bind()))
                except DriverError as error:
                    if last or not error.symbol.endswith("SYSTEM_NOT_READY"):
                        raise
                    return None
                return [bound[0].offset, bound[0].size]

            def unbind() -> None:
                for binding in bound:
                    binding.close(timeout=self.timeout / 2)  # pending work may hold it up

            step = f"{call}: bind"
            ranges = self._do(step, once)
            if None in ranges:
                self._do(f"{call}: unbind", unbind)
                return None
            self._agree(step, ranges, ("offset", "offsets"), ("size", "sizes"))
            undo.pop_all()
        return bound[0]

    def map(self, multicast: MulticastObject) -> MulticastMapping:
        """Map a multicast object for this rank's device, on all ranks or on none: `MulticastObject.map`.

        The votes find out first that all devices were added.
        """
        self._ready("map", multicast)
        with ExitStack() as undo:
            mapping = self._make("map", lambda: undo.enter_context(multicast.map(assume_all_added=True)))
            undo.pop_all()
        return mapping

    def gather_allocations(self, allocation: Allocation) -> list[Allocation]:
        """Give each rank's allocation to all.

        Parameters
        ----------
        allocation : Allocation
            This rank's, made by `Device.allocate`; of the same handle type on every rank.

        Returns
        -------
        list of Allocation
            By rank: this rank's own as it was given, the others' imported by its device and the caller's to close.

        Raises
        ------
        UnsupportedError
            A device has no peer access to another's memory.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, device.allocate(65536) as mine:
        ...     everyones = gi.exchange.Team(transport).gather_allocations(mine)
        ...     everyones[transport.rank] is mine
        True
        """
        call = "gather_allocations"
        exported: list[AllocationHandle] = []
        with ExitStack() as undo, ExitStack() as handles:

            def export() -> int:
                check_type(allocation, Allocation, "allocation", "an Allocation")
                exported.append(handles.enter_context(allocation.export()))
                return allocation.size

            def load(rank: int) -> Allocation:
                if rank == self.rank:
                    return allocation
                return undo.enter_context(allocation.device.import_allocation(everyones[rank], sizes[rank]))

            sizes = self._do(f"{call}: export", export)
            everyones = self._distribute(call, exported[0], type(exported[0]), range(self.size))
            for handle in everyones:
                handles.enter_context(handle)
            gathered = self._make(f"{call}: import", lambda: [load(rank) for rank in range(self.size)])
            undo.pop_all()
        return gathered


def _check_step(argument: str, name: str) -> None:
    """The name travels in every message, and stands in every error."""
    check_type(name, str, argument, "a str")
    if len(name) > _STEP:
        raise InvalidArgumentError(argument, f"expected {_STEP} characters or fewer, got {len(name)}.")
