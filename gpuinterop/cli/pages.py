"""A page of headings, tables and lists, as text, Markdown and HTML. Its content is untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Final, TypeAlias

from .console import columns, table, wrap

__all__ = ["Items", "Section", "Table", "html", "markdown", "text"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with as many texts as columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    red: Sequence[int] = ()
    """Numbers of the rows that HTML shows in red."""


@dataclass(frozen=True, slots=True)
class Items:
    """Items of a list."""

    texts: Sequence[str]


Block: TypeAlias = str | Table | Items
Section: TypeAlias = tuple[str, Sequence[Block]]
"""A heading, and its paragraphs, tables and lists. An empty section says so."""


def text(page: Iterable[Section]) -> str:
    """Write the page for a terminal."""
    sections = ("\n".join([heading, *chain(*map(_lines, blocks))]) for heading, blocks in page)
    return "\n\n".join(sections)


def _lines(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        yield from wrap(_plain(block), columns())
    elif isinstance(block, Items):
        for one in block.texts:
            yield from wrap(f"- {_plain(one)}", columns(), hang=2)
        if not block.texts:
            yield "none"
    else:
        rows = [[_plain(one) for one in row] for row in (block.columns, *block.rows)]
        yield from table(rows, columns())
        if not block.rows:
            yield "none"


def _plain(one: str) -> str:
    """Drop characters that would move a terminal's cursor or colour it."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", one)


def markdown(page: Iterable[Section]) -> str:
    """Write the page as Markdown, for a job's summary on GitHub and the like."""
    parts = (f"## {_marked(heading)}\n\n" + "\n\n".join(map(_markdown, blocks)) for heading, blocks in page)
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return _marked(block)
    if isinstance(block, Items):
        return "\n".join(f"- {_marked(one)}" for one in block.texts) or "none"
    rows = [block.columns, ["---"] * len(block.columns), *block.rows]
    return "\n".join(f"| {' | '.join(map(_marked, row))} |" for row in rows)


def _marked(one: str) -> str:
    """Escape Markdown, and HTML within it; a table's rule stays."""
    return one if one == "---" else re.sub(r"([\\`*_\[\]<>|#~&!])", r"\\\1", _plain(one))


_STYLE: Final = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid #8884; padding: .2rem .6rem; text-align: left; vertical-align: top; }
tr:nth-child(even) { background: #8881; }
tr.red { background: #e532; }
tr.red :nth-child(2) { color: #d33; font-weight: bold; }
"""


def html(page: Iterable[Section]) -> str:
    """Write the page as one HTML file that loads nothing."""
    parts = (f"<h2>{escape(heading)}</h2>\n" + "\n".join(map(_html, blocks)) for heading, blocks in page)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>gpuinterop matrix</title>\n<style>\n{_STYLE}</style>\n<h1>gpuinterop matrix</h1>\n"
        + "\n".join(parts)
        + "\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Items):
        return f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in block.texts)}</ul>" if block.texts else "<p>none</p>"
    head = "".join(f"<th>{escape(one)}</th>" for one in block.columns)
    rows = [
        f"<tr{' class=red' * (number in block.red)}>{''.join(f'<td>{escape(one)}</td>' for one in row)}</tr>"
        for number, row in enumerate(block.rows)
    ]
    return "<table>\n" + "\n".join([f"<tr>{head}</tr>", *rows]) + "\n</table>"
