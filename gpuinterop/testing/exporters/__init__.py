"""Exporters, the other side in tests and in the demo: Vulkan, plain memfds, and either of them in a child process.

An exporter is independent of the backends, which the demo and the conformance kit test with it: it never calls one. The
Vulkan exporter is not independent of `gpuinterop.vulkan`, whose buffers, images and imported arrays it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._arguments import check_type
from ...errors import InvalidArgumentError

if TYPE_CHECKING:
    from ...handles import DeviceIdentity
    from .base import Exporter

__all__ = ["open_exporter"]

_NAMES = ("memfd", "vulkan")


def open_exporter(
    name: str,
    *,
    driver: str | None = None,
    process: bool = False,
    identity: DeviceIdentity | None = None,
    **options: Any,
) -> Exporter:
    """Open an exporter by name; close it with ``close()``.

    Parameters
    ----------
    name : str
        ``memfd`` or ``vulkan``.
    driver : str, optional
        Part of the Vulkan device's or driver's name, such as ``swiftshader``. Only for ``vulkan``.
    process : bool, optional
        Whether to run it in a child process. The process exits with the thread that opened it, so open it in a thread
        that stays as long as the exporter is used.
    identity : DeviceIdentity, optional
        The device that handles name as their origin, if that device is simulated with this exporter. Default: the
        exporter's own device.
    **options
        Passed to the exporter's class.

    Returns
    -------
    Exporter
        The exporter, which makes memory and semaphores without any backend.

    Raises
    ------
    BackendUnavailableError
        Something is missing; the message names it.
    DeviceNotFoundError
        `driver` matches no device.

    Examples
    --------
    >>> from gpuinterop.testing.exporters import open_exporter
    >>> with open_exporter("memfd") as exporter, exporter.create_memory(4096) as theirs, theirs.export() as handle:
    ...     with device.import_memory(handle, size=theirs.size) as memory:
    ...         buffer = memory.map_buffer()
    ...         buffer.fill(7)
    ...     list(theirs.read(0, 4))  # what the other side sees
    [7, 7, 7, 7]
    """
    check_type(name, str, "name", "a str")
    if name not in _NAMES:
        raise InvalidArgumentError("name", f"expected one of {', '.join(_NAMES)}, got {name!r}.")
    if driver is not None:
        if name != "vulkan":
            raise InvalidArgumentError("driver", f"expected None, because {name} has no drivers, got {driver!r}.")
        options["driver"] = driver
    if identity is not None:
        options["identity"] = identity
    return _open(name, process, options)


def _open(name: str, process: bool, options: dict[str, Any]) -> Exporter:
    if process:
        from .process import ProcessExporter

        return ProcessExporter(name, **options)
    if name == "vulkan":
        from .vulkan import VulkanExporter

        return VulkanExporter(**options)
    from .memfd import MemfdExporter

    return MemfdExporter(**options)
