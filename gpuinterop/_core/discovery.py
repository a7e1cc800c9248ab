"""Finds backends and their devices.

The import reads nothing. ``GPUINTEROP_BACKEND`` is read whenever a call chooses a backend, ``GPUINTEROP_DISABLE`` when
a device is first made: a process makes each device once, and its capability table never changes.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from itertools import chain

from .. import errors, system
from .._arguments import NoCopy, check_int, check_type
from ..backend import Backend, DeviceInfo
from ..capabilities import Capabilities
from ..errors import ArgumentTypeError, BackendUnavailableError, GpuInteropError
from ..handles import DeviceIdentity
from ..installing import pip_install
from .capability_table import capability_table
from .device import Device
from .entry_points import installed_backends, top_package
from .lifetime import after_fork

_BACKEND_VARIABLE = "GPUINTEROP_BACKEND"

_lock = threading.RLock()
_loaded: dict[str, LoadedBackend | BackendUnavailableError] = {}
_warned: dict[str, object] = {}
_chosen: tuple[list[object], dict[str | None, str], list[LoadedBackend]] = ([], {}, [])
"""What the last scan of entry points depended on, the chosen backend by requested name, and the working backends."""


@after_fork
def _forked() -> None:
    global _lock  # noqa: PLW0603 - a thread of the parent may hold it; the child does not have that thread
    _lock = threading.RLock()


class LoadedBackend(NoCopy):
    """A backend that works on this machine. `get_backend` returns it.

    Attributes
    ----------
    name : str
        Name of the backend in ``GPUINTEROP_BACKEND``.
    unknown_version : str
        Remark if the backend depends on the driver's version and no recorded run had this one; else empty.

    Examples
    --------
    >>> backend = gi.get_backend("host")
    >>> backend.name, len(backend.devices())
    ('host', 1)
    >>> backend.device(0)
    <Device host:0 ...>
    """

    def __init__(self, driver: Backend) -> None:
        self.driver = driver
        self.name = driver.name
        self.unknown_version = driver.unknown_version
        self._rank = -driver.priority
        self._infos()  # raises if the backend cannot list its devices
        self._devices: dict[int, Device] = {}

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the driver, runtime and bindings."""
        with _guarded(f"{self.name}: versions() failed"):
            return {str(name): str(version) for name, version in self.driver.versions().items()}

    @property
    def libraries(self) -> Mapping[str, str]:
        """Paths of the native libraries."""
        with _guarded(f"{self.name}: libraries() failed"):
            return {str(name): str(path) for name, path in self.driver.libraries().items()}

    def _infos(self) -> tuple[DeviceInfo, ...]:
        with _guarded(f"{self.name}: devices() failed"):
            infos = tuple(self.driver.devices())
            for info in infos:
                if not isinstance(info, DeviceInfo):
                    raise TypeError(f"expected DeviceInfo objects, got {info!r}")
            return infos

    def devices(self) -> Sequence[Device]:
        """Return all devices, in the backend's order."""
        return [self.device(info.ordinal) for info in self._infos()]

    def device(self, ordinal: int = 0) -> Device:
        """Return a device. It is the same object every time.

        Raises
        ------
        DeviceNotFoundError
            The backend has no such device. The message lists its devices.
        ArgumentTypeError
            `ordinal` is not an int.
        """
        try:
            number = check_int(ordinal, "ordinal")
        except ArgumentTypeError:
            raise ArgumentTypeError(
                "ordinal",
                f"expected an int, got {ordinal!r}; to choose a backend, call gpuinterop.get_backend(NAME).device(), "
                f"or set {_BACKEND_VARIABLE}.",
            ) from None
        if (device := self._devices.get(number)) is not None:  # without the lock, which a loading thread may hold
            return device
        return system.under(_lock, self._open, number)

    def _open(self, number: int) -> Device:
        if number not in self._devices:
            infos = {info.ordinal: info for info in self._infos()}
            if number not in infos:
                known = ", ".join(f"{info.ordinal}: {info.name}" for info in infos.values()) or "none"
                raise errors.DeviceNotFoundError(f"ordinal: {self.name} has no device {number}; devices: {known}.")
            self._devices[number] = Device(self.driver, infos[number], self._table(infos[number]), self.devices)
        return self._devices[number]

    def _table(self, info: DeviceInfo) -> Capabilities:
        with _guarded(f"{self.name}: capabilities() failed"):
            declared = {capability.cell: capability for capability in self.driver.capabilities(info.ordinal)}
        return capability_table(self.driver, info, declared)

    def __repr__(self) -> str:
        return f"<LoadedBackend {self.name!r}>"


