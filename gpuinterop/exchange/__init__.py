"""Several processes, one per GPU, agree: handles are distributed, all vote before a driver could block, all fail alike.

The ranks already have a way to talk: torch.distributed, or Unix sockets on one host. A `Transport` makes of it one
operation: give a payload to every rank, take theirs, until a deadline; who is silent, or dead, gave nothing. On it a
`Team` builds one more, the **vote**, and everything else is votes in a row.

A vote has three rounds, in the same step on every rank:

1. each rank tells all how its part of the step went: done, with a value for the others, or its error;
2. each rank tells all what it has heard in the first round;
3. each rank tells all whether it goes on; one that has failed tells its error, and waits for nobody.

After two rounds each rank knows what anybody knows, and decides by that alone: who was heard by nobody is gone; else
the lowest rank that failed names the error; else, where the steps or the time-outs differ, the ranks have not made the
same calls; else all succeed, and all have the values of all. A rank that would succeed fails with the error of one that
it hears fail in the third round; silence there means nothing. The same knowledge gives the same outcome, so:

- While at most one rank dies in one vote, all survivors have the same outcome, and the same error. A rank that dies
  after somebody has heard it counts as heard, for all; the next vote finds it gone.
- When two die within one vote, all survivors fail or all succeed, though of two errors one may have the one, another
  the other. When three do, one may go on where others fail: the next vote of those that went on fails, at the latest by
  its time-out.
- A rank is waited for until the time-out, while nobody dies or hangs; otherwise survivors agree that come to the step
  within half the time-out of each other. One that comes when the others have given up hears so, and fails as they did.
  No protocol can do better than this: where its word and theirs cross, at the time-out itself, or where they have ended
  without a word, it may succeed alone, and its next vote fails. A rank that hangs is named, not ended.
- All this is of ranks that die or are slow. One that lies can part the outcome of the others, and blame another: for
  what nobody has heard, and in the third round. In the first two nobody's word counts against a rank that was heard.

After a failure the team is broken: each later call raises the same error again. To go on, close the transport and
make a new one: the ranks may no longer be in the same round on the old one.
"""

from __future__ import annotations

from .team import Team
from .transport import SocketTransport, TorchTransport, Transport

__all__ = ["SocketTransport", "Team", "TorchTransport", "Transport"]
