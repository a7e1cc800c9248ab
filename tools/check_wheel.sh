#!/usr/bin/env bash
# Build the sdist, from it the wheel, and test the wheel as a user gets it: in new environments, outside the checkout.
# PYTHON names the interpreter. For Vulkan, source .vulkan/env first, or run this by `make wheel-check`.
set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/empty"
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1

# environment NAME REQUIREMENT...: a new one, with these installed.
environment() {
    "$python" -m venv "$work/$1"
    packages "$1" >"$work/$1.before"
    "$work/$1/bin/python" -m pip install --quiet "${@:2}"
}

packages() {
    local names='from importlib.metadata import distributions as d; print(*sorted({one.name for one in d()}), sep="\n")'
    "$work/$1/bin/python" -I -c "$names"
}

# brought NAME: what the installation added to that environment, in one line.
brought() {
    packages "$1" | LC_ALL=C comm -13 "$work/$1.before" - | paste -sd ' '
}

echo "wheel: build"
environment build hatchling
(cd "$checkout" && "$work/build/bin/python" -m hatchling build --target sdist --directory "$work/dist" >/dev/null)
"$work/build/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work"/dist/*.tar.gz >/dev/null
wheel=$(echo "$work"/dist/*.whl)

# The wheel holds the packages' files, all of them and nothing else. The core is tried with the oldest versions that it
# says it works with, where they still have wheels for this Python.
"$python" - "$checkout" "$wheel" "$work/oldest.txt" <<'PYTHON'
import re
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

checkout, wheel, oldest = map(Path, sys.argv[1:])
packages = [checkout / "gpuinterop", *checkout.glob("backends/gpuinterop_*")]
there = {
    str(path.relative_to(package.parent))
    for package in packages
    for path in package.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    metadata = message_from_bytes(archive.read(next(name for name in info if name.endswith("/METADATA"))))
if lost := sorted(there - names):
    sys.exit(f"not in the wheel: {', '.join(lost)}")
if stray := sorted(names - info - there):
    sys.exit(f"in the wheel, and in no package: {', '.join(stray)}")
bounds = [re.sub(">=", "==", line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
oldest.write_text("\n".join(bounds if sys.version_info < (3, 13) else ["# the newest"]) + "\n")
PYTHON

echo "wheel: the core alone, with $(paste -sd ' ' "$work/oldest.txt")"
environment core --constraint "$work/oldest.txt" "$wheel"
cd "$work/empty"
"$work/core/bin/python" -m pip check
"$work/core/bin/python" -W error -c 'import gpuinterop; print("import gpuinterop:", gpuinterop.__file__.removeprefix("'"$work"'/"))'
"$work/core/bin/gpuinterop" --help >/dev/null
if [[ $(brought core) != "gpuinterop numpy" ]]; then
    echo "expected the wheel to bring gpuinterop and numpy alone, it brought: $(brought core)" >&2
    exit 1
fi
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
environment test "$wheel[test]"
if [[ " $(brought test) " =~ \ (hypothesis|rich|pillow)\  ]]; then
    echo "the extra 'test' brings ${BASH_REMATCH[1]}, which the conformance suite does not use" >&2
    exit 1
fi
"$work/test/bin/python" -m pip check
"$work/test/bin/python" -m pytest -n 4 -p no:cacheprovider -W error --timeout 120 --timeout-method thread \
    --pyargs gpuinterop.testing "$@"
