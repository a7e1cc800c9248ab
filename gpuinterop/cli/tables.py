"""What the commands draw with rich, which the extra 'cli' brings: the tables of ``info``, the demo's result."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..capabilities import Capabilities, Capability, Operation, Support
from ..handles import FdHandle, Handle, PointerHandle, Win32Handle
from .console import ASCII, make_tolerant
from .info import Findings

__all__ = ["show", "stderr", "stdout"]

_SHARED = (
    Operation.IMPORT_MEMORY,
    Operation.MAP_BUFFER,
    Operation.MAP_MIPMAPPED_ARRAY,
    Operation.IMPORT_SEMAPHORE,
    Operation.SIGNAL_SEMAPHORE,
    Operation.WAIT_SEMAPHORE,
    Operation.EXPORT_ARRAY,
)
"""What an exporter takes part in; the rest of the table is a device's own business."""
_MARKS = {Support.SUPPORTED: "[green]✓[/green]", Support.UNVERIFIED: "[yellow]○[/yellow]"}


class _Console(Console):
    """Console whose marks are ASCII where its output has no Unicode; rich does the same with boxes."""

    def render_str(self, text: str, **options: Any) -> Text:
        if not self.encoding.startswith("utf"):
            text = text.translate(ASCII)
        return super().render_str(text, **options)


def stdout() -> Console:
    """Return a console on what ``sys.stdout`` is now."""
    make_tolerant(sys.stdout)
    return _Console(highlight=False)


def stderr() -> Console:
    """Return a console on what ``sys.stderr`` is now."""
    make_tolerant(sys.stderr)
    return _Console(stderr=True, highlight=False)


def show(found: Findings, *, every: bool) -> None:
    """Print what ``gpuinterop info`` has found."""
    console = stdout()
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
        unknown = f"\n[yellow]{escape(entry['unknown_version'])}[/yellow]" if entry["unknown_version"] else ""
        table.add_row(
            entry["name"],
            "[green]works[/green]",
            f"{count} device{'' if count == 1 else 's'}; {escape(details)}{unknown}{stand_in}"
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
    """List gaps by their reason; those of another system come last, and in short."""
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
