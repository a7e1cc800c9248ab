"""An exporter in a child process, with the same interface, so that everything is also tested across processes.

Every call ends, whatever happens to the child.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import weakref
from typing import Any

from ..._arguments import check_type
from ...bridge import Endpoint, OwnTimelineEndpoint
from ...capabilities import Capabilities
from ...errors import BackendUnavailableError, GpuInteropError, InvalidArgumentError, PeerError, ResourceClosedError
from ...handles import AllocationHandle, FdHandle, Timeline
from ..child import Child, Remote
from .base import Exporter, ExporterImage, ExporterMemory, ExporterSemaphore, Submission

__all__ = ["ProcessExporter"]


def _called(method: str) -> Any:
    """Make a method that calls the child's object."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return self.call(method, *arguments, **keywords)

    return call


class _Remote(Remote):
    def close(self) -> None:
        # A child that has exited has closed it.
        with contextlib.suppress(PeerError, ResourceClosedError):
            self.call("close")


class ProcessMemory(_Remote, ExporterMemory):
    """Memory of an exporter in another process."""

    export, write, read = map(_called, ("export", "write", "read"))


class ProcessImage(_Remote, ExporterImage):
    """An image of an exporter in another process."""

    export, write, read = map(_called, ("export", "write", "read"))


class ProcessSemaphore(_Remote, ExporterSemaphore):
    """A semaphore of an exporter in another process."""

    export, signal, hold_lock = map(_called, ("export", "signal", "hold_lock"))

    def wait(self, value: int = 0, *, timeout: float) -> bool:
        return bool(self.call("wait", value, timeout=timeout, waits=timeout))

    def endpoint(self) -> Endpoint:
        if self.kind is not Timeline:
            raise InvalidArgumentError("kind", "another process's binary semaphores cannot be reached from this one.")
        handle = self.export()
        try:
            return OwnTimelineEndpoint(handle)
        except BaseException:
            handle.close()  # most likely a driver's: only its own process can read it
            raise


class ProcessSubmission(_Remote, Submission):
    """Work of an exporter in another process."""

    def done(self, timeout: float = 0.0) -> bool:
        return bool(self.call("done", timeout, waits=timeout))


_REMOTES: dict[type, type[Remote]] = {
    ExporterMemory: ProcessMemory,
    ExporterImage: ProcessImage,
    ExporterSemaphore: ProcessSemaphore,
    Submission: ProcessSubmission,
}


class ProcessExporter(Exporter):
    """Another exporter, `inner` (``memfd`` or ``vulkan``), in a child process; `options` are for its class.

    The child exits with the thread that opened the exporter. Any call can raise `PeerError`, if the child has ended or
    did not answer in time, and the inner exporter's errors.
    """

    name = "process"

    def __init__(self, inner: str = "memfd", **options: Any) -> None:
        if not hasattr(socket, "AF_UNIX") or sys.platform == "win32":
            raise BackendUnavailableError(
                f"handles are passed over Unix sockets, which {sys.platform} does not have.", fix="Use it on Linux."
            )
        self.inner = inner
        self._ours = inner == "memfd" and "identity" not in options  # gpuinterop's timelines: any process can read them
        self.child = Child("the exporter's process", __name__, remotes=_REMOTES)
        # Also ends the child if the exporter is dropped without close(), or interrupted below.
        self._finalizer = weakref.finalize(self, self.child.close)
        self.pid = self.child.process.pid
        try:
            there = self.child.run("gpuinterop.testing.exporters:open_exporter", inner, **options)
        except BaseException:
            self.child.close()
            raise
        self.driver, self.device, self.identity = there.driver, there.device, there.identity
        self._capabilities: Capabilities = there.capabilities
        self.call = there.call

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    create_memory, create_image, image_gap = map(_called, ("create_memory", "create_image", "image_gap"))
    create_semaphore, submit = map(_called, ("create_semaphore", "submit"))

    def import_memory(self, handle: AllocationHandle, size: int) -> ProcessMemory:
        memory: ProcessMemory = self.call("import_memory", check_type(handle, FdHandle, "handle", "a VmmFd"), size)
        handle.close()  # the child imported a duplicate
        return memory

    @property
    def endpoint_gap(self) -> str:
        if self._ours:
            return ""
        return "this process's CPU cannot reach the semaphores of a driver in another process"

    def kill(self) -> None:
        """Kill the child with SIGKILL, as a crash would; returns when it has exited."""
        self.child.kill()

    def close(self) -> None:
        try:
            self.call("close")
        except PeerError:  # it does not answer, and may not exit
            self.child.kill()
        except GpuInteropError:
            pass
        self._finalizer()
