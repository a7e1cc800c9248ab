"""``gpuinterop info``: what works here, what does not, and why."""

from __future__ import annotations

import json
import os
import platform
import sys
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .. import __version__
from .._core import stand_ins
from .._core.device import Device
from .._core.registry import InstalledBackend, backends, get_backend
from ..capabilities import Capabilities, Capability, Operation, Support
from ..errors import GpuInteropError
from ..exporters import open_exporter
from ..exporters.vulkan import list_drivers
from ..handles import FdHandle, Handle, PointerHandle, Win32Handle
from .console import complain, note, stdout

__all__ = ["collect", "info"]

_SHARED = (
    Operation.IMPORT_MEMORY,
    Operation.MAP_BUFFER,
    Operation.MAP_MIPMAPPED_ARRAY,
    Operation.IMPORT_SEMAPHORE,
    Operation.SIGNAL_SEMAPHORE,
    Operation.WAIT_SEMAPHORE,
)
"""What an exporter takes part in; the rest of the table is a device's own business."""
_MARKS = {Support.SUPPORTED: "[green]✓[/green]", Support.UNVERIFIED: "[yellow]○[/yellow]"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, and nothing else.")
@click.option("--all", "every", is_flag=True, help="Show every cell of every table, one a line.")
def info(as_json: bool, every: bool) -> None:
    """Show backends, devices and Vulkan drivers, what they can do, and the reason for what they cannot."""
    found = collect()
    for problem in found.problems:
        complain(escape(problem))
    if as_json:
        for text in found.missing_exporters:
            note(text)
        click.echo(json.dumps({"backends": found.backends, "exporters": found.exporters}, indent=2))
        return
    _show(stdout(), found, every=every)


class Findings:
    """What is here.

    Attributes
    ----------
    backends, exporters : list of dict
        As ``gpuinterop info --json`` prints them.
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
        "devices": [],
    }  # fmt: skip
    try:
        if (error := entry.error) is not None:
            result["reason"] = str(error)
            return result
        backend = get_backend(entry.name)
        result["versions"] = dict(backend.versions)
        result["libraries"] = dict(backend.libraries)
        result["stand_in"] = stand_ins.stand_in(backend.libraries) or None
        result["devices"] = [_device(device, found) for device in backend.devices()]
        result["available"] = True
    except GpuInteropError as error:  # a wrong GPUINTEROP_DISABLE, a driver that fails when asked
        result["reason"] = str(error)
    return result


def _device(device: Device, found: Findings) -> dict[str, Any]:
    result = {
        "ordinal": device.ordinal,
        "name": device.name,
        "uuid": str(uuid.UUID(bytes=device.uuid)) if device.uuid else None,
        "pci_bus_id": device.pci_bus_id,
        "luid": device.luid.hex() if device.luid else None,
        "capabilities": [capability.as_dict() for capability in device.capabilities.values()],
    }
    found.tables[id(result)] = device.capabilities
    return result


def _exporters(found: Findings) -> None:
    drivers = list_drivers()
    for driver in drivers:
        _exporter("vulkan", f"{driver.driver} {driver.version}", driver.name, driver.capabilities, found)
    if drivers.reason:
        found.missing_exporters.append(f"vulkan: {drivers.reason}")
    try:
        # Without the process round it: the table is the same.
        with open_exporter("memfd") as exporter:
            _exporter("process", exporter.driver, exporter.device, exporter.capabilities, found)
    except GpuInteropError as error:
        found.missing_exporters.append(f"process: {error}")


def _exporter(name: str, driver: str, device: str, capabilities: Capabilities, found: Findings) -> None:
    result = {
        "name": name,
        "driver": driver,
        "device": device,
        "capabilities": [capability.as_dict() for capability in capabilities.values()],
    }
    found.tables[id(result)] = capabilities
    found.exporters.append(result)


# -- for people ----------------------------------------------------------------------------------------------------


def _show(console: Console, found: Findings, *, every: bool) -> None:
    console.print(
        f"[bold]gpuinterop {__version__}[/bold]  Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}\n"
    )
    console.print("[bold cyan]Backends[/bold cyan]")
    if found.backends:
        console.print(_backend_table(found.backends))
    else:
        console.print("  none is installed: reinstall gpuinterop, which brings the host backend.\n")
    for backend in found.backends:
        for device in backend["devices"]:
            marks = [f"{key} {device[key]}" for key in ("uuid", "pci_bus_id", "luid") if device[key]]
            console.print(
                f"[bold cyan]Device {backend['name']}:{device['ordinal']}[/bold cyan]  "
                f"[bold]{escape(device['name'])}[/bold]  [dim]{escape('  '.join(marks))}[/dim]"
            )
            console.print(_capabilities(found.tables[id(device)], every=every))
    for exporter in found.exporters:
        title = "Vulkan driver" if exporter["name"] == "vulkan" else "Process, with NumPy"
        console.print(
            f"[bold cyan]{title}[/bold cyan]  [bold]{escape(exporter['device'])}[/bold]  "
            f"[dim]{escape(exporter['driver'])}[/dim]"
        )
        console.print(_capabilities(found.tables[id(exporter)], every=every, only=_SHARED))
    for text in found.missing_exporters:
        console.print(f"[yellow]Not here:[/yellow] {escape(text)}")
    console.print(
        "[dim]✓ shown by a recorded run on such hardware   ○ said by the vendor, not shown yet; usable   "
        "· not possible, see the reasons[/dim]"
    )
    if not every:
        console.print("[dim]--all shows every cell, --json everything for programs.[/dim]")


def _backend_table(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for entry in entries:
        if not entry["available"]:
            table.add_row(entry["name"], "[red]does not work[/red]", escape(entry["reason"]))
            continue
        count = len(entry["devices"])
        details = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        paths = "\n".join(f"{name}: {path}" for name, path in entry["libraries"].items())
        stand_in = f"\n[yellow]no hardware: {escape(entry['stand_in'])}[/yellow]" if entry["stand_in"] else ""
        table.add_row(
            entry["name"],
            "[green]works[/green]",
            f"{count} device{'' if count == 1 else 's'}; {escape(details)}{stand_in}"
            + (f"\n[dim]{escape(paths)}[/dim]" if paths else ""),
        )
    return table


def _capabilities(table: Capabilities, *, every: bool, only: Sequence[Operation] = tuple(Operation)) -> RenderableType:
    if every:
        return _every_cell(table.values())
    cells = [capability for capability in table.values() if capability.operation in only]
    parts: list[RenderableType] = []
    if any(cells):
        parts.append(_matrix(table, [capability for capability in cells if capability]))
    parts.append(_gaps([capability for capability in cells if not capability]))
    return Padding(Group(*parts), (0, 0, 1, 2))


def _matrix(table: Capabilities, usable: Sequence[Capability]) -> Table:
    """Usable cells: a row an operation, a column a handle type."""
    handle_types = list(dict.fromkeys(capability.handle_type for capability in usable if capability.handle_type))
    matrix = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    matrix.add_column("")
    for handle_type in handle_types:
        matrix.add_column(handle_type.type_name, justify="center")
    for operation in dict.fromkeys(capability.operation for capability in usable):
        if (alone := table.get((operation, None))) is not None:
            matrix.add_row(f"{operation.value} {_MARKS.get(alone.support, '·')}", *[""] * len(handle_types))
            continue
        marks = []
        for handle_type in handle_types:
            found = table.get((operation, handle_type))
            marks.append("" if found is None else _MARKS.get(found.support, "[dim]·[/dim]"))
        matrix.add_row(operation.value, *marks)
    return matrix


def _gaps(gaps: Iterable[Capability]) -> RenderableType:
    """What cannot be, a reason at a time; what belongs to another system comes last, and in short."""
    by_reason: dict[tuple[bool, str], tuple[dict[str, list[str]], str]] = {}
    for gap in gaps:
        handle_type = gap.handle_type.type_name if gap.handle_type else ""
        foreign = gap.handle_type is not None and _foreign(gap.handle_type)
        cells, _ = by_reason.setdefault((foreign, gap.reason), ({}, gap.workaround))
        cells.setdefault(handle_type, []).append(gap.operation.value)
    listing = Table.grid(padding=(0, 1))
    listing.add_column(style="red", no_wrap=True)
    listing.add_column(overflow="fold")
    for (foreign, reason), (cells, workaround) in sorted(by_reason.items(), key=lambda entry: entry[0][0]):
        text = f"{escape(', '.join(cells) if foreign else _cells(cells))}\n[dim]{escape(reason)}[/dim]"
        if workaround and not foreign:
            text += f"\n[green]instead:[/green] [dim]{escape(workaround)}[/dim]"
        listing.add_row("✗", text)
    return listing


def _foreign(handle_type: type[Handle]) -> bool:
    """Whether there are no such handles on this system: NvSci's are those of embedded ones alone."""
    if issubclass(handle_type, PointerHandle):
        return True
    return issubclass(handle_type, FdHandle if sys.platform == "win32" else Win32Handle)


def _cells(cells: Mapping[str, Sequence[str]]) -> str:
    """``opaque_fd, dma_buf_fd: import_memory, map_buffer``, with handle types of the same gaps together."""
    together: dict[tuple[str, ...], list[str]] = {}
    for handle_type, operations in cells.items():
        together.setdefault(tuple(operations), []).append(handle_type)
    parts = []
    for operations, handle_types in together.items():
        names = ", ".join(name for name in handle_types if name)
        parts.append(f"{names}: {', '.join(operations)}" if names else ", ".join(operations))
    return "; ".join(parts)


def _every_cell(cells: Iterable[Capability]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    previous: Operation | None = None
    for cell in cells:
        if cell.operation is not previous:
            table.add_row(f"[bold]{cell.operation.value}[/bold]")
            previous = cell.operation
        style = "green" if cell.support is Support.SUPPORTED else "yellow" if cell else "red"
        why = escape(cell.reason)
        if cell.workaround:
            why += f" [green]Instead:[/green] {escape(cell.workaround)}"
        scope = f"{cell.scope.value}; " if cell.scope else ""
        table.add_row(
            f"  {cell.handle_type.type_name if cell.handle_type else ''}",
            f"[{style}]{cell.support.value}[/{style}]",
            f"{why} [dim]({escape(scope + cell.reference)})[/dim]",
        )
    return Padding(table, (1, 0, 1, 2))
