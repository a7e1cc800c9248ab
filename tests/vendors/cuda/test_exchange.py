"""Four ranks in four processes, over each transport, one of them killed at every step. On the simulated driver only.

What each rank did is asked of its own driver, which shares nothing with the exchange: what is left, and what was done
against the documentation. `exchange_program.py` is what the ranks run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpuinterop.testing.simulated import assert_simulated
from tests.limits import LIMIT
from tests.simulated.driver import Simulator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds, and libraries preloaded by name")

PROGRAM = Path(__file__).with_name("exchange_program.py")
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "mpi.py"
RANKS = range(4)
GATHERS = 13
"""In a life in which all goes well."""

PREFIX = os.environ.get("GPUINTEROP_TEST_EXCHANGE")
"""Where torch, mpi4py and MPICH are, apart from the environment of the tests; `make test-exchange` sets it."""

CALLS = {
    "create_multicast": 0,
    "export_multicast": 0,
    "take": 3,
    "import_multicast": 2,
    "add_device": 1,
    "bind_memory": 3,
    "map": 0,
    "export_allocation": 2,
    "import_allocation": 1,
}
"""What is done for the ranks, and which one dies of it."""


KILLED: list[dict[str, Any]] = [
    {"name": f"rank {victim} before {number}", "victim": victim, "gather": number}
    for number in range(1, GATHERS + 1)
    for victim in {0, number % 4}
] + [
    {"name": f"{when} {call}", "victim": victim, "call": call, "when": when}
    for call, victim in CALLS.items()
    for when in ("before", "after")
]


def failing(call: str, code: int, *ranks: int, nth: int = 1, every: int = 0) -> dict[str, Any]:
    faults = [{"rank": rank, "call": call, "code": code, "nth": nth, "every": every} for rank in ranks]
    return {"name": f"{call} {code}{' for ever' if every else ''}", "faults": faults}


FAILURES = [
    failing("cuMulticastCreate", 801, 0),
    failing("cuMemExportToShareableHandle", 1, 0),
    failing("cuMemImportFromShareableHandle", 101, 3),
    failing("cuMulticastAddDevice", 2, 2),
    failing("cuMulticastBindMem", 47, 1),
    failing("cuMemSetAccess", 1, 2, nth=2),  # the first is of the allocation
    failing("cuMulticastBindMem", 802, 1),
    failing("cuMulticastBindMem", 802, 2, 3, every=1),
    {"name": "fabric", "channels": ["a", "a", "a", "a"]},
    {"name": "fabric without access", "channels": ["a", "a", "b", "a"]},
]

WELL: dict[str, Any] = {"name": "all goes well"}
PLAIN: dict[str, Any] = {"name": "plain", "plain": True}
"""The transport alone; that over sockets is in tests/core/test_exchange.py."""

FEW = ("rank 0 before 2", "rank 3 before 7", "before bind_memory", "after import_allocation")

SHORT = 8
"""Seconds, at whose end torch and MPI find a death."""

LATE: dict[str, Any] = {"name": "late", "late": 1, "timeout": SHORT}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """What each transport's run has left behind; it runs when it is first asked for."""
    if os.environ.get("GPUINTEROP_TEST_CUDA") == "real":
        pytest.skip("multicast is never tried on real hardware here")
    assert_simulated()
    made: dict[str, Run | BaseException] = {}

    def run(kind: str) -> Run:
        if kind not in made:
            try:
                made[kind] = Run(kind, tmp_path_factory.mktemp(kind))
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                made[kind] = error  # so that it is not tried again for each test
        found = made[kind]
        if isinstance(found, Run):
            return found
        raise found

    return run


@pytest.fixture(params=["socket", "torch", "mpi"])
def run(request: pytest.FixtureRequest, runs: Callable[[str], Run]) -> Run:
    return runs(request.param)


@pytest.fixture
def failures(runs: Callable[[str], Run]) -> Run:
    """Failures of the driver do not depend on the transport: they are tried over sockets."""
    return runs("socket")


