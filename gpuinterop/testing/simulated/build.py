"""Compile the simulated drivers, and cache each under a hash of the sources, the flags and the compiler."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ...errors import BackendUnavailableError, DriverError, InvalidArgumentError
from ...sharing.folder import private_folder

_HERE: Final = Path(__file__).resolve().parent
_FLAGS: Final = ("-std=gnu11", "-O1", "-g", "-fPIC", "-pthread", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class Library:
    """A library's SONAME, and its source folders."""

    soname: str
    folders: tuple[str, ...]


LIBRARIES: Final = {
    "cuda": Library("libcuda.so.1", ("common", "cuda")),
    "hip": Library("libamdhip64.so", ("common", "hip")),
}
"""The simulated drivers, by backend."""


def compiler() -> list[str]:
    """Find a C compiler, and return the first words of its command.

    That is ``CC`` with its options, or the first of ``cc``, ``gcc``, ``clang`` and PyPI's ``ziglang``. Raises
    `BackendUnavailableError` if there is none, ``CC`` names a missing one, or zig's cache cannot be created.
    """
    given = os.environ.get("CC", "").strip()
    for command in [given] if given else ["cc", "gcc", "clang"]:
        name, *options = shlex.split(command)
        if path := shutil.which(name):
            return [path, *options]
    if not given and find_spec("ziglang"):
        # By default zig compiles for this exact processor, stops at undefined behaviour, and has its cache in the home
        # folder.
        zig = [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-fno-sanitize=undefined"]
        return ["env", f"ZIG_GLOBAL_CACHE_DIR={_cache() / 'zig'}", *zig]
    install = "Run one of: pip install ziglang; apt install gcc libc6-dev; dnf install gcc; pacman -S gcc."
    raise BackendUnavailableError(
        f"expected a C compiler ({f'CC={given}' if given else 'cc, gcc, clang, ziglang'}), got none.",
        fix="Install it, or unset CC." if given else install,
    )


def _cache() -> Path:
    """Create ``gpuinterop`` in the user's cache folder, or in the temporary folder if that is not writable."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpuinterop")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    try:
        return Path(private_folder("XDG_CACHE_HOME"), "gpuinterop")
    except (DriverError, InvalidArgumentError) as error:
        raise BackendUnavailableError(f"the simulated driver cannot be cached: {error}") from None


def build(vendor: str = "cuda", *, extra: tuple[str, ...] = ()) -> Path:
    """Compile a vendor's library (``cuda`` or ``hip``) if necessary, and return its path.

    It is cached in ``gpuinterop`` in ``XDG_CACHE_HOME`` or ``~/.cache``, or if neither is writable, in
    ``gpuinterop-UID`` in the temporary folder. `extra` flags follow those of GPUINTEROP_SIM_CFLAGS, such as
    ``-fsanitize=thread`` (with libtsan preloaded). Raises `BackendUnavailableError` if there is no C compiler, the
    compiler fails, or neither folder can be created.
    """
    library = LIBRARIES[vendor]
    name = library.soname
    begin = compiler()
    sources = sorted(source for folder in library.folders for source in (_HERE / folder).glob("*.[ch]"))
    # Few tests use a variant, and compiling it takes most of their time.
    flags = (*_FLAGS, *(("-O0",) if extra else ()), *os.environ.get("GPUINTEROP_SIM_CFLAGS", "").split(), *extra)
    digest = hashlib.sha256(repr((library, flags, begin, _run(*begin, "--version").stdout)).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    target = _cache() / "simulated" / digest.hexdigest()[:16] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # If two processes compile at once, each writes its own file, and the first one is kept. The other process may have
    # loaded it, and a driver is recognized by its path, so the file must not be replaced.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / name
        files = [str(source) for source in sources if source.suffix == ".c"]
        command = [*begin, *flags, "-shared", f"-Wl,-soname,{name}", "-o", str(made)]
        command += [f"-I{_HERE / folder}" for folder in library.folders]
        done = _run(*command, *files)
        if done.returncode:
            raise BackendUnavailableError(
                f"compiling the simulated driver failed:\n{done.stdout}{done.stderr}", fix="apt install gcc libc6-dev"
            )
        with contextlib.suppress(FileExistsError):
            os.link(made, target)
    return target


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
