#!/usr/bin/env python3
"""Fetch software Vulkan (lavapipe, SwiftShader, the validation layers) and Vulkan's headers into <checkout>/.vulkan.

Nothing is installed. Debian and Ubuntu only, root not needed. Packages come from the sources apt is configured with,
through private apt folders; of each package only what is needed is kept. `.vulkan/env`, to be sourced by sh, puts it
into use:

    python3 tools/fetch_vulkan.py && . .vulkan/env

What the system has is used and not fetched, and its drivers stay listed beside the fetched ones. Where the system's own
Vulkan finds a device, nothing is fetched unless --software or --require asks for it.

--hip5 fetches AMD's HIP runtime 5, and nothing else, for a few tests: it loads without a GPU, and has the ABI from
before 6.0. No env file names its folder, so nothing else finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import glob
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1  # of the tree; another number makes every checkout fetch again

HOME = Path(__file__).resolve().parent.parent / ".vulkan"
TREE = HOME / "tree"
ENV = HOME / "env"
STAMP = HOME / "stamp.json"

# Every Debian has them, and a second copy must not come before the system's.
NEVER = {"libc6", "libgcc-s1", "libstdc++6"}


@dataclass(frozen=True)
class Component:
    """One thing to have: the package it is in, the names of its files, where they go, and how the system shows it."""

    name: str
    package: str
    files: tuple[tuple[str, str], ...]  # (pattern of a file's name, folder in the tree)
    system: str  # pattern of the manifest's name, where the system has it
    device: str = ""  # part of the name of the device that shows that the driver works


# The loader and the libraries that drivers link to are found by name, in lib; a driver or a layer through its manifest,
# beside which it lies.
LOADER = Component("loader", "libvulkan1", (("libvulkan.so.1*", "lib"),), "")
LAVAPIPE = Component(
    "lavapipe",
    "mesa-vulkan-drivers",
    (("libvulkan_lvp.so", "icd.d"), ("lvp_icd*.json", "icd.d")),
    "lvp_icd*.json",
    "llvmpipe",
)
SWIFTSHADER = Component(
    "SwiftShader",
    "chromium-common",
    (("libvk_swiftshader.so", "icd.d"), ("vk_swiftshader_icd.json", "icd.d")),
    "vk_swiftshader_icd*.json",
    "SwiftShader",
)
VALIDATION = Component(
    "validation layers",
    "vulkan-validationlayers",
    (("libVkLayer_khronos_validation.so", "layers.d"), ("VkLayer_khronos_validation.json", "layers.d")),
    "VkLayer_khronos_validation.json",
)
HEADERS = Component(
    "headers",
    "libvulkan-dev",
    (("vulkan_core.h", "include/vulkan"), ("vk_platform.h", "include/vulkan"), ("vulkan_video*.h", "include/vk_video")),
    "",
)
HIP5 = Component("HIP 5", "libamdhip64-5", (("libamdhip64.so.5*", "hip5"),), "")
GLSLANG = Component("glslangValidator", "glslang-tools", (("glslang", "bin"), ("glslangValidator", "bin")), "")


class FetchError(Exception):
    """A step failed; the message is for the user."""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, seconds: int = 600) -> str:
    """Run a command without input and return its output; what it said is in the error when it fails."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"} | (env or {}),
            cwd=cwd,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{name} did not end within {seconds} s") from None
    except OSError as error:
        raise FetchError(f"{name} cannot be run: {error}") from None
    if done.returncode:
        said = "\n".join(f"    {line}" for line in done.stderr.strip().splitlines()[-8:])
        raise FetchError(f"{name} failed with status {done.returncode}" + (f":\n{said}" if said else ""))
    return done.stdout


def say(text: str) -> None:
    print(f"vulkan: {text}", file=sys.stderr, flush=True)


# --- the system ---


