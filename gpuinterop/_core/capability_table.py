"""A device's table of capabilities: its backend's, completed, promoted by recorded runs, without what is turned off.

``GPUINTEROP_DISABLE`` is read when a device is first made, and the device's table never changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files

from .. import capabilities, system
from ..backend import INTERFACES, Backend, DeviceInfo, HostSemaphoreBackend
from ..capabilities import DOMAIN, Capabilities, Capability, Cell, Operation, Scope, Support
from ..errors import BackendUnavailableError, InvalidArgumentError
from ..handles import TimelineFd
from .entry_points import installed_backends, package_folder, top_package

_DISABLE_VARIABLE = "GPUINTEROP_DISABLE"


def capability_table(driver: Backend, info: DeviceInfo, declared: Mapping[Cell, Capability]) -> Capabilities:
    """Return the table of one of a backend's devices. `declared` is what the backend says."""
    if unproven := [str(cell) for cell, entry in declared.items() if entry.support is Support.SUPPORTED]:
        raise BackendUnavailableError(
            f"expected UNVERIFIED from the backend {driver.name!r} for {', '.join(unproven)}, got SUPPORTED, which "
            "only verified.toml can contain."
        )
    cells = [_completed(driver, cell, declared.get(cell)) for cell in DOMAIN]
    package = sys.modules.get(type(driver).__module__.partition(".")[0])
    runs: list[capabilities.VerifiedRun] = []
    if package is not None and hasattr(package, "__path__"):  # a single module has no folder
        runs = capabilities.recorded(files(package) / "verified.toml")
    name = None if info.is_cpu else info.name
    return Capabilities(left_on(capabilities.promote(cells, runs, device=name)), owner=info.name)


def _completed(driver: Backend, cell: Cell, declared: Capability | None) -> Capability:
    """Return the backend's entry for a cell, or a gap if the backend or the core lacks what the cell needs."""
    if declared is not None and not declared:
        return declared
    interfaces = INTERFACES.get(cell.operation)
    if interfaces is not None and not isinstance(driver, interfaces):
        names = " or ".join(interface.__name__ for interface in interfaces)
        return _default_gap(cell, f"the backend {driver.name!r} has no {names}")
    # If the backend makes no semaphores, the core makes them from words that streams write.
    of_words = cell.operation is Operation.CREATE_SEMAPHORE and not isinstance(driver, HostSemaphoreBackend)
    if of_words and cell.handle_type is not TimelineFd:
        return cell.gap(
            Scope.BINDINGS,
            "only timelines can be made from words that streams write.",
            "gpuinterop.timeline",
            "use create_semaphore(TimelineFd), if that is supported.",
        )
    if of_words and system.SYS_FUTEX is None:
        return cell.gap(
            Scope.PLATFORM,
            "gpuinterop's own timelines need memfds, /proc and futexes, implemented for x86-64 and aarch64 Linux.",
            "gpuinterop.timeline",
            "import a timeline made by Vulkan or Direct3D.",
        )
    return declared or _undeclared(cell, driver.name)


def _default_gap(cell: Cell, reason: str) -> Capability:
    return cell.gap(Scope.BINDINGS, f"{reason}.", "gpuinterop.backend")


def _undeclared(cell: Cell, backend: str) -> Capability:
    return _default_gap(cell, f"the backend {backend!r} does not declare it")


def left_on(cells: list[Capability]) -> list[Capability]:
    """Return the cells without those that ``GPUINTEROP_DISABLE`` turns off."""
    patterns = os.environ.get(_DISABLE_VARIABLE)
    return capabilities.disable(cells, patterns, _gaps_of) if patterns else cells


def _gaps_of(profile: str) -> list[Capability]:
    """Return the gaps of a device profile in a backend's ``capabilities.toml``. Loads no backend."""
    known: dict[str, tuple[str, capabilities.Rules, str]] = {}
    for backend, rivals in sorted(installed_backends().items()):
        with suppress(Exception):  # skip a backend whose table cannot be read
            if (folder := package_folder(top_package(rivals[0]))) is not None:
                rules = capabilities.Rules(folder / "capabilities.toml")
                known |= {f"{backend}-{name}": (backend, rules, name) for name in rules.profiles}
    if profile not in known:
        raise InvalidArgumentError(
            _DISABLE_VARIABLE,
            f"expected one of the profiles {', '.join(known) or '(none is installed)'}; got {profile!r}; install the "
            "backend whose capabilities.toml has it.",
        )
    backend, rules, name = known[profile]
    try:
        declared = {capability.cell: capability for capability in rules.profile(name)}
    except Exception as error:
        raise InvalidArgumentError(
            _DISABLE_VARIABLE, f"expected a profile, got {profile!r}, whose rules are broken: {error!r}."
        ) from error
    entries = (declared.get(cell, _undeclared(cell, backend)) for cell in DOMAIN)
    return [entry for entry in entries if not entry]
