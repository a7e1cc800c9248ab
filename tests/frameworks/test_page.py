"""docs/reference/frameworks.md says what the tests here claim. Written anew: python -m tests.frameworks.test_page."""

from __future__ import annotations

from pathlib import Path

from .claims import tables

PAGE = Path(__file__).parents[2] / "docs/reference/frameworks.md"
BEGIN, END = "<!-- tables: written by python -m tests.frameworks.test_page -->\n", "<!-- end of the tables -->\n"


def rewritten(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}"


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page), "python -m tests.frameworks.test_page"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
