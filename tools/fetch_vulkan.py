#!/usr/bin/env python3
"""Fetch software Vulkan (lavapipe, SwiftShader, the validation layers) and Vulkan's headers into <checkout>/.vulkan.

Nothing is installed, and root is not needed. The packages are those of the sources that apt is configured with (Debian,
Ubuntu), read through private apt folders; of each, only the files below are kept. What the system has of Vulkan plays
no part. `.vulkan/env`, to be sourced by sh, adds the fetched drivers and layers to the system's. make's tests use no
others:

    python3 tools/fetch_vulkan.py && . .vulkan/env

hip5 fetches AMD's HIP runtime 5 for a few tests: it loads without a GPU, and has the ABI from before 6.0. glslang
fetches a compiler of shaders.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FORMAT = 2  # of the tree; another number makes every checkout fetch again
HOME = Path(__file__).resolve().parent.parent / ".vulkan"
TREE = HOME / "tree"
GROUPS = {
    "vulkan": ["libvulkan1", "mesa-vulkan-drivers", "chromium-common", "vulkan-validationlayers", "libvulkan-dev"],
    "hip5": ["libamdhip64-5"],
    "glslang": ["glslang-tools"],
}
# Of each package: patterns of its files, and where in the tree they go. A manifest goes where its library is.
FILES = {
    "libvulkan1": {"usr/lib/*/libvulkan.so.1*": "lib"},
    "mesa-vulkan-drivers": {"usr/lib/*/libvulkan_lvp.so": "icd.d", "usr/share/vulkan/icd.d/lvp_icd*.json": "icd.d"},
    "chromium-common": {"usr/lib/chromium/*vk_swiftshader*": "icd.d"},
    "vulkan-validationlayers": {
        "usr/lib/*/libVkLayer_khronos_validation.so": "layers.d",
        "usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json": "layers.d",
    },
    "libvulkan-dev": {"usr/include/vulkan/vulkan_core.h": "include/vulkan", "usr/include/vulkan/vk_platform.h":
                      "include/vulkan", "usr/include/vk_video/*.h": "include/vk_video"},
    "libamdhip64-5": {"usr/lib/*/libamdhip64.so.5*": "hip5"},
    "glslang-tools": {"usr/bin/glslang*": "bin"},
}  # fmt: skip
# Every Debian has them, and a second copy must not come before the system's.
NEVER = {"libc6", "libgcc-s1", "libstdc++6"}
# In lib, which the env file names, ROCm's own runtime would find the libraries of HIP 5 before its own.
OWN_LIBRARIES = {"hip5": "hip5"}


class FetchError(Exception):
    """A step failed; the message is for the user."""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command without input and return its output; what it said is in the error when it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            env=os.environ | {"LC_ALL": "C"} | (env or {}), cwd=cwd, timeout=1200, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(str(error)) from None
    if done.returncode:
        said = "; ".join(done.stderr.strip().splitlines()[-3:])
        raise FetchError(f"{Path(command[0]).name} failed with status {done.returncode}: {said}")
    return done.stdout


def say(text: str) -> None:
    print(f"vulkan: {text}", file=sys.stderr, flush=True)


class Apt:
    """apt with folders of its own, for which nothing is installed: it reads the system's sources and keys."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for folder in ("lists/partial", "cache/archives/partial"):
            (home / folder).mkdir(parents=True)
        (home / "status").touch()
        unwanted = ("Contents-deb", "CNF", "DEP-11", "DEP-11-icons", "DEP-11-icons-small", "DEP-11-icons-large")
        lines = [
            f'Dir::State "{home}"; Dir::State::status "{home}/status"; Dir::State::Lists "{home}/lists";',
            f'Dir::Cache "{home}/cache"; Dir::Cache::Archives "{home}/cache/archives";',
            'APT::Sandbox::User "root";',  # as root: do not change to a user who cannot write here
            'APT::Install-Recommends "false"; Acquire::Languages "none"; Acquire::PDiffs "false";',
            'Acquire::Retries "2"; Acquire::http::Timeout "30"; Acquire::https::Timeout "30";',
            'APT::Update::Error-Mode "any";',  # a source that cannot be reached is an error, not a warning
            'Acquire::IndexTargets::deb-src::Sources::DefaultEnabled "false";',
            *(f'Acquire::IndexTargets::deb::{name}::DefaultEnabled "false";' for name in unwanted),
            # What the system runs after an update of its own lists is not for these.
            "#clear APT::Update::Pre-Invoke; #clear APT::Update::Post-Invoke; #clear APT::Update::Post-Invoke-Success;",
        ]
        self.config = home / "apt.conf"
        self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.get("update")

    def get(self, *arguments: str) -> str:
        return run("apt-get", "-c", self.config, "-qq", *arguments, cwd=self.home)

    def unpack(self, *packages: str) -> tuple[str, Path]:
        """Download packages: the version of one, and a folder with the files of all."""
        self.get("download", *packages)
        folder = Path(tempfile.mkdtemp(dir=self.home))
        for deb in self.home.glob("*.deb"):
            run("dpkg-deb", "-x", deb, folder)
            version = run("dpkg-deb", "-f", deb, "Version").strip()
            deb.unlink()
        return version, folder

    def libraries(self, package: str) -> list[str]:
        """The packages with libraries that it needs, directly or not."""
        uris = self.get("-y", "--print-uris", "install", package).splitlines()
        names = {line.split()[1].partition("_")[0] for line in uris if line.startswith("'")}
        return sorted(name for name in names - NEVER - {package} if name.startswith("lib"))


