"""Find English that readers stumble over, in docstrings, comments, messages and pages. `make lint` runs it.

Usage: python tools/plain_english.py PATH...
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PATTERNS = (
    (r"(?<!\b[Tt]here )\b(?:is|are|was|were|be|been) no (?!longer|more|less|better|other|later|larger|smaller)\w+",
     "write 'is not a ...', or say what it is"),
    (r"(?<!\bof )(?<!\b[Tt]here )\b(?:is|are|was|were) none\b(?! of)", "write 'is not a ...', or say what it is"),
    (r"\b(?:[Nn]obody|[Ss]omebody|[Aa]nybody|[Ww]hoever|[Ww]homever)\b", "name the actor"),
    (r"f\".*must be .*, not (?:a )?\{", "write 'expected X, got Y'"),
    (r"\b[Ww]ho (?:waits|signals|calls|asks|sends) \w+s\b", "name the actor, then what it does"),
)  # fmt: skip
"""What to look for, and what to do about it."""
OPENING = re.compile(
    r"(?:Of|For|In|On|At|By|To|From|With|Without|Before|Behind|After|Where|Until|Under|Over|Between|As|Like|Beside|"
    r"Inside|Through|Past|Beyond|Among|Within)\b"
)
_FIELD = re.compile(r"\s*[\w*, ]+ : \S|\s*[A-Z]\w+(?:Error|Warning)$")


def constructions(text: str) -> Iterator[tuple[int, str]]:
    """Each place of a pattern: its line, and what is wrong with it."""
    for number, line in enumerate(text.split("\n"), 1):
        for pattern, advice in PATTERNS:
            if found := re.search(pattern, line):
                yield number, f"'{found[0]}': {advice}"


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring, or description of a parameter in it, that opens with a bare preposition."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = node.value.value.split("\n")
            for index, line in enumerate(lines):
                if (index == 0 or _FIELD.match(lines[index - 1])) and (found := OPENING.match(line.strip())):
                    yield node.lineno + index, f"opens with '{found[0]}': begin with the noun or the verb"


def main(paths: list[str]) -> int:
    """Print what is found in the files and folders; the exit status is 1 if there is something."""
    count = 0
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".md", ".toml"):
                text = file.read_text(encoding="utf-8")
                found = [*constructions(text), *(openings(text) if file.suffix == ".py" else ())]
                count += len(found)
                for number, problem in sorted(found):
                    print(f"{file}:{number}: {problem}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
