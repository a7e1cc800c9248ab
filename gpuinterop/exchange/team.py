"""The ranks as a team: votes, and handles and multicast objects for all ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeVar

from .._arguments import NoCopy, check_int, check_type
from .._core.allocation import Allocation
from .._core.device import Device
from .._core.memory import Buffer
from .._core.multicast import MulticastBinding, MulticastMapping, MulticastObject, create_multicast, import_multicast
from ..errors import ArgumentTypeError, DriverError, GpuInteropError, InvalidArgumentError, PeerError, again
from ..handles import AllocationHandle, Handle, VmmFd
from ..ipc import check_sendable
from .delivery import Delivery
from .transport import Transport, check_seconds
from .votes import Vote, blamed, heard, listed, packed, placed, same

H = TypeVar("H", bound=Handle)

_STEP: Final = 1000
"""Longest name of a step, in characters."""

_PAUSES_S: Final = (0.05, 0.1, 0.2, 0.4)
"""The pauses between attempts to bind memory while a driver is not ready."""


class Team(NoCopy):
    """The ranks of a transport. All make the same calls in the same order.

    Parameters
    ----------
    transport : Transport
        Used only by this team. You still own it, so close it.
    timeout : float
        Longest time of an all-gather in seconds, the same on every rank. A rank can be late by three quarters of it.

    Attributes
    ----------
    rank, size : int
        See `Transport`.
    timeout : float
        The time-out that you passed.

    Notes
    -----
    Every call has one outcome for all ranks. A failure raises the same error on every rank: the class, the attributes
    and the text are equal. The text begins with the rank and the step, which are also in ``.rank`` and ``.step``. On
    the rank that failed, its own exception is the cause. If a rank has exited or does not answer in time, the error is
    a `PeerError`. Before a call raises, it closes what it has made. Then the team is broken: each later call raises the
    error again. `gpuinterop.exchange` describes the limits. Use a team in one thread at a time.

    Examples
    --------
    >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
    ...     team = gi.exchange.Team(transport, timeout=10)
    ...     team
    ...     with device.allocate(65536) as mine:
    ...         (same,) = team.gather_allocations(mine)  # with more ranks: one of each rank
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
        """A copy without traceback and cause, which would keep the callers' frames and everything in them."""

    def __repr__(self) -> str:
        return f"<Team rank {self.rank} of {self.size}{', broken' if self._broken else ''}>"

    # -- votes ---------------------------------------------------------------------------------------------------

    def vote(self, step: str, error: Exception | None = None) -> None:
        """Report how this rank's part of a step went, and raise on all ranks if it failed on one.

        Parameters
        ----------
        step : str
            The same on every rank.
        error : Exception, optional
            The reason why this rank failed.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
        ...     gi.exchange.Team(transport).vote("load", ValueError("no scene"))
        Traceback (most recent call last):
            ...
        gpuinterop.errors.PeerError: rank 0, step 'load': ValueError: no scene
        """
        _check_step("step", step)
        with self._part(step):
            if error is not None:
                raise error

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run the body of a ``with``, and vote: it succeeds on all ranks, or raises on all.

        An exception that is not an ``Exception``, such as Ctrl-C, leaves at once; the others then miss this rank.

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
        with self._part(name):
            yield

    @contextmanager
    def _part(self, step: str, *alike: str) -> Iterator[list[Vote]]:
        """Do a part of a step, and report how it went: all ranks continue, or raise the same error.

        The caller appends this rank's vote to the list. After the block the list contains all ranks' votes. `alike`
        names the entries that must be equal.
        """
        if self._broken is not None:
            raise again(self._broken)
        self._broken = placed(PeerError("this rank has left the team."), step, self.rank)  # if Ctrl-C ends the block
        votes: list[Vote] = []
        failure: Exception | None = None
        try:
            yield votes
        except Exception as error:
            failure = error
        message = packed(step, self.timeout, votes[0] if votes else {}, failure)
        try:
            votes[:] = heard(step, self._transport.all_gather(message, self.timeout))
            same(votes, *alike)
        except GpuInteropError as error:
            outcome = error if hasattr(error, "step") else placed(error, step)
            self._broken = copy.copy(outcome)
            raise outcome from failure
        self._broken = None

    # -- handles -------------------------------------------------------------------------------------------------

    def share_handle(self, handle: Handle | None = None, root: int = 0, *, expect: type[H]) -> H:
        """Give one rank's handle to all ranks.

        Parameters
        ----------
        handle : Handle, optional
            Passed only by the rank `root`, which keeps it.
        root : int
            The rank that has the handle; the same on every rank.
        expect : type
            The handle's type; the same on every rank, so that no rank decides how another uses its descriptor.

        Returns
        -------
        Handle
            A handle that the caller owns; on `root` a duplicate.

        Raises
        ------
        HandleError
            The ranks are on several hosts, and a descriptor cannot leave its host: use `FabricHandle`.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, gi.OpaqueFd(fd) as handle:
        ...     team = gi.exchange.Team(transport)
        ...     shared = team.share_handle(handle if team.rank == 0 else None, expect=gi.OpaqueFd)
        ...     with device.import_memory(shared, size=65536) as memory:
        ...         buffer = memory.map_buffer()
        """
        with ExitStack() as undo, ExitStack() as scope:
            with self._part("share_handle: offer", "root", "handle") as offers:
                check_sendable(expect, "expect")
                check_int(root, "root", minimum=0, maximum=self.size - 1)
                if (handle is None) == (self.rank == root):
                    raise InvalidArgumentError(
                        "handle", f"expected one only on the root, rank {root}, got {handle!r} on rank {self.rank}."
                    )
                if handle is not None and type(handle) is not expect:
                    raise ArgumentTypeError("handle", f"expected {expect.__name__}, got {type(handle).__name__}.")
                delivery = Delivery(handle, expect, scope)
                offers.append({"root": root, **delivery.offer})
            with self._part("share_handle: outcome"):
                (shared,) = delivery.take(offers, [root], self.timeout / 2, undo)
            undo.pop_all()
        return shared  # type: ignore[no-any-return]

    def gather_handles(self, handle: H) -> list[H]:
        """Give each rank's handle to all ranks. All handles must have one type.

        Returns
        -------
        list of Handle
            By rank, owned by the caller; this rank's is a duplicate. The caller keeps `handle`.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, gi.OpaqueFd(fd) as handle:
        ...     for each in gi.exchange.Team(transport).gather_handles(handle):
        ...         each.close()
        """
        with ExitStack() as undo, ExitStack() as scope:
            with self._part("gather_handles: offer", "handle") as offers:
                delivery = Delivery(handle, type(handle), scope)
                offers.append(delivery.offer)
            with self._part("gather_handles: outcome"):
                handles = delivery.take(offers, range(self.size), self.timeout / 2, undo)
            undo.pop_all()
        return handles

    # -- multicast -----------------------------------------------------------------------------------------------

    def create_multicast(
        self, device: Device, size: int, handle_type: type[AllocationHandle] = VmmFd, *, label: str | None = None
    ) -> MulticastObject:
        """Make a multicast object of one device of each rank.

        Rank 0 creates it, the others import it, and each rank adds its device. All are added when the call returns.

        Parameters
        ----------
        device : Device
            This rank's device; each rank passes another one.
        size : int
            Size in bytes, the same on every rank; a multiple of the minimum of `Device.multicast_granularity`.
        handle_type : type
            The handle type, the same on every rank: `VmmFd` on one host, `FabricHandle` across hosts.
        label : str, optional
            Name of the object in messages, warnings and its `repr`.

        Raises
        ------
        InvalidArgumentError
            The ranks' arguments differ, or two have the same device; the message names the ranks.
        UnsupportedError, DriverError, PeerError
            A rank's error: see `gpuinterop.create_multicast`, `gpuinterop.import_multicast` and
            `MulticastObject.add_device`.

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
        with ExitStack() as undo, ExitStack() as scope:
            with self._part("create_multicast: offer", "size", "handle") as offers:
                check_type(device, Device, "device", "a Device")
                check_sendable(handle_type, "handle_type")
                device.multicast_granularity(self.size, size, [handle_type])  # raises without multicast
                handle = None
                if self.rank == 0:  # its object stays open until the outcome, when all have imported it
                    multicast = undo.enter_context(
                        create_multicast(self.size, size, [handle_type], device=device, label=label)
                    )
                    handle = scope.enter_context(multicast.export(handle_type))
                delivery = Delivery(handle, handle_type, scope)
                mark = device.identity.uuid or device.identity.luid or b""
                offers.append({"size": size, "device": mark.hex(), **delivery.offer})
            with self._part("create_multicast: outcome"):
                marks = [offer["device"] for offer in offers]
                if any(mark and marks.count(mark) > 1 for mark in marks):
                    problem = f"expected a different device on each rank, got {listed(marks)}."
                    raise blamed(InvalidArgumentError("device", problem))
                (handle,) = delivery.take(offers, [0], self.timeout / 2, scope)
                if self.rank != 0:
                    multicast = undo.enter_context(
                        import_multicast(handle, self.size, size, device=device, label=label)
                    )
                multicast.add_device(device)
            undo.pop_all()
        return multicast

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

        Every rank binds the same bytes of the object. The ranks check first that all devices were added. While a driver
        is not ready (``CUDA_ERROR_SYSTEM_NOT_READY``), each rank tries up to five times.

        Parameters
        ----------
        multicast : MulticastObject
            The object, to which the ranks have added all devices.
        allocation, offset, start, size
            See `MulticastObject.bind_memory`.

        Raises
        ------
        InvalidArgumentError
            A device is missing in the object, the ranks' objects or bytes differ, or a rank's arguments are wrong.
        DriverError, PeerError
            A driver refused, or a rank has exited.
        """

        def bind() -> MulticastBinding:
            return multicast.bind_memory(allocation, offset, start=start, size=size, assume_all_added=True)

        binding: MulticastBinding = self._when_complete(
            "bind_memory", multicast, lambda: _patiently(bind), "offset", "size"
        )
        return binding

    def bind_address(
        self, multicast: MulticastObject, device: Device, address: int | Buffer, size: int, offset: int = 0
    ) -> MulticastBinding:
        """Bind mapped memory of this rank's device, on all ranks or on none: `MulticastObject.bind_address`.

        See `bind_memory`.
        """

        def bind() -> MulticastBinding:
            return multicast.bind_address(device, address, size, offset, assume_all_added=True)

        binding: MulticastBinding = self._when_complete(
            "bind_address", multicast, lambda: _patiently(bind), "offset", "size"
        )
        return binding

    def _when_complete(self, call: str, multicast: MulticastObject, make: Callable[[], Any], *alike: str) -> Any:
        """Call a driver only if the ranks have added all devices, because it would block otherwise."""
        with ExitStack() as undo:
            with self._part(f"{call}: offer", "multicast") as offers:
                check_type(multicast, MulticastObject, "multicast", "a MulticastObject")
                multicast._check_open()
                what = f"{multicast.size} bytes for {multicast.device_count} devices"
                offers.append({"multicast": what, "added": len(multicast.devices)})
            with self._part(f"{call}: outcome", *alike) as outcomes:
                added = [offer["added"] for offer in offers]
                if sum(added) != multicast.device_count:
                    problem = (
                        f"expected all {multicast.device_count} devices of the object to be added, else the driver "
                        f"would block, got {listed(added)}; call Team.create_multicast(), which adds all."
                    )
                    raise blamed(InvalidArgumentError("multicast", problem))
                made = undo.enter_context(make())
                outcomes.append({name: getattr(made, name) for name in alike})
            undo.pop_all()
        return made

    def map(self, multicast: MulticastObject) -> MulticastMapping:
        """Map a multicast object for this rank's device, on all ranks or on none: `MulticastObject.map`.

        The ranks check first that all devices were added.
        """
        mapping: MulticastMapping = self._when_complete("map", multicast, lambda: multicast.map(assume_all_added=True))
        return mapping

    def gather_allocations(self, allocation: Allocation) -> list[Allocation]:
        """Give each rank's allocation to all ranks.

        Parameters
        ----------
        allocation : Allocation
            This rank's allocation, made by `Device.allocate`; of the same handle type on every rank.

        Returns
        -------
        list of Allocation
            By rank: this rank's own `allocation`, and the others', imported by its device, which the caller closes.

        Raises
        ------
        UnsupportedError
            A device has no peer access to another one's memory.

        Examples
        --------
        >>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport, device.allocate(65536) as mine:
        ...     everyones = gi.exchange.Team(transport).gather_allocations(mine)
        ...     everyones[transport.rank] is mine
        True
        """
        with ExitStack() as undo, ExitStack() as scope:
            with self._part("gather_allocations: offer", "handle") as offers:
                check_type(allocation, Allocation, "allocation", "an Allocation")
                handle = scope.enter_context(allocation.export())
                delivery = Delivery(handle, type(handle), scope)
                offers.append({"bytes": allocation.size, **delivery.offer})
            with self._part("gather_allocations: outcome"):
                handles = delivery.take(offers, range(self.size), self.timeout / 2, scope)
                gathered = [allocation] * self.size
                for rank in set(range(self.size)) - {self.rank}:
                    load = allocation.device.import_allocation(handles[rank], offers[rank]["bytes"])
                    gathered[rank] = undo.enter_context(load)
            undo.pop_all()
        return gathered


def _patiently(bind: Callable[[], MulticastBinding]) -> MulticastBinding:
    """Bind; retry while the driver is not ready."""
    for pause in _PAUSES_S:
        try:
            return bind()
        except DriverError as error:
            if not error.symbol.endswith("SYSTEM_NOT_READY"):
                raise
        time.sleep(pause)
    return bind()


def _check_step(argument: str, name: str) -> None:
    """Limit the name, which is in every message and every error."""
    check_type(name, str, argument, "a str")
    if len(name) > _STEP:
        raise InvalidArgumentError(argument, f"expected {_STEP} characters or fewer, got {len(name)}.")