def os_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def forget_env_file() -> list[str]:
    """Take Vulkan's variables and what an env file put into others out of this process; return the drivers chosen.

    The system is then seen as it is, whatever the shell that this is called from has in its environment.
    """
    ours = f"/{HOME.name}/{TREE.name}/"
    chosen = [path for path in split("VK_DRIVER_FILES") or split("VK_ICD_FILENAMES") if ours not in path]
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES", "VK_LAYER_PATH", "VK_ADD_LAYER_PATH"):
        os.environ.pop(name, None)
    for name in ("PATH", "LD_LIBRARY_PATH"):
        os.environ[name] = os.pathsep.join(part for part in split(name) if ours not in part + "/")
    return chosen


def split(name: str) -> list[str]:
    return [part for part in os.environ.get(name, "").split(os.pathsep) if part]


def look_at_system() -> dict[str, Any]:
    """What the system itself has; a stamp is good as long as this stays the same."""
    release = os_release()
    return {
        "machine": platform.machine(),
        "release": f"{release.get('ID', '')} {release.get('VERSION_ID', '')}".strip(),
        "loader": find_loader(),
        "icds": manifests("icd.d"),
        "layers": manifests("explicit_layer.d"),
    }


def find_loader() -> str:
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig:
        with contextlib.suppress(FetchError):
            for line in run(ldconfig, "-p").splitlines():
                about, _, path = line.strip().partition(" => ")
                if about.startswith("libvulkan.so.1 ") and "64" in about:  # "(libc6,x86-64)", "(libc6,AArch64)"
                    return path
    return ""


def manifests(folder: str) -> list[str]:
    """List the drivers (icd.d) or layers (explicit_layer.d) in the places where the Vulkan loader looks."""
    home = os.environ.get("HOME", "")
    config = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    data = os.environ.get("XDG_DATA_HOME") or f"{home}/.local/share"
    places = (config, "/etc/xdg", "/usr/local/etc", "/etc", data, "/usr/local/share", "/usr/share")
    return [path for place in places for path in sorted(glob.glob(f"{glob.escape(place)}/vulkan/{folder}/*.json"))]


def system_has(component: Component, system: dict[str, Any], chosen: list[str]) -> bool:
    if component is LOADER:
        return bool(system["loader"])
    if component is HEADERS:
        return Path("/usr/include/vulkan/vulkan_core.h").is_file()
    if component is GLSLANG:
        return shutil.which("glslangValidator") is not None
    if component is HIP5:
        return False
    paths = [*(chosen or system["icds"]), *system["layers"]]
    return any(fnmatch.fnmatch(Path(path).name, component.system) for path in paths)


# --- what Vulkan itself reports ---


def list_vulkan() -> dict[str, list[str]]:
    """Ask the Vulkan loader of this process for its devices and layers."""
    import ctypes

    class InstanceCreateInfo(ctypes.Structure):
        _fields_ = (
            ("type", ctypes.c_uint32),
            ("next", ctypes.c_void_p),
            ("flags", ctypes.c_uint32),
            ("application", ctypes.c_void_p),
            ("layer_count", ctypes.c_uint32),
            ("layers", ctypes.c_void_p),
            ("extension_count", ctypes.c_uint32),
            ("extensions", ctypes.c_void_p),
        )

    vulkan = ctypes.CDLL("libvulkan.so.1")
    count = ctypes.c_uint32()
    vulkan.vkEnumerateInstanceLayerProperties(ctypes.byref(count), None)
    layer_size = 256 + 4 + 4 + 256  # VkLayerProperties begins with its name
    layer_bytes = ctypes.create_string_buffer(layer_size * count.value)
    vulkan.vkEnumerateInstanceLayerProperties(ctypes.byref(count), layer_bytes)
    layers = [text_at(layer_bytes.raw, index * layer_size) for index in range(count.value)]

    devices: list[str] = []
    instance = ctypes.c_void_p()
    info = InstanceCreateInfo(type=1)
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) == 0:
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        for handle in handles:
            properties = ctypes.create_string_buffer(4096)  # VkPhysicalDeviceProperties, 824 bytes: five words, a name
            vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
            devices.append(text_at(properties.raw, 20))
        vulkan.vkDestroyInstance(instance, None)
    return {"devices": devices, "layers": layers}


