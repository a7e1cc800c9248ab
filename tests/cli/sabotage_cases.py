"""Each of the four waits and signals is taken out in turn: the field is wrong, every time. With none, it is right."""

from __future__ import annotations

import re
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop.cli.demo.simulation import WaveParameters
from gpuinterop.cli.demo.wave import TOLERANCE, Run, Sabotage, Sync, WaveRun, run_wave
from gpuinterop.testing.exporters.base import Exporter
from tests.limits import LIMIT

TIMES = 3
"""For what may go well by chance. A signal that is left out never comes: once shows it."""
FRAMES = 4
SHORT = 0.25  # for a signal that never comes

Party = tuple[Exporter, gi.Device, Sync]


def run(party: Party, *, sabotage: Sabotage | None = None) -> WaveRun:
    exporter, device, sync = party
    return run_wave(
        exporter,
        device,
        WaveParameters(width=64, height=64),
        FRAMES,
        sync=sync,
        timeout=LIMIT,
        staging=False,
        sabotage=sabotage,
        make_run=Impatient if sabotage in (Sabotage.EXPORTER_SIGNAL, Sabotage.CONSUMER_SIGNAL) else None,
    )


class Impatient(Run):
    """It waits a short time only for the signal that never comes: the exporter's first, or the consumer's first."""

    def _acquire(self, frame: int) -> None:
        super()._acquire(frame)
        if frame == (self.sabotage is Sabotage.CONSUMER_SIGNAL):
            self.timeout = SHORT


class SabotageCases:
    """For a `party` that shares semaphores."""

    def check_problem(self, result: WaveRun, frame: int) -> None:
        """The run ended at `frame`, and says what it waited for.

        With an array library, which works in the stream's order, that is a frame later.
        """
        pattern = (
            rf"frame (\d+): (?:Stream #\d+ .* {re.escape(f'{SHORT:g}')} s; it may be waiting for|the exporter's frame)"
        )
        found = re.match(pattern, result.problem)
        assert found is not None, result.problem
        assert int(found[1]) == len(result.frame_us)
        assert frame <= int(found[1]) <= frame + 1

    def test_with_everything_in_place_it_is_right(self, party: Party) -> None:
        for _ in range(TIMES):
            result = run(party)
            assert result.problem == ""
            assert result.correct
            assert len(result.frame_us) == FRAMES

    @pytest.mark.parametrize("sabotage", [Sabotage.CONSUMER_WAIT, Sabotage.EXPORTER_WAIT])
    def test_without_a_wait_the_field_is_wrong(
        self, party: Party, sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It runs to its end with all its signals, and nothing but the field tells."""

        def signal(*arguments: Any, **options: Any) -> None:
            signals.append(arguments[2:])
            real(*arguments, **options)

        real = gi.ExternalSemaphore.signal
        signals: list[tuple[Any, ...]] = []
        monkeypatch.setattr(gi.ExternalSemaphore, "signal", signal)
        for _ in range(TIMES):
            signals.clear()
            result = run(party, sabotage=sabotage)
            assert result.problem == ""
            assert len(result.frame_us) == len(signals) == FRAMES
            assert result.max_error > 1000 * TOLERANCE
            assert not result.correct

    @pytest.mark.parametrize("sabotage", [Sabotage.EXPORTER_SIGNAL, Sabotage.CONSUMER_SIGNAL])
    def test_without_a_signal_the_run_ends_and_the_field_is_wrong(self, party: Party, sabotage: Sabotage) -> None:
        # Without the exporter's, the first frame never comes; without the consumer's, the second.
        frame = 0 if sabotage is Sabotage.EXPORTER_SIGNAL else 1
        result = run(party, sabotage=sabotage)
        self.check_problem(result, frame)
        assert result.max_error > 1000 * TOLERANCE
        assert not result.correct
