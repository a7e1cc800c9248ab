"""Several processes, one per GPU, agree: all vote before a driver could block, and all fail alike.

The model has four parts, each made of the one before.

- A **round** is the one operation of a `Transport`: each rank gives a payload to all, and takes theirs until a
  deadline. A rank that is dead or silent gave nothing. The ranks already have a way to do that: Unix sockets on one
  host, or torch.distributed; another one is a class with one method.
- A **vote** is three rounds, in the same step on every rank:

  1. each rank tells all how its part of the step went: done, with a value for the others, or its error;
  2. each rank tells all what it has heard in the first round;
  3. each rank tells all whether it goes on; one that has failed tells its error, and waits for none.

- A **step** is an action and a vote on it. It ends with the values of all ranks, or with one error on all.
- A **call** of a `Team` is steps in a row. What it has made is closed when a step fails.

After two rounds each rank knows what any rank knows, and decides by that alone. A rank that none has heard is gone.
Else the lowest rank that failed names the error. Else, where the steps or the time-outs differ, the ranks have not made
the same calls. Else all succeed, and all have the values of all. A rank that would succeed fails with the error of one
that it hears fail in the third round; silence there means nothing. The same knowledge gives the same outcome, so:

- While at most one rank dies in one vote, all survivors have the same outcome, and the same error. A rank that dies
  after another has heard it counts as heard, for all; the next vote finds it gone.
- When two die within one vote, all survivors fail or all succeed, though of two errors one may have the one, another
  the other. When three do, one may go on where others fail: the next vote of those that went on fails, at the latest by
  its time-out.
- A rank is waited for until the time-out, while none dies or hangs; otherwise survivors agree that come to the step
  within half the time-out of each other. One that comes when the others have given up hears so, and fails as they did.
  No protocol can do better than this: where its word and theirs cross, at the time-out itself, or where they have ended
  without a word, it may succeed alone, and its next vote fails. A rank that hangs is named, not ended.

The ranks trust each other: they are processes of one user, who could stop each of them anyway. What can go wrong
without malice is answered by name and within bounds: a rank that dies, is late, is of another version or another job,
or sends more than 64 MiB. Other users of the host cannot connect.

After a failure the team is broken: each later call raises the same error again. To go on, close the transport and
make a new one: the ranks may no longer be in the same round on the old one.

Examples
--------
A job of one rank; more ranks differ in nothing but `rank` and `size`:

>>> with gi.exchange.SocketTransport(folder, rank=0, size=1) as transport:
...     team = gi.exchange.Team(transport, timeout=10)
...     with team.step("load the scene"):
...         buffer.fill(7)
"""

from __future__ import annotations

from .team import Team
from .transport import SocketTransport, TorchTransport, Transport

__all__ = ["SocketTransport", "Team", "TorchTransport", "Transport"]
