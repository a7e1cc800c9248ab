"""`import gpuinterop` is free: no binding, no NumPy, no environment, no driver; and it never raises."""

import ast
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

import gpuinterop
from tests.programs import printed, python

ROOT = Path(gpuinterop.__file__).parents[1]

PROBE = """
import builtins, os, sys

reads = []
class Watched(dict):
    def __iter__(self): reads.append("everything"); return super().__iter__()
    def keys(self): reads.append("everything"); return super().keys()
    def items(self): reads.append("everything"); return super().items()
    def __getitem__(self, key): reads.append(key); return super().__getitem__(key)
    def get(self, key, default=None): reads.append(key); return super().get(key, default)
    def __contains__(self, key): reads.append(key); return super().__contains__(key)

os.environ._data = Watched(os.environ._data)
before = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event in ("ctypes.dlopen", "open") else None)
import gpuinterop
new = {name.partition(".")[0] for name in set(sys.modules) - before}
bindings = {"numpy", "vulkan", "cuda", "hip", "rocm", "torch", "cupy", "cffi"}
forbidden = {*bindings, "gpuinterop_host", "multiprocessing", "typing"}
assert not new & forbidden, new & forbidden
assert "importlib.metadata" in before or "importlib.metadata" not in sys.modules
assert not reads, reads
libraries = [name for name in opened if ".so" in str(name)]
assert not libraries, libraries
print("clean")
"""


def run(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(*options, "-c", code, **environment)


def test_import_loads_nothing_and_reads_nothing() -> None:
    # As installed; and without site-packages, in which an editable installation loads modules.
    for result in (run(PROBE), run(PROBE, "-S", PYTHONPATH=str(ROOT))):
        assert result.stdout.strip() == "clean", result.stderr


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "not installed"])
def test_the_version(installed: bool, tmp_path: Path) -> None:
    """What the installation's metadata says; without one, what a build without git's folder says too."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        expected = tomllib.load(file)["tool"]["hatch"]["version"]["fallback-version"]
    if installed:
        expected = "7.8.9.dev10+gabcdef"
        metadata = tmp_path / "gpuinterop-7.8.9.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.4\nName: gpuinterop\nVersion: {expected}\n")
    program = ("-S", "-c", "import gpuinterop; print(gpuinterop.__version__)")  # -S: no site-packages
    result = python(*program, cwd=tmp_path, PYTHONPATH=os.pathsep.join((str(ROOT), str(tmp_path))))
    assert (result.stdout.strip(), result.stderr) == (expected, "")


def test_a_wrong_backend_breaks_no_import() -> None:
    result = run("import gpuinterop; print(gpuinterop.__version__)", GPUINTEROP_BACKEND="nonsense")
    assert result.returncode == 0, result.stderr
    result = run("import gpuinterop; gpuinterop.device()", GPUINTEROP_BACKEND="nonsense")
    assert "BackendNotFoundError" in result.stderr
    assert "host" in result.stderr  # names what is installed


def test_a_wrong_backend_breaks_no_other_pytest_run(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_nothing():\n    pass\n")
    wrong = {"GPUINTEROP_BACKEND": "nonsense", "GPUINTEROP_DISABLE": "no_such_thing"}
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert "1 passed" in printed(*run, cwd=tmp_path, **wrong)


def test_every_public_name_resolves() -> None:
    for name in gpuinterop.__all__:
        assert getattr(gpuinterop, name) is not None
    assert set(gpuinterop.__all__) <= set(dir(gpuinterop))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(gpuinterop.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {None} == set(gpuinterop.__all__) - {"__version__"}