def unresolved(files: Iterable[Path], *libs: Path) -> set[str]:
    """The libraries that the dynamic linker finds neither in the system nor in these folders."""
    env = {"LD_LIBRARY_PATH": ":".join(map(str, libs))}
    lines = [line for path in files for line in run("ldd", path, env=env).splitlines()]
    return {line.split()[0] for line in lines if line.endswith("=> not found")}


def binaries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.suffix not in (".json", ".h")]


def add(apt: Apt, package: str) -> str:
    """Put a package's files into the tree, with the libraries that they need and the system lacks: all, or none."""
    version, unpacked = apt.unpack(package)
    with tempfile.TemporaryDirectory(dir=apt.home) as made:
        new = Path(made)
        for pattern, folder in FILES[package].items():
            found = [path for path in unpacked.glob(pattern) if not path.is_dir()]
            if not found:
                raise FetchError(f"{package} {version} holds no {pattern}")
            (new / folder).mkdir(parents=True, exist_ok=True)
            for path in found:
                shutil.copy(path, new / folder)  # of a link, what it leads to
                if path.suffix == ".json":
                    point_beside(new / folder / path.name)
        for folder in set(FILES[package].values()) - {"include/vulkan", "include/vk_video"}:
            lib = OWN_LIBRARIES.get(folder, "lib")
            (new / lib).mkdir(exist_ok=True)
            spare: dict[str, Path] = {}
            while missing := unresolved({*binaries(new / folder), *binaries(new / lib)}, new / lib, TREE / lib):
                if not spare and (names := apt.libraries(package)):
                    files = apt.unpack(*names)[1].rglob("*.so*")
                    spare = {path.name: path for path in files if path.is_file()}
                if not missing & spare.keys():
                    raise FetchError(
                        f"no package was found to hold {', '.join(sorted(missing))}, which {package} needs"
                    )
                for name in missing & spare.keys():
                    shutil.copy(spare[name], new / lib)
        shutil.copytree(new, TREE, dirs_exist_ok=True)
    return version


