"""``gpuinterop info``: what works here, what does not, and why."""

from __future__ import annotations

import argparse
import json
import os
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

from .._core.device import Device
from .._core.discovery import InstalledBackend, backends, get_backend
from ..capabilities import Capabilities
from ..errors import GpuInteropError
from ..testing import stand_ins
from ..testing.exporters import open_exporter, opengl, vulkan
from ..testing.exporters.base import Driver
from .console import complain, note

__all__ = ["Findings", "add_arguments", "collect", "command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpuinterop info``."""
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--all", action="store_true", help="show every cell of each table, with its reason")


def command(given: argparse.Namespace) -> int:
    """Show devices, Vulkan and OpenGL drivers, their handoffs, and what can be shared.

    First comes the answer in a few lines, with numbers for the reasons listed below it. Then come versions, libraries
    and what each device and each driver can do.
    """
    found = collect()
    for problem in found.problems:
        complain(problem)
    if given.json:
        for name, reason in found.missing_exporters.items():
            note(f"{name}: {reason}")
        print(json.dumps({"backends": found.backends, "exporters": found.exporters}, indent=2))
        return 0
    from .overview import show

    show(found, every=given.all)
    return 0


class Findings:
    """Facts of this machine: dicts as ``gpuinterop info --json`` prints them, devices, and drivers.

    `problems` lists what is wrong with the environment; `missing_exporters` says why an exporter does not work here.
    """

    def __init__(self) -> None:
        self.backends: list[dict[str, Any]] = []
        self.exporters: list[dict[str, Any]] = []
        self.devices: list[Device] = []
        self.drivers: list[Driver] = []
        self.problems: list[str] = []
        self.missing_exporters: dict[str, str] = {}


def collect() -> Findings:
    """Look at everything that is installed. What is broken is reported and never raised."""
    found = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a backend's fallback, which is shown below anyway
        installed: Mapping[str, InstalledBackend] = {}
        try:
            installed = backends()
        except GpuInteropError as error:
            found.problems.append(str(error))
        if os.environ.get("GPUINTEROP_BACKEND"):
            try:
                get_backend()
            except GpuInteropError as error:
                found.problems.append(str(error))
        for entry in installed.values():
            found.backends.append(_backend(entry, found))
        _exporters(found)
    return found


def _backend(entry: InstalledBackend, found: Findings) -> dict[str, Any]:
    result: dict[str, Any] = {
        "name": entry.name, "available": False, "reason": None, "versions": {}, "libraries": {}, "stand_in": None,
        "unknown_version": None, "devices": [],
    }  # fmt: skip
    try:
        if (error := entry.error) is not None:
            result["reason"] = str(error)
            return result
        backend = get_backend(entry.name)
        result["versions"] = dict(backend.versions)
        result["libraries"] = dict(backend.libraries)
        result["stand_in"] = stand_ins.stand_in(backend.libraries) or None
        result["unknown_version"] = backend.unknown_version or None
        devices = backend.devices()
        result["devices"] = [_device(device) for device in devices]
        found.devices += devices
        result["available"] = True
    except GpuInteropError as error:  # a wrong GPUINTEROP_DISABLE, or a driver that fails
        result["reason"] = str(error)
    return result


def _device(device: Device) -> dict[str, Any]:
    return {
        "ordinal": device.ordinal,
        "name": device.name,
        "uuid": str(uuid.UUID(bytes=device.uuid)) if device.uuid else None,
        "pci_bus_id": device.pci_bus_id,
        "luid": device.luid.hex() if device.luid else None,
        "capabilities": _cells(device.capabilities),
    }


def _cells(table: Capabilities) -> list[dict[str, str | None]]:
    return [capability.as_dict() for capability in table.values()]


def _exporters(found: Findings) -> None:
    for api, drivers in {"vulkan": vulkan.list_drivers(), "opengl": opengl.list_drivers()}.items():
        found.drivers += drivers
        for driver in drivers:
            facts = {"name": api, "driver": f"{driver.driver} {driver.version}", "device": driver.name}
            found.exporters.append({**facts, "capabilities": _cells(driver.capabilities)})
        if drivers.reason:
            found.missing_exporters[api] = drivers.reason
    try:
        # The process exporter's table, without starting a process.
        with open_exporter("memfd") as exporter:
            facts = {"name": "process", "driver": exporter.driver, "device": exporter.device}
            found.exporters.append({**facts, "capabilities": _cells(exporter.capabilities)})
    except GpuInteropError as error:
        found.missing_exporters["process"] = str(error)