class Run:
    """All scenarios over one transport; over torch and MPI, where each death takes the time-out, a few."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self.timeout = 30 if kind == "socket" else SHORT
        self.killed = KILLED if kind == "socket" else [one for one in KILLED if one["name"] in FEW]
        self.output = ""
        scenarios = [
            {"timeout": self.timeout, **scenario}
            for scenario in (WELL, LATE, *self.killed, *(FAILURES if kind == "socket" else [PLAIN]))
        ]
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-W",
            "error::ResourceWarning",
            str(PROGRAM),
            str(folder),
            kind,
        ]
        if kind == "torch":
            _need("torch")
        if kind == "mpi":
            launcher = [_mpiexec(), "-n", str(len(RANKS))]
            for scenario in scenarios:  # an MPI that has lost a rank is of no further use
                self._run([*launcher, *command, json.dumps([scenario])])
        else:
            self._run([*command, json.dumps(scenarios)])

    def _run(self, command: list[str]) -> None:
        done = _start(command)
        self.output += done.stdout + done.stderr

    def written(self, name: str, ranks: set[int]) -> list[dict[str, Any]]:
        """What exactly these ranks have written."""
        files = {int(file.stem): file for file in (self.folder / name).glob("[0-9].json")}
        assert files.keys() == ranks, f"{name}: of ranks {sorted(files)}\n{self.output[-4000:]}"
        return [json.loads(files[rank].read_text()) for rank in sorted(ranks)]

    def results(self, name: str, ranks: set[int]) -> list[dict[str, Any]]:
        """The same of a whole life; nothing is left of anything else."""
        results = self.written(name, ranks)
        assert "ResourceWarning" not in self.output, self.output  # what a call has left open for the collector
        for rank, result in zip(sorted(ranks), results, strict=True):
            assert result["left"] == {}, (name, rank)
            assert result["files"] == [], (name, rank)
            assert result["violations"] == [], (name, rank)
        return results

    def error(self, name: str, ranks: set[int]) -> dict[str, Any]:
        """The one error that they all have had, and again when they went on."""
        results = self.results(name, ranks)
        errors = [result["error"] for result in results]
        assert errors[0] is not None, (name, "all went well")
        assert errors == [errors[0]] * len(ranks), (name, errors)
        assert [result["again"] for result in results] == errors
        error: dict[str, Any] = errors[0]
        return error


def _start(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def _environment() -> dict[str, str]:
    environment = Simulator.attach().environment(GPUINTEROP_SIM_DEVICES=str(len(RANKS)))
    if PREFIX:
        additions = {
            "PATH": _installed("scripts"),
            "LD_LIBRARY_PATH": f"{_installed('data')}/lib",
            "PYTHONPATH": _installed("platlib"),
        }
        for name, entry in additions.items():
            environment[name] = os.pathsep.join(filter(None, [entry, environment.get(name)]))
    return environment


def _installed(what: str) -> str:
    """Where pip has put it, which takes the same scheme for a prefix."""
    variables = {"base": PREFIX, "platbase": PREFIX}
    return sysconfig.get_path(what, sysconfig.get_preferred_scheme("prefix"), vars=variables)


def _need(module: str) -> None:
    if PathFinder.find_spec(module, [_installed("platlib"), *sys.path] if PREFIX else None) is None:
        _missing(module)


def _mpiexec() -> str:
    _need("mpi4py")
    return shutil.which("mpiexec", path=_environment()["PATH"]) or _missing("MPICH's mpiexec")


def _missing(what: str) -> NoReturn:
    problem = f"{what} is not there: make test-exchange installs it"
    if os.environ.get("GPUINTEROP_REQUIRE_EXCHANGE") == "1":
        pytest.fail(problem)
    pytest.skip(problem)


# -- what came of it ---------------------------------------------------------------------------------------------------


def test_all_goes_well(run: Run) -> None:
    """Each rank's word has come to the memory of all, which each sees in its own and in the others' allocations."""
    for result in run.results("all goes well", set(RANKS)):
        assert result["error"] is None
        assert result["values"] == [100, 101, 102, 103] * 4
        assert (result["binds"], result["unbinds"]) == (1, 1)
        assert result["gathers"] == GATHERS


def test_a_rank_killed_at_every_step(run: Run) -> None:
    """The others have one error, which names it; and nothing is left of what they had."""
    for scenario in run.killed:
        victim = scenario["victim"]
        error = run.error(scenario["name"], set(RANKS) - {victim})
        assert (error["class"], error["rank"]) == ("PeerError", victim), scenario
        why = rf"(: gone, or no answer within {run.timeout} s\.| gives no handle: .*)"
        assert re.fullmatch(rf"step {error['step']!r}: rank {victim}{why}", error["text"])
        if call := scenario.get("call"):
            assert error["step"] == STEPS[call]


def test_who_comes_when_the_others_have_given_up(run: Run) -> None:
    """Nobody has died; the late rank hears what has become of it, and fails as the others did."""
    error = run.error("late", set(RANKS))
    assert (error["class"], error["rank"], error["step"]) == ("PeerError", 1, "map: offer")
    assert error["text"] == f"step 'map: offer': rank 1: gone, or no answer within {SHORT} s."


STEPS = {
    "create_multicast": "create_multicast: offer",
    "export_multicast": "create_multicast: offer",
    "take": "create_multicast: outcome",
    "import_multicast": "create_multicast: outcome",
    "add_device": "create_multicast: outcome",
    "bind_memory": "bind_memory: outcome",
    "map": "map: outcome",
    "export_allocation": "gather_allocations: offer",
    "import_allocation": "gather_allocations: outcome",
}


@pytest.mark.parametrize(
    ("name", "rank", "step", "code"),
    [
        ("cuMulticastCreate 801", 0, "create_multicast: offer", 801),
        ("cuMemExportToShareableHandle 1", 0, "create_multicast: offer", 1),
        ("cuMemImportFromShareableHandle 101", 3, "create_multicast: outcome", 101),
        ("cuMulticastAddDevice 2", 2, "create_multicast: outcome", 2),
        ("cuMulticastBindMem 47", 1, "bind_memory: outcome", 47),
        ("cuMemSetAccess 1", 2, "map: outcome", 1),
        ("fabric without access", 2, "create_multicast: outcome", 800),
    ],
)
def test_one_ranks_failure_is_everybodys(failures: Run, name: str, rank: int, step: str, code: int) -> None:
    """Of the driver, with its code; what the others had done by then is undone."""
    error = failures.error(name, set(RANKS))
    assert (error["rank"], error["step"], error["code"]) == (rank, step, code)
    assert error["text"].startswith(f"rank {rank}, step {step!r}: cu")
    causes = [result["cause"] for result in failures.results(name, set(RANKS))]
    assert [cause is not None for cause in causes] == [one == rank for one in RANKS]
    assert causes[rank]["code"] == code
    bound = [result["bindings"] for result in failures.results(name, set(RANKS))]
    assert bound == [int(step == "map: outcome")] * 4
    assert [result["mapped"] for result in failures.results(name, set(RANKS))] == [1] * 4  # its own allocation


def test_a_driver_that_is_not_ready(failures: Run) -> None:
    """It is asked again, five times at the most; then all have its error, and unbind."""
    results = failures.results("cuMulticastBindMem 802", set(RANKS))
    assert [result["error"] for result in results] == [None] * 4
    assert [(result["binds"], result["unbinds"]) for result in results] == [(1, 1), (2, 1), (1, 1), (1, 1)]
    name = "cuMulticastBindMem 802 for ever"
    error = failures.error(name, set(RANKS))
    assert (error["rank"], error["code"]) == (2, 802)
    results = failures.results(name, set(RANKS))
    assert [(result["binds"], result["unbinds"]) for result in results] == [(1, 1), (1, 1), (5, 0), (5, 0)]


def test_fabric_handles(failures: Run) -> None:
    for result in failures.results("fabric", set(RANKS)):
        assert result["error"] is None
        assert result["values"] == [100, 101, 102, 103] * 4


# -- the transports that are not ours ----------------------------------------------------------------------------------


def test_torch_carries_what_is_sent(runs: Callable[[str], Run]) -> None:
    for rank, result in enumerate(runs("torch").written("plain", set(RANKS))):
        assert result["carried"] == [True] * 6
        none_yet, outside, no_cpu = result["refusals"]
        assert none_yet.startswith("InvalidArgumentError: group: expected a group of torch.distributed, got none")
        assert outside == "none" if rank < 2 else outside.startswith("InvalidArgumentError: group: ")
        assert no_cpu.startswith("InvalidArgumentError: group: ")
        assert "got cuda:nccl;" in no_cpu


def test_mpi_carries_what_is_sent(runs: Callable[[str], Run]) -> None:
    for result in runs("mpi").written("plain", set(RANKS)):
        assert result["carried"] == [True] * 6
        (refusal,) = result["refusals"]
        assert refusal == "ArgumentTypeError: communicator: expected an mpi4py.MPI.Intracomm, got int."


def test_the_example_over_mpi() -> None:
    """Each rank reads what every rank has put into its allocation, on the host backend."""
    done = _start([_mpiexec(), "-n", str(len(RANKS)), sys.executable, str(EXAMPLE)])
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert [line.split(",")[0] for line in lines] == [f"rank {rank} of 4" for rank in RANKS]
    assert all(line.endswith(": [10, 11, 12, 13]") for line in lines), lines
