#!/usr/bin/env bash
# Build the sdist, from it the wheel, check both, and install the wheel as a user does: by name, from an index, into new
# environments, outside the checkout.
#
# RELEASE names a tag, v0.1.0: the checkout must be at that tag, without changes. When everything has passed, both files
# are put into dist/. Without RELEASE this rehearses a release: it commits what the checkout has now, committed or not,
# in a temporary repository with the tag v0.1.0.
#
# PYTHON names the interpreter, OTHER_PYTHON one of another version; without it, the script searches for one. For
# Vulkan, source .vulkan/env first, or run `make wheel-check`.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
tag=${RELEASE:-v0.1.0}
version=${tag#v}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/empty"
unset PYTHONPATH "${!GIT_@}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Commits and tags here do not use the caller's name or key.
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=commit.gpgSign GIT_CONFIG_VALUE_0=false
export GIT_CONFIG_KEY_1=tag.gpgSign GIT_CONFIG_VALUE_1=false
export GIT_AUTHOR_NAME=check GIT_AUTHOR_EMAIL=check@localhost
export GIT_COMMITTER_NAME=check GIT_COMMITTER_EMAIL=check@localhost

# expect WHAT PATTERN VALUE: exit if the value does not match.
expect() {
    # shellcheck disable=SC2053  # a pattern
    if [[ $3 != $2 ]]; then
        echo "expected $1 to be $2, got $3" >&2
        exit 1
    fi
}

# environment NAME PYTHON EXTRAS OPTION...: make one, with gpuinterop only from the index, and its requirements.
environment() {
    local pip=("$work/$1/bin/python" -m pip)
    "$2" -m venv "$work/$1"
    packages "$1" >"$work/$1.before"
    "${pip[@]}" --isolated install --quiet --no-deps --index-url "file://$work/index" "gpuinterop==$version"
    "${pip[@]}" install --quiet "gpuinterop$3==$version" "${@:4}"
    "${pip[@]}" check
    expect "the version in environment $1" "gpuinterop $version" "$("$work/$1/bin/gpuinterop" --version)"
}

packages() {
    local names='from importlib.metadata import distributions as d; print(*sorted({one.name for one in d()}), sep="\n")'
    "$work/$1/bin/python" -I -c "$names"
}

# brought NAME: the packages that the installation added to that environment, in one line.
brought() {
    packages "$1" | LC_ALL=C comm -13 "$work/$1.before" - | paste -sd ' '
}

# advised NAME: what the command that messages recommend for the extra `vulkan` would install there.
advised() {
    local ask='from gpuinterop.installing import pip_install; print(pip_install("vulkan"))'
    PATH=$work/$1/bin:$PATH bash -c "$("$work/$1/bin/python" -c "$ask") --dry-run" | tail -n 1
}

# demo NAME: Vulkan and the host backend alternate on one buffer, and the result is what NumPy computes.
demo() {
    "$work/$1/bin/gpuinterop" demo --json --frames 60 --output "$work/$1.png" \
        ${GPUINTEROP_REQUIRE_VULKAN:+--exporter=vulkan} >"$work/$1.json"
    "$work/$1/bin/python" - "$work/$1.json" <<'PYTHON'
import json
import platform
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    result = json.load(file)
if result["correct"] is not True:
    sys.exit(f"expected the demo to be correct, got {result}")
print(f"demo: correct on Python {platform.python_version()}, host and {result['driver']}")
PYTHON
}

# another: an interpreter of another version than PYTHON's that can make environments.
another() {
    local candidate mine usable all=(python3.14 python3.13 python3.12 python3.11 ~/.pyenv/versions/3.*/bin/python)
    mine=$("$python" -c 'import sys; print(sys.version_info.minor)')
    usable='import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11) or sys.version_info.minor == int(sys.argv[1]))'
    for candidate in "${OTHER_PYTHON:-${all[@]}}"; do
        if "$candidate" -c "$usable" "$mine" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# version_of DIRECTORY: the version of a build there.
version_of() {
    (cd "$1" && "$work/tools/bin/python" -W ignore -m hatchling version)
}

echo "wheel: build"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet \
    check-wheel-contents editables hatch-fancy-pypi-readme hatch-vcs hatchling 'twine>=7'
tree=$checkout
if [[ -z ${RELEASE:-} ]]; then
    tree=$work/tree
    git init --quiet "$tree"
    git --git-dir "$tree/.git" --work-tree "$checkout" add --all
    git -C "$tree" commit --quiet --message "What is released"
    git -C "$tree" tag "$tag"
    git -C "$tree" reset --quiet --hard
fi
expect "the version in $tree" "$version" "$(version_of "$tree")"
if [[ -n ${RELEASE:-} ]] && ! grep -q "^## \[$version\] - 20" "$tree/CHANGELOG.md"; then
    echo "expected CHANGELOG.md to have a heading '## [$version] - ' and the date; write it, and move the tag" >&2
    exit 1
fi
(cd "$tree" && "$work/tools/bin/python" -m hatchling build --target sdist --directory "$work/dist" >/dev/null)
"$work/tools/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work"/dist/*.tar.gz >/dev/null
sdist=$(echo "$work"/dist/*.tar.gz) wheel=$(echo "$work"/dist/*.whl)
expect "the files" "gpuinterop-$version-py3-none-any.whl gpuinterop-$version.tar.gz" "${wheel##*/} ${sdist##*/}"

echo "wheel: what the files hold"
"$work/tools/bin/twine" --no-color check --strict "$sdist" "$wheel"
(cd "$tree" && "$work/tools/bin/check-wheel-contents" "$wheel")
if ! diff <(git -C "$tree" ls-files '[!.]*' | LC_ALL=C sort) \
    <(tar --list --file "$sdist" | cut -d / -f 2- | grep -vx -e .gitignore -e PKG-INFO | LC_ALL=C sort); then
    echo "expected the sdist to hold what git tracks (<), it holds something else (>)" >&2
    exit 1
fi
# Test the core with the oldest versions that it declares, if they have wheels for this Python.
"$python" - "$wheel" "$work/oldest.txt" <<'PYTHON'
import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

wheel, oldest = map(Path, sys.argv[1:])
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(archive.read(name))
if dead := re.findall(r"\]\((?!https?:|#)[^)]*\)", str(metadata.get_payload())):
    sys.exit(f"expected the description to link to the repository, got links to files: {dead}")
bounds = [re.sub(">=", "==", line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
oldest.write_text("\n".join(bounds if sys.version_info < (3, 13) else ["# the newest"]) + "\n")
PYTHON

echo "wheel: the version elsewhere"
git clone --quiet "$tree" "$work/later"
git -C "$work/later" commit --quiet --allow-empty --message "Later"
git clone --quiet --depth 1 --no-tags "file://$work/later" "$work/shallow"
mkdir "$work/archive" "$work/copy"
git -C "$tree" archive "$tag" | tar -x -C "$work/archive"
git -C "$tree" ls-files -z | tar --create --directory "$tree" --null --files-from - | tar -x -C "$work/copy"
expect "the version a commit later" "*.dev1+g*" "$(version_of "$work/later")"
expect "the version of a shallow clone without tags" "0.1.dev1+unknown.g*" "$(version_of "$work/shallow")"
expect "the version in git's archive of the tag" "$version" "$(version_of "$work/archive")"
expect "the version of a copy without git's folder" "0.0+unknown" "$(version_of "$work/copy")"
"$work/tools/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable "$work/later"
expect "the version of an editable installation" "$(version_of "$work/later")" \
    "$("$work/tools/bin/python" -c 'import gpuinterop; print(gpuinterop.__version__)')"

# An index: a folder for each project, with a page of links.
mkdir -p "$work/index/gpuinterop"
cp "$sdist" "$wheel" "$work/index/gpuinterop"
printf '<a href="%s">it</a>\n' "${sdist##*/}" "${wheel##*/}" >"$work/index/gpuinterop/index.html"

cd "$work/empty"
echo "wheel: only the core, with $(paste -sd ' ' "$work/oldest.txt")"
environment core "$python" "" --constraint "$work/oldest.txt"
"$work/core/bin/python" -W error -c 'import gpuinterop; print("import gpuinterop:", gpuinterop.__file__.removeprefix("'"$work"'/"))'
"$work/core/bin/gpuinterop" --help >/dev/null
if [[ $(brought core) != "gpuinterop numpy" ]]; then
    echo "expected the wheel to install only gpuinterop and numpy, got: $(brought core)" >&2
    exit 1
fi
expect "what a message's pip line brings" "Would install cffi-*" "$(advised core)"
"$work/core/bin/gpuinterop" info --json >"$work/info.json"
# The host backend computes: a fill waits for a signal, NumPy adds in place, and the file has the sums.
"$work/core/bin/python" -W error - "$work/info.json" <<'PYTHON'
import fcntl
import json
import os
import struct
import sys

import numpy as np

import gpuinterop as gi

with open(sys.argv[1], encoding="utf-8") as file:
    (host,) = (one for one in json.load(file)["backends"] if one["name"] == "host")
if not host["available"]:
    sys.exit(f"the host backend is not available: {host['reason']}")

fd = os.memfd_create("sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.write(fd, b"\xff" * 4096)
fcntl.fcntl(fd, 1033, 0x2)  # F_ADD_SEALS, F_SEAL_SHRINK
device = gi.get_backend("host").device()
with (
    device.create_stream() as stream,
    device.create_stream() as other,
    device.create_semaphore(gi.TimelineFd) as semaphore,
    device.import_memory(gi.OpaqueFd.adopt(os.dup(fd)), size=4096, dedicated=False) as memory,
):
    buffer = memory.map_buffer(0, 4096)
    semaphore.wait(stream, 1)
    buffer.fill(0, stream=stream)
    if os.pread(fd, 4096, 0) != b"\xff" * 4096:
        sys.exit("the host backend did not wait")
    semaphore.signal(other, 1)
    stream.synchronize(20)
    array = np.asarray(buffer.view((1024,), "int32"))
    array += np.arange(1024, dtype=np.int32)
    del array
if os.pread(fd, 4096, 0) != struct.pack("1024i", *range(1024)):
    sys.exit("the host backend computed something else")
print("host: available, and it computes")
PYTHON

echo "wheel: the conformance suite, from the wheel"
environment test "$python" "[test]"
if [[ " $(brought test) " =~ \ (hypothesis|pillow)\  ]]; then
    echo "the extra 'test' brings ${BASH_REMATCH[1]}, which the conformance suite does not use" >&2
    exit 1
fi
demo test
"$work/test/bin/python" -m pytest -n 4 -p no:cacheprovider -W error --timeout 120 --timeout-method thread \
    --pyargs gpuinterop.testing "$@"
"$work/test/bin/python" - <<'PYTHON'
from gpuinterop.testing.simulated import build

print("simulated drivers:", *(build(vendor).name for vendor in ("cuda", "hip")))
PYTHON

if other=$(another) && [[ -n $other ]]; then
    echo "wheel: a second Python, $("$other" --version)"
    environment other "$other" "[vulkan,cli]"
    demo other
elif [[ -n ${OTHER_PYTHON:-} ]]; then
    echo "expected OTHER_PYTHON to be a Python of another version, 3.11 or newer, with venv; got $OTHER_PYTHON" >&2
    exit 1
else
    echo "wheel: NOT TRIED on a second Python: there is none here"
fi

if [[ -n ${RELEASE:-} ]]; then
    rm -rf "$checkout/dist"
    mkdir "$checkout/dist"
    cp "$sdist" "$wheel" "$checkout/dist"
    echo "wheel: dist/ has $version"
fi
