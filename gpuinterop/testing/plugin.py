"""The pytest plugin. pytest loads it in every run of every user who has gpuinterop installed.

Until tests that use it are collected, it imports only pytest and the standard library, reads no variable of
gpuinterop's and loads no backend. Everything else is in :mod:`.kit`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .._core.device import Device
    from .._core.discovery import LoadedBackend
    from .exporters.base import Exporter
    from .kit import Kit
    from .suites.base import Harness

PARTIAL = pytest.StashKey[bool]()
"""Whether only part of the tests was run: some were deselected, or a worker of pytest-xdist crashed."""

SKIPPED = pytest.StashKey[list[pytest.CollectReport]]()
"""Modules that skipped themselves."""

_KIT = pytest.StashKey[Any]()
_FAILED = pytest.StashKey[bool]()
_FIXTURES = frozenset(("gpuinterop_backend", "gpuinterop_device"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, which the package's docstring describes."""
    group = parser.getgroup("gpuinterop", "gpuinterop's conformance kit")
    group.addoption(
        "--gpuinterop-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend, if it works (repeatable; default: every installed backend)",
    )
    group.addoption(
        "--gpuinterop-require",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend, and fail if it does not work (repeatable; default: GPUINTEROP_BACKEND)",
    )
    strict = "fail if a test or a module skips itself for a reason that is not declared"
    group.addoption("--gpuinterop-strict", action="store_true", help=strict)
    group.addoption(
        "--gpuinterop-exporter",
        action="append",
        default=[],
        metavar="NAME",
        help="use only these independent exporters: memfd, vulkan, vulkan:DRIVER, each also with @process",
    )
    group.addoption(
        "--gpuinterop-require-exporter",
        action="append",
        default=[],
        metavar="NAME",
        help="fail if this independent exporter is missing",
    )
    group.addoption(
        "--gpuinterop-simulated",
        action="append",
        default=[],
        metavar="NAME",
        help="the devices of this backend are simulated on the CPU (repeatable): their results are not recorded",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the listener for the tests' results."""
    config.addinivalue_line(
        "markers",
        "gpuinterop_requires(*cells): the capabilities that a test exercises (gpuinterop.testing.requires)",
    )
    config.pluginmanager.register(_Listener(config), "gpuinterop-listener")


# -- fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpuinterop_device(request: pytest.FixtureRequest) -> Device:
    """Runs the test on each `gpuinterop.Device` of the backends that the options choose.

    Examples
    --------
    >>> def test_it_runs_everywhere(gpuinterop_device):
    ...     with gpuinterop_device.create_stream() as stream:
    ...         stream.synchronize(timeout=10)
    """
    return kit_of(request.config).device(_param(request))


def _param(request: pytest.FixtureRequest) -> Any:
    try:
        return request.param
    except AttributeError:
        raise pytest.UsageError(
            f"{request.fixturename}: expected a function or a method with this fixture among its arguments, got "
            f"{request.node.nodeid}; a unittest.TestCase, a doctest and request.getfixturevalue have no parameters."
        ) from None


@pytest.fixture
def gpuinterop_backend(request: pytest.FixtureRequest) -> LoadedBackend:
    """Runs the test for each backend that the options choose, as `gpuinterop.get_backend` returns it.

    In a test that also uses `gpuinterop_device`, it is that device's backend.

    Examples
    --------
    >>> def test_each_device_has_a_name(gpuinterop_backend):
    ...     assert all(device.name for device in gpuinterop_backend.devices())
    """
    from .._core import discovery

    spec = getattr(request, "param", None)
    return discovery.get_backend(spec.backend if spec else request.getfixturevalue("gpuinterop_device").backend)


@pytest.fixture
def gpuinterop_exporter(_gpuinterop_party: Any, request: pytest.FixtureRequest) -> Generator[Exporter, None, None]:
    """Runs the test with each exporter on the device's hardware: a Vulkan driver or memfds, here or in a child process.

    An exporter does not use the backend, so it is an oracle. Tests share it until one of them fails.

    Examples
    --------
    >>> def test_a_renderer(gpuinterop_exporter):
    ...     with gpuinterop_exporter.create_memory(4096) as theirs:
    ...         theirs.write(0, b"drawn")
    """
    kit = kit_of(request.config)
    yield kit.exporter(_gpuinterop_party)
    if request.node.stash.get(_FAILED, False):
        kit.discard(_gpuinterop_party)


@pytest.fixture
def _gpuinterop_party(gpuinterop_device: Device, request: pytest.FixtureRequest) -> Any:
    """The exporter's parameters, for tests that open another."""
    return _param(request)


@pytest.fixture
def gpuinterop_harness(
    gpuinterop_device: Device, gpuinterop_exporter: Exporter, request: pytest.FixtureRequest
) -> Generator[Harness, None, None]:
    """Makes pairs: memory or a semaphore of the exporter, and its import by the device.

    It closes everything it made at the end of the test; see `gpuinterop.testing.suites.base.Harness`.

    Examples
    --------
    >>> def test_one_memory(gpuinterop_harness):
    ...     theirs, ours = gpuinterop_harness.buffer(4096)
    ...     ours.fill(7)
    ...     assert theirs.read(0, 4096) == bytes([7]) * 4096
    """
    from .suites.base import Harness

    with ExitStack() as scope:
        simulated = kit_of(request.config).is_simulated(gpuinterop_device.backend)
        yield Harness(gpuinterop_device, gpuinterop_exporter, scope, simulated=simulated)


# -- hooks -----------------------------------------------------------------------------------------------------------


def kit_of(config: pytest.Config) -> Kit:
    """Return the run's kit, created when its first test is collected."""
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is None:
        from .kit import Kit

        kit = config.stash[_KIT] = Kit(config)
    return kit


def is_ours(item: object) -> bool:
    """Whether a test belongs to a suite of the kit, or uses the plugin's fixtures."""
    suite = getattr(getattr(item, "cls", None), "gpuinterop_suite", False)
    return bool(suite) or not _FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the kit's tests by backend, device, exporter and gap."""
    if is_ours(metafunc):
        kit_of(metafunc.config).parametrize(metafunc)


@pytest.hookimpl(trylast=True)  # after -k and -m have deselected tests
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prepare the kit's tests, whatever the ini file says; missing requirements become a first test, which fails."""
    ours = [item for item in items if is_ours(item)]
    if ours or (items and (config.getoption("gpuinterop_require") or config.getoption("gpuinterop_strict"))):
        items[:0] = kit_of(config).prepare(ours, session)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note that only part of the tests runs."""
    if items:
        items[0].config.stash[PARTIAL] = True


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Print versions, drivers and variables, once tests of the kit are collected."""
    kit: Kit | None = config.stash.get(_KIT, None)
    return kit.header() if kit is not None and not kit.controls else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a declared gap."""
    if is_ours(item):
        kit_of(item.config).check(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a skip that is not declared a failure, if the backend is required."""
    report = yield
    ours = is_ours(item)
    if ours:
        kit_of(item.config).judge(item, report)
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("gpuinterop_strict"):
        _refuse(report)
    if ours:
        item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


def _refuse(report: pytest.TestReport) -> None:
    """Make a skip a failure, unless it is declared."""
    from .results import DECLARED, reason_of

    reason = reason_of(report)
    if not reason.startswith(DECLARED):
        report.outcome = "failed"
        report.longrepr = f"--gpuinterop-strict: expected a test that runs, got a skip: {reason}"


class _Listener:
    """Collects the tests' results, in the only process or in the controller of pytest-xdist's workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "'gpuinterop." in repr(report.user_properties):
            kit_of(self._config).results.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._config.stash.setdefault(SKIPPED, []).append(report)


@pytest.hookimpl(tryfirst=True)  # before pytest writes the XML
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Add the run's facts to the XML, and close what the kit has opened.

    A worker of pytest-xdist reports to its controller only whether it ran part of the tests.
    """
    config = session.config
    chosen = any("::" in arg for arg in config.args) or any(config.getoption(key, False) for key in ("lf", "stepwise"))
    if chosen or session.shouldstop or session.shouldfail or exitstatus not in (0, 1):
        config.stash[PARTIAL] = True
    # pytest's, which writes the XML; a worker has none.
    plugins = config.pluginmanager.get_plugins()
    writers: list[Any] = [plugin for plugin in plugins if hasattr(plugin, "add_global_property")]
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is None and not (writers and config.getoption("gpuinterop_require")):
        return
    kit = kit_of(config)
    kit.close()
    if hasattr(config, "workeroutput"):
        config.workeroutput["gpuinterop"] = kit.partial
    for writer in writers:
        for name, value in kit.properties(int(exitstatus)):
            writer.add_global_property(name, value)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Note whether a worker of pytest-xdist ran part of the tests, or crashed: then the run is not complete."""
    output: dict[str, Any] | None = getattr(node, "workeroutput", None)
    if output is None or output.get("gpuinterop"):
        node.config.stash[PARTIAL] = True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print one line per device: passed, failed, skipped as declared, skipped otherwise."""
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is not None:
        terminalreporter.section("gpuinterop conformance")
        for line in kit.summary():
            terminalreporter.write_line(line)
