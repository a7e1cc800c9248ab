"""The ranks of test_exchange.py: four processes on the simulated driver, of which one kills itself where it is told.

``exchange_program.py FOLDER TRANSPORT SCENARIOS``: SCENARIOS is a JSON list. The process loads everything once, and
forks the four ranks of one scenario after the other; over MPI it is one of four that mpiexec has started. Each rank
that lives writes ``FOLDER/SCENARIO/RANK.json``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpuinterop as gi
from gpuinterop.exchange import MpiTransport, SocketTransport, Team, TorchTransport, Transport, delivery
from gpuinterop.handles import AllocationHandle
from gpuinterop.testing.simulated import assert_simulated
from tests.descriptors import named_fds
from tests.limits import LIMIT
from tests.simulated.driver import STAY, Simulator

SIZE = 4
DRIVER = "cuda.bindings.driver"


def main() -> None:
    folder, kind, text = sys.argv[1:]
    scenarios = json.loads(text)
    for name in (DRIVER, "gpuinterop_cuda.backend", "numpy", *(["torch.distributed"] if kind == "torch" else [])):
        importlib.import_module(name)
    gc.freeze()  # else each rank's collection goes through all that was loaded, and copies it
    if kind == "mpi":  # in a child, because MPI's launcher ends all ranks when it sees one die
        (scenario,) = scenarios
        if child := os.fork():
            signal.alarm(int(LIMIT))
            os.waitpid(child, 0)
            wait_for(
                Path(folder, scenario["name"]), *(f"{rank}.json" for rank in {*range(SIZE)} - {scenario.get("victim")})
            )
        else:
            one(Path(folder), scenario, MpiTransport)
        os._exit(0)  # MPI_Finalize would wait for the dead
    for scenario in scenarios:
        ranks = [forked(Path(folder), kind, scenario, rank) for rank in range(SIZE)]
        for rank in ranks:
            os.waitpid(rank, 0)


def forked(folder: Path, kind: str, scenario: dict[str, Any], rank: int) -> int:
    """The process of one rank; CUDA begins in it, not before."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if "channels" in scenario:
            with_fabric(scenario["channels"][rank])
        one(folder, scenario, lambda: connect(folder / scenario["name"], kind, rank))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def one(folder: Path, scenario: dict[str, Any], connect: Callable[[], Transport]) -> None:
    place = folder / scenario["name"]
    place.mkdir(exist_ok=True)
    life(place, scenario, connect)


def with_fabric(channel: str) -> None:
    """Before CUDA begins: the node that the device is on is of an NVLink domain, and may use this channel."""
    os.environ["GPUINTEROP_SIM_FABRIC"] = channel
    setattr(importlib.import_module("gpuinterop_cuda.capabilities"), "imex_channel", lambda: True)  # noqa: B010


def connect(place: Path, kind: str, rank: int) -> Transport:
    if kind == "socket":
        return SocketTransport(place, rank, SIZE, timeout=LIMIT)
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/group", rank=rank, world_size=SIZE)
    return TorchTransport()


# -- a rank's life -----------------------------------------------------------------------------------------------------


