"""What tests take besides the drivers that every test has: a newer lavapipe, and a display of X11."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
from collections.abc import Iterator

from tests.limits import LIMIT
from tests.missing_vulkan import give_up
from tools.fetch_vulkan import TREE


def newer_lavapipe() -> dict[str, str]:
    """What a process has in its environment to run on lavapipe only, of Mesa 25 or newer.

    Debian 12's own is too old for slangpy. Where its backports were not fetched, the release's should be new enough.
    """
    found = [*TREE.glob("mesa25/*.json"), *TREE.glob("icd.d/lvp*.json")]
    if not found:
        give_up("lavapipe was not fetched")
    folders = [str(found[0].parent), os.environ.get("LD_LIBRARY_PATH", "")]
    drivers = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(found[0]))
    return {**os.environ, **drivers, "LD_LIBRARY_PATH": ":".join(filter(None, folders))}


@contextlib.contextmanager
def x11() -> Iterator[dict[str, str]]:
    """What a process has in its environment to open windows, by GLX, on a display that nobody sees."""
    server = shutil.which("Xvfb")
    if not server:
        give_up("there is no Xvfb here: apt install xvfb")
    reads, writes = os.pipe()
    with open(reads, encoding="ascii") as said:
        command = [
            server,
            "-displayfd",
            str(writes),
            "-screen",
            "0",
            "1280x1024x24",
            "-nolisten",
            "tcp",
            "+extension",
            "GLX",
        ]
        with subprocess.Popen(command, pass_fds=[writes], stderr=subprocess.DEVNULL) as process:
            os.close(writes)
            try:
                if not select.select([said], [], [], LIMIT)[0] or not (number := said.readline().strip()):
                    give_up("Xvfb gave no display")
                yield {**os.environ, "DISPLAY": f":{number}"}
            finally:
                process.terminate()
