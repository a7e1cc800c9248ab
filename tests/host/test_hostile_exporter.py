"""Exporters that lie: an attach or an acquire raises an error of ours, and nothing of it is left."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from .shells import Raised, Shell, pair

COUNT: Final = int(os.environ.get("GPUINTEROP_TEST_HOSTILE", "1000"))
KINDS: Final = {"", "PeerError", "HandleError", "DriverError", "DeviceNotFoundError", "UnsupportedError"}
LATER: Final = KINDS | {"SemaphoreTimeoutError", "InvalidArgumentError", "ArgumentTypeError"}
TAKES: Final = """
def takes():
    attached = None
    try:
        with gi.attach(bytes.fromhex(descriptor), timeout=0.3) as attached:
            np.asarray(attached.view).sum()
            attached.acquire(timeout=0.1)
            attached.release()
        return "acquire", ""
    except gi.GpuInteropError as error:
        return ("acquire" if attached else "attach"), type(error).__name__
"""


@pytest.fixture
def liar(sockets: Path) -> Iterator[tuple[Shell, Shell]]:
    """One that answers as `hostile.lie` is told, and a reader."""
    with pair() as (exporter, reader):
        exporter("from tests.host import hostile; contents = share.lifetime.handle.contents")
        exporter("with contents.write() as file: told = json.loads(os.pread(file.fd, 9999, 0))")
        exporter("share.close()")
        exporter.until("threads() == idle")
        exporter(f"listener, descriptor = hostile.listen({os.fspath(sockets)!r})")
        reader(f"descriptor = {exporter('descriptor')!r}")
        reader(TAKES)
        yield exporter, reader


def test_answers_at_random(liar: tuple[Shell, Shell]) -> None:
    exporter, reader = liar
    seen: Counter[tuple[str, ...]] = Counter()
    before = None
    for seed in range(COUNT):
        exporter.give(f"hostile.lie(listener, json.loads(json.dumps(told)), {seed})")
        step, kind = reader("takes()")
        assert kind in (KINDS if step == "attach" else LATER), (seed, step, kind)
        seen[exporter.answer(), step, kind] += 1
        if step == "acquire" and before is None:
            reader.until("threads() == idle")
            before = reader("left()")
    reader.until(f"grown({before}) == []")
    print(*sorted(seen.items()), sep="\n")


@pytest.mark.parametrize("answer", ["None", "listener.accept()[0].close()", "hostile.drips(listener)"])
def test_no_answer_is_a_peer_error_in_time(liar: tuple[Shell, Shell], answer: str) -> None:
    exporter, reader = liar
    begin = reader("time.monotonic()")
    exporter.give(answer)
    with pytest.raises(Raised, match=r"PeerError: .*is it alive and serving"):
        reader("gi.attach(bytes.fromhex(descriptor), timeout=0.3)")
    assert reader("time.monotonic()") - begin < 5
    exporter.answer()
