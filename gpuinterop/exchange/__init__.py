"""Several processes, one per GPU, agree: no driver blocks for want of one, and all fail alike.

- An **all-gather** is the one operation of a `Transport`: each rank gives bytes to all, and takes theirs. The ranks
  have a way to do that: torch.distributed, MPI, or else Unix sockets on one host; another is a class with one method.
- A **step** of the program, `Team.vote` and `Team.step`, is one all-gather: each rank says how its part went.
- Every other **call** of a `Team` is two: of what each rank offers, or why it cannot; and, when all have offered and go
  together, of what has come of it. What the call has made is closed when a rank fails.

All ranks have the same messages, and decide by them alone. The lowest rank that failed names the error. Else, where the
steps, the time-outs or the arguments differ, the ranks have not made the same call. Else all succeed. A rank that is
dead or silent fails the all-gather itself, on all ranks, with an error that names it.

- A rank may come three quarters of the time-out later than another. One that comes later raises the error of the
  others. A rank that hangs is named, not ended.
- A rank that dies within an all-gather may have been heard by some ranks and not by others: then some go on, and their
  next call fails.

The ranks trust each other: they are processes of one user, and unpickle what they send each other. Mistakes are
answered by name and within bounds: a rank that dies, is late, is of another version or another job. Other users of
the host cannot connect.

After a failure the team is broken: each later call raises the same error again. To go on, close the transport and
make a new one.

Examples
--------
A job of one rank; more ranks differ in nothing but `rank` and `size`:

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
