"""Build AMD's own HIP runtime, from AMD's sources, on our stand-in for the HSA runtime below it (``hsa/``).

    python -m tests.simulated.amd SOURCES [release|assert|asan] [--fetch]

prints the library that GPUINTEROP_TEST_HIP_AMD is to name. It takes some minutes once; the result is kept under a hash
of the sources, ours and AMD's. AMD's sources are never in the tree: SOURCES is a folder with clr, HIP and rocr, of 6.3
(``--fetch`` makes these checkouts by git) or of 7.1, or of another version, whose facts are not known. ``--packages``
prints what is to be installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent

_RELEASE: Final = Path("/etc/os-release")
_UBUNTU: Final = _RELEASE.is_file() and "ID=ubuntu" in _RELEASE.read_text(encoding="utf-8").split()
PACKAGES: Final = (
    "cmake ninja-build g++ libamd-comgr-dev libelf-dev libnuma-dev libdrm-dev libgl-dev "
    f"rocm-device-libs{'-17' * _UBUNTU}"
)
"""What the build needs of Debian 12 or Ubuntu 24.04."""

CHECKOUTS: Final = {
    "clr": ("https://github.com/ROCm/clr", "f9f995c6d0aecec28debd3db0f41df0c15ec003d"),
    "HIP": ("https://github.com/ROCm/HIP", "c5e11fcac8249ce4f7e70157588ff9661a870b59"),
    "rocr": ("https://github.com/ROCm/ROCR-Runtime", "c7785a6da1c10c25bc8d527c00b1fe79bfbd84c9"),
}
"""What ``--fetch`` makes: each folder's repository, and the commit that was tried (October 2024, ROCm 6.3)."""

_USED: Final = {
    ("clr",): ("hipamd/include", "hipamd/src", "opencl/amdocl", "opencl/khronos/headers", "rocclr"),
    ("HIP", "hip"): ("VERSION", "include"),
    ("rocr", "rocr-runtime"): ("runtime/hsa-runtime/inc",),
}
"""The folders, by the names of `CHECKOUTS` or by those of later sources (projects/ of ROCm/rocm-systems)."""

_STAND_IN: Final = "libhsa-runtime64.so.1"

VARIANTS: Final = {
    "release": ("-O1", "-DNDEBUG"),
    "assert": ("-O1",),
    "asan": ("-O1", "-g1", "-DNDEBUG", "-fsanitize=address", "-fno-omit-frame-pointer"),
}


class SourcesError(RuntimeError):
    """AMD's sources or what their build needs is missing, or they do not compile."""


def amd_library(sources: Path, variant: str = "release") -> Path:
    """``libamdhip64.so``, with the stand-in beside it; built if need be."""
    sources = sources.resolve()
    used = [_folder(sources, names) / part for names, parts in _USED.items() for part in parts]
    if missing := [str(path.relative_to(sources)) for path in used if not path.exists()]:
        raise SourcesError(
            f"expected checkouts of AMD's sources in {sources}, got none of {', '.join(missing)}; "
            f"make them: python -m tests.simulated.amd {sources} --fetch"
        )
    version = _version(sources)
    target = HERE / ".build" / _digest(used, variant) / "libamdhip64.so"
    work = HERE / ".build" / f"amd-{version}-{variant}"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one folder would spoil each other
        if not target.exists():
            _compile(sources, variant, work)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(work / _STAND_IN, target.parent)
            versioned = target.with_name(f"{target.name}.{version}")
            shutil.copy(work / target.name, versioned)
            target.symlink_to(versioned.name)  # last: it shows that all is there
    return target


def _folder(sources: Path, names: tuple[str, ...]) -> Path:
    return next((sources / name for name in names if (sources / name).is_dir()), sources / names[0])


def _version(sources: Path) -> str:
    """``6.3.0``: each number stands below a line that names it."""
    file = _folder(sources, ("HIP", "hip")) / "VERSION"
    return ".".join(file.read_text(encoding="utf-8").split("\n")[1:6:2])


def _digest(used: list[Path], variant: str) -> str:
    """Of all that is compiled; by content, for a checkout's times are those of the checkout."""
    digest = hashlib.sha256(repr((variant, VARIANTS[variant], _run("c++", "--version"))).encode())
    for folder in (HERE / "hsa", *used):
        for file in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if file.is_file():
                digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(sources: Path, variant: str, work: Path) -> None:
    """In a folder that is kept: what has not changed since is not compiled again."""
    flags = " ".join(VARIANTS[variant])
    linked = " ".join(flag for flag in VARIANTS[variant] if flag.startswith("-fsanitize"))
    _run(
        *("cmake", "-S", str(HERE / "hsa"), "-B", str(work), "-G", "Ninja"),
        *(f"-D{names[0].upper()}={_folder(sources, names)}" for names in _USED),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CXX_FLAGS_RELEASE={flags}", f"-DCMAKE_SHARED_LINKER_FLAGS={linked}"),
    )
    _run("ninja", "-C", str(work))


def fetch(sources: Path) -> None:
    """Make the checkouts, each at the commit that was tried; one that was begun before is made anew."""
    for name, (repository, commit) in CHECKOUTS.items():
        folder, half = sources / name, sources / f".{name}"
        if folder.exists():
            continue
        if half.exists():  # with what a git that was ended has left there
            shutil.rmtree(half)
        _run("git", "init", "--quiet", str(half))
        _run("git", "-C", str(half), "fetch", "--quiet", "--depth", "1", repository, commit)
        _run("git", "-C", str(half), "checkout", "--quiet", "--force", commit)
        half.rename(folder)


def _run(*command: str) -> str:
    """What a command has printed; where it is missing or fails, why."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except FileNotFoundError:
        packages = "git" if command[0] == "git" else PACKAGES
        raise SourcesError(f"{command[0]} is missing; install what the build needs: apt install {packages}") from None
    if done.returncode:
        hint = "" if command[0] == "git" else f"\nOf Debian 12 or Ubuntu 24.04 the build needs: {PACKAGES}"
        raise SourcesError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{hint}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Build AMD's own HIP runtime on a stand-in device.")
    parser.add_argument("sources", nargs="?", type=Path, help=f"the folder with the checkouts {', '.join(CHECKOUTS)}")
    parser.add_argument("variant", nargs="?", default="release", choices=VARIANTS)
    parser.add_argument("--fetch", action="store_true", help="make the checkouts first, by git, where they are missing")
    parser.add_argument("--packages", action="store_true", help="print the packages that the build needs, and no more")
    given = parser.parse_args()
    if given.packages:
        print(PACKAGES)
        return 0
    if given.sources is None:
        parser.error("expected SOURCES, or --packages")
    try:
        if given.fetch:
            fetch(given.sources)
        print(amd_library(given.sources, given.variant))
    except SourcesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
