"""``gpuinterop selftest multicast`` on the simulated driver: what it finds, and that it ends, whatever the driver does.

Its processes have a ``sitecustomize`` that asks, before anything else, whether the driver is the simulated one:
multicast runs on no other here. It scripts the faults too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpuinterop.cli.multicast as cli
from gpuinterop.errors import InvalidArgumentError
from gpuinterop.testing import multicast, stand_ins
from gpuinterop.testing.results import read_run
from gpuinterop.testing.simulated import assert_simulated
from tests.cli.invoke import invoke
from tests.limits import LIMIT
from tests.programs import python, runs
from tests.simulated.driver import Simulator
from tools import record

CHILD, PEER, BOTH = "child", "peer", "child, peer"
HUNG = "10"
"""Seconds until a step that hangs is given up: the others take hundredths, and starting a process does not count."""
ENDED = 97
MARKER = b"gpuinterop_simulated_driver"
PROLOGUE = (
    f"""
import json, os, sys, traceback
from pathlib import Path

try:
    from gpuinterop.testing.simulated import assert_simulated
    from tests.simulated.driver import Simulator
    assert_simulated()
except BaseException:  # Python itself would tell it, and go on
    traceback.print_exc()
    os._exit({ENDED})
"""
    """
FOLDER = Path(__file__).parent
line = " ".join(sys.orig_argv)
role = "child" if "gpuinterop.testing.multicast" in line else "peer" if "gpuinterop.testing.peer" in line else ""
simulator = Simulator.attach()
ended = os._exit

def end(status):
    kept = {"live": simulator.live(), "violations": simulator.violations()}
    (FOLDER / f"{role}.left").write_text(json.dumps(kept))
    ended(status)

if role:
    (FOLDER / f"{role}.pid").write_text(str(os.getpid()))
    os._exit = end
"""
)


@dataclass(frozen=True, slots=True)
class Done:
    """What the command came to."""

    status: int
    output: str
    errors: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output)
        return found

    def failed(self) -> dict[str, Any]:
        """The step that was not right: the last one, and no other."""
        *right, last = self.result["steps"]
        assert self.status == 1, self.output + self.errors
        assert not self.result["correct"]
        assert {step["outcome"] for step in right} <= {"right"}
        found: dict[str, Any] = last
        return found


@pytest.fixture(autouse=True)
def _once(request: pytest.FixtureRequest) -> None:
    """With other bindings than the newest only what goes through them is run again: all else is the same with any."""
    version = os.environ.get("GPUINTEROP_TEST_CUDA_BINDINGS")
    if version and request.function is not test_it_passes:
        pytest.skip("it does not depend on the version of cuda-bindings, and is run with the newest")


@pytest.fixture
def environment(simulator: Simulator, tmp_path: Path) -> dict[str, str]:
    """The simulated driver with two devices, and the folder of its ``sitecustomize``."""
    assert_simulated()
    variables = simulator.environment(GPUINTEROP_SIM_DEVICES="2", COLUMNS="300")
    return {**variables, "PYTHONPATH": os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the command here, with what its processes do first; all that it has started must be gone at its end."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, role: str = CHILD, script: str = "pass") -> Done:
        _script(tmp_path, role, script)
        result = invoke("selftest", "multicast", "--backend", "cuda", *arguments)
        _are_gone(tmp_path)
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def run_process(environment: dict[str, str], tmp_path: Path) -> Callable[..., Done]:
    """The same in a process of its own, with an environment of its own."""

    def run(
        *arguments: str, role: str = CHILD, script: str = "pass", folder: Path = tmp_path, **variables: str
    ) -> Done:
        _script(folder, role, script)
        python_path = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
        command = ("-m", "gpuinterop", "selftest", "multicast", "--backend", "cuda", *arguments)
        done = python(*command, env=environment, PYTHONPATH=python_path, **variables)
        _are_gone(folder)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def _script(folder: Path, role: str, script: str) -> None:
    body = "".join(f"    {line}\n" for line in script.strip().splitlines())
    (folder / "sitecustomize.py").write_text(f"{PROLOGUE}\nif role and role in {role!r}:\n{body}")


def _are_gone(folder: Path) -> None:
    deadline = time.monotonic() + LIMIT
    left = {file.stem: int(file.read_text()) for file in folder.glob("*.pid")}
    while any(map(runs, left.values())) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = {name: pid for name, pid in left.items() if runs(pid)}
    for pid in left.values():
        os.kill(pid, signal.SIGKILL)
    assert not left, f"still there: {left}"


def _left(folder: Path, role: str) -> dict[str, int]:
    """What a process had of the driver when it ended."""
    found = json.loads((folder / f"{role}.left").read_text())
    assert found["violations"] == []
    kinds = ("multicast", "multicast_binding", "vmm_handle", "vmm_mapping", "reservation", "bytes")
    return {kind: count for kind, count in found["live"].items() if kind in kinds and count}


def test_it_passes(run_process: Callable[..., Done], tmp_path: Path) -> None:
    """Every step in order, in two processes, on the devices that were chosen; and neither leaves anything behind."""
    done = run_process("--json", "--devices", "2,0", role=BOTH, GPUINTEROP_SIM_DEVICES="3")
    assert done.status == 0, done.output + done.errors
    assert done.result["correct"]
    assert [device["ordinal"] for device in done.result["devices"]] == [2, 0]
    assert done.result["stand_in"].endswith("libcuda.so.1")
    steps = [step["step"] for step in done.result["steps"]]
    assert steps == [name for name, _ in multicast.Life([]).steps()]
    for role in (CHILD, PEER):
        assert _left(tmp_path, role) == {}, role


# -- what is wrong -------------------------------------------------------------------------------------------------


def test_what_hangs(run: Callable[..., Done]) -> None:
    """It is named, with what may be the cause, and its processes are killed."""
    step = run(
        "--json", "--timeout", HUNG, script="simulator._call('block', b'cuMulticastBindMem', 2, 1000.0)"
    ).failed()
    assert (step["step"], step["outcome"]) == ("bind memory", "hung")
    assert "was killed" in step["detail"]
    assert "fabric" in step["likely_cause"]


MISSED = """
from gpuinterop.handles import VmmFd
from gpuinterop_cuda.backend import CudaBackend
bind = CudaBackend.bind_memory

