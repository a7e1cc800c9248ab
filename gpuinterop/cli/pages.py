"""A page of headings, tables and lists, as text and as Markdown. Its content is untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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


Section: TypeAlias = tuple[str, Table | Items]
"""A heading, and what it is about."""


def text(page: Iterable[Section]) -> str:
    """Write the page for a terminal."""
    return "\n\n".join("\n".join([heading, *_lines(block)]) for heading, block in page)


def _lines(block: Table | Items) -> Iterator[str]:
    if isinstance(block, Items):
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
    return "\n\n".join(f"## {_marked(heading)}\n\n{_markdown(block)}" for heading, block in page) + "\n"


def _markdown(block: Table | Items) -> str:
    if isinstance(block, Items):
        return "\n".join(f"- {_marked(one)}" for one in block.texts)
    rows = [block.columns, ["---"] * len(block.columns), *block.rows]
    return "\n".join(f"| {' | '.join(map(_marked, row))} |" for row in rows)


def _marked(one: str) -> str:
    """Escape Markdown, and HTML within it; a table's rule stays."""
    return one if one == "---" else re.sub(r"([\\`*_\[\]<>|#~&!])", r"\\\1", _plain(one))
