"""The participants of a run: the devices to test, and the exporters that share memory with them."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from .._core import capability_table, discovery
from ..errors import BackendUnavailableError, GpuInteropError, InvalidArgumentError
from ..handles import DeviceIdentity
from . import stand_ins
from .exporters import open_exporter

if TYPE_CHECKING:
    from .._core.device import Device
    from .exporters.base import DriverList, Exporter

__all__ = ["SIMULATED_DRIVERS", "DeviceSpec", "ExporterSpec", "Participants", "short_name"]

SIMULATED_DRIVERS: Final = ("swiftshader",)
"""The Vulkan drivers that a simulated driver can share with: memory without a header, a documented semaphore.

lavapipe is not one: its memory begins with a header that only the host backend understands.
"""

_VARIABLES: Final = tuple(
    f"GPUINTEROP_{name}"
    for name in (
        "BACKEND", "DISABLE", "SHARE_DIR", "REQUIRE_VULKAN", "KIT_LIMIT", "VALIDATION",
        "SIM_DEVICES", "SIM_CUDA_VERSION", "SIM_HIP_VERSION", "SIM_INIT",
    )
)  # fmt: skip
_OTHERS: Final = re.compile(
    "(?!GPUINTEROP_).*|GPUINTEROP_((TEST|STANDIN)_.*|EXPLORE|VULKAN_ROOT|REQUIRE_(EXCHANGE|FRAMEWORKS|NAMESPACES)"
    "|SIM_(CFLAGS|DOES_NOTHING|FABRIC|HIP_ABORT|IPC|MIG|TEAM_SECONDS))",
    re.DOTALL,
)
"""Variables of other programs, and those of this project's own tests."""

