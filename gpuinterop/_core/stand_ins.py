"""Whether what a backend calls is one of our test doubles, or stands on one: each exports a symbol that says so."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from .. import system

__all__ = ["simulated_driver", "stand_in"]

_SIMULATED: Final = "gpuinterop_simulated_driver"
_FORWARDING: Final = "gpuinterop_forwarding_hip"
_DEVICE: Final = "gpuinterop_stand_in_device"
_EMULATOR: Final = "librocjitsu_kmd"  # AMD's, which preloads it


def stand_in(libraries: Mapping[str, str]) -> str:
    """What stands in for the driver that a backend calls or for the device below it; empty where nothing does.

    No recorded run counts for it, and no run on it is recorded. One of ours that is loaded beside another is enough.
    A driver of ours is named by its file. AMD's own runtime is linked with the library below it, and a symbol of that
    one is found through it.

    Parameters
    ----------
    libraries : Mapping
        The backend's (`LoadedBackend.libraries`).
    """
    for path in _drivers(libraries):
        if _exports(path, _SIMULATED) or _exports(path, _FORWARDING):
            return path
        if _exports(path, _DEVICE):
            version = os.path.basename(os.path.realpath(path)).partition(".so.")[2].split(".")[:2]
            return " ".join(("AMD's runtime", *filter(None, [".".join(version)]), "on a stand-in device"))
    names = {_name(path) for _, path in system.mapped_files()} if "libamdhip64" in libraries else set()
    return "AMD's emulator rocjitsu" if _EMULATOR in names else ""


def simulated_driver(libraries: Mapping[str, str]) -> str:
    """The same of a simulated driver alone: behind it there is no hardware, whatever is called.

    (A forwarding one sends its calls on to another vendor's driver.) Every driver of the name that is loaded must be
    one: which of them is called cannot be told.
    """
    drivers = _drivers(libraries)
    return drivers[0] if drivers and all(_exports(path, _SIMULATED) for path in drivers) else ""


def _drivers(libraries: Mapping[str, str]) -> list[str]:
    """The files of the driver that a backend calls, and of every other that is loaded and has the same name."""
    names = {_name(path) for path in libraries.values()}
    loaded = (path for _, path in system.mapped_files() if _name(path) in names)
    return list(dict.fromkeys([*libraries.values(), *loaded]))


def _name(path: str) -> str:
    """``libcuda``, of ``/usr/lib/libcuda.so.580.159.04``."""
    return PurePath(path).name.partition(".so")[0]


def _exports(path: str, symbol: str) -> bool:
    try:
        library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE)
    except OSError:  # it is not loaded, or cannot be
        return False
    return hasattr(library, symbol)
