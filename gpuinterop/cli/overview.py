"""The text of ``gpuinterop info``: the answer, the reasons for it, and what each device and driver can do."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from .. import __version__
from .._core.device import Device
from .._core.discovery import match_device
from ..capabilities import DOMAIN, Capabilities, Capability, Cell, Operation, Support
from ..errors import GpuInteropError
from ..graphics.modes import MODES
from ..handles import PointerHandle, is_here
from ..opengl._context import is_same_driver
from ..testing.exporters.base import Driver
from .console import columns, paint, say, table
from .info import Findings

__all__ = ["show"]

_MEMORY: Final = (Operation.IMPORT_MEMORY, Operation.MAP_BUFFER)
_DRIVERS: Final = frozenset(
    (
        *_MEMORY, Operation.MAP_MIPMAPPED_ARRAY, Operation.IMPORT_SEMAPHORE, Operation.SIGNAL_SEMAPHORE,
        Operation.WAIT_SEMAPHORE, Operation.EXPORT_ARRAY,
    )
)  # fmt: skip
"""Operations of Vulkan and OpenGL drivers; all others belong to devices."""
_PROCESSES: Final = {
    "memory": Operation.EXPORT_ALLOCATION,
    "arrays": Operation.EXPORT_ARRAY,
    "semaphores": Operation.CREATE_SEMAPHORE,
}
_SIGNS: Final = {Support.SUPPORTED: ("✓", "green"), Support.UNVERIFIED: ("○", "yellow")}
_GAP: Final = ("·", "dim")
_LEGEND: Final = {
    "✓": "shown by a run on this kind of hardware",
    "○": "documented by the vendor",
    "·": "a gap, see --all",
}
_APIS: Final = {"vulkan": "Vulkan", "opengl": "OpenGL"}
_NO_DRIVER: Final = (
    "{api}'s loader lists no driver for it. Install the {api} driver of this GPU; in an NVIDIA container, set "
    "NVIDIA_DRIVER_CAPABILITIES=all."
)


@dataclass(eq=False)
class _Party:
    """Devices of a backend, or drivers of an API, with the same name and table: eight GPUs are one line."""

    kind: str
    name: str
    capabilities: Capabilities
    members: dict[int, Device | Driver]

    @property
    def label(self) -> str:
        """``cuda:0-7``."""
        numbers = sorted(self.members)
        if len(numbers) > 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
            return f"{self.kind}:{numbers[0]}-{numbers[-1]}"
        return f"{self.kind}:{','.join(map(str, numbers))}"

    def sign(self, cell: Cell) -> tuple[str, str]:
        if self.kind in _APIS and cell.operation not in _DRIVERS:
            return "", ""
        return _SIGNS.get(self.capabilities.of(cell).support, _GAP)


def show(found: Findings, *, every: bool) -> None:
    """Print the findings of ``gpuinterop info``."""
    text = _Text(found, every)
    system = f", Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    say((f"gpuinterop {__version__}", "bold"), (system, ""))
    text.answer()
    text.reasons()
    text.facts()
    if every:
        text.every_cell()
    elif text.parties:
        text.table()


class _Text:
    def __init__(self, found: Findings, every: bool) -> None:
        self._found, self._every = found, every
        parties: dict[tuple[Any, ...], _Party] = {}
        members: list[Device | Driver] = [*found.devices, *found.drivers]
        for one in members:
            if isinstance(one, Driver):
                kind, number, name = one.api, one.index, f"{one.name}, {one.driver} {one.version}"
            else:
                kind, number, name = one.backend, one.ordinal, one.name
            alike = kind, name, *(cell.support for cell in one.capabilities.values())
            parties.setdefault(alike, _Party(kind, name, one.capabilities, {})).members[number] = one
        self.parties = [*parties.values()]
        names = [backend["name"] for backend in found.backends] + [party.label for party in self.parties]
        names += _APIS
        self._width = max(map(len, names)) + 2
        self._reasons: dict[str, int] = {}

    def _line(self, label: str, *parts: tuple[str, str], why: str = "") -> None:
        """Print a label and its text, with the number of the reason."""
        number = self._reasons.setdefault(why, len(self._reasons) + 1) if why else 0
        note = (f" [{number}]", "dim") if why else ("", "")
        say((f"{label:{self._width}}", "bold"), *parts, note, hang=self._width)

    def answer(self) -> None:
        """Print what works, which handoffs exist, what can be shared, and what to do next."""
        pairs = {party: [*self._pairs(party)] for party in self.parties if party.kind in _APIS}
        partners: dict[str, set[str]] = {}
        for party, found in pairs.items():
            partners.setdefault(_APIS[party.kind], set()).update(partner for partner, *_ in found)
        for backend in self._found.backends:
            if not backend["available"]:
                self._line(backend["name"], ("does not work", "red"), why=backend["reason"])
            elif not backend["devices"]:
                self._line(backend["name"], ("works, but has no device", "yellow"))
            for party in (party for party in self.parties if party.kind == backend["name"]):
                stand_in = f"No hardware: its driver is {backend['stand_in']}." if backend["stand_in"] else ""
                remarks = " ".join(filter(None, (stand_in, backend["unknown_version"])))
                self._line(party.label, ("works", "green"), (f": {party.name}", ""), why=remarks)
                if shares := "; ".join(_for_processes(party.capabilities)):
                    self._line("", (f"exports {shares}", ""))
                is_gpu = not all(one.identity.is_cpu for one in party.members.values())
                for api in (api for api, labels in partners.items() if is_gpu and party.label not in labels):
                    self._line("", (f"no {api} driver for this device", "yellow"), why=_NO_DRIVER.format(api=api))
        for party, found in pairs.items():
            self._line(party.label, (party.name, ""))
            for partner, text, why in found:
                self._line("", (f"with {partner or 'no device'}{text}", ""), why=why)
        for name in _APIS:
            if reason := self._found.missing_exporters.get(name):
                some = any(party.kind == name for party in pairs)
                self._line(name, ("a driver does not work" if some else "no driver works", "red"), why=reason)
        if self._found.devices:
            more = "" if self._every else ", and gpuinterop info --all for each gap's reason"
            self._line("try", ("gpuinterop demo", "green"), (more, ""))

    def _pairs(self, party: _Party) -> dict[tuple[str, str, str], None]:
        """Return the labels of the drivers' devices, what both share, and why not more."""
        found: dict[tuple[str, str, str], None] = {}
        for driver in party.members.values():
            assert isinstance(driver, Driver)
            try:
                device = match_device(driver.identity)
            except GpuInteropError as error:
                found["", "", str(error)] = None
                continue
            mine = f"{device.backend}:{device.ordinal}"  # the backend may fail on other devices
            partner = next((one.label for one in self.parties if device in one.members.values()), mine)
            text, why = _shared(driver, device)
            if driver.api == "opengl" and not self._has_vulkan(driver):
                text = ": needs Vulkan" if driver.identity.is_cpu else f"{text}, through Vulkan, which is missing"
                why = (
                    "OpenGL imports semaphores, and llvmpipe's memory, from a Vulkan driver of the same GPU and build."
                )
            found[partner, text, why] = None
        return found

    def _has_vulkan(self, driver: Driver) -> bool:
        """Whether a Vulkan driver of the same device and build can make what OpenGL cannot."""
        drivers = [one for party in self.parties if party.kind == "vulkan" for one in party.members.values()]
        return any(is_same_driver(driver.identity, one.identity) for one in drivers)

    def reasons(self) -> None:
        """Print the numbered reasons."""
        say()
        for reason, number in self._reasons.items():
            say((f"[{number}] {reason}", ""), hang=4)

    def facts(self) -> None:
        """Print versions, libraries, and device identities."""
        say()
        for backend in self._found.backends:
            facts = [f"{name} {fact}" for kind in ("versions", "libraries") for name, fact in backend[kind].items()]
            if facts:
                self._line(backend["name"], (", ".join(facts), ""))
            for device in backend["devices"]:
                if marks := [f"{name} {device[name]}" for name in ("uuid", "pci_bus_id", "luid") if device[name]]:
                    self._line(f"{backend['name']}:{device['ordinal']}", (", ".join(marks), ""))

    def table(self) -> None:
        """Print a row for the operations of one handle type with equal signs, if a device or driver can do them."""
        rows: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
        for cell in sorted(DOMAIN, key=lambda cell: _PLACES.index(cell.handle_type)):
            name = cell.handle_type.__name__ if cell.handle_type else ""
            signs = tuple(party.sign(cell) for party in self.parties)
            if any(sign in _SIGNS.values() for sign in signs):
                rows.setdefault((name, signs), []).append(cell.operation.value)
        there = {name for name, _ in rows} | {operation for operations in rows.values() for operation in operations}
        absent = [kind.__name__ for kind in _PLACES if kind and is_here(kind) and not issubclass(kind, PointerHandle)]
        absent += [cell.operation.value for cell in DOMAIN if cell.handle_type is None]
        lines = [
            [name, ", ".join(operations), *(paint(*sign) for sign in signs)]
            for (name, signs), operations in rows.items()
        ]
        for line in table([["", "", *(party.label for party in self.parties)], *lines], columns()):
            say((line, ""))
        if nothing := [name for name in absent if name not in there]:
            say((f"None has {', '.join(nothing)}.", ""))
        shown = {sign for _, signs in rows for sign, _ in signs}
        say(("; ".join(f"{sign} {meaning}" for sign, meaning in _LEGEND.items() if sign in shown), "dim"))

    def every_cell(self) -> None:
        """Print each cell of each table with its reason; cells that differ only in the handle type are one."""
        for party in self.parties:
            say()
            say((f"{party.label}  {party.name}", "bold"))
            for operation in Operation:
                say((operation.value, "bold"))
                alike: dict[Capability, list[str]] = {}
                for cell in (cell for cell in party.capabilities.values() if cell.operation is operation):
                    names = alike.setdefault(replace(cell, handle_type=None), [])
                    names += [cell.handle_type.__name__] if cell.handle_type else []
                for cell, names in alike.items():
                    style = "green" if cell.support is Support.SUPPORTED else "yellow" if cell else "red"
                    instead = f" Instead: {cell.workaround}" if cell.workaround else ""
                    source = f"{cell.scope.value}; {cell.reference}" if cell.scope else cell.reference
                    say(("  ", ""), (cell.support.value, style), (f" {', '.join(names)}".rstrip(), ""), hang=4)
                    say((f"    {cell.reason}{instead} ({source})".rstrip(), ""))


