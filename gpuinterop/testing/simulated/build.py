"""Compile the simulated drivers. Once: the result is kept under a hash of the sources, the flags and the compiler."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import BackendUnavailableError

_HERE: Final = Path(__file__).resolve().parent
_FLAGS: Final = ("-std=gnu11", "-O1", "-g", "-fPIC", "-pthread", "-fvisibility=hidden")


@dataclass(frozen=True, slots=True)
class Library:
    """A library: its SONAME, and the folders with its sources."""

    soname: str
    folders: tuple[str, ...]


LIBRARIES: Final = {
    "cuda": Library("libcuda.so.1", ("common", "cuda")),
    "hip": Library("libamdhip64.so", ("common", "hip")),
}
"""The simulated drivers, by backend."""


def build(vendor: str = "cuda", *, extra: tuple[str, ...] = ()) -> Path:
    """Compile a vendor's library if need be, and return its path.

    It is kept in ``gpuinterop`` in the user's cache folder: in ``XDG_CACHE_HOME``, or ``~/.cache``.

    Parameters
    ----------
    vendor : str
        ``cuda`` or ``hip``.
    extra : tuple of str
        Further flags, beside those of GPUINTEROP_SIM_CFLAGS: ``-fsanitize=thread``, with libtsan preloaded.

    Raises
    ------
    BackendUnavailableError
        The machine has no C compiler, the compiler fails, or the cache folder cannot be made.
    """
    library = LIBRARIES[vendor]
    name = library.soname
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BackendUnavailableError(
            "the simulated driver is compiled when it is first used, and there is no C compiler (CC, cc, gcc, clang).",
            fix="apt install gcc libc6-dev",
        )
    sources = sorted(source for folder in library.folders for source in (_HERE / folder).glob("*.[ch]"))
    # A variant is for a test or two: compiling it is most of its time.
    flags = (*_FLAGS, *(("-O0",) if extra else ()), *os.environ.get("GPUINTEROP_SIM_CFLAGS", "").split(), *extra)
    digest = hashlib.sha256(repr((library, flags, compiler, _version(compiler))).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "gpuinterop" / "simulated" / digest.hexdigest()[:16] / name
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendUnavailableError(
            f"the simulated driver is kept in {target.parent}, which cannot be made: {error.strerror}.",
            fix="Set XDG_CACHE_HOME to a folder that you can write.",
        ) from None
    # Two processes may get here at once: each compiles a file of its own, and the first to be done wins. What the other
    # may have loaded by then must stay the file of that name: a driver is asked by its path whether it is simulated.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / name
        files = [str(source) for source in sources if source.suffix == ".c"]
        command = [compiler, *flags, "-shared", f"-Wl,-soname,{name}", "-o", str(made)]
        command += [f"-I{_HERE / folder}" for folder in library.folders]
        done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackendUnavailableError(
                f"compiling the simulated driver failed:\n{done.stdout}{done.stderr}", fix="apt install gcc libc6-dev"
            )
        with contextlib.suppress(FileExistsError):
            os.link(made, target)
    return target


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
