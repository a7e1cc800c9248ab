"""Find English that readers stumble over, in docstrings, comments, messages and pages. `make lint` runs it.

Usage: python tools/plain_english.py PATH...
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
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
_ALONE = r"(?=[.,;:)]|$| (?:that|which|whose|in|on|to|with|is|are|was|were|has|have|may|must|can)\b)"
PRONOUN = re.compile(
    r"(?<![\w'`])(?:(?:[Ii]t|[Ii]ts|[Ii]tself|[Tt]hey|[Tt]hem|[Tt]heir|[Tt]hose of)\b(?!')|"
    rf"(?:[Tt]his|[Tt]hose|[Oo]ne){_ALONE}|that(?=[.,;:)]|$))"
)
NOUN = re.compile(
    r"`|\b[A-Z]{2,}|\w's\b|(?<=[\s(])(?!(?:a|about|after|again|against|all|already|alone|also|an|and|another|any|are|as|at|"
    r"away|back|be|because|been|before|behind|being|beside|between|both|but|by|can|could|did|do|does|each|either|else|"
    r"even|ever|every|few|for|from|had|has|have|here|how|if|in|inside|instead|into|is|just|later|less|like|many|may|"
    r"more|most|much|must|neither|never|no|none|nor|not|now|of|off|on|once|one|only|onto|or|others?|out|over|own|past|"
    r"per|same|so|still|such|than|that|the|then|there|these|this|those|through|till|to|too|twice|under|unless|until|up|"
    r"very|was|were|what|whatever|when|where|whether|which|while|who|whom|whose|why|will|with|within|without|would|yet|"
    r"\w+ly)\b)\w{2,}"
)
"""What a pronoun may point to: nearly any word but the first of its sentence, which is a verb."""
QUESTION = re.compile(
    r"(?:Whether|Why|How(?: many| much| often| long)?) (?:is|are|was|were|has|have|may|must|can|does|to)\b|"
    r"What (?!(?:an?|the|all|any|another|each|either|every|one|only|other|this)\b|[A-Z`:])"
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


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """The first sentence of each docstring and comment; the lines of a comment that follow each other are one."""
    texts = {
        node.lineno: node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    above = first = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            own, line = token.line.lstrip().startswith("#"), token.start[0]
            first = first if own and above == line - 1 else line
            above = line if own else -1
            texts[first] = f"{texts.get(first, '')} {token.string.strip('#- ')}"
    for line, text in texts.items():
        yield line, re.split(r"(?<!e\.g\.)(?<=[.!?])\s|\n\s*\n", text.strip())[0]


def unnamed(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring or comment whose first sentence has a pronoun before any noun, or asks without a subject."""
    for line, sentence in sentences(source):
        if (found := PRONOUN.search(sentence)) and not NOUN.search(sentence, 0, found.start()):
            yield line, f"'{found[0]}' stands before any noun: name what it means"
        if found := QUESTION.match(sentence):
            yield line, f"opens with '{found[0]}': name the subject"


def main(paths: list[str]) -> int:
    """Print what is found in the files and folders; the exit status is 1 if there is something."""
    count = 0
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".md", ".toml"):
                text = file.read_text(encoding="utf-8")
                found = [*constructions(text), *((*openings(text), *unnamed(text)) if file.suffix == ".py" else ())]
                count += len(found)
                for number, problem in sorted(found):
                    print(f"{file}:{number}: {problem}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
