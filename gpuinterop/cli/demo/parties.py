"""Open the two sides of a demo: an exporter, and the device that matches it."""

from __future__ import annotations

from ..._core.device import Device
from ..._core.discovery import get_backend, match_device
from ...capabilities import Operation
from ...errors import BackendUnavailableError, DeviceNotFoundError, InvalidArgumentError
from ...handles import DeviceIdentity, OpaqueFd, OpaqueWin32, TimelineFd, TimelineWin32
from ...testing.exporters import open_exporter, opengl, vulkan
from ...testing.exporters.base import Driver, Exporter
from ..console import note
from .opengl import OpenGLParty

__all__ = ["find_device", "open_party"]


def find_device(identity: DeviceIdentity, backend: str | None) -> Device:
    """Find the device of an exporter's identity: among `backend`'s devices, or with `gpuinterop.match_device`.

    Raises `DeviceNotFoundError`, `BackendNotFoundError` or `BackendUnavailableError`.
    """
    if backend is None:
        return match_device(identity)
    devices = get_backend(backend).devices()
    for device in devices:
        if not device.identity.conflicts(identity):
            return device
    names = ", ".join(device.name for device in devices) or "none"
    raise DeviceNotFoundError(
        f"expected backend {backend!r} to have the device {identity.name or 'of the exporter'}; got {names}; "
        "choose another exporter or driver."
    )


def open_party(exporter: str | None, driver: str | None, backend: str | None) -> Exporter | OpenGLParty:
    """Open the other side.

    `exporter` is ``vulkan``, ``opengl`` or ``process``; by default Vulkan if a driver matches a device of `backend`,
    otherwise a process, with a note. `driver` is part of the name of a Vulkan or OpenGL driver.

    Raises `InvalidArgumentError` for a driver of an exporter that has none, and `BackendUnavailableError` if the chosen
    API is missing.
    """
    if exporter == "process":
        if driver is not None:
            raise InvalidArgumentError("--driver", "needs --exporter vulkan or opengl; a process has no drivers.")
        return open_exporter("memfd", process=True)
    if driver is not None and exporter != "opengl":
        return open_exporter("vulkan", driver=driver)
    drivers = opengl.list_drivers() if exporter == "opengl" else vulkan.list_drivers()
    unmatched = ""
    for candidate in sorted(drivers, key=_rank):
        try:
            if driver and driver.lower().replace("lavapipe", "llvmpipe") not in candidate.name.lower():
                raise DeviceNotFoundError(f"--driver: expected a part of {candidate.name!r}, got {driver!r}.")
            device = find_device(candidate.identity, backend)
        except DeviceNotFoundError as error:
            unmatched = unmatched or str(error)
            continue
        if exporter == "opengl":
            return OpenGLParty(candidate, device)
        return open_exporter("vulkan", device_index=candidate.index)  # two GPUs can have the same name
    reason = " ".join(filter(None, (drivers.reason, unmatched)))
    if exporter is not None:
        if unmatched:
            raise DeviceNotFoundError(reason)
        raise BackendUnavailableError(reason, fix="`gpuinterop demo --exporter process` needs no driver.")
    note(f"no Vulkan driver to share with ({reason}) The other side is a process with NumPy instead.")
    return open_exporter("memfd", process=True)


def _rank(driver: Driver) -> tuple[bool, bool]:
    """GPUs first; then drivers that share semaphores."""
    shares = any(
        driver.capabilities.supports((Operation.IMPORT_SEMAPHORE, handle_type))
        for handle_type in (TimelineFd, OpaqueFd, TimelineWin32, OpaqueWin32)
    )
    return driver.identity.is_cpu, not shares
