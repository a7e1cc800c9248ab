"""The plugin's work once tests of the kit are collected: it parametrizes, skips, counts and reports."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from .. import __version__
from .._core import discovery
from ..capabilities import DOMAIN, Operation
from .exporters.process import ProcessExporter
from .participants import DeviceSpec, ExporterSpec, Participants, short_name
from .plugin import PARTIAL, SKIPPED
from .requirements import cells_of, params_of, skip_declared
from .results import (
    CELLS,
    DECLARED,
    DEVICE,
    DRIVER,
    PART,
    PARTY,
    RUNS,
    SKIP,
    STAND_IN,
    STATUS,
    UNRECORDED,
    Result,
    Results,
    counts,
    exercised,
    make_run,
    of_suites,
    reason_of,
)

if TYPE_CHECKING:
    from .exporters.base import Driver, Exporter

__all__ = ["Kit"]

_TIMEOUT: Final = 90
"""Seconds, at least, after which a test is ended and every thread's stack shown. No test needs a tenth of that."""

_HOME: Final = Path(__file__).parent
# Cells whose operation the exporter must support as well.
_BOTH_SIDES: Final = frozenset(
    (
        Operation.IMPORT_MEMORY,
        Operation.MAP_MIPMAPPED_ARRAY,
        Operation.IMPORT_SEMAPHORE,
        Operation.EXPORT_ALLOCATION,
        Operation.EXPORT_ARRAY,
    )
)


