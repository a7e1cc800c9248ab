"""``gpuinterop info``: what works here, what does not, and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
import uuid
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Final

from .. import __version__
from .._core.device import Device
from .._core.discovery import InstalledBackend, backends, get_backend, match_device
from ..capabilities import DOMAIN, Capability, Cell, Operation, Support
from ..errors import GpuInteropError
from ..handles import handle_types
from ..opengl._context import is_same_driver
from ..testing import stand_ins
from ..testing.exporters import open_exporter, opengl, vulkan
from ..testing.exporters.base import Driver, DriverList, Exporter
from .console import columns, complain, note, paint, say, table

__all__ = ["Findings", "add_arguments", "collect", "command"]

_EXPORTS: Final = {
    "memory": Operation.EXPORT_ALLOCATION, "arrays": Operation.EXPORT_ARRAY, "semaphores": Operation.CREATE_SEMAPHORE,
}  # fmt: skip
_SIGNS: Final = {Support.SUPPORTED: ("✓", "green"), Support.UNVERIFIED: ("○", "yellow")}
_GAP: Final = ("·", "dim")
_NO_DRIVER: Final = "Install this GPU's {} driver; in an NVIDIA container, set NVIDIA_DRIVER_CAPABILITIES=all."
_NO_VULKAN: Final = "OpenGL imports semaphores, and llvmpipe's memory, from a Vulkan driver of the same GPU and build."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpuinterop info``."""
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    parser.add_argument("--all", action="store_true", help="show every cell of each table, with its reason")


def command(given: argparse.Namespace) -> int:
    """Show devices, Vulkan and OpenGL drivers, their handoffs, and what can be shared.

    First comes the answer in a few lines, with numbers for the reasons listed below it. Then come versions, libraries
    and what each device and each driver can do.
    """
    findings = collect()
    if findings.problem:
        complain(findings.problem)
    if given.json:
        for api, drivers in findings.drivers.items():
            if drivers.reason:
                note(f"{api}: {drivers.reason}")
        exporters = [*chain(*findings.drivers.values()), *findings.processes]
        print(json.dumps({"backends": findings.backends, "exporters": exporters}, indent=2, default=_as_dict))
    else:
        _Text(findings).show(every=given.all)
    return 0


@dataclass
class Findings:
    """Backends as ``--json`` prints them, but with `Device` objects; each API's drivers; exporters of other processes.

    `problem` says what is wrong with the environment.
    """

    backends: list[dict[str, Any]] = field(default_factory=list)
    drivers: dict[str, DriverList] = field(default_factory=dict)
    processes: list[Exporter] = field(default_factory=list)
    problem: str = ""


def collect() -> Findings:
    """Look at everything that is installed. What is broken is reported and never raised."""
    findings = Findings()
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a backend's fallback, shown anyway
        try:
            findings.backends += map(_backend, backends().values())
            if os.environ.get("GPUINTEROP_BACKEND"):
                get_backend()
        except GpuInteropError as error:
            findings.problem = str(error)
        findings.drivers = {"Vulkan": vulkan.list_drivers(), "OpenGL": opengl.list_drivers()}
        with suppress(GpuInteropError), open_exporter("memfd") as exporter:  # its table, without starting a process
            findings.processes.append(exporter)
    return findings


def _backend(installed: InstalledBackend) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": installed.name, "available": False, "reason": None, "versions": {}, "libraries": {}, "stand_in": None,
        "unknown_version": None, "devices": [],
    }  # fmt: skip
    try:
        if (error := installed.error) is not None:
            return {**facts, "reason": str(error)}
        backend = get_backend(installed.name)
        facts |= {"versions": backend.versions, "libraries": backend.libraries}
        facts["stand_in"] = stand_ins.stand_in(backend.libraries) or None
        facts["unknown_version"] = backend.unknown_version or None
        return {**facts, "available": True, "devices": backend.devices()}
    except GpuInteropError as error:  # a wrong GPUINTEROP_DISABLE, or a driver that fails
        return {**facts, "reason": str(error)}


