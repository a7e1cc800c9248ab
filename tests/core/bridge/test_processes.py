"""Bridges and other processes: exit, fork, and two that share an eventfd."""

from __future__ import annotations

import textwrap

from tests.programs import printed


def run(script: str, limit: float = 60.0) -> str:
    """A child's output; it must end by itself, without an error."""
    preamble = """
        import atexit, faulthandler, os, struct, sys, threading, time
        last = []
        atexit.register(lambda: [call() for call in last])  # first, so it runs behind those of the library
        faulthandler.dump_traceback_later(40, exit=True)
        import gpuinterop as gi
        device = gi.get_backend("host").device()
        class Never(gi.bridge.Endpoint):
            kind, label = gi.Timeline, "never"
            def wait(self, value, timeout): return False
            def signal(self, value): pass
            def close(self): pass
    """
    code = textwrap.dedent(preamble) + textwrap.dedent(script)
    return printed("-c", code, seconds=limit)


def test_the_interpreter_exits_while_a_stream_waits() -> None:
    """It waits until then, and has failed afterwards."""
    out = run(
        """
        bridge = gi.bridge.Bridge(device)
        semaphore = bridge.from_endpoint(Never())
        stream = device.create_stream()
        semaphore.wait(stream, 1)
        atexit.register(lambda: print("idle", stream.query(), flush=True))
        last.append(lambda: print("refused", semaphore._handle.refusal, flush=True))
        """
    )
    assert out.splitlines() == ["idle False", "refused the interpreter is exiting while a stream still waits."]


def test_a_fork_leaves_the_bridge_to_the_parent() -> None:
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        bridge = gi.bridge.Bridge(device)
        mine = os.eventfd(0, os.EFD_NONBLOCK)
        semaphore = bridge.import_semaphore(gi.EventFd(os.dup(mine)))
        stream = device.create_stream()
        semaphore.wait(stream)
        fd = os.eventfd(0)
        handle = gi.EventFd(fd)
        child = os.fork()
        if child == 0:
            other = device.create_stream()
            for call in (  # new semaphores neither: no thread would see to them
                lambda: semaphore.wait(other), lambda: semaphore.signal(other), lambda: semaphore.host_wait(timeout=20),
                lambda: bridge.from_endpoint(Never()), lambda: bridge.import_semaphore(handle),
            ):
                try:
                    call()
                except gi.ResourceClosedError as error:
                    assert "made before the fork" in str(error), error
                else:
                    os._exit(2)
            assert handle.fd == fd
            with gi.bridge.Bridge(device) as anew:  # one of its own works
                again = anew.import_semaphore(gi.EventFd(os.dup(fd)))
                again.wait(other)
                os.write(fd, struct.pack("=Q", 1))
                other.synchronize(20)
                again.close(timeout=20)
            os._exit(7)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.write(mine, struct.pack("=Q", 1))
        stream.synchronize(20)  # the parent's goes on
        bridge.close(timeout=20)
        stream.close()
        """
    )
    assert out.split() == ["child", "7"]


def test_a_childs_exit_leaves_the_parents_stream_waiting() -> None:
    """The words are shared with it: whatever it closes, and its exit functions, must not store."""
    out = run(
        """
        import warnings
        warnings.simplefilter("ignore")
        class Watched(Never):
            reached = False
            def wait(self, value, timeout): return self.reached
            def signal(self, value): os.write(told, b"s")
            def close(self): os.write(told, b"c")
        heard, told = os.pipe()
        endpoint = Watched()
        bridge = gi.bridge.Bridge(device)
        semaphore, second = bridge.from_endpoint(endpoint), bridge.from_endpoint(Watched())
        stream = device.create_stream()
        semaphore.wait(stream, 1)
        semaphore.signal(stream, 2)
        words = semaphore._handle.words
        faulthandler.cancel_dump_traceback_later()  # its thread would be waited for in the child, which has none
        child = os.fork()
        if child == 0:
            second.close()
            semaphore.close()
            device.drain()
            sys.exit(0)
        os.set_blocking(heard, False)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        try:
            print("it has called", os.read(heard, 9))
        except BlockingIOError:
            print("it has called nothing")
        print("word", words.load(0), "idle", stream.query())
        endpoint.reached = True
        stream.synchronize(20)
        bridge.close(timeout=20)
        stream.close()
        """
    )
    assert out.splitlines() == ["child 0", "it has called nothing", "word 0 idle False"]


def test_a_bridge_takes_nothing_more_at_the_end() -> None:
    out = run(
        """
        bridge = gi.bridge.Bridge(device)
        early, stream = bridge.from_endpoint(Never()), device.create_stream()
        fd = os.eventfd(0)
        handle = gi.EventFd(fd)
        gi.system.end_threads()
        for call in (
            lambda: bridge.from_endpoint(Never()), lambda: bridge.import_semaphore(handle),
            lambda: early.wait(stream, 1), lambda: early.host_wait(1, timeout=20),
        ):
            try:
                call()
            except gi.ResourceClosedError as error:
                print("the interpreter is exiting" in str(error), handle.fd == fd)
        """
    )
    assert out.split() == ["True"] * 8
