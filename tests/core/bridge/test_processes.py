"""Bridges and other processes: exit and fork."""

from __future__ import annotations

import textwrap

from tests.programs import printed


def run(script: str) -> list[str]:
    """What a child prints; it must end by itself, without an error."""
    preamble = """
        import atexit, faulthandler, os, struct, sys, warnings
        last = []
        atexit.register(lambda: [call() for call in last])  # first, so it runs behind those of the library
        import gpuinterop as gi
        device = gi.get_backend("host").device()
        class Watched(gi.bridge.Endpoint):
            kind, label, reached, calls = gi.Timeline, "watched", False, b""
            def wait(self, value, timeout): return self.reached
            def signal(self, value): os.write(told, b"s")
            def close(self): os.write(told, b"c")
        heard, told = os.pipe()
        os.set_blocking(heard, False)
        fd = os.eventfd(0)
        handle = gi.EventFd(fd)
        bridge = gi.bridge.Bridge(device)
        semaphore = bridge.from_endpoint(Watched())
        stream = device.create_stream()
        semaphore.wait(stream, 1)
        def refused(expected, *calls):
            for call in calls:
                try:
                    call()
                except gi.ResourceClosedError as error:
                    assert expected in str(error), error
                else:
                    os._exit(2)
            assert handle.fd == fd
    """
    return printed("-c", textwrap.dedent(preamble) + textwrap.dedent(script)).splitlines()


def test_the_interpreter_exits_while_a_stream_waits() -> None:
    """It waits until then, and has failed afterwards; then the bridge takes nothing more."""
    assert run(
        """
        atexit.register(lambda: print("idle", stream.query(), flush=True))
        last.append(lambda: print("refused", semaphore._handle.refusal, flush=True))
        early = gi.bridge.Bridge(device).from_endpoint(Watched())  # its thread would start now
        last.append(lambda: refused(
            "the interpreter is exiting", lambda: bridge.from_endpoint(Watched()),
            lambda: bridge.import_semaphore(handle),
            lambda: early.wait(stream, 1), lambda: early.host_wait(1, timeout=300),
        ))
        """
    ) == ["idle False", "refused the interpreter is exiting while a stream still waits."]


def test_a_fork_leaves_the_bridge_to_the_parent() -> None:
    """Its words are shared with the child: whatever that closes, and its exit functions, must not store."""
    assert run(
        """
        warnings.simplefilter("ignore")
        second = bridge.from_endpoint(Watched())
        semaphore.signal(stream, 2)
        child = os.fork()
        if child == 0:
            other = device.create_stream()
            refused(  # new semaphores neither: no thread would see to them
                "made before the fork",
                lambda: semaphore.wait(other, 1), lambda: semaphore.signal(other, 1),
                lambda: semaphore.host_wait(1, timeout=300),
                lambda: bridge.from_endpoint(Watched()), lambda: bridge.import_semaphore(handle),
            )
            with gi.bridge.Bridge(device) as anew:  # one of its own works
                again = anew.import_semaphore(gi.EventFd(os.dup(fd)))
                again.wait(other)
                os.write(fd, struct.pack("=Q", 1))
                other.synchronize(300)
                again.close(timeout=300)
            second.close()
            semaphore.close()
            device.drain()
            sys.exit(7)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            print("it has called", os.read(heard, 9))
        except BlockingIOError:
            print("it has called nothing")
        print("word", semaphore._handle.words.load(0), "idle", stream.query())
        semaphore.endpoint.reached = True
        stream.synchronize(300)  # the parent's goes on
        bridge.close(timeout=300)
        stream.close()
        print(sorted(os.read(heard, 9).decode()))
        """
    ) == ["child 7", "it has called nothing", "word 0 idle False", "['c', 'c', 's']"]
