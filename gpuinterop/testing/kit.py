"""What the plugin does once tests of the kit are collected: which devices, which parties, what counts."""

from __future__ import annotations

import datetime
import os
import pickle
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from .. import __version__
from .._core import registry, stand_ins
from ..capabilities import DOMAIN, Cell, Operation, VerifiedRun, disable
from ..errors import BackendUnavailableError, GpuInteropError, InvalidArgumentError
from ..exporters import open_exporter
from ..handles import Binary, DeviceIdentity, OpaqueFd, Timeline, TimelineFd
from .report import make_run, of_suites, write_report
from .required import vulkan_is_required

if TYPE_CHECKING:
    from .._core.device import Device
    from ..exporters.base import Exporter
    from ..exporters.vulkan import DriverList

__all__ = ["KIND", "SIMULATED_DRIVERS", "DeviceSpec", "ExporterSpec", "Kit", "requires", "skip_declared"]

KIND: Final = "kind"
"""Stands in `requires` for the handle type of the semaphore kind that the test is parametrized with as ``kind``."""

HANDLE_TYPES: Final[dict[Any, Any]] = {Binary: OpaqueFd, Timeline: TimelineFd}
"""What an exporter's semaphore of a kind is exported as."""

SIMULATED_DRIVERS: Final = ("swiftshader",)
"""The Vulkan drivers whose objects a simulated driver understands: memory without a header, a documented semaphore.

Not lavapipe: its memory begins with a header of its own, which the host backend alone knows.
"""

_TIMEOUT: Final = 90
"""Seconds after which a test has hung: it is ended, and every thread's stack shown. No test takes a tenth of it."""

_DECLARED: Final = "declared: "
_PARTY: Final = re.compile(r"(memfd|vulkan(:.+)?)?(@(here|process)?)?")
_HOME: Final = Path(__file__).parent
# Which cells need somebody on the other side who can do the like.
_BOTH_SIDES: Final = frozenset(
    (
        Operation.IMPORT_MEMORY,
        Operation.MAP_MIPMAPPED_ARRAY,
        Operation.IMPORT_SEMAPHORE,
        Operation.EXPORT_ALLOCATION,
    )
)


def requires(*cells: Any) -> pytest.MarkDecorator:
    """Declare the capabilities that a test, or every test of a class, exercises.

    On a device where one of them is a gap the test is skipped with the gap's reason; where the tests that claim a
    cell have all passed, it counts as exercised.

    Parameters
    ----------
    *cells : Operation, Cell or (Operation, handle type)
        `KIND` as a handle type stands for that of the test's ``kind`` parameter.
    """
    mark: pytest.MarkDecorator = pytest.mark.gpuinterop_requires(*cells)
    return mark


