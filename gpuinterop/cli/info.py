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
from .._core.registry import InstalledBackend, backends, get_backend
from ..capabilities import Capabilities
from ..errors import GpuInteropError
from ..exporters import open_exporter
from ..exporters.vulkan import list_drivers
from ..testing import stand_ins
from .console import complain, note
from .records import need

__all__ = ["Findings", "add_arguments", "collect", "command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gpuinterop info``."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON, and nothing else")
    parser.add_argument("--all", action="store_true", help="show every cell of every table, one a line")


def command(given: argparse.Namespace) -> int:
    """Show backends, devices and Vulkan drivers, what they can do, and the reason for what they cannot."""
    if not given.json:
        need("rich", "`gpuinterop info` without --json", "cli")
    found = collect()
    for problem in found.problems:
        complain(problem)
    if given.json:
        for text in found.missing_exporters:
            note(text)
        print(json.dumps({"backends": found.backends, "exporters": found.exporters}, indent=2))
        return 0
    from .tables import show

    show(found, every=given.all)
    return 0


class Findings:
    """Facts of this machine.

    Attributes
    ----------
    backends, exporters : list of dict
        The facts, as ``gpuinterop info --json`` prints them.
    tables : dict
        The capability tables, by the identity of the dict that they belong to.
    problems : list of str
        What is wrong with the environment.
    missing_exporters : list of str
        Which exporters do not work here, and why.
    """

    def __init__(self) -> None:
        self.backends: list[dict[str, Any]] = []
        self.exporters: list[dict[str, Any]] = []
        self.tables: dict[int, Capabilities] = {}
        self.problems: list[str] = []
        self.missing_exporters: list[str] = []

    def note(self, capabilities: Capabilities, **facts: Any) -> dict[str, Any]:
        """The facts of a device or an exporter, whose table is kept."""
        result = {**facts, "capabilities": [capability.as_dict() for capability in capabilities.values()]}
        self.tables[id(result)] = capabilities
        return result


def collect() -> Findings:
    """Look at everything that is installed. Never raises for what is broken: it is told instead.

    Returns
    -------
    Findings
    """
    found = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that a backend fell back: it is shown below anyway
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
        result["devices"] = [_device(device, found) for device in backend.devices()]
        result["available"] = True
    except GpuInteropError as error:  # a wrong GPUINTEROP_DISABLE, a driver that fails when asked
        result["reason"] = str(error)
    return result


def _device(device: Device, found: Findings) -> dict[str, Any]:
    return found.note(
        device.capabilities,
        ordinal=device.ordinal,
        name=device.name,
        uuid=str(uuid.UUID(bytes=device.uuid)) if device.uuid else None,
        pci_bus_id=device.pci_bus_id,
        luid=device.luid.hex() if device.luid else None,
    )


def _exporters(found: Findings) -> None:
    drivers = list_drivers()
    for driver in drivers:
        label = f"{driver.driver} {driver.version}"
        found.exporters.append(found.note(driver.capabilities, name="vulkan", driver=label, device=driver.name))
    if drivers.reason:
        found.missing_exporters.append(f"vulkan: {drivers.reason}")
    try:
        # Without the process round it: the table is the same.
        with open_exporter("memfd") as exporter:
            facts = {"name": "process", "driver": exporter.driver, "device": exporter.device}
            found.exporters.append(found.note(exporter.capabilities, **facts))
    except GpuInteropError as error:
        found.missing_exporters.append(f"process: {error}")