def text_at(data: bytes, offset: int) -> str:
    return data[offset : offset + 256].split(b"\0", 1)[0].decode("utf-8", "replace")


def ask_vulkan(env_file: Path | None = None) -> dict[str, list[str]]:
    """Ask it in a process of its own, since a driver may crash: with the env file, or the system's Vulkan alone."""
    source = f". {shlex.quote(str(env_file))} && " if env_file else ""
    command = [sys.executable, str(Path(__file__).resolve()), "--list", "--json"]
    try:
        answer: dict[str, list[str]] = json.loads(run("sh", "-c", source + shlex.join(command), seconds=120))
    except (FetchError, ValueError):
        return {"devices": [], "layers": []}
    return answer


# --- apt ---


class Apt:
    """apt with folders of its own: it reads the system's sources and keys, and writes nothing outside `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.debs = home / "debs"
        for folder in ("lists/partial", "cache/archives/partial", "state", "debs"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        unwanted = ("Contents-deb", "CNF", "DEP-11", "DEP-11-icons", "DEP-11-icons-small", "DEP-11-icons-large")
        lines = [
            f'Dir::State "{home}/state";',
            'Dir::State::status "/var/lib/dpkg/status";',
            f'Dir::State::Lists "{home}/lists";',
            f'Dir::Cache "{home}/cache";',
            f'Dir::Cache::Archives "{home}/cache/archives";',
            'Dir::Cache::pkgcache "pkgcache.bin";',
            'Dir::Cache::srcpkgcache "srcpkgcache.bin";',
            'APT::Sandbox::User "root";',  # as root: do not change to a user who cannot write here
            'Acquire::Languages "none";',
            'Acquire::PDiffs "false";',
            'Acquire::Retries "2";',
            'Acquire::http::Timeout "30";',
            'Acquire::https::Timeout "30";',
            'APT::Update::Error-Mode "any";',  # a source that cannot be reached is an error, not a warning
            'Acquire::IndexTargets::deb-src::Sources::DefaultEnabled "false";',
            *(f'Acquire::IndexTargets::deb::{name}::DefaultEnabled "false";' for name in unwanted),
            # What the system runs after an update of its own lists is not for these.
            "#clear APT::Update::Pre-Invoke;",
            "#clear APT::Update::Post-Invoke;",
            "#clear APT::Update::Post-Invoke-Success;",
        ]
        self.config = home / "apt.conf"
        self.config.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def update(self) -> str:
        """Fetch the lists. One bad source among good ones does not fail: return what apt said."""
        try:
            run("apt-get", "-c", self.config, "-qq", "update", seconds=600)
        except FetchError as error:
            return str(error)
        return ""

    def candidates(self, packages: Iterable[str]) -> dict[str, str]:
        """The version that would be fetched, of those packages that there are."""
        versions: dict[str, str] = {}
        package = ""
        for line in run("apt-cache", "-c", self.config, "policy", *packages).splitlines():
            if line and not line[0].isspace():
                package = line.rstrip(":")
            key, _, value = line.strip().partition(": ")
            if key == "Candidate" and value != "(none)":
                versions[package] = value
        return versions

    def libraries(self, packages: Iterable[str]) -> list[str]:
        """The library packages that these need, directly or not, and that are not installed."""
        wanted = list(packages)
        edges: dict[str, list[str]] = {}
        package, alternative = "", False
        options = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
        for line in run("apt-cache", "-c", self.config, "depends", "--recurse", *options, *wanted).splitlines():
            if line and not line[0].isspace():
                package = line.strip()
                continue
            kind, _, name = line.strip().partition("Depends: ")
            if not name:
                continue
            if not alternative and not name.startswith("<"):
                edges.setdefault(package, []).append(name.partition(":")[0])
            alternative = kind.startswith("|") and not name.startswith("<")  # of "a | b" the first
        seen: list[str] = []
        while wanted:
            for name in edges.get(wanted.pop(), []):
                if name.startswith("lib") and name not in NEVER and name not in seen:
                    seen.append(name)
                    wanted.append(name)
        return sorted(set(seen) - installed())

    def download(self, packages: Iterable[str]) -> list[Path]:
        names = list(packages)
        before = set(self.debs.iterdir())
        if names:
            run("apt-get", "-c", self.config, "-qq", "download", *names, cwd=self.debs, seconds=1800)
        return sorted(set(self.debs.iterdir()) - before)


def installed() -> set[str]:
    lines = run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\\n").splitlines()
    return {line.partition(" ")[0] for line in lines if line.endswith(" installed")}


# --- the packages ---


def members(deb: Path) -> Iterator[tuple[str, str, Any]]:
    """Each file and symbolic link of a package, in its order: name without folder, link's target or "", open file."""
    import tarfile

    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as unpacking:
        try:
            with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
                for member in archive:
                    name = Path(member.name).name
                    if member.isfile():
                        yield name, "", archive.extractfile(member)
                    elif member.issym():
                        yield name, Path(member.linkname).name, None
            if unpacking.stdout:
                unpacking.stdout.read()  # what pads the archive: dpkg-deb fails where it is not read
        except tarfile.TarError as error:
            raise FetchError(f"{deb.name} cannot be unpacked: {error}") from None
    if unpacking.returncode:
        raise FetchError(f"{deb.name} cannot be unpacked: dpkg-deb failed with status {unpacking.returncode}")


