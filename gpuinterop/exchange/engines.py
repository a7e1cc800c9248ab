"""Transports over a connection that the ranks already have: torch.distributed or MPI."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from .._arguments import check_type
from ..errors import InvalidArgumentError, PeerError
from .transport import Transport, silent

_SIZE: Final = 8
"""Bytes of each rank's first message, the size of the second."""

_LONGEST_PAUSE_S: Final = 0.02


class EngineTransport(Transport):
    """Uses an engine's own all-gather, and a roll call if that fails, because an engine does not report missing ranks.

    In the roll call each rank leaves a word for all others. An empty word means that the rank is there. The first rank
    whose time is up lists the missing ranks, and the others repeat that list. A rank that finds a roll call is late.
    """

    _failure: type[Exception]
    """The engine's error."""

    def all_gather(self, payload: bytes, timeout: float) -> list[bytes]:
        end = time.monotonic() + timeout
        late = end - timeout / 4
        problem: Exception | None = None
        if not self._words():
            try:
                sizes = self._gather(len(payload).to_bytes(_SIZE, "little"), [_SIZE] * self.size, late)
                return self._gather(payload, [int.from_bytes(size, "little") for size in sizes], late)
            except (TimeoutError, self._failure) as error:
                problem = error
            _until(self._words, late)  # missing ranks may still arrive in time
            self._say([])
        _until(lambda: len(self._words()) == self.size or any(self._words().values()), end - timeout / 8)
        words = self._words()
        missing = next(filter(None, words.values()), [rank for rank in range(self.size) if rank not in words])
        if not missing:
            why = problem or "a rank gave up"
            raise PeerError(f"the all-gather has failed, though all ranks answer: {why}.") from problem
        self._say(missing)
        _until(lambda: all(self._words().values()), end)  # other ranks may need this process to read the words
        raise silent(missing, timeout) from problem

    def _gather(self, part: bytes, sizes: Sequence[int], late: float) -> list[bytes]:
        gathered = self._start(part, sizes)
        _until(lambda: gathered() is not None or self._words(), late)
        if (parts := gathered()) is None:
            raise TimeoutError
        return [parts[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    @abstractmethod
    def _start(self, part: bytes, sizes: Sequence[int]) -> Callable[[], bytes | None]:
        """Start an all-gather of parts of these sizes; return a function that returns them joined, or None before."""

    @abstractmethod
    def _say(self, word: list[int]) -> None:
        """Leave a word for all ranks, which replaces an earlier one."""

    @abstractmethod
    def _words(self) -> dict[int, list[int]]:
        """The words that ranks have left, including this one's."""


def _until(condition: Callable[[], object], end: float) -> None:
    pause = 50e-6
    while not condition() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


class TorchTransport(EngineTransport):
    """A ``torch.distributed`` process group that sends CPU tensors, such as gloo.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        The process group. Default: all ranks. A group with only NCCL sends no CPU tensors;
        ``dist.new_group(backend="gloo")`` makes one that does.

    Raises
    ------
    InvalidArgumentError
        torch.distributed is not initialised, the group does not contain this process, or it sends no CPU tensors.

    Notes
    -----
    The all-gather is the group's own. After the time-out, missing ranks are found through the group's store. After a
    failure you cannot use the group any more.

    Examples
    --------
    With torch:

    >>> import torch.distributed
    >>> torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    >>> team = gi.exchange.Team(gi.exchange.TorchTransport())
    >>> team.vote("ready")
    >>> torch.distributed.destroy_process_group()
    """

    _failure = RuntimeError

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed

        self._torch: Any = torch
        distributed: Any = torch.distributed
        if not distributed.is_initialized():
            problem = "expected a group of torch.distributed, got none; call init_process_group() first."
            raise InvalidArgumentError("group", problem)
        self._group = distributed.group.WORLD if group is None else group
        self.rank = distributed.get_rank(self._group)
        if self.rank < 0:
            raise InvalidArgumentError("group", "expected a group that contains this process, got another.")
        backends = distributed.get_backend_config(self._group)  # such as "cpu:gloo,cuda:nccl"
        if "cpu:" not in backends:
            problem = f"expected a group that sends CPU tensors, got {backends}; use new_group(backend='gloo')."
            raise InvalidArgumentError("group", problem)
        self._store = distributed.PrefixStore("gpuinterop.exchange", self._group.get_group_store())
        ranks = distributed.get_process_group_ranks(self._group)
        self._keeper = [ranks.index(0)] if 0 in ranks else []
        """The rank that keeps the store, unless a launcher does."""
        self.size = len(ranks)

    def _start(self, part: bytes, sizes: Sequence[int]) -> Callable[[], bytes | None]:
        longest = max(1, *sizes)
        tensor = self._torch.tensor(list(part.ljust(longest, b"\0")), dtype=self._torch.uint8)
        parts = [self._torch.empty_like(tensor) for _ in sizes]
        work = self._torch.distributed.all_gather(parts, tensor, group=self._group, async_op=True)

        def answer() -> bytes | None:
            if not work.is_completed():
                return None
            work.wait()  # raises the group's error
            return b"".join(bytes(part[:size].tolist()) for part, size in zip(parts, sizes, strict=True))

        return answer

    def _say(self, word: list[int]) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self.rank), json.dumps(word))
            self._store.set("roll call", "")

    def _words(self) -> dict[int, list[int]]:
        try:
            if not self._store.check(["roll call"]):
                return {}
            there = [rank for rank in range(self.size) if self._store.check([str(rank)])]
            return {rank: json.loads(self._store.get(str(rank))) for rank in there}
        except RuntimeError:  # the rank that kept the store has exited
            return {self.rank: self._keeper}