def skip_declared(reason: str) -> Any:
    """Skip for a reason that a table or the documentation states: no failure where the backend is required."""
    pytest.skip(_DECLARED + reason)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device to test, or why there is none."""

    backend: str
    ordinal: int = 0
    problem: str = ""
    fails: bool = False
    """Whether the problem fails the run: the backend is required, or its name, a variable or its own code is wrong."""

    def __str__(self) -> str:
        return f"{self.backend}:{self.ordinal}" if not self.problem else self.backend


@dataclass(frozen=True, slots=True)
class ExporterSpec:
    """One independent party, or why there is none."""

    name: str
    driver: str = ""
    index: int = 0
    process: bool = False
    problem: str = ""
    identity: DeviceIdentity | None = None
    """The simulated device on top of it, which its handles are said to come from."""

    def __str__(self) -> str:
        text = f"{self.name}:{self.driver}" if self.driver else self.name
        return text + (f"#{self.index}" if self.index else "") + ("@process" if self.process else "")

    def fits(self, wanted: str) -> bool:
        """Whether ``--gpuinterop-exporter`` means this one; without ``@process`` both forms do."""
        name, at, where = wanted.partition("@")
        if at and (where == "process") != self.process:
            return False
        return name in ("", self.name, str(self).partition("@")[0])

    def open(self) -> Exporter:
        options: dict[str, Any] = {"process": self.process}
        if self.driver:
            options |= {"driver": self.driver, "device_index": self.index}
        return open_exporter(self.name, identity=self.identity, **options)


@dataclass(slots=True)
class _Tally:
    """What happened on one device."""

    versions: dict[str, str] = field(default_factory=dict)
    passed: dict[Cell, int] = field(default_factory=dict)
    failed: set[Cell] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        """The outcomes, in the words of the summary line."""
        o = self.outcomes
        return {
            "passed": o["passed"],
            "failed": o["failed"],
            "skipped as declared": o["declared"],
            "unexpected skips": o["skipped"],
        }

    def add(self, other: _Tally) -> None:
        """What happened on another device of the same name: what has failed there has failed here."""
        self.passed |= other.passed
        self.failed |= other.failed
        self.outcomes += other.outcomes

    @property
    def exercised(self) -> set[Cell]:
        return of_suites(cell for cell in self.passed if cell not in self.failed)


class Kit:
    """One pytest run of the kit."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self._config = config
        # By name, with what names them.
        self._required = dict.fromkeys(option("gpuinterop_require"), "--gpuinterop-require")
        self._named = dict.fromkeys(option("gpuinterop_backend"), "--gpuinterop-backend") | self._required
        self._simulated = frozenset(option("gpuinterop_simulated"))
        self._only = list(option("gpuinterop_exporter"))
        self._report = option("gpuinterop_report")
        self._exporter_report = option("gpuinterop_exporter_report")
        self._exporters_required = list(option("gpuinterop_require_exporter"))
        if vulkan_is_required():
            self._exporters_required.append("vulkan")
        # An explicit choice never falls back. Beside an option the variable chooses nothing, but must be right.
        chosen = os.environ.get("GPUINTEROP_BACKEND")
        if chosen and (not self._named or chosen not in registry.backends()):
            self._required[chosen] = self._named[chosen] = "GPUINTEROP_BACKEND"
        self.partial = False
        self.summed = False
        self._devices: list[DeviceSpec] | None = None
        self._drivers: DriverList | None = None
        self._exporters: dict[DeviceSpec, list[ExporterSpec]] = {}
        self._open: dict[ExporterSpec, Exporter] = {}
        self._parties: dict[ExporterSpec, str] = {}
        self._tallies: dict[DeviceSpec, _Tally] = {}
        self._driver_tallies: dict[tuple[str, int], _Tally] = {}

    # -- what there is ------------------------------------------------------------------------------------------

    def backends(self) -> list[str]:
        """The names of the backends to test."""
        return list(self._named or registry.backends())

    def is_required(self, backend: str) -> bool:
        return backend in self._required

    def is_simulated(self, backend: str) -> bool:
        """Whether the backend's devices are simulated on the CPU."""
        return backend in self._simulated

    def is_unrecorded(self, backend: str) -> bool:
        """Whether nothing is recorded of a backend: its devices are simulated, or what it calls stands in for a driver.

        One that does not work stands for none.
        """
        if self.is_simulated(backend):
            return True
        try:
            return bool(self._stand_in(backend))
        except Exception:  # it does not load, which its own tests say
            return False

    @staticmethod
    def _stand_in(backend: str) -> str:
        return stand_ins.stand_in(registry.get_backend(backend).libraries)

    def devices(self) -> list[DeviceSpec]:
        """Every device to test; one entry with the problem for a backend that does not work. Loads backends."""
        if self._devices is None:
            self._devices = [spec for name in self.backends() for spec in self._devices_of(name)]
        return self._devices

    def _devices_of(self, name: str) -> list[DeviceSpec]:
        required = self.is_required(name)
        try:
            devices = registry._by_name(name, self._named.get(name, "name")).devices()
        except GpuInteropError as error:
            broken = isinstance(error, registry.BrokenBackendError) or not isinstance(error, BackendUnavailableError)
            return [DeviceSpec(name, problem=str(error), fails=required or broken)]
        except Exception as error:  # a broken backend fails once, not the collection of the others' tests
            return [DeviceSpec(name, problem=f"{type(error).__name__}: {error}", fails=True)]
        found = [DeviceSpec(name, device.ordinal) for device in devices]
        return found or [DeviceSpec(name, problem=f"the backend {name!r} has no device", fails=required)]

    def lacking(self) -> list[str]:
        """What fails a run, whichever of the suites it has: what it requires and has not, and wrong names."""
        found = [spec.problem for spec in self.devices() if spec.fails]
        installed = registry.backends()
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
            disable((), os.environ.get("GPUINTEROP_DISABLE", ""))
        except InvalidArgumentError as error:
            found.append(str(error))  # once, though it is the problem of every backend that works
        for spec in self.devices():
            if not spec.problem and (missing := self.missing_exporters(spec)):
                there = ", ".join(map(str, self.exporters(spec)))
                found.append(f"{spec} lacks the required {', '.join(missing)}; there are {there}")
        return list(dict.fromkeys(found))

    @staticmethod
    def device(spec: DeviceSpec) -> Device:
        return registry.get_backend(spec.backend).device(spec.ordinal)

    def drivers(self) -> DriverList:
        """Every Vulkan driver on this machine; not looked for where this run uses none."""
        if self._drivers is None:
            from ..exporters.vulkan import DriverList, list_drivers

            self._drivers = DriverList()
            if self._only and not any(wanted.startswith(("vulkan", "@")) for wanted in self._only):
                self._drivers.reason = "--gpuinterop-exporter asks for none"
            else:
                self._drivers = list_drivers()
        return self._drivers

    def exporters(self, spec: DeviceSpec) -> list[ExporterSpec]:
        """The independent parties that live on the device's own hardware, each here and in a child process."""
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
                short = _short(driver.name, driver.driver)
                if short in SIMULATED_DRIVERS if simulated else identity.matches(driver.identity):
                    found.append(ExporterSpec("vulkan", short, seen[short], identity=said))
                seen[short] += 1
            if sys.platform != "win32":
                found += [replace(one, process=True) for one in found]
            if self._only:
                found = [one for one in found if any(one.fits(wanted) for wanted in self._only)]
            none = f"no independent party shares this device; Vulkan: {self.drivers().reason or 'no driver of it'}"
            self._exporters[spec] = found or [ExporterSpec("none", problem=none)]
        return self._exporters[spec]

    def missing_exporters(self, spec: DeviceSpec) -> list[str]:
        """Those that are required, and that the device has not."""
        there = [one for one in self.exporters(spec) if not one.problem]
        return [wanted for wanted in self._exporters_required if not any(one.fits(wanted) for one in there)]

    def exporter(self, spec: ExporterSpec) -> Exporter:
        """An open one, shared by the tests."""
        if spec not in self._open:
            self._open[spec] = spec.open()
            self._parties[spec] = self._open[spec].driver
        return self._open[spec]

    def discard(self, spec: ExporterSpec) -> None:
        """Close the shared one: a failed test may have left work pending on it."""
        exporter = self._open.pop(spec, None)
        if exporter is not None:
            exporter.close()

    # -- hooks --------------------------------------------------------------------------------------------------

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        if "device" not in names:
            return
        devices = self.devices()
        # The header names what does not work, and its tests are not even made.
        # Where none works at all, the one that stands in for it carries the reason.
        working = [spec for spec in devices if not spec.problem] or devices[:1]
        if "exporter" in names or "exporter_spec" in names:
            wanted = getattr(metafunc.cls, "exporter_filter", lambda spec: True)
            pairs = [(spec, one) for spec in working for one in self.exporters(spec) if one.problem or wanted(one)]
            target = "exporter" if "exporter" in names else "exporter_spec"
            metafunc.parametrize(("device", target), pairs, indirect=True, ids=[f"{spec}-{one}" for spec, one in pairs])
        elif "gap" in names:
            gaps = [
                (spec, found.cell)
                for spec in working
                for found in (self.device(spec).capabilities.values() if not spec.problem else ())
                if not found.usable
            ] or [(spec, DOMAIN[0]) for spec in working if spec.problem]
            metafunc.parametrize(
                ("device", "gap"), gaps, indirect=["device"], ids=[f"{spec}-{cell}" for spec, cell in gaps]
            )
        else:
            metafunc.parametrize("device", working, indirect=True, ids=map(str, working))

    def prepare(self, items: list[pytest.Item], session: pytest.Session) -> list[pytest.Item]:
        """Give the tests a time-out, and make leaks errors. Returns a test to run beside them, if one must fail."""
        timeouts = self._config.pluginmanager.hasplugin("timeout")
        for item in items:
            if timeouts and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT, method="thread"))
            item.add_marker(pytest.mark.filterwarnings("error::gpuinterop.errors.LeakedResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"))
        lacking = self.lacking()
        return [_Environment.of(session, lacking)] if lacking else []

    def check(self, item: pytest.Item) -> None:
        """Skip a test whose capabilities one of the two sides lacks."""
        spec, party = _specs(item)
        if spec is not None and spec.problem:
            skip_declared(spec.problem)
        if party is not None and party.problem:
            pytest.skip(party.problem)
        if spec is None:
            return
        cells = _cells(item)
        if missing := self.device(spec).capabilities.missing(*cells):
            skip_declared(f"{missing[0].cell} on {spec}: {missing[0].reason}")
        if party is not None:
            table = self.exporter(party).capabilities
            if missing := table.missing(*(cell for cell in cells if cell.operation in _BOTH_SIDES)):
                skip_declared(f"{missing[0].cell} of {party}: {missing[0].reason}")

    def record(self, item: pytest.Item, report: pytest.TestReport) -> None:
        spec, party = _specs(item)
        if spec is None or spec.problem:
            return
        name = spec.backend
        tally = self._tallies.setdefault(spec, _Tally())
        tallies = [tally]
        if party is not None and party.driver and not self.is_unrecorded(name):
            tallies.append(self._driver_tallies.setdefault((party.driver, party.index), _Tally()))
        if report.skipped and not hasattr(report, "wasxfail"):
            found = report.longrepr
            where, _, reason = found if isinstance(found, tuple) else ("", 0, str(found))
            if reason.removeprefix("Skipped: ").startswith(_DECLARED):
                tally.outcomes["declared"] += 1
            elif self.is_required(name) and (_is_kits_own(item) or Path(where).is_relative_to(_HOME)):
                report.outcome = "failed"
                report.longrepr = f"the backend {name!r} is required, and this gap is not declared: {reason}"
            else:
                tally.outcomes["skipped"] += 1
        if report.failed:
            tally.outcomes["failed"] += 1
            for one in tallies:
                one.failed.update(_cells(item))
        elif report.when == "call" and report.passed:
            tally.outcomes["passed"] += 1
            for one in tallies:
                one.passed.update(dict.fromkeys(_cells(item), 1))

    def exercised(self, spec: DeviceSpec) -> set[Cell]:
        """The cells whose tests have all passed so far."""
        tally = self._tallies.get(spec)
        return tally.exercised if tally else set()

    def counts(self) -> bytes:
        """What this process has counted, for `add` in another."""
        return pickle.dumps((self.partial, self._tallies, self._driver_tallies, self._parties))

    def add(self, counts: bytes) -> None:
        """What another process of this run has counted."""
        partial, tallies, driver_tallies, parties = pickle.loads(counts)
        self.summed = True
        self.partial |= partial
        for ours, theirs in ((self._tallies, tallies), (self._driver_tallies, driver_tallies)):
            for key, tally in theirs.items():
                ours.setdefault(key, _Tally()).add(tally)
        self._parties |= parties

    def close(self) -> None:
        for one in list(self._open):
            self.discard(one)

    def finish(self) -> None:
        if self.partial:
            return
        now = datetime.datetime.now(datetime.UTC).date().isoformat()
        if self._only_simulated():
            return
        if self._report:
            write_report(self._report, self._device_runs(now))
        if self._exporter_report:
            write_report(self._exporter_report, self.driver_runs(now))

    def _only_simulated(self) -> bool:
        """Whether this run has shown nothing of any real device."""
        return all(map(self.is_unrecorded, self.backends()))

    def _device_runs(self, now: str) -> list[VerifiedRun]:
        found: dict[str, _Tally] = {}  # several devices of one name are one run
        for spec, tally in self._tallies.items():
            if self.is_unrecorded(spec.backend):
                continue
            total = found.setdefault(self.device(spec).name, _Tally())
            total.add(tally)
            total.versions |= registry.get_backend(spec.backend).versions
            for one in self.exporters(spec):
                if one in self._parties and not one.process:
                    total.versions[f"exporter {one}"] = self._parties[one]
        return [
            make_run(
                date=now,
                platform=sys.platform,
                device=name,
                versions={"gpuinterop": __version__, **total.versions},
                cells=total.exercised,
                tests=total.counts,
            )
            for name, total in found.items()
            if total.exercised
        ]

    def driver_runs(self, now: str) -> list[VerifiedRun]:
        """What each Vulkan driver has shown: of what was exercised with it, the cells in which it has a part."""
        found: dict[str, _Tally] = {}  # a driver of several devices is one run
        seen: Counter[str] = Counter()
        for driver in self.drivers():
            short = _short(driver.name, driver.driver)
            tally = self._driver_tallies.get((short, seen[short]), _Tally())
            seen[short] += 1
            total = found.setdefault(driver.driver, _Tally())
            total.add(tally)
            total.failed |= {cell for cell in tally.passed if not driver.capabilities.supports(cell)}
            total.versions[driver.driver] = driver.version
        return [
            make_run(
                date=now,
                platform=sys.platform,
                device=name,
                versions={"gpuinterop": __version__, **total.versions},
                cells=total.exercised,
            )
            for name, total in found.items()
            if total.exercised
        ]

    def header(self) -> list[str]:
        lines = [f"gpuinterop {__version__}, Python {platform.python_version()}, {platform.platform()}"]
        variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("GPUINTEROP_")]
        lines.append(f"gpuinterop variables: {' '.join(variables) or 'none set'}")
        for spec in self.devices():
            if spec.problem:
                lines.append(f"gpuinterop backend {spec.backend}: not available: {spec.problem}")
                continue
            versions = ", ".join(f"{k} {v}" for k, v in registry.get_backend(spec.backend).versions.items())
            simulated = " (simulated)" if self.is_simulated(spec.backend) else ""
            lines.append(f"gpuinterop device {spec}{simulated}: {self.device(spec).name} ({versions})")
            lines.append(f"gpuinterop exporters of {spec}: {', '.join(map(str, self.exporters(spec)))}")
        lines += [f"gpuinterop Vulkan driver: {found.name}: {found.driver} {found.version}" for found in self.drivers()]
        if not self.drivers():
            lines.append(f"gpuinterop Vulkan driver: none: {self.drivers().reason}")
        return lines

    def summary(self) -> list[str]:
        lines = self.header() if self.summed else []  # no worker has printed it
        if self._report and self.partial:
            lines.append(f"{self._report} was not written: a part of the tests was run, and would replace the whole")
        elif self._report and self._only_simulated():
            lines.append(f"{self._report} was not written: what simulated devices do proves nothing of real ones")
        if self._report or self._exporter_report:
            lines += [
                f"{name}: nothing was recorded, for it ran on {self._stand_in(name)}"
                for name in self.backends()
                if self.is_unrecorded(name) and not self.is_simulated(name)
            ]
        for spec, tally in self._tallies.items():
            simulated = " (simulated)" if self.is_simulated(spec.backend) else ""
            lines.append(
                f"{spec}{simulated}: {', '.join(f'{count} {name}' for name, count in tally.counts.items())}; "
                f"{len(tally.exercised)} cells exercised" + (" (a part of the suite)" if self.partial else "")
            )
        return lines