def bind_another(self, group, device, offset, allocation, start, size):
    if device is self._devices_seen[-1]:
        allocation = self.allocate(device, size, VmmFd)
    bind(self, group, device, offset, allocation, start, size)

def remember(self, group, device):
    self._devices_seen.append(device)
    add(self, group, device)

add = CudaBackend.add_device
CudaBackend._devices_seen = []
CudaBackend.add_device = remember
CudaBackend.bind_memory = bind_another
"""
"""What is stored does not get into the memory of the last device: another allocation is bound in its place."""

LONG = """
from gpuinterop_cuda.backend import CudaBackend
store = CudaBackend.multimem_store
CudaBackend.multimem_store = lambda self, stream, address, value, count: store(self, stream, address, value, count + 1)
"""
QUIT = "quit = lambda *arguments: ended(0)\n"
DIES = """
from gpuinterop_cuda.backend import CudaBackend
import signal
CudaBackend.multimem_store = lambda *arguments: os.kill(os.getpid(), signal.SIGSEGV)
"""


def failing(call: str, code: int) -> str:
    return f"simulator.fail({call!r}, code={code})"


SECOND = "the memory of <Device cuda:1 'Simulated GPU 1'>"
WRONG: dict[str, tuple[str, str, str, str, str]] = {
    "no driver": (CHILD, failing("cuInit", 999), "start a process", "wrong", "cuInit.*999"),
    "no module": (
        CHILD, "sys.modules['gpuinterop.testing.multicast'] = None", "start a process", "wrong", "ModuleNotFoundError",
    ),
    "no object": (CHILD, failing("cuMulticastCreate", 802), "create", "wrong", "cuMulticastCreate.*802"),
    "no import": (
        PEER, failing("cuMemImportFromShareableHandle", 800), "import in the second process", "wrong",
        "cuMemImportFromShareableHandle",
    ),
    "a crash": (CHILD, DIES, "multimem store", "died", "SIGSEGV"),
    "an end in the last": (
        CHILD, QUIT + "from gpuinterop.testing.peer import BackendPeer\nBackendPeer.close_multicast = quit",
        "close in both", "died", r"has ended \(exit status 0\)",
    ),
    "one memory is missed": (CHILD, MISSED, "multimem store", "wrong", SECOND),
    "one word too many": (CHILD, LONG, "multimem store", "wrong", "1 of 524288 words are wrong"),
    "one memory is missed there": (
        PEER, MISSED, "multimem store from both", "wrong", f"{SECOND} after a store by this process",
    ),
}  # fmt: skip
"""What is wrong: in which process, how, in which step it is found, as what, and what is said.