def life(place: Path, scenario: dict[str, Any], connect: Callable[[], Transport]) -> None:
    # No rank outlives the test.
    killer = threading.Timer(LIMIT, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()
    if "plain" in scenario:
        write(place, *alone(connect))
        return
    assert_simulated()
    simulator = Simulator.attach()
    transport = connect()
    ours = Team(transport, timeout=scenario["timeout"])
    device = gi.get_backend("cuda").devices()[ours.rank]
    device.synchronize()
    before, files = kept(simulator), named_fds()
    counted = arm(scenario, transport, simulator)
    result: dict[str, Any] = {"error": None}
    made: list[gi.MulticastObject] = []
    with contextlib.ExitStack() as own:
        try:
            kind = gi.FabricHandle if "channels" in scenario else gi.VmmFd
            result["values"] = work(ours, device, simulator, own, made, kind, lambda: come_late(place, scenario, ours))
        except gi.GpuInteropError as error:
            result["error"] = describe(error)
            result["bindings"] = len(made[0].bindings) if made else 0
            result["mapped"] = simulator.live()["vmm_mapping"] - before["vmm_mapping"]
            result["cause"] = None if error.__cause__ is None else describe(error.__cause__)
            try:
                ours.vote("again")
            except gi.GpuInteropError as later:
                result["again"] = describe(later)
    made.clear()
    gc.collect()
    for one in gi.get_backend("cuda").devices():
        one.drain()
    after = kept(simulator)
    result |= {
        "gathers": counted[0],
        "left": {kind: after[kind] - before[kind] for kind in before if after[kind] != before[kind]},
        "files": sorted(named_fds() - files),
        "violations": simulator.violations(),
        "binds": simulator.calls("cuMulticastBindMem"),
        "unbinds": simulator.calls("cuMulticastUnbind"),
    }
    write(place, ours.rank, result)
    if "late" in scenario:  # the late one finds the others alive
        wait_for(place, f"{scenario['late']}.json")


def write(place: Path, rank: int, result: dict[str, Any]) -> None:
    """At once: others wait for it."""
    written = place / f"{rank}.part"
    written.write_text(json.dumps(result))
    written.rename(place / f"{rank}.json")


def kept(simulator: Simulator) -> dict[str, int]:
    """What a program does not leave; a device keeps streams, with events, for later copies."""
    return {kind: count for kind, count in simulator.live().items() if kind not in {*STAY, "stream", "event"}}


def come_late(place: Path, scenario: dict[str, Any], team: Team) -> None:
    """The late rank waits until all others have given up."""
    if scenario.get("late") == team.rank:
        wait_for(place, *(f"{rank}.json" for rank in range(SIZE) if rank != team.rank))


def wait_for(place: Path, *names: str) -> None:
    while not all((place / name).exists() for name in names):
        time.sleep(0.01)


def describe(error: BaseException) -> dict[str, Any]:
    extra = {name: getattr(error, name, None) for name in ("rank", "step", "code", "symbol", "argument")}
    return {"class": type(error).__name__, "text": str(error), **extra}


def work(
    team: Team,
    device: gi.Device,
    simulator: Simulator,
    own: contextlib.ExitStack,
    made: list[gi.MulticastObject],
    kind: type[AllocationHandle],
    before_map: Callable[[], None],
) -> list[int]:
    """Everything that a team does; what it made is closed by `own`, the last first."""
    size = device.multicast_granularity(team.size, 1, kind).minimum
    allocation = own.enter_context(device.allocate(size, kind))
    allocation.buffer.fill(0)
    multicast = own.enter_context(team.create_multicast(device, size, kind))
    made.append(multicast)
    own.enter_context(team.bind_memory(multicast, allocation))
    before_map()
    mapping = own.enter_context(team.map(multicast))
    gathered = team.gather_allocations(allocation)
    for rank, one in enumerate(gathered):
        if rank != team.rank:
            own.enter_context(one)
    for rank in range(team.size):  # in turn, each writes a word of its own to all
        with team.step(f"write {rank}"):
            if rank == team.rank:
                simulator.multimem_store(mapping.ptr + 4 * rank, [100 + rank])
            # Nobody votes, or dies, before the store has reached it: survivors of a death unbind what is stored to.
            word = bytearray(4)
            while not any(word):
                allocation.buffer.copy_to_host(word, offset=4 * rank)
    values: list[int] = []
    with team.step("read"):
        for one in gathered:
            words = bytearray(4 * team.size)
            one.buffer.copy_to_host(words)
            values += memoryview(words).cast("I").tolist()
    return values


# -- a transport alone -------------------------------------------------------------------------------------------------


def carried(transport: Transport) -> list[bool]:
    """Whether rounds of empty payloads, and of far more than goes at once, have come as they were sent."""

    def payload(rank: int, size: int) -> bytes:
        return bytes([rank + 1]) * size * (rank + 1)

    return [
        transport.all_gather(payload(transport.rank, size), LIMIT) == [payload(rank, size) for rank in range(SIZE)]
        for size in (1, 0, 70_000, 1_000_000, 0, 7)
    ]


def refusal(make: Callable[[], object]) -> str:
    try:
        make()
    except gi.GpuInteropError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def alone(connect: Callable[[], Transport]) -> tuple[int, dict[str, Any]]:
    if "torch" not in sys.modules:
        transport = connect()
        return transport.rank, {"carried": carried(transport), "refusals": [refusal(lambda: MpiTransport(7))]}
    import torch.distributed

    refusals = [refusal(TorchTransport)]
    transport = connect()
    pair = torch.distributed.new_group([0, 1], backend="gloo")
    refusals.append(refusal(lambda: TorchTransport(pair)))
    # No NCCL here: what torch would say of a group of it.
    said = str(torch.distributed.distributed_c10d.BackendConfig(torch.distributed.Backend("nccl")))
    torch.distributed.get_backend_config = lambda group=None: said
    refusals.append(refusal(TorchTransport))
    return transport.rank, {"carried": carried(transport), "refusals": refusals}


# -- where it dies, or fails -------------------------------------------------------------------------------------------


def arm(scenario: dict[str, Any], transport: Transport, simulator: Simulator) -> list[int]:
    """Wrap what the scenario is about; returns the count of all-gathers, which goes on."""
    count = [0]
    all_gather = transport.all_gather
    mine = scenario.get("victim") == transport.rank

    def counted(payload: bytes, timeout: float) -> list[bytes]:
        count[0] += 1
        if mine and scenario.get("gather") == count[0]:
            die()
        return all_gather(payload, timeout)

    transport.all_gather = counted  # type: ignore[method-assign]
    if mine and "call" in scenario:
        wrap(scenario["call"], scenario["when"])
    for fault in scenario.get("faults", ()):
        if fault["rank"] == transport.rank:
            simulator.fail(fault["call"], code=fault["code"], nth=fault["nth"], every=fault["every"])
    return count


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(call: str, when: str) -> None:
    """Die before or after a call of the backend, or of the delivery of handles."""
    owners: dict[str, Any] = {"take": delivery.Delivery, "map": gi.MulticastObject}
    owner = owners.get(call, type(gi.get_backend("cuda").devices()[0].driver))
    real = getattr(owner, call)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            die()
        result = real(*arguments, **named)
        die()
        return result

    setattr(owner, call, wrapped)


if __name__ == "__main__":
    main()
