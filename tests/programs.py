"""Programs that tests start, and processes that they look for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.limits import LIMIT

LAYER_INFO: Final = re.compile(r"^Validation Layer Info - Logging .*\n", re.MULTILINE)
"""What newer validation layers print, wherever they log to."""


def python(
    *arguments: str, cwd: Any = None, env: Any = os.environ, seconds: Any = LIMIT, fds: Any = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python, with these variables beside those of `env` and with these descriptors, until it ends."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        pass_fds=fds,
    )
    done.stdout = LAYER_INFO.sub("", done.stdout)
    return done


def printed(*arguments: str, **options: Any) -> str:
    """Run it likewise, and return what it prints; it must succeed."""
    done = python(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
