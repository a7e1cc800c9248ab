"""Each rank of an MPI job reads what every other has in an allocation: a `Transport` over mpi4py.

    mpiexec -n 4 python docs/examples/mpi.py         # on the host backend, which needs no GPU
    mpiexec -n 4 python docs/examples/mpi.py cuda    # a GPU for each rank

It needs mpi4py and an MPI; `pip install mpi4py mpich` brings both. An allocation goes to the others as a file
descriptor, so the ranks are on one host.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

from mpi4py import MPI

import gpuinterop as gi
from gpuinterop.exchange import Team, Transport


class MpiTransport(Transport):
    """The ranks of a communicator that carries nothing else.

    MPI tells no rank of a death, so a dead rank is one that does not answer by the deadline.
    """

    TAGS = 32768  # what every MPI has; an answer that comes after its round is never asked for

    def __init__(self, communicator: MPI.Comm) -> None:
        self.rank = communicator.Get_rank()
        self.size = communicator.Get_size()
        self._communicator = communicator
        self._round = 0
        self._sending: list[tuple[Any, bytes]] = []  # MPI reads a payload until its receiver has it
        self._receiving: dict[tuple[int, int], tuple[Any, bytearray]] = {}  # and writes to these

    def exchange(self, payload: bytes, deadline: float) -> list[bytes | None]:
        tag = self._round % self.TAGS
        self._round += 1
        answers: list[bytes | None] = [None] * self.size
        answers[self.rank] = payload
        waiting = set(range(self.size)) - {self.rank}
        for peer in waiting:
            with suppress(MPI.Exception):  # an MPI that knows of the death
                self._sending.append((self._communicator.Isend([payload, MPI.BYTE], dest=peer, tag=tag), payload))
        while True:
            last = time.monotonic() >= deadline
            for peer in sorted(waiting):
                with suppress(MPI.Exception):
                    answers[peer] = self._receive(peer, tag)
                if answers[peer] is not None:
                    waiting.discard(peer)
            self._sending = [sending for sending in self._sending if not self._has_gone(sending[0])]
            if last or not (waiting or self._sending):
                return answers
            time.sleep(0.0005)

    def _receive(self, peer: int, tag: int) -> bytes | None:
        """The whole message of a round, once it is there."""
        if (peer, tag) not in self._receiving:
            status = MPI.Status()
            message = self._communicator.Improbe(source=peer, tag=tag, status=status)
            if message is None:
                return None
            room = bytearray(status.Get_count(MPI.BYTE))
            self._receiving[peer, tag] = (message.Irecv([room, MPI.BYTE]), room)
        request, room = self._receiving[peer, tag]
        if not request.Test():
            return None
        del self._receiving[peer, tag]
        return bytes(room)

    @staticmethod
    def _has_gone(request: Any) -> bool:
        try:
            return bool(request.Test())
        except MPI.Exception:
            return True


def main() -> None:
    """A rank's part."""
    team = Team(MpiTransport(MPI.COMM_WORLD.Dup()), timeout=10.0)  # Dup: other messages of the program stay apart
    devices = gi.get_backend(sys.argv[1] if len(sys.argv) > 1 else "host").devices()
    device = devices[team.rank % len(devices)]
    with ExitStack() as scope:
        with team.step("allocate"):
            own = scope.enter_context(device.allocate(device.allocation_granularity(gi.VmmFd).minimum))
            own.buffer.fill(10 + team.rank)
        everyones = team.gather_allocations(own)
        found = bytearray(team.size)
        for rank, allocation in enumerate(everyones):
            if rank != team.rank:
                scope.enter_context(allocation)
            allocation.buffer.copy_to_host(memoryview(found)[rank : rank + 1])
        # In one piece: other ranks write at the same time, and `print` may write the end of the line by itself.
        sys.stdout.write(f"rank {team.rank} of {team.size}, {device.name}: {list(found)}\n")
        team.vote("read")  # then all may free their own


if __name__ == "__main__":
    try:
        main()
    except gi.GpuInteropError as error:
        print(error, file=sys.stderr)
        MPI.COMM_WORLD.Abort(1)  # MPI_Finalize, which mpi4py calls at the end, would wait for a dead rank for ever