def _as_dict(item: Device | Driver | Exporter) -> dict[str, Any]:
    """The form printed by ``gpuinterop info --json``."""
    cells = {"capabilities": [capability.as_dict() for capability in item.capabilities.values()]}
    if isinstance(item, Device):
        return {"ordinal": item.ordinal, "name": item.name, **_identity(item), **cells}
    if isinstance(item, Driver):
        return {"name": item.api, "driver": f"{item.driver} {item.version}", "device": item.name, **cells}
    return {"name": "process", "driver": item.driver, "device": item.device, **cells}


def _identity(device: Device) -> dict[str, str | None]:
    text = str(uuid.UUID(bytes=device.uuid)) if device.uuid else None
    return {"uuid": text, "pci_bus_id": device.pci_bus_id, "luid": device.luid.hex() if device.luid else None}


class _Text:
    """The text of ``gpuinterop info``. Equal devices, or drivers, are one group: eight GPUs are one line."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._reasons: dict[str, int] = {}
        alike: dict[tuple[Any, ...], list[Any]] = {}
        devices = chain(*(backend["devices"] for backend in findings.backends))
        for member in chain(devices, *findings.drivers.values()):
            supports = [capability.support for capability in member.capabilities.values()]
            alike.setdefault((*_names(member), *supports), []).append(member)
        self._groups = {_label(members): members for members in alike.values()}

    def show(self, *, every: bool) -> None:
        """Print what works, the reasons for what does not, versions, libraries, and what can be done."""
        system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
        say((f"gpuinterop {__version__}, {system}", "bold"))
        for backend in self._findings.backends:
            self._answer(backend)
        for api, drivers in self._findings.drivers.items():
            for label, members in self._groups_of(drivers):
                self._line(label, _names(members[0])[1])
                for shared, why in dict.fromkeys(map(self._shared, members)):
                    self._line("", shared, why)
            if drivers.reason:
                self._line(api.lower(), paint("works in part" if drivers else "does not work", "red"), drivers.reason)
        if any(backend["devices"] for backend in self._findings.backends):
            self._line("try", paint("gpuinterop demo", "green"))
        say()
        for reason, number in self._reasons.items():
            say((f"[{number}] {reason}", ""), hang=4)
        say()
        self._facts()
        (self._every_cell if every else self._table)()

    def _groups_of(self, members: list[Any]) -> list[tuple[str, list[Any]]]:
        return [(label, group) for label, group in self._groups.items() if group[0] in members]

    def _line(self, label: str, text: str, why: str | None = "") -> None:
        """Print a label and its text, with the number of the reason."""
        number = self._reasons.setdefault(why, len(self._reasons) + 1) if why else 0
        say((f"{label:11} ", "bold"), (text, ""), (f" [{number}]" if number else "", "dim"), hang=12)

    def _answer(self, backend: dict[str, Any]) -> None:
        """Print whether it works, what its devices export to other processes, and the APIs that lack a driver."""
        if not backend["devices"]:
            works = "works, but has no device" if backend["available"] else "does not work"
            self._line(backend["name"], paint(works, "red"), backend["reason"])
        stand_in = f"No hardware: its driver is {backend['stand_in']}." if backend["stand_in"] else ""
        remarks = " ".join(filter(None, (stand_in, backend["unknown_version"])))
        for label, devices in self._groups_of(backend["devices"]):
            self._line(label, f"{paint('works', 'green')}: {devices[0].name}", remarks)
            exports = [f"{noun} {kinds}" for noun, need in _EXPORTS.items() if (kinds := _kinds(devices, need))]
            self._line("", f"exports {'; '.join(exports) or 'nothing to other processes'}")
            for api, drivers in self._findings.drivers.items():
                pairs = [(gpu.identity, driver.identity) for gpu in devices for driver in drivers]
                if pairs and not any(gpu.is_cpu or gpu.matches(driver) for gpu, driver in pairs):
                    self._line("", paint(f"no {api} driver for this device", "yellow"), _NO_DRIVER.format(api))

    def _shared(self, driver: Driver) -> tuple[str, str]:
        """Return what a driver shares with its device, and why not more."""
        try:
            device = match_device(driver.identity)
        except GpuInteropError as error:
            return "with no device", str(error)
        label = next((label for label, members in self._groups.items() if device in members), _label([device]))
        missing: dict[str, list[str]] = {}
        for handoff, gap in driver.gaps(driver, device).items():
            if gap is None:
                break
            missing.setdefault(gap.capability.reason, []).append(handoff)
        else:
            handoff = "none: the host waits"
        how = "bridged, by share_handoff(allow=('bridged',))" if handoff == "bridged" else handoff
        why = [f"No {' or '.join(handoffs)} handoff: {reason}" for reason, handoffs in missing.items()]
        vulkans = self._findings.drivers["Vulkan"]
        if driver.api == "opengl" and not any(is_same_driver(driver.identity, other.identity) for other in vulkans):
            how, why = f"{how}, through Vulkan, which is missing", [_NO_VULKAN]
        memory = _kinds([driver, device], Operation.IMPORT_MEMORY, Operation.MAP_BUFFER) or "none"
        return f"with {label}: memory {memory}; handoff {how}", " ".join(why)

    def _facts(self) -> None:
        """Print versions, libraries, and device identities."""
        for backend in self._findings.backends:
            if facts := [*backend["versions"].items(), *backend["libraries"].items()]:
                self._line(backend["name"], ", ".join(map(" ".join, facts)))
            for device in backend["devices"]:
                if marks := [f"{name} {mark}" for name, mark in _identity(device).items() if mark]:
                    self._line(_label([device]), ", ".join(marks))

    def _table(self) -> None:
        """Print a row for the operations of one handle type with equal signs, if a device or driver can do them."""
        rows: dict[tuple[str, ...], list[str]] = {}
        for cell in sorted(DOMAIN, key=_kind):
            capabilities = [members[0].capabilities.of(cell) for members in self._groups.values()]
            if any(capabilities):
                signs = (paint(*_SIGNS.get(capability.support, _GAP)) for capability in capabilities)
                rows.setdefault((_kind(cell), *signs), []).append(cell.operation.value)
        lines = [[kind, ", ".join(operations), *signs] for (kind, *signs), operations in rows.items()]
        for line in table([["", "", *self._groups], *lines], columns(), keys=2):
            say((line, ""))
        say(("✓ shown by a run on this kind of hardware; ○ documented by the vendor; · a gap, see --all", "dim"))

    def _every_cell(self) -> None:
        """Print each cell of each table with its reason; neighbours that differ only in the handle type are one."""
        for label, (member, *_) in self._groups.items():
            say((f"\n{label}  {_names(member)[1]}", "bold"))
            for cell, alike in groupby(member.capabilities.values(), lambda cell: replace(cell, handle_type=None)):
                support = paint(cell.support.value, _SIGNS.get(cell.support, _GAP)[1])
                instead = f" Instead: {cell.workaround}" if cell.workaround else ""
                source = f"{cell.scope.value}; {cell.reference}" if cell.scope else cell.reference
                what = f"{cell.operation.value} {', '.join(map(_kind, alike))} {support}"
                say((f"{what}\n    {cell.reason}{instead} ({source})", ""), hang=4)


def _names(member: Any) -> tuple[str, str]:
    """Return the backend or API of a device or driver, and its name."""
    if isinstance(member, Driver):
        return member.api, f"{member.name}, {member.driver} {member.version}"
    return member.backend, member.name


def _label(members: list[Any]) -> str:
    """Return the label of equal devices or drivers: ``cuda:0-7``."""
    numbers = [member.index if isinstance(member, Driver) else member.ordinal for member in members]
    consecutive = numbers[1:] and numbers == [*range(numbers[0], numbers[-1] + 1)]
    return f"{_names(members[0])[0]}:" + (f"{numbers[0]}-{numbers[-1]}" if consecutive else ",".join(map(str, numbers)))


def _kind(cell: Cell | Capability) -> str:
    return cell.handle_type.__name__ if cell.handle_type else "no handle"


def _kinds(members: list[Any], *operations: Operation) -> str:
    """Name the handle types with which all members support all operations."""
    needs = [(member.capabilities, operation) for member in members for operation in operations]
    kinds = (kind for kind in handle_types().values() if all(able.supports((need, kind)) for able, need in needs))
    return ", ".join(kind.__name__ for kind in kinds)
