"""Detect test doubles that replace a backend's driver, or are below it: each exports a symbol for that."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from .. import system

_SIMULATED: Final = "gpuinterop_simulated_driver"
_DEVICE: Final = "gpuinterop_stand_in_device"
_EMULATOR: Final = "librocjitsu_kmd"  # AMD's, loaded with LD_PRELOAD


def stand_in(libraries: Mapping[str, str]) -> str:
    """Name the test double in place of a backend's driver or below it; empty if there is none.

    One test double is enough, even if a real driver is loaded too: the run is not recorded. gpuinterop's simulated
    drivers are named after their file. AMD's own runtime is linked to the library below it, so it exports a symbol of
    that library. `libraries` are the backend's native libraries (`LoadedBackend.libraries`).
    """
    for path in _drivers(libraries):
        if _exports(path, _SIMULATED):
            return path
        if _exports(path, _DEVICE):
            version = os.path.basename(os.path.realpath(path)).partition(".so.")[2].split(".")[:2]
            return " ".join(("AMD's runtime", *filter(None, [".".join(version)]), "on a stand-in device"))
    names = {_name(one.path) for one in system.mappings()} if "libamdhip64" in libraries else set()
    return "AMD's emulator rocjitsu" if _EMULATOR in names else ""


def simulated_driver(libraries: Mapping[str, str]) -> str:
    """Name a simulated driver, which uses no hardware; empty if there is none.

    Every loaded driver of that name must be simulated, because it is unknown which one is called.
    """
    drivers = _drivers(libraries)
    return drivers[0] if drivers and all(_exports(path, _SIMULATED) for path in drivers) else ""


def _drivers(libraries: Mapping[str, str]) -> list[str]:
    """The files of the driver that a backend calls, and of all loaded drivers with its name."""
    names = {_name(path) for path in libraries.values()}
    loaded = (one.path for one in system.mappings() if _name(one.path) in names)
    return list(dict.fromkeys([*libraries.values(), *loaded]))


def _name(path: str) -> str:
    """The name ``libcuda`` of ``/usr/lib/libcuda.so.580.159.04``."""
    return PurePath(path).name.partition(".so")[0]


def _exports(path: str, symbol: str) -> bool:
    try:
        library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE)
    except OSError:  # the library is not loaded, or cannot be
        return False
    return hasattr(library, symbol)
