"""A weight server, and three engines that read its weights in place. One engine is killed, and a new one replaces it.

    python weight_server.py            prints what each engine has read

The server shares its arrays once, and publishes versions of them. Each engine is a process that attaches with the
bytes in its arguments, and reads the newest version, which does not change while the engine holds it. Engine 1 is
killed while it holds version 3. The server continues within a second, and a new engine 1 attaches with those bytes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np

import gpuinterop as gi

LAYERS = {"embedding": (1024, 256), "head": (256, 1024)}
VERSIONS, LIMIT = 8, 20.0  # seconds

Engine = subprocess.Popen[str]


# -- the server --------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Share the weights, publish each version, and kill an engine meanwhile."""
    device = gi.device()
    on_cpu = device.identity.is_cpu
    # Another process cannot open NumPy's plain memory, so it is copied once, here. A torch tensor stays where it is.
    with stream_of(device) as stream, gi.share(new_weights(on_cpu), stream=stream, copy=on_cpu) as shared:
        weights = {name: array_of(shared, name) for name in shared}
        print(f"{len(shared)} layers by {shared.transport}; a reader can touch {shared.exposes}")
        engines = [start(number, shared) for number in range(3)]
        for version in range(1, VERSIONS + 1):
            shared.acquire(stream)  # waits for the engines that are reading
            stream.synchronize(timeout=LIMIT)
            for weight in weights.values():
                weight[:] = version
            shared.release(stream)
            time.sleep(0.02)  # a step of training
            if version == 3:
                expect(engines[1], "holds version 3")
                engines[1].kill()
                engines[1].communicate()
                print("engine 1 was killed while it held version 3")
            if version == 4:
                print("version 4 is there")
                engines[1] = start(1, shared, again=True)
        for number, engine in enumerate(engines):
            said, _ = engine.communicate(timeout=LIMIT)
            assert engine.returncode == 0, f"engine {number} ended with {engine.returncode}"
            print(f"engine {number}: {said.strip()}")
        del weights, weight
        shared.close(timeout=LIMIT)  # waits until the last engine has detached


def start(number: int, shared: gi.ArrayShare, *, again: bool = False) -> Engine:
    """Start an engine. Engine 1 hangs the first time."""
    role = "engine that hangs" if number == 1 and not again else "engine"
    arguments = [sys.executable, "-u", __file__, role, str(shared)]
    engine = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    expect(engine, "attached")
    return engine


def expect(engine: Engine, words: str) -> None:
    """Wait for an engine to print these words."""
    assert engine.stdout is not None
    assert (said := engine.stdout.readline().strip()) == words, f"expected {words!r}, got {said!r}"


# -- an engine ---------------------------------------------------------------------------------------------------------


def run_engine(descriptor: str, *, hangs: bool) -> None:
    """Read the newest version in a loop, up to the last one."""
    with gi.attach(descriptor, timeout=LIMIT) as attached, stream_of(attached.device) as stream:
        print("attached")
        weights = {name: array_of(attached, name) for name in attached}
        seen, version, reads = set(), 0, 0
        while version < VERSIONS:
            attached.acquire(stream)  # waits while the server is writing
            stream.synchronize(timeout=LIMIT)
            version = int(weights["head"][0, 0])
            for name, weight in weights.items():
                assert bool((weight == version).all()), f"{name} of version {version} is not whole"
            if hangs and version == 3:
                print("holds version 3")
                time.sleep(LIMIT)
            attached.release(stream)
            seen.add(version)
            reads += 1
        print(f"{len(seen)} versions in {reads} reads, each of them whole")
        del weights, weight


# -- both --------------------------------------------------------------------------------------------------------------


def new_weights(on_cpu: bool) -> dict[str, Any]:
    """Existing arrays: NumPy's on the host, torch's on a GPU."""
    if on_cpu:
        return {name: np.zeros(shape, np.float32) for name, shape in LAYERS.items()}
    import torch

    return {name: torch.zeros(shape, device="cuda") for name, shape in LAYERS.items()}


def array_of(arrays: gi.ArrayShare | gi.AttachedArrays, name: str) -> Any:
    """Make the array library's array of the shared bytes."""
    view = arrays[name]
    if arrays.device.identity.is_cpu:
        return np.asarray(view)
    import torch

    return torch.from_dlpack(view)


def stream_of(device: gi.Device) -> gi.Stream:
    """The array library's stream; on the host any stream, because NumPy works at once, after `synchronize`."""
    if device.identity.is_cpu:
        return device.create_stream()
    import torch

    return device.wrap_stream(torch.cuda.current_stream())


def main() -> int:
    if len(sys.argv) == 3:
        run_engine(sys.argv[2], hangs=sys.argv[1] == "engine that hangs")
    else:
        serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
