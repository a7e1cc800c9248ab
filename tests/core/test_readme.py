"""The README's capability table is today's."""

import re
from pathlib import Path

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_says_what_the_host_can_do_and_nothing_more() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| host |"))
    kinds = re.findall(r"`(\w+)`", lines[start])
    said: dict[str, str] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        operation, *words = (word.strip() for word in line.strip("|").split("|"))
        said |= {f"{operation.strip('`')}:{kind}": word for kind, word in zip(kinds, words, strict=True) if word}
    table = gi.get_backend("host").device().capabilities
    real = {str(cell): table.of(cell).support.value for cell in DOMAIN if table.of(cell)}
    assert said == real
