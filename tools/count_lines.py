"""Count the lines of each folder, and its code lines: without docstrings, comments and blank lines.

Usage: python tools/count_lines.py [COMMIT...]    # by default HEAD
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter

SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def code_lines(source: str) -> list[str]:
    """The lines of Python code, without docstrings, comments and blank lines."""
    lines = source.split("\n")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or 0) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type not in SILENT:
            used.update(range(row, token.end[0] + 1))
    return [lines[number - 1] for number in sorted(used - documented)]


def main(commits: list[str]) -> None:
    for commit in commits or ["HEAD"]:
        lines, code = Counter[str](), Counter[str]()
        for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
            if path.endswith((".py", ".toml")) and "/" in path:
                folder = "/".join(path.split("/")[:2]) if path.count("/") > 1 else path.split("/")[0]
                source = git("show", f"{commit}:{path}")
                folder += " (toml)" if path.endswith(".toml") else ""
                lines[folder] += source.count("\n")
                code[folder] += len(code_lines(source)) if path.endswith(".py") else 0
        print(f"{commit}: lines, of code")
        for folder in sorted(lines):
            print(f"  {folder:36}{lines[folder]:7}{code[folder]:7}")


if __name__ == "__main__":
    main(sys.argv[1:])
