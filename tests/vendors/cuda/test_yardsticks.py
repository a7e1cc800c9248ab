"""The yardsticks of ``gpuinterop bench`` that only CUDA has: those of semaphores, and those in C."""

from __future__ import annotations

from tests.simulated.driver import Simulator

from ..test_bench import ANEW, REUSED, bench, run


def test_without_a_compiler_the_others_are_measured(simulator: Simulator) -> None:
    found = bench(simulator, "--only", "signal and", "--only", "batches", CC="/nonexistent")
    assert [one["name"] for one in found["signal"]["times"]] == ["gpuinterop", REUSED, ANEW]
    assert [one["name"] for one in found["signal, batch of 16"]["times"]] == ["gpuinterop", REUSED]


def test_the_yardstick_of_semaphores(simulator: Simulator) -> None:
    """Each way of calling sets its own values: the driver's descriptors, and the words that the other side holds."""
    printed = run(
        simulator,
        """
        with ExitStack() as scope:
            semaphores = [scope.enter_context(party.create_semaphore(gi.Timeline)) for _ in range(2)]
            handles = [scope.enter_context(one.export()) for one in semaphores]
            theirs = by_hand.timelines([os.dup(one.fd) for one in handles], stream)
            words = lambda: [struct.unpack("=Q", os.pread(one.fd, 8, 16))[0] for one in handles]
            print(words())
            for what in ("Signal", "Wait"):
                simulator.forget_descriptors()
                signals = what == "Signal"
                reused, anew, at_once = (
                    (theirs.signal, theirs.signal_new_struct, theirs.signal_all) if signals else
                    (theirs.wait, theirs.wait_new_struct, theirs.wait_all)
                )
                for call in (reused, anew):
                    for step in (1, 2):
                        first = words()[0] + step * signals
                        by_hand.check(call(first))
                        by_hand.synchronize(stream)
                by_hand.check(at_once([6, 9]))
                it = floor.Compute(*theirs.addresses(signal=signals))
                assert floor.load().calls(it, 7, int(signals), 3) == 0
                by_hand.synchronize(stream)
                simulator.fail(f"cu{what}ExternalSemaphoresAsync", code=3)
                assert floor.load().calls(it, 9, 0, 2) == 3
                given = simulator.descriptors(f"cu{what}ExternalSemaphoresAsync")
                print([[one.value for one in each] for each in given])
                print(words())
        """,
    )
    signalled = [[2], [4], [5], [7], [6, 9], [7], [8], [9]]
    assert printed == ["[1, 1]", str(signalled), "[9, 9]", str([[9]] * 4 + [[6, 9]] + [[7]] * 3), "[9, 9]"]
