"""The README's sample with NumPy 1, whatever NumPy is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from gpuinterop.exporters import open_exporter

README = Path(__file__).parents[2] / "README.md"


def test_the_field_can_be_written_with_numpy_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_dlpack(thing: Any, **options: Any) -> Any:
        # NumPy 1 makes every array that it takes from DLPack read-only: its capsules cannot say that they are not.
        array = real(thing, **options)
        array.flags.writeable = False
        return array

    real = np.from_dlpack
    monkeypatch.setattr(np, "from_dlpack", from_dlpack)
    lines = re.findall(r"^ *(field .*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2, lines  # how it is made, and what is done with it
    with open_exporter("memfd") as exporter, exporter.create_memory(4096) as theirs:
        theirs.write(0, np.full(1024, 2, np.float32).tobytes())
        device = gi.match_device(exporter.identity)
        with (
            device.import_memory(theirs.export(), size=4096, dedicated=False) as memory,
            memory.map_buffer(offset=0, size=4096) as buffer,
        ):
            names: dict[str, Any] = {"np": np, "buffer": buffer, "shape": (32, 32)}
            exec("\n".join(lines), names)
            assert theirs.read(0, 4096) == np.ones(1024, np.float32).tobytes()
            names.clear()
