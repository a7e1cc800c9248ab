"""How to install what is missing, for messages."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Final


def pip_install(extra: str = "") -> str:
    """The command that installs an extra of gpuinterop, or gpuinterop itself, for this machine's shell.

    The name is enough however gpuinterop was installed: pip and uv keep an installation that satisfies it, even an
    editable one or one that no index has. Only a checkout that is not installed needs its path.
    """
    # Imported here because only a message needs it, and it takes milliseconds.
    from importlib.metadata import PackageNotFoundError, distribution

    command, what = "pip install", "gpuinterop"
    try:
        distribution(what)
    except PackageNotFoundError:
        checkout = Path(__file__).parents[1]
        if (checkout / "pyproject.toml").is_file():
            command, what = f"{command} -e", str(checkout)
    what += extra and f"[{extra}]"
    return f'{command} "{what}"' if sys.platform == "win32" else f"{command} {shlex.quote(what)}"


_VULKAN: Final = {
    "apt": "apt install mesa-vulkan-drivers",
    "dnf": "dnf install vulkan-loader mesa-vulkan-drivers",
    "pacman": "pacman -S vulkan-icd-loader vulkan-swrast",
}


def install_vulkan() -> str:
    """Return how to install Vulkan on this machine: the command for a loader and a software driver."""
    import shutil  # slow: it imports the archive formats

    tool = next(filter(shutil.which, _VULKAN), "")
    checkout = Path(__file__).parents[1]
    command = f"sudo {_VULKAN[tool]}" if tool else "install your system's Vulkan loader and Mesa's lavapipe"
    if tool == "apt" and (checkout / "tools" / "fetch_vulkan.py").is_file():  # needs no root
        folder = shlex.quote(str(checkout))
        command = f"make -C {folder} vulkan; . {folder}/.vulkan/env"
    return f"Install the GPU's Vulkan driver, or a software driver: {command}"
