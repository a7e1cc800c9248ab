#!/usr/bin/env python3
"""Fetch software Vulkan (lavapipe, SwiftShader, the validation layers), its headers and OpenGL into <checkout>/.vulkan.

It installs nothing, and needs no root. The packages come from apt's configured sources (Debian, Ubuntu), which it reads
with private apt folders; of each package it keeps only the files below. It does not use the system's Vulkan.
`.vulkan/env`, to be sourced by sh, adds the fetched drivers and layers to the system's. make's tests use only these:

    python3 tools/fetch_vulkan.py && . .vulkan/env

OpenGL is llvmpipe with EGL and GLX, from the same Mesa as lavapipe. Its libraries precede the system's. NVIDIA's driver
still works through them, and so do Mesa's GPU drivers if the system's Mesa has that version.

hip5 fetches AMD's HIP runtime 5 for a few tests: it loads without a GPU, and has the ABI from before 6.0. glslang
fetches a shader compiler. slangpy fetches what slangpy also needs. On Debian 12 that includes the backports' lavapipe,
in the tree's folder mesa25; no variable points to it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from platform import freedesktop_os_release
from typing import Any
from urllib.parse import unquote

FORMAT = 4  # of the tree; change it to make every checkout fetch again
HOME = Path(__file__).resolve().parent.parent / ".vulkan"
TREE = HOME / "tree"
GROUPS = {
    "vulkan": [
        "libvulkan1",
        "mesa-vulkan-drivers",
        "chromium-common",
        "vulkan-validationlayers",
        "libvulkan-dev",
        "libglvnd0",
        "libegl1",
        "libopengl0",
        "libglx0",
        "libgl1",
        "libegl-mesa0",
        "libglx-mesa0",
        "libgl1-mesa-dri",
    ],
    "hip5": ["libamdhip64-5"],
    "glslang": ["glslang-tools"],
    "slangpy": ["libatomic1", "mesa-vulkan-drivers/bookworm-backports"],
}
# For each package: patterns of its files, and their folders in the tree. A manifest is put beside its library.
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
    "libglvnd0": {"usr/lib/*/libGLdispatch.so.0": "lib"},
    "libegl1": {"usr/lib/*/libEGL.so.1": "lib"},
    "libopengl0": {"usr/lib/*/libOpenGL.so.0": "lib"},
    "libglx0": {"usr/lib/*/libGLX.so.0": "lib"},
    "libgl1": {"usr/lib/*/libGL.so.1": "lib"},
    "libegl-mesa0": {"usr/lib/*/libEGL_mesa.so.0": "egl.d", "usr/share/glvnd/egl_vendor.d/50_mesa.json": "egl.d"},
    "libglx-mesa0": {"usr/lib/*/libGLX_mesa.so.0": "lib"},
    "libgl1-mesa-dri": {"usr/lib/*/dri/swrast_dri.so": "dri"},
    "libamdhip64-5": {"usr/lib/*/libamdhip64.so.5*": "hip5"},
    "glslang-tools": {"usr/bin/glslang*": "bin"},
    "libatomic1": {"usr/lib/*/libatomic.so.1": "lib"},
    "mesa-vulkan-drivers/bookworm-backports": {
        "usr/lib/*/libvulkan_lvp.so": "mesa25",
        "usr/share/vulkan/icd.d/lvp_icd*.json": "mesa25",
    },
}  # fmt: skip
# Every Debian has them, and a second copy must not precede the system's.
NEVER = {"libc6", "libgcc-s1", "libstdc++6"}
# Mesa's OpenGL works only with libraries of its own build, not with the system's.
OPENGL = {"libegl-mesa0", "libglx-mesa0", "libgl1-mesa-dri"}
OF_MESA = {"libgbm1", "libglapi-mesa", "mesa-libgallium"}
# In lib, which the env file names, ROCm's own runtime would find HIP 5's libraries before its own, and the older Mesa
# the newer one's.
OWN_LIBRARIES = {"hip5": "hip5", "mesa25": "mesa25"}


class FetchError(Exception):
    """A step failed; the message is for the user."""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command without input and return its output; if it fails, the error has its messages."""
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
    """apt with private folders, into which nothing is installed: it reads the system's sources and keys.

    From the same mirror it reads other releases too, such as bookworm-backports.
    """

    def __init__(self, home: Path, *releases: str) -> None:
        self.home = home
        self.unpacked: dict[str, Path] = {}
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
            'APT::Update::Error-Mode "any";',  # an unreachable source is an error, not a warning
            'Acquire::IndexTargets::deb-src::Sources::DefaultEnabled "false";',
            *(f'Acquire::IndexTargets::deb::{name}::DefaultEnabled "false";' for name in unwanted),
            # Do not run the system's hooks after updating its own lists.
            "#clear APT::Update::Pre-Invoke; #clear APT::Update::Post-Invoke; #clear APT::Update::Post-Invoke-Success;",
        ]
        self.config = home / "apt.conf"
        self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if releases:
            sources = "".join(f"deb {self.mirror(release)} {release} main\n" for release in releases)
            system = Path("/etc/apt/sources.list")
            kept = system.read_text(encoding="utf-8") if system.exists() else ""
            (home / "sources.list").write_text(f"{kept}\n{sources}", encoding="utf-8")
            with self.config.open("a", encoding="utf-8") as file:
                file.write(f'Dir::Etc::sourcelist "{home}/sources.list";\n')
        self.get("update")

    def mirror(self, release: str) -> str:
        """The mirror from which the system gets the release that `release` extends."""
        base = release.partition("-")[0]
        targets = ("indextargets", "--no-release-info", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages")
        found = [line.partition(" ")[2] for line in self.get(*targets).splitlines() if line.startswith(f"{base} ")]
        if not found:
            raise FetchError(f"Unable to find a source of {base}, which {release} adds to")
        return found[0]

    def get(self, *arguments: str) -> str:
        return run("apt-get", "-c", self.config, "-qq", *arguments, cwd=self.home)

    def unpack(self, *packages: str) -> list[Path]:
        """Download NAME, NAME=VERSION or NAME/RELEASE unless that is done; return a folder with the files of each."""
        if wanted := [package for package in packages if package not in self.unpacked]:
            self.get("download", *wanted)
            debs = {path.name.partition("_")[0]: path for path in self.home.glob("*.deb")}
            for package in wanted:
                deb = debs[re.split("[=/]", package)[0]]
                run("dpkg-deb", "-x", deb, self.home / deb.stem)
                deb.unlink()
                self.unpacked[package] = self.home / deb.stem
        return [self.unpacked[package] for package in packages]

    def needed(self, package: str) -> list[str]:
        """The packages that it needs, directly or not, as NAME=VERSION."""
        name, _, release = package.partition("/")
        options = ("-t", release) if release else ()  # applies to its dependencies too
        uris = self.get("-y", *options, "--print-uris", "install", name).splitlines()
        files = [line.split()[1].split("_") for line in uris if line.startswith("'")]
        return [f"{name}={unquote(version)}" for name, version, *_ in files if name not in NEVER | {package}]

    def libraries(self, *packages: str) -> dict[str, Path]:
        """The libraries in packages, by their names."""
        files = (path for folder in self.unpack(*packages) for path in folder.rglob("*.so*"))
        return {path.name: path for path in files if path.is_file()}


def unresolved(files: Iterable[Path], *libs: Path, own: Collection[str] = ()) -> set[str]:
    """Libraries that the dynamic linker finds neither in the system nor in `libs`; it may find `own` only in `libs`."""
    env = {"LD_LIBRARY_PATH": ":".join(map(str, libs))}
    lines = [line.split() for path in files for line in run("ldd", path, env=env).splitlines() if " => " in line]
    found = {name: Path(path) for name, _, path, *_ in lines}  # "NAME => PATH (ADDRESS)" or "NAME => not found"
    return {name for name, path in found.items() if path == Path("not") or (name in own and path.parent not in libs)}


def binaries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.suffix not in (".json", ".h")]


