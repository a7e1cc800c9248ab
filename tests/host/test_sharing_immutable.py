"""Arrays that their library takes for immutable, as JAX its own: they are read, and not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi


@pytest.mark.parametrize("given", [lambda array: array, lambda array: {"weight": array}], ids=["single", "named"])
def test_the_writer_of_what_is_immutable_is_refused(given: Callable[[Any], Any]) -> None:
    device = gi.get_backend("host").device()
    with device.allocate(4096) as memory:
        array = np.asarray(memory.buffer.view(8))
        array.flags.writeable = False
        with gi.share(given(array)) as shared, gi.attach(bytes(shared)) as attached:
            with pytest.raises(gi.InvalidArgumentError, match=r"immutable.*copy=True"):
                shared.acquire()
            attached.acquire(timeout=10)
            attached.release()
        with gi.share(given(array), copy=True) as shared:
            shared.acquire(timeout=10)
            shared.release()
        del array