The oracle of the bytes is an ordinary copy of each device's own allocation. A status of 0 alone shows nothing.
"""


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(run: Callable[..., Done], case: str) -> None:
    role, script, step, outcome, text = WRONG[case]
    failed = run("--json", role=role, script=script).failed()
    assert (failed["step"], failed["outcome"]) == (step, outcome)
    assert re.search(text, failed["detail"])
    assert failed["likely_cause"] or outcome == "wrong"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_what_ends_the_command(environment: dict[str, str], tmp_path: Path, number: int, status: int) -> None:
    """Its processes end with it, while the second hangs, and also where it can do nothing for that any more."""
    _script(tmp_path, PEER, "simulator._call('block', b'cuMulticastAddDevice', 1, 1000.0)")
    command = [sys.executable, "-m", "gpuinterop", "selftest", "multicast", "--backend", "cuda"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while "✓ import in the second process " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == status
    assert "Traceback" not in errors
    _are_gone(tmp_path)


# -- whose driver it is --------------------------------------------------------------------------------------------


@pytest.fixture
def unmarked(simulator: Simulator, tmp_path: Path) -> Path:
    """The simulated driver without its marker: to all who ask it is a real one. It has a folder of its own."""
    folder = tmp_path / "unmarked"
    folder.mkdir()
    data = simulator.path.read_bytes()
    assert MARKER in data
    (folder / "libcuda.so.1").write_bytes(data.replace(MARKER, MARKER[::-1]))
    return folder / "libcuda.so.1"


def test_no_process_runs_on_another_driver(run_process: Callable[..., Done], unmarked: Path, tmp_path: Path) -> None:
    """The guard of these tests ends it before it has done anything."""
    done = run_process("--json", LD_LIBRARY_PATH=str(unmarked.parent))
    assert done.status == ENDED
    assert done.output == ""
    assert "expected the simulated libcuda.so.1, got another" in done.errors
    assert not list(tmp_path.glob("*.pid"))


# -- nothing is tried ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "text"),
    [
        ((), {"GPUINTEROP_SIM_DEVICES": "1"}, "devices with multicast, got cuda:0"),
        (("--devices", "1,1"), {}, "devices with multicast, got cuda:1"),
        (("--devices", "0,x"), {}, "list of ordinals such as 0,1, got '0,x'"),
        ((), {"GPUINTEROP_DISABLE": "import_multicast:vmm_fd"}, "turned off by GPUINTEROP_DISABLE"),
        (("--backend", "host"), {}, "create_multicast is unsupported"),
        (("--report", "/nonexistent/run.xml"), {}, "--report: expected a file that can be written"),
    ],
)
def test_it_refuses(
    run: Callable[..., Done],
    run_process: Callable[..., Done],
    tmp_path: Path,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    text: str,
) -> None:
    """Exit status 2, the reason, and no process is started."""
    done = run_process(*arguments, **variables) if variables else run(*arguments)
    assert done.status == 2, done.output + done.errors
    assert text in " ".join(done.errors.split())
    assert done.output == ""
    assert not list(tmp_path.glob("*.pid"))


# -- what is reported ----------------------------------------------------------------------------------------------


def test_a_report(run: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each device has done may be recorded: not a stand-in's, and not a run that was not right.

    On the simulated driver, which says for the first part of this test that it is none.
    """
    file = tmp_path / "run.xml"
    report = ("--report", str(file))
    with monkeypatch.context() as patch:
        patch.setattr(stand_ins, "stand_in", lambda _libraries: "")
        done = run(*report)
        assert done.status == 0, done.output + done.errors
        assert [(one["device"], one["cells"]) for one in record.runs_of(file)["cuda"]] == [
            ("Simulated GPU 0", ["create_multicast", "export_multicast:vmm_fd"]),
            ("Simulated GPU 1", ["create_multicast", "import_multicast:vmm_fd"]),
        ]
        patch.setattr(cli, "_run", lambda *arguments: [cli.Step("create", "wrong", detail="no \x1b[1m memory")])
        assert run(*report).status == 1
        with pytest.raises(InvalidArgumentError, match="a step was not right"):
            record.runs_of(file)
        (step,) = read_run(file).results
        assert (step.id, step.outcome, step.reason) == ("multicast::create", "failed", "wrong: no  [1m memory")
    monkeypatch.setattr(cli, "_run", lambda *arguments: [cli.Step(name, "right") for name in cli._names_of_steps()])
    assert run(*report).status == 0
    with pytest.raises(InvalidArgumentError, match=r"it ran on .*libcuda"):
        record.runs_of(file)
