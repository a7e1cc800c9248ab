"""The pytest plugin. It is loaded in every pytest run of every user who has gpuinterop installed.

So it imports pytest and the standard library only, reads no environment and loads no backend, until tests of the kit
are collected. Everything else is in :mod:`.kit`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .kit import Kit

_KIT = pytest.StashKey[Any]()
_LOST = pytest.StashKey[bool]()
_OUTCOME = pytest.StashKey[dict[str, pytest.TestReport]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; see the package for what they do."""
    group = parser.getgroup("gpuinterop", "gpuinterop's conformance kit")
    group.addoption(
        "--gpuinterop-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend, where it works (repeatable; default: every installed one)",
    )
    group.addoption(
        "--gpuinterop-require",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend, and fail where it does not work (repeatable; default: GPUINTEROP_BACKEND)",
    )
    group.addoption(
        "--gpuinterop-exporter",
        action="append",
        default=[],
        metavar="NAME",
        help="use only these independent parties: memfd, vulkan, vulkan:DRIVER, each also with @process",
    )
    group.addoption(
        "--gpuinterop-require-exporter",
        action="append",
        default=[],
        metavar="NAME",
        help="fail where this independent party is missing",
    )
    group.addoption(
        "--gpuinterop-simulated",
        action="append",
        default=[],
        metavar="NAME",
        help="the devices of this backend are simulated on the CPU (repeatable): nothing they do is reported",
    )
    group.addoption(
        "--gpuinterop-report",
        default=None,
        metavar="FILE",
        help="write the cells that were exercised and passed, as an entry of verified.toml",
    )
    group.addoption(
        "--gpuinterop-exporter-report",
        default=None,
        metavar="FILE",
        help="write what the Vulkan drivers have shown, as entries of the exporters' verified.toml",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "gpuinterop_requires(*cells): the capabilities that a test of gpuinterop's kit exercises"
    )


def kit_of(config: pytest.Config) -> Kit:
    """The kit of this run; made when the first of its tests is collected."""
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is None:
        from .kit import Kit

        kit = config.stash[_KIT] = Kit(config)
    return kit


def is_ours(item: object) -> bool:
    """Whether a test belongs to a suite of the kit."""
    return bool(getattr(getattr(item, "cls", None), "gpuinterop_suite", False))


def failed(item: pytest.Item) -> bool:
    """Whether the test has failed so far; for fixtures that clean up after it."""
    return any(report.failed for report in item.stash.get(_OUTCOME, {}).values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the suites by backend, device, exporter and gap."""
    if is_ours(metafunc):
        kit_of(metafunc.config).parametrize(metafunc)


@pytest.hookimpl(trylast=True)  # what -k and -m have left takes part
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prepare our tests, whatever the ini file of this run says; what they lack is a failure of its own, the first."""
    ours = [item for item in items if is_ours(item)]
    if ours:
        items[:0] = kit_of(config).prepare(ours, session)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Note that the run is not the whole."""
    for item in items:
        if is_ours(item):
            kit_of(item.config).partial = True


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """The header, once it is known that our tests take part: versions, drivers, variables."""
    kit: Kit | None = config.stash.get(_KIT, None)
    return kit.header() if kit is not None and not kit.summed else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a declared gap."""
    if is_ours(item):
        kit_of(item.config).check(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep count; a skip that nothing declares fails where the backend is required."""
    report = yield
    if is_ours(item):
        kit_of(item.config).record(item, report)
        item.stash.setdefault(_OUTCOME, {})[report.when] = report
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, and end what the kit has started.

    A worker of pytest-xdist sends what it has counted to its controller, whose report is that of the run.
    """
    config = session.config
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is None:
        return
    kit.close()
    if hasattr(config, "workeroutput"):
        config.workeroutput["gpuinterop"] = kit.counts()
    else:
        kit.finish()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of pytest-xdist has counted; what one has counted that crashed is lost."""
    stash = node.config.stash
    output: dict[str, bytes] | None = getattr(node, "workeroutput", None)
    if output is None:
        stash[_LOST] = True
    elif "gpuinterop" in output:
        kit_of(node.config).add(output["gpuinterop"])
    if _KIT in stash:
        stash[_KIT].partial |= stash.get(_LOST, False)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line a device: passed, failed, skipped as declared, skipped otherwise."""
    kit: Kit | None = config.stash.get(_KIT, None)
    if kit is not None:
        terminalreporter.section("gpuinterop conformance")
        for line in kit.summary():
            terminalreporter.write_line(line)