class MpiTransport(EngineTransport):
    """A communicator of mpi4py.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm, optional
        Default: ``COMM_WORLD``. The transport uses a duplicate, which all ranks make together.

    Raises
    ------
    ArgumentTypeError
        `communicator` is not a communicator, or does not contain this process.

    Notes
    -----
    If a rank exits, MPI does not notify the others: by default its launcher ends all ranks. A missing rank is found at
    the time-out. ``MPI_Finalize``, which mpi4py calls at exit, would then wait for it forever: call
    ``communicator.Abort()``, which ends all ranks.

    Examples
    --------
    With mpi4py:

    >>> team = gi.exchange.Team(gi.exchange.MpiTransport())
    >>> team.vote("ready")
    """

    def __init__(self, communicator: Any = None) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._failure = MPI.Exception
        given = MPI.COMM_WORLD if communicator is None else communicator
        self._communicator: Any = check_type(given, MPI.Intracomm, "communicator", "an mpi4py.MPI.Intracomm").Dup()
        self.rank, self.size = self._communicator.rank, self._communicator.size
        self._heard: dict[int, list[int]] = {}
        self._sent: list[Any] = []
        """MPI reads each word until its receiver has it."""
        self._pending: tuple[Any, ...] = ()
        """MPI uses the memory of an all-gather until it is complete, even after this rank has given up."""

    def _start(self, part: bytes, sizes: Sequence[int]) -> Callable[[], bytes | None]:
        room = bytearray(sum(sizes))
        request = self._communicator.Iallgatherv([part, self._mpi.BYTE], [room, sizes, None, self._mpi.BYTE])
        self._pending = request, part, room, sizes
        return lambda: bytes(room) if request.Test() else None

    def _say(self, word: list[int]) -> None:
        self._heard[self.rank] = word
        for rank in set(range(self.size)) - {self.rank}:
            with contextlib.suppress(self._mpi.Exception):  # the rank has exited
                self._sent.append(self._communicator.isend(word, rank))

    def _words(self) -> dict[int, list[int]]:
        status = self._mpi.Status()
        with contextlib.suppress(self._mpi.Exception):
            while self._communicator.iprobe(status=status):
                self._heard[status.source] = self._communicator.recv(source=status.source)
        return self._heard