class InstalledBackend:
    """An installed backend, which may not work here. `backends` returns it.

    Attributes
    ----------
    name : str
        Name of the backend in ``GPUINTEROP_BACKEND``.
    distribution : str
        Name and version of the distribution that installs it.

    Examples
    --------
    >>> installed = gi.backends()["host"]
    >>> installed.available
    True
    >>> installed.distribution
    'gpuinterop ...'
    """

    def __init__(self, rivals: Sequence[EntryPoint]) -> None:
        self._rivals = rivals
        self.name = rivals[0].name
        dists = [rival.dist for rival in rivals]
        self.distribution = ", ".join(f"{dist.name} {dist.version}" if dist else "unknown" for dist in dists)

    @property
    def error(self) -> BackendUnavailableError | None:
        """Why the backend does not work; None if it works. Loads the backend."""
        outcome = _load(self._rivals)
        return outcome if isinstance(outcome, BackendUnavailableError) else None

    @property
    def available(self) -> bool:
        """Whether the backend works on this machine. Loads the backend."""
        return self.error is None

    def __repr__(self) -> str:
        return f"<InstalledBackend {self.name!r} of {self.distribution}>"


class BrokenBackendError(BackendUnavailableError):
    """The backend raised an unexpected error, so the conformance kit fails instead of skipping."""


@contextmanager
def _guarded(failure: str, let_through: type[GpuInteropError] = GpuInteropError) -> Iterator[None]:
    """Turn errors of third-party code into `BrokenBackendError`, so that others can still be used."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit, let_through):
        raise
    except BaseException as error:
        raise BrokenBackendError(f"{failure}: {error!r}.") from error


def _load(rivals: Sequence[EntryPoint]) -> LoadedBackend | BackendUnavailableError:
    """Return the backend of an entry point. It is loaded once."""
    return system.under(_lock, _load_once, rivals)


def _load_once(rivals: Sequence[EntryPoint]) -> LoadedBackend | BackendUnavailableError:
    name, value = rivals[0].name, rivals[0].value
    if name not in _loaded:
        try:
            with _guarded(f"{name} = {value!r} failed to start", BackendUnavailableError):
                _loaded[name] = LoadedBackend(_class_of(rivals)())
        except BackendUnavailableError as error:
            _loaded[name] = _without_frames(error)
    return _loaded[name]


def _without_frames(error: BackendUnavailableError) -> BackendUnavailableError:
    """Return the error without tracebacks: `_loaded` refers to it, and they to the first callers' variables."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def _class_of(rivals: Sequence[EntryPoint]) -> type[Backend]:
    entry_point, *others = rivals
    if others:
        raise BackendUnavailableError(
            f"two distributions install a backend named {entry_point.name!r}: "
            f"{' and '.join(rival.value for rival in rivals)}.",
            fix="Uninstall one of them.",
        )
    if EntryPoint.pattern.match(entry_point.value) is None:
        raise ValueError("expected an entry point such as 'module:Class'")
    cls = entry_point.load()
    if (package := top_package(entry_point)).startswith("gpuinterop_"):  # other names can be an application's
        errors.passed_over.add(f"{package}.")
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise BackendUnavailableError(f"expected a subclass of gpuinterop.backend.Backend, got {entry_point.value}.")
    if getattr(cls, "name", None) != entry_point.name:
        raise BackendUnavailableError(
            f"expected {entry_point.value}.name to equal its entry point's, {entry_point.name!r}, got "
            f"{getattr(cls, 'name', None)!r}."
        )
    return cls


