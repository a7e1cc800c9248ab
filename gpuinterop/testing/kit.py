"""What the plugin does once tests of the kit are collected: what is parametrized, skipped, counted and reported."""

from __future__ import annotations

import os
import pickle
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from .. import __version__
from .._core import registry
from ..capabilities import DOMAIN, Cell, Operation, VerifiedRun
from .participants import DeviceSpec, ExporterSpec, Participants, short_name
from .report import make_run, of_suites, write_report
from .requirements import DECLARED, cells_of, params_of, skip_declared

if TYPE_CHECKING:
    from ..exporters.base import Exporter

__all__ = ["Kit"]

_TIMEOUT: Final = 90
"""Seconds after which a test has hung: it is ended, and every thread's stack shown. No test takes a tenth of it."""

_HOME: Final = Path(__file__).parent
# Which cells need another party that can do the like.
_BOTH_SIDES: Final = frozenset(
    (
        Operation.IMPORT_MEMORY,
        Operation.MAP_MIPMAPPED_ARRAY,
        Operation.IMPORT_SEMAPHORE,
        Operation.EXPORT_ALLOCATION,
    )
)


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


class Kit(Participants):
    """One pytest run of the kit."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._config = config
        self._report = config.getoption("gpuinterop_report")
        self._exporter_report = config.getoption("gpuinterop_exporter_report")
        self.partial = False
        self.summed = False
        self._open: dict[ExporterSpec, Exporter] = {}
        self._parties: dict[ExporterSpec, str] = {}
        self._tallies: dict[DeviceSpec, _Tally] = {}
        self._driver_tallies: dict[tuple[str, int], _Tally] = {}

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
        cells = cells_of(item)
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
            if reason.removeprefix("Skipped: ").startswith(DECLARED):
                tally.outcomes["declared"] += 1
            elif self.is_required(name) and (_is_kits_own(item) or Path(where).is_relative_to(_HOME)):
                report.outcome = "failed"
                report.longrepr = f"the backend {name!r} is required, and this gap is not declared: {reason}"
            else:
                tally.outcomes["skipped"] += 1
        if report.failed:
            tally.outcomes["failed"] += 1
            for one in tallies:
                one.failed.update(cells_of(item))
        elif report.when == "call" and report.passed:
            tally.outcomes["passed"] += 1
            for one in tallies:
                one.passed.update(dict.fromkeys(cells_of(item), 1))

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
        if self._only_simulated():
            return
        if self._report:
            write_report(self._report, self._device_runs())
        if self._exporter_report:
            write_report(self._exporter_report, self.driver_runs())

    def _only_simulated(self) -> bool:
        """Whether this run has shown nothing of any real device."""
        return all(map(self.is_unrecorded, self.backends()))

    def _device_runs(self) -> list[VerifiedRun]:
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
            make_run(name, total.versions, total.exercised, total.counts)
            for name, total in found.items()
            if total.exercised
        ]

    def driver_runs(self) -> list[VerifiedRun]:
        """What each Vulkan driver has shown: of what was exercised with it, the cells in which it has a part."""
        found: dict[str, _Tally] = {}  # a driver of several devices is one run
        seen: Counter[str] = Counter()
        for driver in self.drivers():
            short = short_name(driver.name, driver.driver)
            tally = self._driver_tallies.get((short, seen[short]), _Tally())
            seen[short] += 1
            total = found.setdefault(driver.driver, _Tally())
            total.add(tally)
            total.failed |= {cell for cell in tally.passed if not driver.capabilities.supports(cell)}
            total.versions[driver.driver] = driver.version
        return [make_run(name, total.versions, total.exercised) for name, total in found.items() if total.exercised]

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
    """Whether a test is one of the suites', and not one of a subclass elsewhere."""
    assert isinstance(item, pytest.Function)
    return bool(item.function.__module__.startswith(f"{__package__}."))


def _specs(item: pytest.Item) -> tuple[DeviceSpec | None, ExporterSpec | None]:
    params = params_of(item)
    return params.get("device"), params.get("exporter") or params.get("exporter_spec")
