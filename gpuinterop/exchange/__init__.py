"""Let several processes, one per GPU, agree: no driver call blocks because a rank is missing, and all ranks fail alike.

- A `Transport` has one operation, the **all-gather**: each rank gives bytes to all ranks, and receives theirs. It uses
  torch.distributed, MPI, or Unix sockets on one host. Your own transport is a class with one method.
- A **step** of your program, `Team.vote` or `Team.step`, is one all-gather: each rank reports how its part went.
- Every other **call** of a `Team` is two all-gathers. In the first, each rank reports what it offers, or why it cannot.
  If all offers are compatible, the second one reports the results. If a rank fails, what the call has made is closed.

All ranks get the same messages, and decide only from these. If ranks failed, the lowest of them names the error. Else,
if the steps, time-outs or arguments differ, the error is that the ranks did not make the same call. If a rank has
exited or does not answer, the all-gather itself fails on all ranks, with an error that names it.

- A rank can be late by up to three quarters of the time-out. A later one raises the others' error. gpuinterop names a
  rank that hangs, but does not end it.
- If a rank exits within an all-gather, some ranks may have its message and others not. Then some continue, and their
  next call fails.

The ranks trust each other: they run as one user, and unpickle each other's messages. Errors are found in bounded time
and name the rank: one that exited, is late, or belongs to another version or job. Other users of the host cannot
connect.

After a failure the team is broken: each later call raises the same error again. To continue, close the transport and
make a new one.

Examples
--------
A job of one rank; with more ranks, only `rank` and `size` differ:

>>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
...     team = gi.exchange.Team(transport, timeout=10)
...     with team.step("load the scene"):
...         buffer.fill(7)
"""

from __future__ import annotations

from .engines import MpiTransport, TorchTransport
from .team import Team
from .transport import SocketTransport, Transport

__all__ = ["MpiTransport", "SocketTransport", "Team", "TorchTransport", "Transport"]