def point_beside(path: Path) -> None:
    """Let a driver's or a layer's manifest point to the library beside it."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    about = manifest["ICD" if "ICD" in manifest else "layer"]
    about["library_path"] = f"./{Path(about['library_path']).name}"
    path.write_text(json.dumps(manifest, indent=4) + "\n", encoding="utf-8")


def env_text() -> str:
    """The env file: shell code that needs no bash, works under set -eu, and may be sourced twice."""
    drivers = ":".join(f"$gi_tree/icd.d/{path.name}" for path in sorted(TREE.glob("icd.d/*.json")))
    lines = [f'export VK_ADD_DRIVER_FILES="{drivers}" VK_ADD_LAYER_PATH="$gi_tree/layers.d"'] if drivers else []
    for name, folder in {"LD_LIBRARY_PATH": "lib", "C_INCLUDE_PATH": "include", "PATH": "bin"}.items():
        if (TREE / folder).exists():
            lines.append(f'case ":${{{name}-}}:" in *":$gi_tree/{folder}:"*) ;; *)')
            lines.append(f'    export {name}="$gi_tree/{folder}${{{name}:+:${name}}}" ;; esac')
    start = "# Written by tools/fetch_vulkan.py, to be sourced by sh: it adds the Vulkan in .vulkan to the system's."
    return "\n".join([start, f"gi_tree={shlex.quote(str(TREE))}", *lines, "unset gi_tree", ""])


def read_stamp() -> dict[str, Any]:
    """What an earlier run has fetched, where that is there still and complete: versions, or why there is none."""
    try:
        found = json.loads((HOME / "stamp.json").read_text(encoding="utf-8"))
        stamp = {"format": found["format"], "versions": dict(found["versions"]), "missing": dict(found["missing"])}
        if stamp["format"] == FORMAT and not any(
            unresolved(binaries(TREE / folder), TREE / OWN_LIBRARIES.get(folder, "lib"))
            for folder in ("icd.d", "layers.d", "hip5", "bin")
        ):
            return stamp
    except (OSError, ValueError, LookupError, TypeError, FetchError):
        pass
    shutil.rmtree(TREE, ignore_errors=True)
    return {"format": FORMAT, "versions": {}, "missing": {}}


def provide(packages: list[str]) -> dict[str, str]:
    """Bring `.vulkan` up to date; return why packages are missing."""
    HOME.mkdir(exist_ok=True)
    failed: dict[str, str] = {}
    with (HOME / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=HOME) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = read_stamp()
        wanted = [name for name in packages if name not in stamp["versions"] and name not in stamp["missing"]]
        try:
            if wanted:
                say(f"fetching {', '.join(wanted)}")
                apt = Apt(Path(scratch) / "apt")
        except FetchError as error:
            failed, wanted = dict.fromkeys(wanted, str(error)), []
        for name in wanted:
            try:
                stamp["versions"][name] = add(apt, name)
            except FetchError as error:
                # A package that there is not will not be there the next time, either.
                there_is_none = "Unable to locate package" in str(error) or "Unable to find a source" in str(error)
                (stamp["missing"] if there_is_none else failed)[name] = str(error)
        for path, text in (("env", env_text()), ("stamp.json", json.dumps(stamp, indent=2))):
            (HOME / f"{path}.new").write_text(text, encoding="utf-8")
            os.replace(HOME / f"{path}.new", HOME / path)
    if there := [f"{name} {stamp['versions'][name]}" for name in packages if name in stamp["versions"]]:
        say(f"{', '.join(there)}: in {HOME.name}")
    return {name: reason for name, reason in {**stamp["missing"], **failed}.items() if name in packages}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--require", action="store_true", help="fail if anything is missing")
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help=f"{', '.join(GROUPS)}; by default vulkan")
    options = parser.parse_args()
    packages = [name for group in options.groups or ["vulkan"] for name in GROUPS[group]]
    try:
        missing = provide(packages)
    except OSError as error:  # the checkout cannot be written to
        missing = dict.fromkeys(packages, str(error))
    for reason in dict.fromkeys(missing.values()):
        names = [name for name, its in missing.items() if its == reason]
        say(f"missing: {', '.join(names)}: {reason}")
    if missing:
        say("tests that need what is missing skip. It is fetched on Debian and Ubuntu; elsewhere, with Mesa's drivers")
        say("installed, `make test-system-vulkan` runs the tests of Vulkan on the system's own.")
    return 1 if options.require and missing else 0


if __name__ == "__main__":
    sys.exit(main())
