"""Facts of a device. `capabilities.toml` derives its capabilities from them. The current device does not change."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Final

from gpuinterop.capabilities import Capability, Cell, Operation, Rules
from gpuinterop.handles import D3D12Fence, Win32Handle

from .driver import Driver, advised

RULES: Final = Rules(files(__package__) / "capabilities.toml")


def table(driver: Driver, ordinal: int) -> list[Capability]:
    """Every cell that a rule matches. The other cells are gaps."""
    attribute = partial(driver.attribute, ordinal)
    facts = RULES.attributes(attribute) | {
        "imports are kept": driver.facts.holds["imports are kept"],
        "windows": sys.platform == "win32",
        "fabric type": has_fabric_type(driver),
        "newer bindings": advised("pip install 'hip-python>=10'"),
        "legacy ipc": os.environ.get("HSA_ENABLE_IPC_MODE_LEGACY", "0") not in ("", "0"),
        "command processor waits": os.environ.get("GPU_STREAMOPS_CP_WAIT", "0") not in ("", "0"),
    }
    return RULES.table(facts, driver.has)


def has_fabric_type(driver: Driver) -> bool:
    """Whether the bindings have fabric handles, as from version 10 on."""
    return hasattr(driver.api.hipMemAllocationHandleType, "hipMemHandleTypeFabric")


def nameless(kind: type[Win32Handle]) -> Capability:
    """The gap of a named semaphore. Also used for `OpaqueWin32`, whose own cell is about memory."""
    gap = RULES.of(Cell(Operation.IMPORT_BY_NAME, D3D12Fence), {"windows": True})
    assert gap is not None
    return replace(gap, handle_type=kind)