def unpack(deb: Path, files: Iterable[tuple[str, str]], tree: Path) -> list[Path]:
    """Put the package's files whose names fit a pattern into the folder beside it; a link becomes what it points to."""
    wanted = list(files)
    placed: dict[str, Path] = {}
    links: list[tuple[str, str]] = []
    for name, target, content in members(deb):
        folder = next((folder for pattern, folder in wanted if fnmatch.fnmatch(name, pattern)), None)
        if folder is None:
            continue
        if target:
            links.append((name, target))
            continue
        placed[name] = tree / folder / name
        placed[name].parent.mkdir(parents=True, exist_ok=True)
        with placed[name].open("wb") as out:
            shutil.copyfileobj(content, out)
        placed[name].chmod(0o644 if name.endswith(".json") else 0o755)
    for name, target in links:
        if target in placed and name not in placed:
            placed[name] = placed[target].with_name(name)
            os.link(placed[target], placed[name])
    deb.unlink()
    return list(placed.values())


def fix_manifest(path: Path) -> None:
    """Let a driver's or a layer's manifest point to the library beside it."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for key in ("ICD", "layer"):
        if key in manifest:
            library = Path(manifest[key]["library_path"]).name
            if not (path.parent / library).is_file():
                raise FetchError(f"{path.name} names {library}, which its package does not hold")
            manifest[key]["library_path"] = f"./{library}"
    path.write_text(json.dumps(manifest, indent=4) + "\n", encoding="utf-8")


def unresolved(files: Iterable[Path], lib: Path) -> dict[str, set[Path]]:
    """The libraries that the dynamic linker finds neither in the system nor in `lib`, and who needs them."""
    missing: dict[str, set[Path]] = {}
    for path in files:
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        for line in run("ldd", path, env={"LD_LIBRARY_PATH": str(lib)}).splitlines():
            name, _, where = line.strip().partition(" => ")
            if where == "not found":
                missing.setdefault(name, set()).add(path)
    return missing


def add_libraries(apt: Apt, owners: dict[Path, Component], tree: Path, folder: str) -> None:
    """Put into a folder what the fetched files link to and the system lacks, and nothing that the system has."""
    lib, spare = tree / folder, tree / "spare"
    missing = unresolved(owners, lib)
    if missing:
        packages = {owners[path].package for paths in missing.values() for path in paths}
        for deb in apt.download(apt.libraries(packages)):
            unpack(deb, [("*.so", "spare"), ("*.so.*", "spare")], tree)
    while missing:
        names = [name for name in missing if (spare / name).is_file()]
        if not names:
            raise FetchError("no package was found to hold " + ", ".join(sorted(missing)))
        lib.mkdir(exist_ok=True)
        for name in names:
            os.replace(spare / name, lib / name)
        missing = unresolved([*owners, *lib.iterdir()], lib)
    shutil.rmtree(spare, ignore_errors=True)


def fetch(components: list[Component], tree: Path) -> tuple[dict[str, str], dict[str, str], str]:
    """Fetch into `tree`: the version of what is there now, why the rest is not, and what apt complained of."""
    for tool in ("apt-get", "apt-cache", "dpkg-deb", "dpkg-query", "ldd"):
        if not shutil.which(tool):
            raise FetchError(f"{tool} is not here: software drivers are fetched on Debian and Ubuntu only")
    apt = Apt(tree / "apt")
    say("reading the package lists")
    complaint = apt.update()
    found = apt.candidates(component.package for component in components)
    there = [component for component in components if component.package in found]
    if complaint and not there:
        raise FetchError(complaint)
    unsure = f", or its source did not answer: {complaint}" if complaint else ""
    missing = {c.name: f"there is no package {c.package} for this system{unsure}" for c in components if c not in there}
    if there:
        say("fetching " + ", ".join(f"{component.package} {found[component.package]}" for component in there))
    debs = {deb.name.partition("_")[0]: deb for deb in apt.download(component.package for component in there)}
    owners: dict[Path, Component] = {}
    for component in there:
        files = unpack(debs[component.package], component.files, tree)
        for pattern, _ in component.files:
            if component is not GLSLANG and not any(fnmatch.fnmatch(path.name, pattern) for path in files):
                raise FetchError(f"{component.package} {found[component.package]} holds no {pattern}")
        for path in files:
            if path.suffix == ".json":
                fix_manifest(path)
            else:
                owners[path] = component
    # HIP 5 has its libraries to itself: in lib, which the env file names, ROCm's own would find them before theirs.
    for folder in ("lib", "hip5"):
        group = {path: component for path, component in owners.items() if (component is HIP5) == (folder == "hip5")}
        add_libraries(apt, group, tree, folder)
    shutil.rmtree(tree / "apt")
    return {component.name: found[component.package] for component in there}, missing, complaint


# --- the tree and its env ---


STAMP_SHAPE = {"format": int, "system": dict, "own": bool, "components": dict, "missing": dict, "files": list}


def read_stamp(system: dict[str, Any]) -> dict[str, Any] | None:
    """The stamp, where what it tells of is there still."""
    try:
        stamp: Any = json.loads(STAMP.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        stamp = None
    if not is_stamp(stamp):
        say(f"{STAMP.name} is broken, or of another version: fetching again")
        return None
    if stamp["format"] != FORMAT or stamp["system"] != system:
        return None
    return stamp if all((TREE / name).is_file() for name in stamp["files"]) else None


def is_stamp(found: Any) -> bool:
    if not (isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in STAMP_SHAPE.items())):
        return False
    texts = (*found["components"].values(), *found["missing"].values(), *found["files"])
    return all(isinstance(text, str) for text in texts)


def write(path: Path, text: str) -> None:
    """Replace the file in one step, where its text is another."""
    if not path.is_file() or path.read_bytes() != text.encode():
        new = path.with_name(f"{path.name}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)


def env_text(system: dict[str, Any]) -> str:
    """The env file: shell code that needs no bash, works under set -eu, and may be sourced twice."""
    lines = ["# Written by tools/fetch_vulkan.py, to be sourced by sh. It puts the Vulkan in .vulkan into use."]
    drivers = sorted(path.name for path in TREE.glob("icd.d/*.json"))
    layers = any(TREE.glob("layers.d/*.json"))
    libraries = any(TREE.glob("lib/*"))
    programs = any(TREE.glob("bin/*"))
    headers = any(TREE.glob("include/*"))
    if not (drivers or layers or libraries or programs or headers):
        return "\n".join([*lines, "# There is nothing in it: the system's own Vulkan is used, or none.", ""])
    lines += [
        f"gi_tree=${{GPUINTEROP_VULKAN_ROOT:-{shlex.quote(str(HOME))}}}/tree",
        'gi_has() { case ":$1:" in *":$2:"*) return 0 ;; *) return 1 ;; esac; }',
    ]
    if programs:
        lines.append('if ! gi_has "${PATH-}" "$gi_tree/bin"; then export PATH="$gi_tree/bin${PATH:+:$PATH}"; fi')
    if headers:
        lines += [
            'if ! gi_has "${C_INCLUDE_PATH-}" "$gi_tree/include"; then',
            '    export C_INCLUDE_PATH="$gi_tree/include${C_INCLUDE_PATH:+:$C_INCLUDE_PATH}"',
            "fi",
        ]
    if libraries:
        lines += [
            "# The loader and the libraries that the drivers link to: what the system lacks, so it comes last.",
            'if ! gi_has "${LD_LIBRARY_PATH-}" "$gi_tree/lib"; then',
            '    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$gi_tree/lib"',
            "fi",
        ]
    if drivers:
        lines += [
            "# The drivers already chosen, else the system's; then those fetched.",
            "gi_drivers=${VK_DRIVER_FILES:-${VK_ICD_FILENAMES-}}",
            f"gi_drivers=${{gi_drivers:-{shlex.quote(os.pathsep.join(system['icds']))}}}",
            "for gi_file in " + " ".join(f'"$gi_tree/icd.d/{name}"' for name in drivers) + "; do",
            '    if ! gi_has "$gi_drivers" "$gi_file"; then gi_drivers="${gi_drivers:+$gi_drivers:}$gi_file"; fi',
            "done",
            'export VK_DRIVER_FILES="$gi_drivers" VK_ICD_FILENAMES="$gi_drivers"  # the second for older loaders',
        ]
    if layers:
        folders = dict.fromkeys(str(Path(path).parent) for path in system["layers"])
        lines += [
            "# The variable replaces the places where the loader looks for layers: the system's are named again.",
            f"gi_layers=${{VK_LAYER_PATH:-{shlex.quote(os.pathsep.join(folders))}}}",
            'if ! gi_has "$gi_layers" "$gi_tree/layers.d"; then',
            '    gi_layers="$gi_tree/layers.d${gi_layers:+:$gi_layers}"',
            "fi",
            'export VK_LAYER_PATH="$gi_layers"',
        ]
    lines += ["unset gi_tree gi_drivers gi_layers gi_file", "unset -f gi_has", ""]
    return "\n".join(lines)


def make_tree(components: list[Component], stamp: dict[str, Any]) -> dict[str, str]:
    """Add components to the tree and its stamp; return why some are missing.

    It is made beside the old one, and takes its place when it is whole.
    """
    new, old = HOME / "tree.new", HOME / "tree.old"
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    if stamp["files"]:
        shutil.copytree(TREE, new, copy_function=os.link)
    else:
        new.mkdir()
    try:
        versions, missing, complaint = fetch(components, new) if components else ({}, {}, "")
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    STAMP.unlink(missing_ok=True)
    if TREE.exists():
        os.replace(TREE, old)
    os.replace(new, TREE)
    shutil.rmtree(old, ignore_errors=True)
    write(ENV, env_text(stamp["system"]))
    devices = ask_vulkan(ENV)["devices"]
    for component in components:
        shown = not component.device or any(component.device in device for device in devices)
        if component.name in versions and not shown:
            missing[component.name] = (
                f"{component.package} was fetched, but Vulkan lists no device of it (remove {HOME.name} to try again)"
            )
            del versions[component.name]
    stamp["components"] |= versions
    if not complaint:  # else another try may find them
        stamp["missing"] |= missing
    stamp["devices"] = devices
    stamp["files"] = sorted(str(path.relative_to(TREE)) for path in TREE.rglob("*") if path.is_file())
    write(STAMP, json.dumps(stamp, indent=2) + "\n")
    return missing


# --- the user ---


def advice(components: list[Component]) -> list[str]:
    """How a user gets by hand what could not be fetched. (HIP 5 is of use to one test only.)"""
    components = [component for component in components if component is not HIP5]
    if not components:
        return []
    release = os_release()
    family = f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split()
    names = [component.name for component in components]
    lines: list[str] = []
    if sys.platform != "linux":
        lines.append("the loader and the validation layers come with the Vulkan SDK, https://vulkan.lunarg.com")
    elif "debian" in family or "ubuntu" in family:
        packages = [component.package for component in components if component is not SWIFTSHADER]
        if packages:
            lines.append("sudo apt install " + " ".join(packages))
    elif "fedora" in family:
        lines.append(
            "sudo dnf install vulkan-loader mesa-vulkan-drivers vulkan-validation-layers vulkan-headers glslang"
        )
    elif "arch" in family:
        lines.append("sudo pacman -S vulkan-icd-loader vulkan-swrast vulkan-validation-layers vulkan-headers glslang")
    else:
        lines.append(
            "install your system's Vulkan loader and headers, Mesa's lavapipe driver, the Khronos validation layers"
        )
    if SWIFTSHADER.name in names:
        lines.append("SwiftShader: build https://github.com/google/swiftshader, put its manifest into VK_DRIVER_FILES")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--software", action="store_true", help="also where the system's own Vulkan finds a device")
    parser.add_argument("--require", action="store_true", help="as --software, and fail if anything is missing")
    parser.add_argument("--glslang", action="store_true", help="fetch glslangValidator, and nothing else")
    parser.add_argument("--hip5", action="store_true", help="fetch AMD's HIP runtime 5, and nothing else")
    parser.add_argument("--list", action="store_true", help="only print the devices and layers of this environment")
    parser.add_argument("--json", action="store_true", help="with --list: print JSON")
    options = parser.parse_args()
    if options.list:
        answer = list_vulkan()
        print(json.dumps(answer) if options.json else "\n".join(answer["devices"] + answer["layers"]))
        return 0
    tools = [component for component, asked in ((GLSLANG, options.glslang), (HIP5, options.hip5)) if asked]
    wanted = tools or [LOADER, LAVAPIPE, SWIFTSHADER, VALIDATION, HEADERS]
    try:
        missing = provide(wanted, options.software or options.require or bool(tools))
    except OSError as error:  # the checkout cannot be written to
        missing = dict.fromkeys((component.name for component in wanted), str(error))
    return report([component for component in wanted if component.name in missing], missing, options.require)


def provide(wanted: list[Component], software: bool) -> dict[str, str]:
    """Bring `.vulkan` up to date: which of the wanted is neither there nor in the system, and why."""
    HOME.mkdir(exist_ok=True)
    if sys.platform != "linux":
        write(ENV, env_text({"icds": [], "layers": []}))
        return dict.fromkeys((component.name for component in wanted), "it is fetched on Linux only")

    import fcntl

    chosen = forget_env_file()
    missing: dict[str, str] = {}
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        system = look_at_system()
        stamp = read_stamp(system)
        if not stamp:
            own = bool(system["loader"] and system["icds"] and ask_vulkan()["devices"])
            stamp = {"format": FORMAT, "system": system, "own": own, "components": {}, "missing": {}, "files": []}
        if stamp["own"] and not software:
            wanted = []
        wanted = [component for component in wanted if not system_has(component, system, chosen)]
        known = stamp["components"].keys() | stamp["missing"].keys()
        unknown = [component for component in wanted if component.name not in known]
        try:
            if unknown or not STAMP.is_file():
                missing = make_tree(unknown, stamp)
        except (FetchError, OSError) as error:
            missing = {component.name: str(error) for component in unknown}
        write(ENV, env_text(system))
    if there := [f"{name} {version}" for name, version in stamp["components"].items()]:
        say(f"{', '.join(there)}: in {HOME.name}")
    elif not wanted:
        say("the system's own is used")
    missing |= stamp["missing"]
    return {component.name: missing[component.name] for component in wanted if component.name in missing}


def report(components: list[Component], reasons: dict[str, str], require: bool) -> int:
    for reason in dict.fromkeys(reasons[component.name] for component in components):
        names = [component.name for component in components if reasons[component.name] == reason]
        say(f"missing: {', '.join(names)}: {reason}")
    for line in advice(components) if components else []:
        say(f"    {line}")
    return 1 if require and components else 0


if __name__ == "__main__":
    sys.exit(main())
