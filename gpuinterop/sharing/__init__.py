"""Share arrays and frames, in place, with other processes on the same host.

`share` accepts an array of torch, CuPy, JAX, NumPy or another DLPack library, or several arrays by name.
``bytes(share)`` is a short descriptor, and ``str(share)`` is the descriptor as text. It contains no handle, so you can
send it any way you like. `attach` connects to the sharing process and returns the same memory, without a copy. Later
attachments to that process reuse the connection. Linux only. Both processes run as one user, or name each other's user
in ``users=``; they can run in two containers.

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

**Order.** The sharing process is the only writer. Its `ArrayShare.acquire` makes a stream wait for the readers that
have acquired and not released. Its `ArrayShare.release` publishes the next version once the stream's queued work is
done. Version 0 is the arrays as they are when the work queued on the stream of ``share(stream=...)`` is done. A
reader's `AttachedArrays.acquire` makes a stream wait for the newest version, or for the next one while the writer is
writing. Its `release` lets the writer acquire. Only streams wait; the host waits only if the stream is the calling
thread of a CPU. A reader that has attached but not acquired never delays the writer. If you read without `acquire`,
order the reads yourself; weights that never change need no order.

**A process that exits.** The writer drops a reader that has exited within a second, and its stream continues. If the
writer exits, the streams that wait for it continue too: their work runs on undefined bytes, and the next call, or
``stream.synchronize``, raises `PeerError`.

**No silent copy.** If another process cannot map an array's memory, `share` raises `UnsupportedError`, which gives the
reason and what to change. ``copy=True`` copies the array once, into memory that can be shared.

`gpuinterop.sharing.order` specifies the order protocol. `gpuinterop.sharing.messages` specifies the messages and the
counts of holders.
"""

from __future__ import annotations

from .attachments import AttachedArrays, attach
from .frames import Frame, Publisher, Subscription, publish, subscribe
from .shares import ArrayShare, share

__all__ = [
    "ArrayShare", "AttachedArrays", "Frame", "Publisher", "Subscription", "attach", "publish", "share",
    "subscribe",
]  # fmt: skip
