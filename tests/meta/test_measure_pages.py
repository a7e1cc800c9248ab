"""tools/measure_pages.py sees what sticks out and what is cut, and nothing in a page that is as it should be."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.measure_pages import BROWSERS, Browser, problems

WIDE = "<table style='width: 600px'><tr><td>a wide table</td></tr></table>"
ENTRY = (
    "<div class='toc-tree' style='width: 6em; font: 16px monospace'><a style='{style}'>gpuinterop.exchange</a></div>"
)
TEXT = "<text x='9' y='20' fill='{colour}'>words</text>"
BACKGROUND = "<rect width='99' height='30' fill='#1d2126'/>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not (os.environ.get("CI") or any(map(shutil.which, BROWSERS))):
        pytest.skip("there is no Chromium here")
    with contextlib.closing(Browser()) as found:
        yield found


def picture(content: str) -> str:
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 99 30'>{content}</svg>"


@pytest.mark.parametrize(
    ("suffix", "content", "problem"),
    [
        (".html", f"<div style='overflow: auto'><p style='width: 700px'>in a box</p></div>{WIDE}",
         'scrolls sideways, 608 px: <td >a wide table, at 360 px, light'),
        (".html", f"<div style='overflow-x: auto'>{WIDE}</div>", None),
        (".html", WIDE.replace("600", "300"), None),
        (".html", f"<article style='overflow: hidden'>{WIDE}</article>",
         'cuts what is in it: <article >, at 360 px, light'),
        (".html", ENTRY.format(style=""), 'an entry of a sidebar is cut: <a >gpuinterop.exchange, at 360 px, light'),
        (".html", ENTRY.format(style="overflow-wrap: anywhere"), None),
        (".html", "<article><a class='reference internal'>cuda.md</a></article>", "a link's text is a file: cuda.md"),
        (".html", "<div class='sidebar-tree'><a class=reference>Memory</a><p><a class=reference>Memory</a></div>",
         'two entries of the sidebar are called "Memory"'),
        (".html", "<div class='highlight-python'><pre>x = 1</pre></div>", "code has no button that copies it"),
        (".svg", picture(BACKGROUND + TEXT.format(colour="#555")), '"words" hardly stands out, at 360 px, light'),
        (".svg", picture(BACKGROUND + TEXT.format(colour="#ddd")), None),
        (".svg", picture(TEXT.format(colour="#ddd")), '"words" has no background, at 360 px, light'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_page(
    suffix: str, content: str, problem: str | None, browser: Browser, tmp_path: Path
) -> None:
    file = (tmp_path / "page").with_suffix(suffix)
    file.write_text(content if suffix == ".svg" else f"<!doctype html>{content}", encoding="utf-8")
    assert [*problems(browser, file, widths=(360,))] == ([problem] if problem else [])
