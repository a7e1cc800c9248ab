"""The samples of docs/howto/multicast.md do what they say: on the simulated driver, and on no other."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuinterop as gi
from tests.simulated.driver import Simulator, assert_simulated

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "howto" / "multicast.md"
ONE_PROCESS, SEVERAL_PROCESSES, ONE_ALLOCATION = range(3)
SIZE = 2 << 20


def samples(document: Path) -> list[str]:
    return re.findall(r"^```python[^\n]*\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def sample(index: int) -> str:
    found = samples(DOCUMENT)
    assert len(found) == 3
    return found[index]


@pytest.mark.parametrize("nbytes", [1000, SIZE, 2 * SIZE + 1000])
def test_in_one_process(simulator: Simulator, nbytes: int) -> None:
    """The kernel's stores, up to the last byte that is wanted, are in each allocation, when they are printed."""
    assert_simulated()
    seen: list[bytes] = []

    def look(buffer: gi.Buffer) -> None:
        target = np.zeros(20, np.uint8)
        buffer.copy_to_host(target, offset=nbytes - 20)
        seen.append(target.tobytes())

    def launch(_kernel: Any, address: int, stream: Any) -> None:
        stream.device._backend.multimem_store(stream._native, address + nbytes - 20, 0x61616161, 5)

    names: dict[str, Any] = {"nbytes": nbytes, "kernel": None, "launch": launch, "print": look}
    exec(sample(ONE_PROCESS), names)
    assert seen == [b"a" * 20] * len(gi.get_backend("cuda").devices())
    assert len(seen) >= 2
    names["stream"].close()


RANK = """
import sys
import numpy as np
from gpuinterop.exchange import SocketTransport
import gpuinterop as gi
from tests.simulated.driver import assert_simulated

assert_simulated()
path, rank, size, sample = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def launch(kernel, address, stream):
    stream.device._backend.multimem_store(stream._native, address + 4 * rank, 0x61616161 + rank, 1)

target = np.zeros(2, np.uint32)
transport = SocketTransport(path, rank, 2)
exec(sample, {"transport": transport, "gi": gi, "size": size, "launch": launch, "kernel": None, "target": target})
print(target.tolist())
"""


def test_in_several_processes(simulator: Simulator) -> None:
    """Each rank finds in its own memory what both have stored."""
    assert_simulated()
    path = f"@gpuinterop-{uuid.uuid4().hex}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, path, str(rank), str(SIZE), sample(SEVERAL_PROCESSES)],
            env=simulator.environment(GPUINTEROP_BACKEND="cuda", GPUINTEROP_SIM_DEVICES="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert output == f"{[0x61616161, 0x61616162]}\n"


def test_one_allocation(simulator: Simulator) -> None:
    """Every device's buffer is of the same bytes, and each has filled them."""
    assert_simulated()
    device = gi.get_backend("cuda").device()
    names: dict[str, Any] = {"device": device, "size": SIZE}
    exec(sample(ONE_ALLOCATION), names)
    allocation = names["allocation"]
    assert allocation.devices == (device, *device.peers)
    assert len(allocation.devices) >= 2
    target = np.zeros(SIZE, np.uint8)
    allocation.buffer.copy_to_host(target)
    assert (target == 7).all()
    names.clear()
    allocation.close()


def test_what_it_says_of_the_rest() -> None:
    """The picture is there, and every error that it names is one whose meaning the backend tells."""
    from gpuinterop_cuda.error_hints import MEANINGS

    text = DOCUMENT.read_text(encoding="utf-8")
    assert (DOCUMENT.parent / re.findall(r"!\[.*?\]\((.*?)\)", text)[0]).is_file()
    named = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert named == {code for call, code in MEANINGS if call.startswith("cuMulticast")}