class _Environment(pytest.Item):
    """The test that fails for what a run lacks: once, since every process of pytest-xdist's collects the same."""

    lacking: Sequence[str] = ()

    @classmethod
    def of(cls, session: pytest.Session, lacking: Sequence[str]) -> _Environment:
        made: _Environment = cls.from_parent(session, name="environment", nodeid="gpuinterop::environment")
        made.lacking = lacking
        return made

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.nodeid

    def runtest(self) -> None:
        pytest.fail("\n".join(self.lacking), pytrace=False)


def _is_kits_own(item: pytest.Item) -> bool:
    """Whether a test is one of the suites', and not of somebody who subclasses them."""
    assert isinstance(item, pytest.Function)
    return bool(item.function.__module__.startswith(f"{__package__}."))


def _short(name: str, driver: str) -> str:
    text = f"{name} {driver}".lower()
    for known, short in (("llvmpipe", "lavapipe"), ("swiftshader", "swiftshader"), ("nvidia", "nvidia")):
        if known in text:
            return short
    return driver.split()[0].lower() if driver.split() else name.lower()


def _params(item: pytest.Item) -> dict[str, Any]:
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return params


def _specs(item: pytest.Item) -> tuple[DeviceSpec | None, ExporterSpec | None]:
    params = _params(item)
    return params.get("device"), params.get("exporter") or params.get("exporter_spec")


def _cells(item: pytest.Item) -> list[Cell]:
    params = _params(item)
    instead: Mapping[Operation, Operation] = getattr(getattr(item, "cls", None), "gpuinterop_instead", {})
    cells: dict[Cell, None] = {}
    for mark in item.iter_markers("gpuinterop_requires"):
        for wanted in mark.args:
            cell = wanted
            if not isinstance(wanted, Cell):
                operation, handle_type = wanted if isinstance(wanted, tuple) else (wanted, None)
                if operation not in instead:
                    cell = Cell(operation, HANDLE_TYPES[params["kind"]] if handle_type == KIND else handle_type)
                else:
                    cell = Cell(instead[operation], None)
            cells[cell] = None
    return list(cells)