_PARTY: Final = re.compile(r"(memfd|vulkan(:.+)?)?(@(here|process)?)?")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device to test, or why there is none."""

    backend: str
    ordinal: int = 0
    problem: str = ""
    fails: bool = False
    """Whether the problem fails the run: the backend is required, or its name, a variable or its own code is wrong."""

    def __str__(self) -> str:
        return f"{self.backend}:{self.ordinal}" if not self.problem else self.backend


@dataclass(frozen=True, slots=True)
class ExporterSpec:
    """An independent exporter, or why there is none."""

    name: str
    driver: str = ""
    index: int = 0
    process: bool = False
    problem: str = ""
    identity: DeviceIdentity | None = None
    """The device that is simulated with it, which its handles name as their origin."""

    def __str__(self) -> str:
        text = f"{self.name}:{self.driver}" if self.driver else self.name
        return text + (f"#{self.index}" if self.index else "") + ("@process" if self.process else "")

    def fits(self, wanted: str) -> bool:
        """Whether ``--gpuinterop-exporter=wanted`` means this one; without ``@process`` it means both forms."""
        name, at, where = wanted.partition("@")
        if at and (where == "process") != self.process:
            return False
        return name in ("", self.name, str(self).partition("@")[0])

    def open(self) -> Exporter:
        options: dict[str, Any] = {"process": self.process}
        if self.driver:
            options |= {"driver": self.driver, "device_index": self.index}
        return open_exporter(self.name, identity=self.identity, **options)


class Participants:
    """A run's participants, from its options and the machine."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        # Names, and the option or variable that contains each.
        self._required = dict.fromkeys(option("gpuinterop_require"), "--gpuinterop-require")
        self._named = dict.fromkeys(option("gpuinterop_backend"), "--gpuinterop-backend") | self._required
        self._simulated = set(option("gpuinterop_simulated"))  # and gpuinterop's simulated drivers, once loaded
        self._only = list(option("gpuinterop_exporter"))
        self._exporters_required = list(option("gpuinterop_require_exporter"))
        if os.environ.get("GPUINTEROP_REQUIRE_VULKAN"):
            self._exporters_required.append("vulkan")
        # The variable chooses a backend only if no option does, but must name one in any case.
        self._chosen = chosen = os.environ.get("GPUINTEROP_BACKEND")
        if chosen and (not self._named or chosen not in discovery.backends()):
            self._required[chosen] = self._named[chosen] = "GPUINTEROP_BACKEND"
        self._devices: list[DeviceSpec] | None = None
        self._drivers: DriverList | None = None
        self._exporters: dict[DeviceSpec, list[ExporterSpec]] = {}

    def backends(self) -> list[str]:
        """Names of the backends to test."""
        return list(self._named or discovery.backends())

    def is_required(self, backend: str) -> bool:
        return backend in self._required

    def is_simulated(self, backend: str) -> bool:
        """Whether the backend's devices are simulated on the CPU."""
        return backend in self._simulated

    def why_unrecorded(self, backend: str) -> str:
        """Why no results of a backend are recorded; empty if they are.

        They are not if a test double is loaded in place of its driver, if its devices are simulated, or if no run has
        shown the driver's version.
        """
        try:
            double = self._stand_in(backend)
            unknown = discovery.get_backend(backend).unknown_version
        except Exception:  # the backend does not load, and its own tests report that
            return ""
        return f"it ran on {double}" if double else "its devices are simulated" * self.is_simulated(backend) or unknown

    @staticmethod
    def _stand_in(backend: str) -> str:
        return stand_ins.stand_in(discovery.get_backend(backend).libraries)

    def devices(self) -> list[DeviceSpec]:
        """Every device to test, or an entry with the problem of a backend that does not work. Loads backends."""
        if self._devices is None:
            self._devices = [spec for name in self.backends() for spec in self._devices_of(name)]
        return self._devices

    def _devices_of(self, name: str) -> list[DeviceSpec]:
        required = self.is_required(name)
        try:
            loaded = discovery._by_name(name, self._named.get(name, ""))
            if stand_ins.simulated_driver(loaded.libraries):  # if this raises, nothing may be recorded
                self._simulated.add(name)
            devices = loaded.devices()
        except GpuInteropError as error:
            broken = isinstance(error, discovery.BrokenBackendError) or not isinstance(error, BackendUnavailableError)
            return [DeviceSpec(name, problem=str(error), fails=required or broken)]
        except Exception as error:  # a broken backend fails once, and not other backends' collection
            return [DeviceSpec(name, problem=f"{name}: {type(error).__name__}: {error}", fails=True)]
        found = [DeviceSpec(name, device.ordinal) for device in devices]
        return found or [DeviceSpec(name, problem=f"the backend {name!r} has no device", fails=required)]

    def lacking(self, *, parties: bool = True) -> list[str]:
        """Problems that fail any run: wrong names, and missing requirements.

        A run without a test of the kit needs no exporters (`parties`).
        """
        found = [spec.problem for spec in self.devices() if spec.fails]
        if self._chosen is not None and self._chosen not in self._named:
            found.append(
                f"GPUINTEROP_BACKEND: expected {' or '.join(self._named) or 'the name of a backend'}, got "
                f"{self._chosen!r}; gpuinterop.device() reads it too, so name what the options name, or unset it."
            )
        found += [
            f"{name}: expected {', '.join(_VARIABLES)}, got a variable that gpuinterop does not know; correct its "
            "name, or unset it."
            for name in sorted(os.environ)
            if name not in _VARIABLES and not _OTHERS.fullmatch(name)
        ]
        installed = discovery.backends()
        found += [
            f"--gpuinterop-simulated: there is no backend {name!r}; installed: {', '.join(installed)}."
            for name in sorted(self._simulated - installed.keys())
        ]
        found += [
            f"--gpuinterop-exporter: expected memfd, vulkan[:DRIVER], with @here, @process or neither, got {wanted!r}."
            for wanted in self._only
            if not _PARTY.fullmatch(wanted)
        ]
        try:
            capability_table.left_on([])
        except InvalidArgumentError as error:
            found.append(str(error))  # once, although it affects every working backend
        for spec in self.devices():
            if parties and not spec.problem and (missing := self.missing_exporters(spec)):
                there = ", ".join(map(str, self.exporters(spec)))
                found.append(f"{spec} lacks the required {', '.join(missing)}; it has {there}")
        return list(dict.fromkeys(found))

    @staticmethod
    def device(spec: DeviceSpec) -> Device:
        return discovery.get_backend(spec.backend).device(spec.ordinal)

    def drivers(self) -> DriverList:
        """Every Vulkan driver on this machine; empty if the options exclude Vulkan."""
        if self._drivers is None:
            from .exporters.base import DriverList
            from .exporters.vulkan import list_drivers

            self._drivers = DriverList()
            if self._only and not any(wanted.startswith(("vulkan", "@")) for wanted in self._only):
                self._drivers.reason = "--gpuinterop-exporter names no Vulkan driver"
            else:
                self._drivers = list_drivers()
        return self._drivers

    def exporters(self, spec: DeviceSpec) -> list[ExporterSpec]:
        """The exporters on the device's own hardware, each in this process and in a child."""
        if spec.problem:
            return [ExporterSpec("none", problem=spec.problem)]
        if spec not in self._exporters:
            identity = self.device(spec).identity
            simulated = self.is_simulated(spec.backend)
            said = identity if simulated else None
            on_cpu = simulated or identity.is_cpu
            found = [ExporterSpec("memfd", identity=said)] if on_cpu and sys.platform == "linux" else []
            seen: Counter[str] = Counter()
            for driver in self.drivers():
                short = short_name(driver.name, driver.driver)
                if short in SIMULATED_DRIVERS if simulated else identity.matches(driver.identity):
                    found.append(ExporterSpec("vulkan", short, seen[short], identity=said))
                seen[short] += 1
            if sys.platform != "win32":
                found += [replace(one, process=True) for one in found]
            if self._only:
                found = [one for one in found if any(one.fits(wanted) for wanted in self._only)]
            none = f"no independent exporter shares this device; Vulkan: {self.drivers().reason or 'no driver of it'}"
            self._exporters[spec] = found or [ExporterSpec("none", problem=none)]
        return self._exporters[spec]

    def missing_exporters(self, spec: DeviceSpec) -> list[str]:
        """Required exporters that the device lacks."""
        there = [one for one in self.exporters(spec) if not one.problem]
        return [wanted for wanted in self._exporters_required if not any(one.fits(wanted) for one in there)]


def short_name(name: str, driver: str) -> str:
    """The options' name of a Vulkan driver."""
    text = f"{name} {driver}".lower()
    for known, short in (("llvmpipe", "lavapipe"), ("swiftshader", "swiftshader"), ("nvidia", "nvidia")):
        if known in text:
            return short
    return driver.split()[0].lower() if driver.split() else name.lower()