_PLACES: Final = [*dict.fromkeys(cell.handle_type for cell in DOMAIN if cell.handle_type), None]
"""The handle types in the table's order; cells without one are last."""


def _for_processes(capabilities: Capabilities) -> Iterator[str]:
    for noun, operation in _PROCESSES.items():
        names = [
            cell.handle_type.__name__
            for cell in capabilities.values()
            if cell and cell.operation is operation and cell.handle_type
        ]
        if names:
            yield f"{noun} {', '.join(names)}"


def _shared(driver: Driver, device: Device) -> tuple[str, str]:
    """Return what a driver and its device share, and why not more."""
    gaps = driver.gaps(driver, device)
    mode = next((mode for mode in MODES if gaps[mode] is None), "")
    better: dict[str, list[str]] = {}
    for name in MODES[: MODES.index(mode) if mode else None]:
        if (gap := gaps[name]) is not None:
            better.setdefault(gap.capability.reason, []).append(name)
    reasons = [f"No {' or '.join(names)} handoff: {reason}" for reason, names in better.items()]
    if mode == "bridged":
        reasons.append("share_handoff bridges with allow=('bridged',).")
    memory = [
        kind.__name__
        for kind in _PLACES
        if kind
        and all(one.capabilities.supports(*((operation, kind) for operation in _MEMORY)) for one in (driver, device))
    ]
    how = {"": "none: the host waits", "bridged": "bridged, if allowed"}.get(mode, mode)
    return f": memory {', '.join(memory) or 'none'}; handoff {how}", " ".join(reasons)
