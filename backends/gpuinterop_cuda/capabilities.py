"""Facts of a device. `capabilities.toml` derives its capabilities from them. No context is created."""

from __future__ import annotations

import glob
import os
import sys
from functools import partial
from importlib.resources import files
from typing import Final

from gpuinterop.capabilities import Capability, Rules

from .driver import Driver

RULES: Final = Rules(files(__package__) / "capabilities.toml")
_INTEGRATED, _MAJOR = 18, 75  # CUdevice_attribute


def table(driver: Driver, ordinal: int) -> list[Capability]:
    """Every cell that a rule matches. The other cells are gaps."""
    attribute = partial(driver.attribute, driver.ask("DeviceGet", ordinal))
    windows, integrated = sys.platform == "win32", attribute(_INTEGRATED) != 0
    facts = RULES.attributes(attribute) | {
        "windows": windows,
        "integrated": integrated,
        "thor": integrated and not windows and attribute(_MAJOR) >= 10,
        # cuda-bindings have the type from 13.0 on.
        "dma-buf type": hasattr(driver.api.CUexternalMemoryHandleType, "CU_EXTERNAL_MEMORY_HANDLE_TYPE_DMABUF_FD"),
        "imex channel": imex_channel(),
    }
    return RULES.table(facts, driver.has)


def imex_channel() -> bool:
    """Whether this process may open an IMEX channel."""
    return any(os.access(path, os.R_OK | os.W_OK) for path in glob.glob("/dev/nvidia-caps-imex-channels/channel*"))
