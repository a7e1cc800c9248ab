"""A page of headings, tables and lists, as text and as Markdown. Its content is untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from .console import columns, table, wrap

__all__ = ["Items", "Section", "Table", "markdown", "text"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with as many texts as columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Items:
    """Items of a list."""

    texts: Sequence[str]


Block: TypeAlias = str | Table | Items
Section: TypeAlias = tuple[str, Sequence[Block]]
"""A heading, and its paragraphs, tables and lists."""


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
    else:
        rows = [[_plain(one) for one in row] for row in (block.columns, *block.rows)]
        yield from table(rows, columns())


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
        return "\n".join(f"- {_marked(one)}" for one in block.texts)
    rows = [block.columns, ["---"] * len(block.columns), *block.rows]
    return "\n".join(f"| {' | '.join(map(_marked, row))} |" for row in rows)


def _marked(one: str) -> str:
    """Escape Markdown, and HTML within it; a table's rule stays."""
    return one if one == "---" else re.sub(r"([\\`*_\[\]<>|#~&!])", r"\\\1", _plain(one))