def add(apt: Apt, package: str) -> str:
    """Add a package's files to the tree, with required libraries that the system lacks: all, or none."""
    (unpacked,) = apt.unpack(package)
    version = unquote(unpacked.name.split("_")[1])
    with tempfile.TemporaryDirectory(dir=apt.home) as made:
        new = Path(made)
        for pattern, folder in FILES[package].items():
            found = [path for path in unpacked.glob(pattern) if not path.is_dir()]
            if not found:
                raise FetchError(f"{package} {version} holds no {pattern}")
            (new / folder).mkdir(parents=True, exist_ok=True)
            for path in found:
                shutil.copy(path, new / folder)  # copies the target of a link
                if folder == "lib":  # pyglet opens it under this name
                    shutil.copy(path, new / folder / f"{path.name.partition('.so')[0]}.so")
                if path.suffix == ".json":
                    point_beside(new / folder / path.name)
        needed = apt.needed(package) if package in OPENGL or "/" in package else []
        own = apt.libraries(*(name for name in needed if name.partition("=")[0] in OF_MESA or "~bpo" in name))
        for folder in set(FILES[package].values()) - {"include/vulkan", "include/vk_video"}:
            lib = OWN_LIBRARIES.get(folder, "lib")
            (new / lib).mkdir(exist_ok=True)
            spare = own
            while missing := unresolved(
                {*binaries(new / folder), *binaries(new / lib)}, new / lib, TREE / lib, own=own
            ):
                if not missing & spare.keys() and spare is own:
                    names = [name for name in apt.needed(package) if name.startswith(("lib", "mesa-lib"))]
                    spare = apt.libraries(*names)
                if not missing & spare.keys():
                    raise FetchError(
                        f"no package was found to hold {', '.join(sorted(missing))}, which {package} needs"
                    )
                for name in missing & spare.keys():
                    shutil.copy(spare[name], new / lib)
        shutil.copytree(new, TREE, dirs_exist_ok=True)
    return version


