"""mypy takes the programs of the manual, and the examples of docstrings: an annotation refuses nothing that they do.

``make types`` runs it. The programs annotate nothing, and know which optional object is there, so mypy is not strict.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools import manual

from .examples import docstrings

EXEMPT: Final = {
    "docs/howto/vulkan-buffer.md": "`shared` is a SharedBuffer and later a Buffer, and a function uses the first",
    "gpuinterop.errors": "it passes what is refused",
    "gpuinterop.errors.again": "a caught BaseException has more attributes than its type",
    "gpuinterop.handles": "Allocation.export has no type for the handle that Device.allocate was asked for",
}
"""Programs that mypy refuses, and why."""
NAMES: Final = """
from typing import Any
import numpy as np
import gpuinterop as gi
device, devices = gi.device(), gi.devices()
stream, buffer = device.create_stream(), device.allocate(1).buffer
fd, timeline_fd, texture, folder = 1, 1, 1, "."
def _application() -> Any: ...
instance = physical_device = vk_device = queue = record = submit = _application()
vk = gi.vulkan.VulkanContext(instance, physical_device, vk_device, queue, 0)
"""
"""What `names` gives the examples, as a type checker sees it."""
FLAGS: Final = (
    "--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--explicit-package-bases",
    "--check-untyped-defs", "--allow-redefinition", "--no-strict-optional", "--hide-error-context",
    "--disable-error-code=no-redef", "--disable-error-code=var-annotated", "--disable-error-code=has-type",
)  # fmt: skip


def programs() -> dict[tuple[str, str], list[str]]:
    """The lines of each, by its page or docstring and by its file, at the lines where they stand in a page."""
    found: dict[tuple[str, str], list[str]] = {}
    for page in manual.pages():
        for kind in sorted(manual.KINDS):
            for block in manual.program(page, kind):
                if block.language == "python" and "output" not in block.marks:
                    lines = found.setdefault((page, f"{kind}_{block.file or 'page.py'}"), [])
                    lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    for one in docstrings():
        if source := "".join(example.source for example in one.examples if not example.exc_msg):
            found[str(one), "examples.py"] = [*NAMES.splitlines(), *source.splitlines()]
    return found


def main() -> int:
    names = {re.sub(r"\W", "_", one): one for one, _ in programs()}
    with tempfile.TemporaryDirectory() as made:
        for (one, file), lines in programs().items():
            path = Path(made, re.sub(r"\W", "_", one), file)
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        places = os.pathsep.join(map(str, (manual.ROOT, manual.ROOT / "backends", manual.EXAMPLES)))
        cache = f"--cache-dir={manual.ROOT / '.mypy_cache' / 'manual'}"
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *FLAGS, cache, "."],
            cwd=made, env=os.environ | {"MYPYPATH": places}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    refused = {names[line.partition(os.sep)[0]] for line in done.stdout.splitlines() if ": error: " in line}
    if done.returncode in (0, 1) and refused == EXEMPT.keys():
        return 0
    print(done.stdout, done.stderr, f"Refused, and not exempt, or the reverse: {sorted(refused ^ EXEMPT.keys())}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
