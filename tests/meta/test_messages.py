"""docs/reference/messages.md against the code: the rows are messages, and a message has a row or says what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpuinterop as gi

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/messages.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE)

_ELSEWHERE = ("cli", "exporters", "testing")
"""Rooms with a user of their own, or none: the command line, and the parties of tests."""


_OURS = {name for name in gi.errors.__all__ if name.endswith("Error")}


@dataclass(frozen=True)
class Message:
    where: str
    kind: str
    text: str
    has_fix: bool


KINDS: dict[str, Callable[[Message], object]] = {
    "`expected …, got …`": lambda one: re.search(r"\bexpect(?:ed|s)\b.*\bgot\b", one.text),
    # What to do, or to ask; not what follows from it.
    "`; …`": lambda one: one.has_fix or re.search(r"; (?!(?:it|is|they|this|that)\b)\w+(?:\(\)|:? \S+)", one.text),
    "`gi.ResourceClosedError`": lambda one: one.kind == "ResourceClosedError",
    "`gi.SemaphoreTimeoutError`": lambda one: one.kind == "SemaphoreTimeoutError",
    "`gi.PeerError`": lambda one: one.kind == "PeerError",
    "`gi.UnsupportedError`": lambda one: one.kind == "UnsupportedError",
    "`gi.DriverError`": lambda one: one.kind in ("DriverError", "OutOfMemoryError"),
}
"""What the page says of many messages at once, and which they are."""


class _Texts:
    """The texts of expressions, each whole, with ``{}`` for what is filled in."""

    def __init__(self, trees: dict[Path, ast.Module]) -> None:
        self.trees = trees
        self._functions: dict[str, list[ast.AST]] = {}
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self._functions.setdefault(node.name, []).append(node)

    def of(self, node: ast.AST, scope: ast.AST, depth: int = 3) -> list[str]:
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in parts)]
            case ast.BinOp(left=left, right=right):
                ends = self.of(right, scope, depth) or ["{}"]
                return [start + end for start in self.of(left, scope, depth) or ["{}"] for end in ends]
            case ast.IfExp(body=one, orelse=other):
                return [*self.of(one, scope, depth), *self.of(other, scope, depth)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self.of(value, scope, depth)]
            case ast.Name(id=name) if depth:
                given = [value for target, value in _assigned(scope) if target == name]
                return [text for value in given for text in self.of(value, scope, depth - 1)]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if depth:
                found = [(one.value, made) for made in self._functions.get(name, ()) for one in _returns(made)]
                return [text for value, made in found if value for text in self.of(value, made, depth - 1)]
        return []


def _assigned(scope: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else (node.target,):
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Return))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _messages(texts: _Texts) -> list[Message]:
    """The text of every error of ours that is made outside of `_ELSEWHERE`; an empty one, if it cannot be found."""
    found = []
    for file, tree in texts.trees.items():
        if file.parts[1] in _ELSEWHERE:
            continue
        scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inner = {id(node): scope for scope in scopes for node in ast.walk(scope)}  # the innermost comes last
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and _name(node) in _OURS):
                continue
            has_fix = any(keyword.arg == "fix" for keyword in node.keywords)
            told = texts.of(node.args[-1], inner.get(id(node), tree)) if node.args else []
            found += [Message(f"{file}:{node.lineno}", _name(node), text, has_fix) for text in set(told) - {""} or [""]]
    return found


def _said(texts: _Texts) -> list[str]:
    """All texts of the library and the backends but docstrings, each whole, with ``{}`` for what is filled in."""
    found = []
    for tree in texts.trees.values():
        gone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                gone |= set(map(id, node.values))
            if id(node) not in gone and isinstance(node, ast.JoinedStr | ast.Constant):
                found += texts.of(node, tree)
    return found


def _says(text: str, row: str) -> bool:
    """Whether one text has all of the row, with something filled in where the row has capitals of its own."""
    parts = re.split(r"([A-Z]{3,})", row)
    wanted = (rf"(?:\{{\}}|{part})" if part.isupper() and len(part) > 2 else re.escape(part) for part in parts)
    return re.search("".join(wanted), text) is not None


@pytest.fixture(scope="module")
def texts() -> _Texts:
    files = [file for top in ("gpuinterop", "backends") for file in sorted((ROOT / top).rglob("*.py"))]
    return _Texts({file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8")) for file in files})


def test_the_messages_are_the_librarys(texts: _Texts) -> None:
    said = _said(texts)
    assert len(ROWS) > 40
    assert [row for row in ROWS if not any(_says(text, row) for text in said)] == []
    made_up = (
        "is closed; pass the allocation's own size",  # of two messages
        "beyond the end: START to END; covers bytes",  # in another order
        "expects one of VALUE or TYPES, got",  # a word more
    )
    assert not [row for row in made_up if any(_says(text, row) for text in said)]


def test_a_message_has_a_row_or_says_what_to_do(texts: _Texts) -> None:
    assert [kind for kind in KINDS if kind not in PAGE] == []
    messages = _messages(texts)
    assert len(messages) > 400
    unused = [kind for kind, holds in KINDS.items() if not any(map(holds, messages))]
    assert unused == []
    bare = [one for one in messages if not any(holds(one) for holds in KINDS.values())]
    assert [f"{one.where} {one.text}" for one in bare if not any(_says(one.text, row) for row in ROWS)] == []


def test_what_says_nothing_of_a_cure_is_found() -> None:
    """Also a text that is put together, comes from a function, or cannot be found."""
    code = """
def made(value):
    return f"{value} is wrong." if value else ""
def call(value):
    problem = f"{value} is " + "wrong."
    raise InvalidArgumentError("value", problem)
def other(value):
    raise HandleError(made(value))
def third(value):
    raise HandleError(elsewhere(value))
def fourth(value):
    raise HandleError("the value is wrong; sorry")
    raise HandleError("the value is wrong; it fails.")
def good(value):
    raise HandleError(f"expected a handle, got {value}.")
    raise HandleError(f"{value} is closed; make a new one.")
    raise BackendUnavailableError("the driver is not there", fix="Install it.")
"""
    texts = _Texts({Path("gpuinterop/bad.py"): ast.parse(code), Path("gpuinterop/cli/bad.py"): ast.parse(code)})
    bare = [one for one in _messages(texts) if not any(holds(one) for holds in KINDS.values())]
    assert sorted(one.text for one in bare) == [
        "", "the value is wrong; it fails.", "the value is wrong; sorry", "{} is wrong.", "{} is wrong."
    ]  # fmt: skip
