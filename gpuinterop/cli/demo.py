"""``gpuinterop demo``: a wave in memory that two sides share."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import click
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..exporters.base import WaveParameters
from .console import complain, note, stderr, stdout
from .parties import find_device, open_party
from .picture import render
from .wave import Sabotage, WaveRun, choose_sync, run_wave

__all__ = ["demo"]

DAMPING = 0.9955
"""Echoes from the border have faded before they come back to the middle: rings, and no clutter."""


def _size(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    width, _, height = value.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise click.BadParameter(f"{value!r} is no size; write e.g. 512x512.")
    size = int(width), int(height)
    if not all(16 <= edge <= 8192 for edge in size):
        raise click.BadParameter(f"{value!r} is out of range; each edge has 16 to 8192 cells.")
    return size


@click.command()
@click.option("--backend", metavar="NAME", help="The compute side; by default the one that matches the exporter.")
@click.option(
    "--exporter",
    type=click.Choice(["vulkan", "process"]),
    help="The other side: a compute shader, or a child process with NumPy. By default Vulkan where there is a driver.",
)
@click.option(
    "--driver", metavar="NAME", help="Which Vulkan driver, by part of its name: swiftshader, lavapipe, nvidia."
)
@click.option(
    "--sync",
    type=click.Choice(["auto", "native", "bridged"]),
    default="auto",
    show_default=True,
    help="What keeps the two in order. native: semaphores that both drivers know; bridged: the exporter's, whose "
    "signals a CPU thread carries to the stream and back; auto: the first that works, else the host waits for each "
    "side.",
)
@click.option(
    "--frames", type=click.IntRange(1, 1_000_000), default=600, show_default=True, help="How many, on each side."
)
@click.option(
    "--size", metavar="WxH", callback=_size, default="512x512", show_default=True, help="Of the field, in cells."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="wave.png",
    show_default=True,
    help="Where the picture goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
@click.option("--sabotage", type=click.Choice([entry.value for entry in Sabotage]), hidden=True)
@click.option("--timeout", type=click.FloatRange(0.01), default=10.0, hidden=True)
def demo(
    backend: str | None,
    exporter: str | None,
    driver: str | None,
    sync: str,
    frames: int,
    size: tuple[int, int],
    output: Path,
    as_json: bool,
    sabotage: str | None,
    timeout: float,
) -> None:
    """Step a wave in shared memory, a frame on each side in turn, and check every number.

    Each frame the exporter steps the field and signals; the backend's stream waits for that, reads the field through a
    view without a copy, writes a disturbance that depends on it, and signals back. The final field is compared with a
    NumPy simulation of the same frames: the exit status is 0 only when they agree.
    """
    _check_target(output)
    with ExitStack() as cleanup:
        with _noted_warnings():
            party = cleanup.enter_context(open_party(exporter, driver, backend))
            device = find_device(party.identity, backend)
        chosen = choose_sync(party, device, sync)
        progress = cleanup.enter_context(_progress(frames, show=not as_json))
        task = progress.add_task("frames", total=frames)
        run = run_wave(
            party,
            device,
            WaveParameters(width=size[0], height=size[1], damping=DAMPING),
            frames,
            sync=chosen,
            timeout=timeout,
            tick=lambda: progress.advance(task),
            sabotage=Sabotage(sabotage) if sabotage else None,
        )
    failure = ""
    try:
        render(run.field).save(output, format="PNG", optimize=True)
    except Exception as error:  # of whatever kind: the result is worth more than its picture, and is told first
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        failure = f"[bold]error:[/bold] {escape(str(output))} cannot be written: {escape(why)}."
    if as_json:
        click.echo(json.dumps(run.as_dict(None if failure else str(output)), indent=2))
    else:
        stdout().print(_table(run, None if failure else output))
    if failure:
        complain(failure)
    if not run.correct:
        complain(_verdict(run))
        sys.exit(1)
    sys.exit(2 if failure else 0)


def _check_target(output: Path) -> None:
    """Before the run, which may take long. That `output` is no directory, click has seen."""
    if not output.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(output.parent)!r}.", param_hint="--output")
    if not output.exists() and not os.access(output.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"the folder {str(output.parent)!r} is not writable.", param_hint="--output")


@contextmanager
def _noted_warnings() -> Iterator[None]:
    """Turn warnings into notes, also before an error.

    For the choice of who takes part alone: those of the run go through Python's filters, as any program's.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            yield
        finally:
            for warning in caught:
                note(str(warning.message))


def _progress(frames: int, *, show: bool) -> AbstractContextManager[Progress]:
    return Progress(
        TextColumn("[cyan]wave"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=(console := stderr()),
        disable=not (show and console.is_terminal),
        transient=True,
    )


def _table(run: WaveRun, output: Path | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, str]] = [
        ("exporter", f"{run.exporter}: {run.driver}"),
        ("device", f"{run.backend}: {run.device}"),
        ("consumer", run.consumer),
        ("memory", f"{run.memory_handle}, {_bytes(run.shared_bytes)} shared, not copied"),
        ("semaphores", _semaphores(run)),
        ("frames", f"{len(run.frame_us)} of {run.parameters.width} x {run.parameters.height} cells"),
    ]
    if run.median_us is not None and run.p99_us is not None:
        rows.append(("a frame", f"median {run.median_us:,.0f} us, p99 {run.p99_us:,.0f} us"))
    if run.staging_ratio is not None:
        rows.append(("with copies", f"{run.staging_ratio:.2f} times as long, through host staging"))
    if output is not None:
        rows.append(("picture", str(output)))
    for name, text in rows:
        table.add_row(name, escape(text))
    if run.correct:
        off = f"within {run.max_error:.1g} of" if run.max_error else "in every cell that of"
        table.add_row("field", f"[green]correct[/green]: {off} the NumPy simulation")
    else:
        table.add_row("field", f"[red]WRONG[/red]: {run.max_error:.3g} off the NumPy simulation")
    return table


def _semaphores(run: WaveRun) -> str:
    if run.sync.name == "host":
        return f"none are shared, so the host waits for each side in turn. {run.sync.reason}"
    if run.sync.name == "bridged":
        how = "a timeline of the exporter's, bridged: a CPU thread carries its signals to the stream and back."
        return f"{how} {run.sync.reason}".strip()
    what = "one timeline for both ways" if run.sync.name == "timeline" else "two binary ones, one each way"
    return f"{run.semaphore_handle}, {what}, shared"


def _verdict(run: WaveRun) -> str:
    if run.problem:
        return f"[bold]not correct:[/bold] {escape(run.problem)}"
    return (
        f"[bold]not correct:[/bold] the final field is {run.max_error:.3g} off the NumPy simulation: "
        "the two sides were out of step, or did not see each other's writes."
    )


def _bytes(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count = count // 1024 if count % 1024 == 0 else round(count / 1024)
    return f"{count:g} GiB"