class Kit(Participants):
    """One pytest run of the kit."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._config = config
        # Whether this process controls pytest-xdist's workers, which run the tests.
        self.controls = config.pluginmanager.hasplugin("dsession")
        self._open: dict[ExporterSpec, Exporter] = {}
        self.results = Results()

    @property
    def partial(self) -> bool:
        """Whether only part of the tests was run."""
        return self._config.stash.get(PARTIAL, False)

    def exporter(self, spec: ExporterSpec) -> Exporter:
        """Return an open exporter, shared by the tests."""
        exporter = self._open.get(spec)
        if isinstance(exporter, ProcessExporter) and exporter.child.process.poll() is not None:
            self.discard(spec)  # its process exited with the thread that opened it
        if spec not in self._open:
            self._open[spec] = spec.open()
        return self._open[spec]

    def discard(self, spec: ExporterSpec) -> None:
        """Close the shared exporter: a failed test may have left work pending on it."""
        exporter = self._open.pop(spec, None)
        if exporter is not None:
            exporter.close()

    # -- hooks --------------------------------------------------------------------------------------------------

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        names = metafunc.fixturenames
        devices = self.devices()
        # A backend that does not work is in the header and gets no tests. If none works, the first one gets them, to
        # report the reason.
        working = [spec for spec in devices if not spec.problem] or devices[:1]
        if "gpuinterop_device" not in names:
            if "gpuinterop_backend" in names:
                first = {spec.backend: spec for spec in reversed(working)}
                metafunc.parametrize("gpuinterop_backend", first.values(), indirect=True, ids=list(first))
        elif "_gpuinterop_party" in names:
            wanted = getattr(metafunc.cls, "exporter_filter", lambda spec: True)
            pairs = [(spec, one) for spec in working for one in self.exporters(spec) if one.problem or wanted(one)]
            none = ExporterSpec(
                "none", problem=f"{DECLARED}the options leave no exporter of the kind that the suite needs"
            )
            pairs = pairs or [(spec, none) for spec in working]
            metafunc.parametrize(
                ("gpuinterop_device", "_gpuinterop_party"),
                pairs,
                indirect=True,
                ids=[f"{spec}-{one}" for spec, one in pairs],
            )
        elif "gap" in names and getattr(metafunc.cls, "gpuinterop_suite", False):
            gaps = [
                (spec, found.cell)
                for spec in working
                for found in (self.device(spec).capabilities.values() if not spec.problem else ())
                if not found.usable
            ] or [(spec, DOMAIN[0]) for spec in working if spec.problem]
            metafunc.parametrize(
                ("gpuinterop_device", "gap"),
                gaps,
                indirect=["gpuinterop_device"],
                ids=[f"{spec}-{cell}" for spec, cell in gaps],
            )
        else:
            metafunc.parametrize("gpuinterop_device", working, indirect=True, ids=map(str, working))

    def prepare(self, items: list[pytest.Item], session: pytest.Session) -> list[pytest.Item]:
        """Set time-outs, and make leaks errors. Returns a further test if one must fail."""
        from .suites.base import LIMIT  # not before conftests have told pytest to rewrite the suites

        seconds = max(_TIMEOUT, 3 * LIMIT)  # more than the longest wait
        alone: dict[str, None] = {}
        for item in items:
            if item.get_closest_marker("timeout") is None and self._hangs_for_ever(item):
                item.add_marker(pytest.mark.timeout(seconds, method="thread"))
            item.add_marker(pytest.mark.filterwarnings("error::gpuinterop.errors.LeakedResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"))
            spec, party = _specs(item)
            if spec is not None:
                if not spec.problem and (reason := self._known_failure(item, spec.backend)):
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                item.user_properties.append((DEVICE, str(spec)))
                if cells := cells_of(item):
                    item.user_properties.append((CELLS, " ".join(map(str, cells))))
            if party is not None:
                item.user_properties.append((PARTY, str(party)))
            if spec is not None and party is not None and self._fails_alone(spec, party):
                alone[f"{spec}: {party.problem}"] = None
        lacking = [*self.lacking(parties=bool(items)), *alone]
        if self._config.getoption("gpuinterop_strict"):
            lacking += [
                f"--gpuinterop-strict: expected the tests of {report.nodeid}, got a skip: {reason_of(report)}"
                for report in self._config.stash.get(SKIPPED, [])
            ]
        return [_Environment.of(session, lacking)] if lacking else []

    def _fails_alone(self, spec: DeviceSpec, party: ExporterSpec) -> bool:
        """Whether a required device has no exporter to share with: one failure reports it, and its tests skip."""
        needed = self.is_required(spec.backend) or self._config.getoption("gpuinterop_strict")
        return bool(needed and not spec.problem and party.problem and not party.problem.startswith(DECLARED))

    @staticmethod
    def _known_failure(item: pytest.Item, backend: str) -> str:
        """Why the backend's driver makes a test fail; empty if it does not."""
        assert isinstance(item, pytest.Function)
        return discovery.get_backend(backend).driver.known_failures.get(item.function.__qualname__, "")

    def _hangs_for_ever(self, item: pytest.Item) -> bool:
        """Whether pytest-timeout is installed, but no setting limits this test (for a suite's test: no option)."""
        config = self._config
        if not config.pluginmanager.hasplugin("timeout") or config.getoption("timeout", None) is not None:
            return False
        return _is_kits_own(item) or not (config.getini("timeout") or os.environ.get("PYTEST_TIMEOUT"))

    def check(self, item: pytest.Item) -> None:
        """Skip a test if one of the two sides lacks its capabilities."""
        spec, party = _specs(item)
        if spec is not None and spec.problem:
            skip_declared(spec.problem)
        if party is not None and party.problem:
            if spec is not None and self._fails_alone(spec, party):
                skip_declared(party.problem)
            pytest.skip(party.problem)
        if spec is None:
            return
        cells = cells_of(item)
        if missing := self.device(spec).capabilities.missing(*cells):
            skip_declared(f"{missing[0].cell} on {spec}: {missing[0].reason}")
        if party is not None:
            item.user_properties.append((DRIVER, self.exporter(party).driver))
            table = self.exporter(party).capabilities
            if missing := table.missing(*(cell for cell in cells if cell.operation in _BOTH_SIDES)):
                skip_declared(f"{missing[0].cell} of {party}: {missing[0].reason}")

    def judge(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Classify a skip, and make it a failure if it is not declared and the backend is required."""
        spec, _ = _specs(item)
        if spec is None or not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = reason_of(report)
        where = report.longrepr[0] if isinstance(report.longrepr, tuple) else ""
        declared = reason.startswith(DECLARED)
        if not declared and not _is_kits_own(item) and not Path(where).is_relative_to(_HOME):
            return
        for properties in (report.user_properties, item.user_properties):  # the latter are in the XML
            properties.append((SKIP, "gap" if declared else "undeclared"))
        if not declared and self.is_required(spec.backend) and not spec.problem:
            report.outcome = "failed"
            report.longrepr = f"the backend {spec.backend!r} is required, and this gap is not declared: {reason}"

    # -- the properties of the XML ---------------------------------------------------------------------------------

    def close(self) -> None:
        for one in list(self._open):
            self.discard(one)

    def properties(self, status: int) -> list[tuple[str, str]]:
        """The facts of the run, and its results as entries of ``verified.toml``, by owner of that file."""
        facts = [*self._facts(), (STATUS, str(status))]
        if self.partial:
            facts.append((UNRECORDED, PART))
        elif "gpuinterop.testing" not in self._config.args:
            facts.append((UNRECORDED, "its tests are not those of gpuinterop.testing"))
        facts += [(f"{UNRECORDED}.{name}", why) for name in self.backends() if (why := self.why_unrecorded(name))]
        entries = {name: self._device_runs(name) for name in self.backends()} | {"vulkan": self.driver_runs()}
        return facts + [(RUNS + name, json.dumps(runs)) for name, runs in entries.items() if runs]

    def _device_runs(self, backend: str) -> list[dict[str, Any]]:
        devices: dict[str, list[str]] = {}  # several devices with one name make one run
        for spec in self.devices():
            if spec.backend == backend and not spec.problem and not self.why_unrecorded(backend):
                devices.setdefault(self.device(spec).name, []).append(str(spec))
        runs = []
        for name, specs in devices.items():
            results = self.results.of(*specs)
            if not (cells := exercised(results)):
                continue
            versions = dict(discovery.get_backend(backend).versions)
            versions |= {f"exporter {one.party}": one.driver for one in results if one.driver and "@" not in one.party}
            runs.append(make_run(name, versions, cells, counts(results)))
        return runs

    def driver_runs(self) -> list[dict[str, Any]]:
        """Entries for the Vulkan drivers: the exercised cells in which each took part."""
        recorded = [str(spec) for spec in self.devices() if not spec.problem and not self.why_unrecorded(spec.backend)]
        results: dict[str, list[Result]] = {}
        for result in self.results.of(*recorded):
            results.setdefault(result.party.partition("@")[0], []).append(result)
        by_name: dict[str, list[tuple[Driver, list[Result]]]] = {}  # a driver of several devices makes one run
        seen: Counter[str] = Counter()
        for driver in self.drivers():
            short = short_name(driver.name, driver.driver)
            if tests := results.get(str(ExporterSpec("vulkan", short, seen[short]))):
                by_name.setdefault(driver.driver, []).append((driver, tests))
            seen[short] += 1
        runs = []
        for name, devices in by_name.items():
            passed = exercised(result for _, tests in devices for result in tests)
            cells = [cell for cell in passed if all(driver.capabilities.supports(cell) for driver, _ in devices)]
            if cells:
                runs.append(make_run(name, {name: devices[0][0].version}, cells))
        return runs

    def header(self) -> list[str]:
        return [f"{name.replace('.', ' ', 2)}: {value}" for name, value in self._facts()]

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Versions, variables and participants of the run: properties of the XML, and lines of the header."""
        gil: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
        python = platform.python_version() + " without GIL" * (not gil)
        yield "gpuinterop.version", f"{__version__}, Python {python}, {platform.platform()}"
        variables = (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("GPUINTEROP_"))
        yield "gpuinterop.variables", " ".join(variables) or "none set"
        for spec in self.devices():
            if spec.problem:
                yield f"gpuinterop.problem.{spec}", spec.problem
                continue
            backend = discovery.get_backend(spec.backend)
            versions = ", ".join(f"{k} {v}" for k, v in backend.versions.items())
            double = "simulated" if self.is_simulated(spec.backend) else self._stand_in(spec.backend)
            unknown = f"; {backend.unknown_version}" if backend.unknown_version else ""
            yield f"{DEVICE}.{spec}", f"{self.device(spec).name} ({versions}){unknown}"
            if double:
                yield f"{STAND_IN}.{spec}", double
            yield f"gpuinterop.exporters.{spec}", ", ".join(map(str, self.exporters(spec)))
        drivers = "; ".join(f"{driver.name}: {driver.driver} {driver.version}" for driver in self.drivers())
        yield "gpuinterop.Vulkan.driver", drivers or f"none: {self.drivers().reason}"

    def summary(self) -> list[str]:
        lines = self.header() if self.controls else []  # no worker has printed it
        for spec in self.devices():
            if not (results := self.results.of(str(spec))) or spec.problem:
                continue
            simulated = " (simulated)" if self.is_simulated(spec.backend) else ""
            numbers = ", ".join(f"{count} {word}" for word, count in counts(results).items())
            shown = exercised(results)
            lines.append(
                f"{spec}{simulated}: {numbers}; {len(shown)} cells exercised"
                + (" (a part of the suite)" if self.partial else "")
            )
            table = self.device(spec).capabilities.values()
            usable = sorted(map(str, of_suites(found.cell for found in table if found) - shown))
            if usable and not self.partial and "gpuinterop.testing" in self._config.args:
                lines.append(f"{spec}{simulated}: usable, and no test has shown it: {', '.join(usable)}")
        return lines


class _Environment(pytest.Item):
    """A test that fails for what a run lacks: only one, because all processes of pytest-xdist must collect the same."""

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
    """Whether a test is one of the kit's own, and not of a subclass elsewhere."""
    assert isinstance(item, pytest.Function)
    return bool(item.function.__module__.startswith(f"{__package__}."))


def _specs(item: pytest.Item) -> tuple[DeviceSpec | None, ExporterSpec | None]:
    params = params_of(item)
    return params.get("gpuinterop_device") or params.get("gpuinterop_backend"), params.get("_gpuinterop_party")
