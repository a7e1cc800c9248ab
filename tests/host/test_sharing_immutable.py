"""Arrays that their library takes for immutable, as JAX its own: they are read, and not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi


class Jaxs:
    """An array as JAX's are on the CPU: its capsule has no version, and its array of NumPy is not to be written."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__dlpack_device__ = array.__dlpack_device__

    def __dlpack__(self, *, stream: object = None) -> Any:
        return self._array.__dlpack__()

    def __array__(self) -> Any:
        seen = self._array.view()
        seen.flags.writeable = False
        return seen


def test_an_array_without_a_version_is_asked_by_its_array_of_numpy() -> None:
    with gi.get_backend("host").device().allocate(4096) as memory:
        array = np.asarray(memory.buffer.view(8))
        for given, immutable in ((Jaxs(array), True), (array, False)):
            with gi.share(given) as shared:
                if immutable:
                    with pytest.raises(gi.InvalidArgumentError, match="immutable"):
                        shared.acquire()
                else:
                    shared.acquire(timeout=10)
                    shared.release()
        del array, given


@pytest.mark.parametrize("given", [lambda array: array, lambda array: {"weight": array}], ids=["single", "named"])
def test_the_writer_of_what_is_immutable_is_refused(given: Callable[[Any], Any]) -> None:
    device = gi.get_backend("host").device()
    with device.allocate(4096) as memory:
        array = np.asarray(memory.buffer.view(8))
        array.flags.writeable = False
        with gi.share(given(array)) as shared, gi.attach(bytes(shared)) as attached:
            for one in (shared, attached):
                view = one[one.names[0]]
                assert view.read_only
                assert not np.asarray(view).flags.writeable
                assert not np.from_dlpack(view).flags.writeable
            with pytest.raises(gi.InvalidArgumentError, match=r"immutable.*copy=True"):
                shared.acquire()
            attached.acquire(timeout=10)
            attached.release()
        with gi.share(given(array), copy=True) as shared:
            shared.acquire(timeout=10)
            shared.release()
        del array