def backends() -> Mapping[str, InstalledBackend]:
    """Return every installed backend by name. Drivers are called only when you check whether a backend is available.

    Examples
    --------
    >>> for name, installed in gi.backends().items():
    ...     if installed.error is not None:
    ...         reason, fix = installed.error.reason, installed.error.fix
    >>> "host" in gi.backends()
    True
    """
    return {name: InstalledBackend(rivals) for name, rivals in sorted(installed_backends().items())}


def get_backend(name: str | None = None) -> LoadedBackend:
    """Return a backend that works. It is the same object every time.

    Parameters
    ----------
    name : str, optional
        By default ``GPUINTEROP_BACKEND``; if that is not set, the working backend with a device and the highest
        priority.

    Raises
    ------
    BackendNotFoundError
        No backend of that name is installed. The message lists the installed ones.
    BackendUnavailableError
        The backend does not work here. The message says why and what to install. A backend requested by name is never
        replaced by another.

    Examples
    --------
    >>> gi.get_backend("host").device()
    <Device host:0 ...>
    >>> gi.get_backend("metal")
    Traceback (most recent call last):
        ...
    gpuinterop.errors.BackendNotFoundError: there is no backend 'metal'; installed: ...
    """
    if name is not None:
        check_type(name, str, "name", "a str")
    source = ""
    if name is None and (name := os.environ.get(_BACKEND_VARIABLE)):
        source = _BACKEND_VARIABLE
    names = _scanned_here()[0]
    loaded = _loaded.get(names.get(name, ""))
    if not isinstance(loaded, LoadedBackend):
        loaded = _by_name(name, source) if name else _by_priority()
        names[name] = loaded.name
    return loaded


def _scanned_here() -> tuple[dict[str | None, str], list[LoadedBackend]]:
    """Return the results of earlier scans, emptied if their inputs have changed. A scan is slow."""
    global _chosen  # noqa: PLW0603 - replaced as a whole, for other threads
    where: list[object] = [*sys.path, *sys.meta_path]
    if (chosen := _chosen)[0] != where:
        chosen = _chosen = (where, {}, [])
    return chosen[1:]


def _by_name(name: str, source: str) -> LoadedBackend:
    """Return the backend. `source` is the variable that names it; empty if the caller does."""
    installed, prefix = installed_backends(), f"{source}: " if source else ""
    if name not in installed:
        known = f"installed: {', '.join(sorted(installed))}." if installed else _none_installed()
        raise errors.BackendNotFoundError(f"{prefix}there is no backend {name!r}; {known}")
    loaded = _load(installed[name])
    if isinstance(loaded, BackendUnavailableError):
        # A new error each time, because the same one would collect the tracebacks of all callers.
        reason = f"{prefix}the backend {name!r} is not available: {loaded.reason}"
        raise type(loaded)(reason, fix=loaded.fix) from loaded.__cause__
    return loaded


def _by_priority() -> LoadedBackend:
    """Return the first backend that works and has a device. Warns once of those that it skipped."""
    for loaded in _working():
        if loaded._rank > 0:
            _warn_of_failures(loaded.name)
        if loaded._infos():
            return loaded
    raise BackendUnavailableError(
        f"no installed backend works here: {_reasons() or _none_installed()}", fix="Run `gpuinterop info` for details."
    )


def _none_installed() -> str:
    return f"none is installed; an installation of gpuinterop includes its own ({pip_install()})."


def _warn_of_failures(fallback: str) -> None:
    for name, error in _loaded.copy().items():
        if not isinstance(error, BackendUnavailableError) or error.absent:
            continue
        mark = object()
        if _warned.setdefault(name, mark) is mark:  # otherwise another thread warns
            warnings.warn(
                f"falling back to the backend {fallback!r}: {name!r} is not available. {str(error).rstrip('.')}. "
                f"Set {_BACKEND_VARIABLE}={fallback} to choose it and silence this.",
                RuntimeWarning,
                stacklevel=errors.users_frame()[1],
            )


