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
    "$work/$1/bin/python" -m pip install --quiet "${@:2}"
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
"$work/core/bin/gpuinterop" info --json | "$python" -m json.tool >/dev/null

echo "wheel: the conformance suite, from the wheel"
environment test "$wheel[test,vulkan]"
"$work/test/bin/python" -m pip check
"$work/test/bin/python" -m pytest -n 4 -p no:cacheprovider -W error --timeout 120 --timeout-method thread \
    --pyargs gpuinterop.testing "$@"
