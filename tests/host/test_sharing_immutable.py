"""Arrays that their library takes for immutable, as JAX its own: they are read, and not written."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.limits import LIMIT


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


def test_the_writer_of_what_is_immutable_is_refused() -> None:
    with gi.get_backend("host").device().allocate(4096) as memory:
        array = np.asarray(memory.buffer.view(8))
        (fixed := array[:4]).flags.writeable = False
        for given, copy, name in (
            (array, False, None), (fixed, True, None), (Jaxs(array), False, "array"), (fixed, False, "array"),
            ({"free": array, "fixed": fixed}, False, "fixed"),
        ):  # fmt: skip
            with gi.share(given, copy=copy) as shared, gi.attach(bytes(shared)) as attached:
                for one in (shared, attached):
                    view = one[one.names[-1]]
                    assert view.read_only is (name is not None)
                    assert np.asarray(view).flags.writeable is np.from_dlpack(view).flags.writeable is (name is None)
                refused = pytest.raises(gi.InvalidArgumentError, match=rf"^{name}: .*immutable.*copy=True")
                with refused if name else nullcontext():
                    shared.acquire(timeout=LIMIT)
                    shared.release()
                attached.acquire(timeout=LIMIT)
                attached.release()
        del array, fixed, given, view