def _reasons() -> str:
    outcomes = ((name, _loaded.get(name)) for name in installed_backends())
    return "; ".join(f"{name}: {error}" for name, error in outcomes if isinstance(error, BackendUnavailableError))


def devices() -> Sequence[Device]:
    """Return every device of the chosen backend.

    Examples
    --------
    >>> for device in gi.devices():
    ...     print(device.backend, device.ordinal)
    host 0
    """
    return get_backend().devices()


def device(ordinal: int = 0) -> Device:
    """Return a device of the chosen backend (`get_backend`). It is the same object every time, and needs no `close`.

    `ordinal` is its number in the backend, from 0.

    Raises
    ------
    DeviceNotFoundError
        The backend has no such device. The message lists its devices.
    BackendNotFoundError, BackendUnavailableError
        See `get_backend`.
    ArgumentTypeError
        `ordinal` is not an int.

    Examples
    --------
    >>> gi.device()  # with GPUINTEROP_BACKEND=host
    <Device host:0 ...>
    """
    return get_backend().device(ordinal)


def match_device(identity: DeviceIdentity) -> Device:
    """Find the device that another API reports as `identity`, by UUID, PCI bus id or LUID.

    It searches every working backend, by priority; if ``GPUINTEROP_BACKEND`` is set, only that one. A CPU matches the
    host backend's device. The device is the same object every time, and needs no `close`.

    Parameters
    ----------
    identity : DeviceIdentity
        Identity of the device, for example from `gpuinterop.vulkan.identity`.

    Raises
    ------
    DeviceNotFoundError
        No device matches. The message lists the available devices.

    Examples
    --------
    >>> gi.match_device(gi.vulkan.identity(physical_device))
    <Device host:0 ...>
    """
    check_type(identity, DeviceIdentity, "identity", "a DeviceIdentity, as gpuinterop.vulkan.identity(...) returns")
    return search(
        lambda candidate: candidate.identity.matches(identity),
        f"identity: no device is {identity.name or 'that one'} (uuid {_hex(identity.uuid)}, pci "
        f"{identity.pci_bus_id}, luid {_hex(identity.luid)})",
        only_chosen=True,
    )


def search(fits: Callable[[Device], bool], problem: str, *, only_chosen: bool = False) -> Device:
    """Return the first device that fits, in the order of `match_device`, or raise with `problem` and all devices.

    Memory can belong to another backend than the chosen one; a program can request that backend by name.
    """
    seen, chosen = [], os.environ.get(_BACKEND_VARIABLE)
    first = [get_backend()] if chosen else []
    others = () if chosen and only_chosen else (backend for backend in _known_first() if backend not in first)
    for loaded in chain(first, others):
        try:
            candidates = loaded.devices()
        except BackendUnavailableError as error:
            if loaded in first:
                raise
            seen.append(str(error).rstrip("."))
            continue
        for candidate in candidates:
            if fits(candidate):
                return candidate
            note = f" ({candidate.info.note})" if candidate.info.note else ""
            seen.append(f"{loaded.name}:{candidate.ordinal} {candidate.name}{note}")
    only = f"; {_BACKEND_VARIABLE}={chosen} excludes other backends" if chosen and only_chosen else ""
    raise errors.DeviceNotFoundError(f"{problem}; devices: {', '.join(seen) or 'none'}{only}.")


def _working() -> list[LoadedBackend]:
    outcomes = map(_load, installed_backends().values())
    loaded = (outcome for outcome in outcomes if isinstance(outcome, LoadedBackend))
    working = sorted(loaded, key=lambda backend: backend._rank)
    _scanned_here()[1][:] = working
    return working


def _known_first() -> Iterator[LoadedBackend]:
    """Return the working backends, those of the last scan first, so that most callers need no new scan."""
    yield from (known := _scanned_here()[1].copy())
    yield from (backend for backend in _working() if backend not in known)


def _hex(mark: bytes | None) -> str:
    return mark.hex() if mark else "unknown"
