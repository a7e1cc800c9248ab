"""Arrays that exist, shared in place with other processes of the host.

`share` takes an array of torch, CuPy, JAX, NumPy or another library with DLPack, or several by name. ``bytes(share)``
is a descriptor of some hundred bytes, which holds no handle, and ``str(share)`` the same as text: send it by any way.
`attach` connects to the process that shares, and returns the same memory there, without a copy. Later attachments to
that process use the same connection. Linux; both processes run on one host, as one user or one that the other names
(``users=``), also in two containers.

>>> weights = np.asarray(buffer.view((2, 2), "float32"))  # or any tensor
>>> with gi.share(weights) as shared:
...     descriptor = bytes(shared)
...     with gi.attach(descriptor) as attached:  # in any process; this one will do
...         shared.acquire()
...         weights[:] = 7
...         shared.release()  # version 1
...         attached.acquire()  # a GPU: acquire(torch.cuda.current_stream())
...         np.asarray(attached.view)
...         attached.release()
array([[7., 7.],
       [7., 7.]], dtype=float32)

**Order.** One process writes: the one that shares. Its `ArrayShare.acquire` makes a stream wait for the readers that
have acquired and not released, and its `ArrayShare.release` publishes the next version, after the stream's work.
Version 0 is what the arrays had when they were shared, after what the stream of ``share(stream=...)`` had been given. A
reader's `AttachedArrays.acquire` makes a stream wait for the newest version; while the writer writes, for the next. Its
`release` lets the writer acquire. The streams wait, and the host does not, except where the stream is the calling
thread of a CPU. A reader that has attached and not acquired never holds the writer up. A program that reads without
`acquire` orders its reads by means of its own, or needs no order: weights that never change.

**Deaths.** A reader that dies is dropped within a second, and the writer's stream goes on. If the writer dies, streams
that wait for it go on too: their work runs on undefined bytes, and the next call, or ``stream.synchronize``, raises
`PeerError`.

**No silent copy.** An array whose memory cannot get to another process raises `UnsupportedError`, with the reason and
what to change. ``copy=True`` copies it once, into memory that can.

`gpuinterop.sharing.order` specifies the protocol of the order, `gpuinterop.sharing.descriptor` the bytes that travel,
and the counts of who holds what.
"""

from __future__ import annotations

from .arrays import acquire
from .attachment import AttachedArrays, attach
from .frames import Frame, Publisher, Subscription, publish, subscribe
from .offer import ArrayShare, share

__all__ = [
    "ArrayShare", "AttachedArrays", "Frame", "Publisher", "Subscription", "acquire", "attach", "publish", "share",
    "subscribe",
]  # fmt: skip
