"""Each rank of an MPI job reads the allocations of all others, as a team over mpi4py.

    mpiexec -n 4 python docs/examples/mpi.py         # on the host backend, which needs no GPU
    mpiexec -n 4 python docs/examples/mpi.py cuda    # a GPU for each rank

It needs mpi4py and an MPI; `pip install mpi4py mpich` installs both. Allocations are sent as file descriptors, so all
ranks must be on one host.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from mpi4py import MPI

import gpuinterop as gi
from gpuinterop.exchange import MpiTransport, Team


def main() -> None:
    """Run one rank."""
    team = Team(MpiTransport(), timeout=10.0)
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
        # One write: other ranks write at the same time, and `print` may write the newline separately.
        sys.stdout.write(f"rank {team.rank} of {team.size}, {device.name}: {list(found)}\n")
        team.vote("read")  # after that, every rank can free its own


if __name__ == "__main__":
    try:
        main()
    except gi.GpuInteropError as error:
        print(error, file=sys.stderr)
        MPI.COMM_WORLD.Abort(1)  # at exit mpi4py calls MPI_Finalize, which would wait for a failed rank for ever
