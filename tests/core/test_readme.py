"""The README's capability tables are today's."""

import re
from pathlib import Path

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN, read_verified

ROOT = Path(__file__).parents[2]


def table_of(name: str) -> dict[str, str]:
    """What the README's table of a backend says, by cell."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {name} |"))
    kinds = [word.strip().strip("`") for word in lines[start].strip("|").split("|")[1:]]
    said: dict[str, str] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        operation, *words = (word.strip() for word in line.strip("|").split("|"))
        for kind, word in zip(kinds, words, strict=True):
            if word:
                said[re.sub(":no handle$", "", f"{operation.strip('`')}:{kind}")] = word
    return said


def test_the_readme_says_what_the_host_can_do_and_nothing_more() -> None:
    table = gi.get_backend("host").device().capabilities
    assert table_of("host") == {str(cell): table.of(cell).support.value for cell in DOMAIN if table.of(cell)}


def test_the_readme_says_what_runs_on_gpus_have_shown_and_nothing_more() -> None:
    runs = read_verified(ROOT / "backends" / "gpuinterop_cuda" / "verified.toml")
    shown = {str(cell) for run in runs if run.platform == "linux" for cell in run.cells}
    assert table_of("cuda") == dict.fromkeys(shown, "supported")