def point_beside(path: Path) -> None:
    """Let the manifest of a driver or a layer point to the library beside it."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    about = manifest["ICD" if "ICD" in manifest else "layer"]
    about["library_path"] = f"./{Path(about['library_path']).name}"
    path.write_text(json.dumps(manifest, indent=4) + "\n", encoding="utf-8")


OPENGL_ENV = [
    'gi_egl="$gi_tree/egl.d/50_mesa.json" gi_dri="$gi_tree/dri"',
    "for gi_one in /usr/share/glvnd/egl_vendor.d/*.json /etc/glvnd/egl_vendor.d/*.json /usr/lib/*/dri; do",
    '    if [ -e "$gi_one" ]; then case "$gi_one" in',
    "        *mesa.json) ;;",
    '        *.json) gi_egl="$gi_one:$gi_egl" ;;',
    '        *) gi_dri="$gi_dri:$gi_one" ;;',
    "    esac; fi",
    "done",
    'export __EGL_VENDOR_LIBRARY_FILENAMES="$gi_egl" LIBGL_DRIVERS_PATH="$gi_dri"',
    "# moderngl and vispy look for none but the system's, unless these name them.",
    "export GLCONTEXT_LINUX_LIBEGL=libEGL.so.1 GLCONTEXT_LINUX_LIBGL=libGL.so.1 GLCONTEXT_LINUX_LIBX11=libX11.so.6",
    'export VISPY_GL_LIB=libGL.so.1 EGL_LIBRARY="$gi_tree/lib/libEGL.so.1"',
    "unset gi_egl gi_dri gi_one",
]
"""The fetched Mesa comes after other vendors' EGL, but its driver before the system's, which may be for a GPU."""


def env_text() -> str:
    """The env file: shell code that does not need bash, works under set -eu, and can be sourced twice."""
    drivers = ":".join(f"$gi_tree/icd.d/{path.name}" for path in sorted(TREE.glob("icd.d/*.json")))
    lines = [f'export VK_ADD_DRIVER_FILES="{drivers}" VK_ADD_LAYER_PATH="$gi_tree/layers.d"'] if drivers else []
    if (TREE / "egl.d").exists():
        lines += OPENGL_ENV
    for name, folder in {"LD_LIBRARY_PATH": "lib", "C_INCLUDE_PATH": "include", "PATH": "bin"}.items():
        if (TREE / folder).exists():
            lines.append(f'case ":${{{name}-}}:" in *":$gi_tree/{folder}:"*) ;; *)')
            lines.append(f'    export {name}="$gi_tree/{folder}${{{name}:+:${name}}}" ;; esac')
    start = (
        "# Written by tools/fetch_vulkan.py, to be sourced by sh: it adds what is in .vulkan to the system's drivers."
    )
    return "\n".join([start, f"gi_tree={shlex.quote(str(TREE))}", *lines, "unset gi_tree", ""])


def read_stamp() -> dict[str, Any]:
    """Read what an earlier run has fetched, if it is still complete: versions, or why there is none."""
    try:
        found = json.loads((HOME / "stamp.json").read_text(encoding="utf-8"))
        stamp = {"format": found["format"], "versions": dict(found["versions"]), "missing": dict(found["missing"])}
        if stamp["format"] == FORMAT and not any(
            unresolved(binaries(TREE / folder), TREE / OWN_LIBRARIES.get(folder, "lib"))
            for folder in ("icd.d", "layers.d", "lib", "egl.d", "dri", "hip5", "bin")
        ):
            return stamp
    except (OSError, ValueError, LookupError, TypeError, FetchError):
        pass
    shutil.rmtree(TREE, ignore_errors=True)
    return {"format": FORMAT, "versions": {}, "missing": {}}


def is_meant(package: str) -> bool:
    """Whether this system needs the package: a later Debian needs no backports of an earlier one."""
    if "/" not in package:
        return True
    try:
        codename = freedesktop_os_release()["VERSION_CODENAME"]
    except (OSError, KeyError):
        return False
    return package.endswith(f"/{codename}-backports")


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
                apt = Apt(Path(scratch) / "apt", *{name.partition("/")[2] for name in wanted if "/" in name})
        except FetchError as error:
            failed, wanted = dict.fromkeys(wanted, str(error)), []
        for name in wanted:
            try:
                stamp["versions"][name] = add(apt, name)
            except FetchError as error:
                # A package that does not exist will not exist the next time either.
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
    packages = [name for group in options.groups or ["vulkan"] for name in GROUPS[group] if is_meant(name)]
    try:
        missing = provide(packages)
    except OSError as error:  # the checkout is not writable
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
