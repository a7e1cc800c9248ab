"""What Sphinx adds to the pages: where a block ran, links to the reference, and tables that are made of the code."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinterop.capabilities import DOMAIN, read_verified
from gpuinterop.testing import suites as testing_suites
from tools import manual

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "docs" / "reference" / "stand_in.toml"
_GENERATED = ROOT / "docs" / "_generated"
_ENTRY = re.compile(r"\[`gi\.([\w.]+)(\(\))?`\]\(\S*\bapi/\w+\.md\)")
_NAME = re.compile(r"(?<!`)`gi\.([\w.]+)(\(\))?`(?!`)")
RAN = {
    "any": "Runs in CI: the host backend, simulated drivers of CUDA and HIP, and real software Vulkan.",
    "host": "Runs in CI: the host backend, and real software Vulkan.",
    "cuda": "Runs in CI: a simulated CUDA driver.",
    "hip": "Runs in CI: a simulated HIP runtime.",
}


def _source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    """Make MyST's fences of ours, with a line below each that says where it ran, and link names to the reference.

    Words that readers search for, in `<!-- search: docker, kubernetes -->`, become entries of the index: the search
    puts the page that has such an entry first.
    """
    page = str((Path(app.srcdir) / f"{docname}.md").relative_to(ROOT))
    if not (ROOT / page).exists():
        return
    ran = dict(RAN)
    record = manual.recorded().get(page, {})
    if record and record["sha256"] == manual.digest(page):
        ran["gpu"] = f"Ran on an {record['device']} on {record['date']} ({record['software']})."
        ran["any"] += f" {ran['gpu']}"
    lines: list[str] = []
    caption, inside = "", False
    for line in content[0].split("\n"):
        fence = re.match(r"^( *)```(\S*) ?([^`]*)$", line)
        if fence and not inside and not fence[2].startswith("{"):
            inside = True
            caption = " ".join(text for kind, text in ran.items() if kind in fence[3].split())
            lines.append(f"{fence[1]}```{fence[2]}")
        elif inside:
            lines.append(line)
            if line.strip() == "```":
                inside = False
                if caption:
                    indent = line[: -len("```")]
                    lines += ["", f'{indent}<p class="ran">{caption}</p>', ""]
        elif fence:
            inside, caption = True, ""
            lines.append(line)
        elif words := re.fullmatch("<!-- search: (.+) -->", line):
            lines += ["```{index} " + ", ".join(f"! {word}" for word in words[1].split(", ")), "```"]
        else:
            link = r"{py:obj}`gi.\1\2 <gpuinterop.\1>`"
            lines.append(_NAME.sub(link, _ENTRY.sub(link, line)))
    if page.startswith("docs/examples/") and "gpu" in ran:
        lines += ["", f"## What they printed on an {record['device']}", "", "```text", record["output"], "```"]
    content[0] = "\n".join(lines)


# -- the tables that are made of the code ------------------------------------------------------------------------------


def matrix() -> str:
    """The table of what recorded runs have shown: a column a run, a row a cell; and what a stand-in device has."""
    columns: list[tuple[str, str, Collection[str], str]] = []
    for owner, folder in {
        "cuda": "backends/gpuinterop_cuda",
        "hip": "backends/gpuinterop_hip",
        "host": "backends/gpuinterop_host",
        "Vulkan": "gpuinterop/vulkan",
    }.items():
        runs = read_verified(ROOT / folder / "verified.toml")
        columns += [(f"{owner}: {run.device}", run.date, set(map(str, run.cells)), "yes") for run in runs]
    shown = tomllib.loads(STAND_IN.read_text(encoding="utf-8"))
    columns.append((shown["title"], str(shown["date"]), shown["cells"], "stand-in"))
    lines = [f"| | {' | '.join(title for title, *_ in columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines.append(f"| *date* | {' | '.join(date for _, date, *_ in columns)} |")
    for cell in map(str, DOMAIN):
        said = [word if cell in cells else "" for *_, cells, word in columns]
        if any(said):
            lines.append(f"| `{cell}` | {' | '.join(said)} |")
    return "\n".join(lines) + "\n"


def suites() -> str:
    """The table of the conformance kit's suites."""
    named = ((name, inspect.getdoc(getattr(testing_suites, name)) or "") for name in testing_suites.__all__)
    rows = (f"| `{name}` | {text.splitlines()[0]} |" for name, text in named if name != "Suite")
    return "\n".join(("| `gpuinterop.testing.suites` | |", "|---|---|", *rows)) + "\n"


def _write(app: Sphinx) -> None:
    _GENERATED.mkdir(exist_ok=True)
    for name, text in {"matrix.md": matrix(), "suites.md": suites()}.items():
        path = _GENERATED / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """Leave out the constructor of a class that its users do not construct: its docstring has no parameters."""
    if what != "class" or not signature:
        return None
    if signature.startswith("(*_args"):  # `__new__` of a handle takes anything; `__init__` says what
        wanted = list(inspect.signature(obj.__init__).parameters.values())[1:]  # type: ignore[misc]
        return str(inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in wanted])), returns
    return None if "\nParameters\n" in inspect.cleandoc(obj.__doc__ or "") else ("", returns)


def setup(app: Sphinx) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("source-read", _source_read)
    app.connect("builder-inited", _write)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True}
