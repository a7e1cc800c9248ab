"""Passes one object back and forth between a graphics API and a stream, frame by frame.

With binary semaphores there is one for each direction. A timeline is one semaphore: in frame k (from 0) the graphics
side signals ``2 k + 1`` and the compute side ``2 k + 2``. The handoff enforces the order submit, acquire, release: a
call in the wrong order raises at once instead of waiting forever. On a used timeline it continues from its value.

Examples
--------
>>> with device.create_semaphore(gi.TimelineFd) as semaphore:
...     handoff = gi.Handoff(semaphore)
...     for frame in range(2):
...         handoff.next_submit()
...         semaphore.host_signal(2 * frame + 1)  # the graphics side signals
...         handoff.acquire(stream)
...         handoff.release(stream)
HandoffStep(frame=0, wait_value=None, signal_value=1)
HandoffStep(frame=1, wait_value=2, signal_value=3)
"""

from __future__ import annotations

from .graphics.handoff import Handoff, HandoffStep

__all__ = ["Handoff", "HandoffStep"]
