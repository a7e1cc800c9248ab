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
                    (theirs.signal, theirs.signal_anew, theirs.signal_all) if signals else
                    (theirs.wait, theirs.wait_anew, theirs.wait_all)
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


def test_the_yardstick_of_frames_in_c(simulator: Simulator) -> None:
    """The other side stands in for Vulkan. Its word goes up by 2 a frame, by the driver's calls and by its graph.

    The end waits for the counter, and what fails ends the frames.
    """
    printed = run(
        simulator,
        """
        with ExitStack() as scope:
            semaphore = scope.enter_context(party.create_semaphore(gi.Timeline))
            handle = scope.enter_context(semaphore.export())
            theirs = by_hand.timelines([os.dup(handle.fd)], stream)
            word = lambda: struct.unpack("=Q", os.pread(handle.fd, 8, 16))[0]
            waits, signals = (ctypes.c_uint64 * 1)(), (ctypes.c_uint64 * 1)()
            number, pointer = ctypes.c_int, ctypes.c_void_p
            submitted, looks, failing = [], [], []

            @ctypes.CFUNCTYPE(number, pointer, ctypes.c_uint32, pointer, pointer)
            def submit(*given):
                submitted.append((waits[0], signals[0]))
                if failing:
                    return failing.pop()
                semaphore.wait(waits[0], timeout=20)
                semaphore.signal(signals[0])
                return 0

            @ctypes.CFUNCTYPE(number, pointer, pointer, ctypes.POINTER(ctypes.c_uint64))
            def counter(device, semaphore, out):
                looks.append(1)
                out[0] = word() if len(looks) > 2 else 0
                return 0

            address = lambda function: ctypes.cast(function, pointer).value
            graphics = floor.Graphics(
                address(submit), 1, 1, ctypes.addressof(waits), ctypes.addressof(signals), address(counter), 1, 1
            )
            wait, signal = (floor.Compute(*theirs.addresses(signal=one)) for one in (False, True))
            graph = theirs.graph()
            nodes = floor.Node(*graph.wait), floor.Node(*graph.signal), floor.Launch(*graph.launch)
            for run, given, first, count, call in (
                (floor.load().frames, (wait, signal), 1, 2, "cuWaitExternalSemaphoresAsync"),
                (floor.load().launches, nodes, 5, 3, "cuGraphExecExternalSemaphoresWaitNodeSetParams"),
            ):
                submitted.clear()
                looks.clear()
                simulator.forget_descriptors()
                print(run(graphics, *given, first, count), word(), submitted, len(looks) > 2)
                print([one.value for one, in simulator.descriptors(call)])
                failing.append(3)
                print(run(graphics, *given, 77, 2), len(submitted) - count)
                by_hand.synchronize(stream)
            for call in ("Wait", "Signal"):
                simulator.fail(f"cu{call}ExternalSemaphoresAsync", code=3)
                print(floor.load().frames(graphics, wait, signal, word(), 2))
            by_hand.synchronize(stream)
        """,
    )
    frames = ["0 5 [(1, 2), (3, 4)] True", "[2, 4]", "3 1"]
    launches = ["0 11 [(5, 6), (7, 8), (9, 10)] True", "[6, 8, 10]", "3 1"]
    assert printed == [*frames, *launches, "3", "3"]
