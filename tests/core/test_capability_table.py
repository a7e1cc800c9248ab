"""A device's table of capabilities: what the backend says, recorded runs, and what the user turns off."""

import dataclasses
import importlib.resources
import re
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import discovery, entry_points
from gpuinterop.capabilities import DOMAIN, Capability, Operation, Rules, Scope, Support, VerifiedRun, read_verified

from . import fake
from .conftest import Install
from .fake import FakeBackend, FakeWords


class Boastful(FakeBackend):
    name = "boastful"

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return [Capability(operation=Operation.GRAPH_CAPTURE, support=Support.SUPPORTED)]


class Usable(FakeBackend):
    name = "usable"
    said: ClassVar[list[Operation]] = [Operation.GRAPH_CAPTURE, Operation.STREAM_MEMORY_OPS]

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        for cell in DOMAIN:
            if cell.operation is not Operation.EXPORT_MULTICAST:
                yield Capability(
                    operation=cell.operation, handle_type=cell.handle_type, support=Support.UNVERIFIED,
                    scope=Scope.DRIVER, reason="says so.", reference="its manual",
                )  # fmt: skip


class Writing(FakeWords, Usable):
    name = "writing"


def test_only_a_run_can_say_supported(install: Install) -> None:
    install(Boastful)
    with pytest.raises(gi.BackendUnavailableError, match=r"verified\.toml"):
        gi.device()


@pytest.mark.parametrize("is_cpu", [False, True])
def test_a_run_counts_for_gpus_of_its_name_and_for_any_cpu(
    install: Install, monkeypatch: pytest.MonkeyPatch, is_cpu: bool
) -> None:
    info = dataclasses.replace(fake.fake_info(), is_cpu=is_cpu)
    monkeypatch.setattr(fake, "fake_info", lambda: info)
    for where, support in (
        (info.name, Support.SUPPORTED),
        ("another", Support.SUPPORTED if is_cpu else Support.UNVERIFIED),
    ):
        run = VerifiedRun(date="2026-11-21", platform=sys.platform, device=where, versions={}, cells=frozenset(DOMAIN))
        monkeypatch.setattr("gpuinterop.capabilities.recorded", lambda file, run=run: [run])
        monkeypatch.setattr(discovery, "_loaded", {})
        install(Usable)
        found = gi.device().capabilities[Operation.IMPORT_MEMORY, gi.OpaqueFd]
        assert found.support is support
        assert f"2026-11-21 on {where}" in found.reference + found.reason


RUN = """
[[run]]
date = "2026-11-21"
platform = "{platform}"
device = "fake"
cells = ["graph_capture", "map_buffer:opaque_fd"]
"""


@pytest.fixture
def recorded(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bytes], Path]:
    """Install a backend whose package has this record of runs."""

    def put(record: bytes) -> Path:
        folder = tmp_path / "recordedbackend"
        folder.mkdir()
        (folder / "__init__.py").write_text(
            f"from {__name__} import Usable\nclass Recorded(Usable):\n    name = 'recorded'\n"
        )
        file = folder / "verified.toml"
        file.write_bytes(record)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, folder.name, raising=False)
        install(extra=[EntryPoint("recorded", f"{folder.name}:Recorded", entry_points.GROUP)])
        return file

    return put


def test_a_run_that_is_recorded_promotes(recorded: Callable[[bytes], Path]) -> None:
    recorded(RUN.format(platform=sys.platform).encode())
    assert gi.device().capabilities[Operation.MAP_BUFFER, gi.OpaqueFd].support is Support.SUPPORTED


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (b"[[run]\n", "line 1"),
        (b"run = 5\n", "int"),
        (b"[[run]]\ndate = '2026-11-21'\n", "platform"),
        (RUN.replace("graph_capture", "grasp_capture").encode(), "grasp_capture"),
    ],
)
def test_a_broken_record_of_runs_promotes_nothing_and_says_so(
    recorded: Callable[[bytes], Path], record: bytes, said: str
) -> None:
    """The backend works as ever."""
    file = recorded(record)
    with pytest.warns(UserWarning, match="verified.toml") as caught:
        table = gi.device().capabilities
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(file) in text
    assert said in text
    assert table[Operation.MAP_BUFFER, gi.OpaqueFd].support is Support.UNVERIFIED
    with pytest.raises(gi.InvalidArgumentError, match=re.escape(str(file))):  # who writes to it is told
        read_verified(file)


def test_the_table_is_total_and_missing_interfaces_are_gaps(install: Install) -> None:
    install(Usable)
    table = gi.device().capabilities
    assert len(table) == len(DOMAIN)
    assert table[Operation.IMPORT_MEMORY, gi.OpaqueFd].support is Support.UNVERIFIED
    assert table[Operation.MAP_MIPMAPPED_ARRAY, gi.OpaqueFd].usable  # FakeBackend is an ArrayBackend
    graph = table[Operation.GRAPH_CAPTURE, None]  # usable in its words, but it has no such interface
    assert graph.support is Support.UNSUPPORTED
    assert "GraphBackend" in graph.reason
    assert table[Operation.EXPORT_MULTICAST, gi.VmmFd].support is Support.UNSUPPORTED
    assert all(found.scope and found.reason and found.reference for found in table.values())


ACME = """
[symbols]
map_buffer = ["acmeMap"]

[profiles.old]
open = false
year = 1999
missing = ["acmeMap"]

[profiles.new]
open = true

[profiles.half]

[profiles.yearless]
open = false

[profiles.misspelt]
open = true
missing = ["acmeMop"]

[[rule]]
cells = ["map_buffer"]
when = ["missing"]
gap = "driver"
reason = "the driver lacks {missing}."
reference = "Acme's manual, 1"
workaround = "update it."

[[rule]]
cells = ["*_semaphore"]
when = ["not open"]
gap = "device"
reason = "closed since {year}."
reference = "Acme's manual, 2"

[[rule]]
cells = ["*"]
but = ["wait_timeout"]
reason = "open."
reference = "Acme's manual, 3"
"""
"""What a third party's package has; its drivers are not here."""


def acme(folder: Path, table: str = ACME) -> EntryPoint:
    package = folder / "acme"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libacme.so: no such file')")
    (package / "capabilities.toml").write_text(table)
    return EntryPoint("acme", "acme.backend:Acme", entry_points.GROUP)


@pytest.fixture
def installed_acme(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(Usable, extra=[acme(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)


def with_disabled(patterns: str, monkeypatch: pytest.MonkeyPatch) -> gi.Capabilities:
    monkeypatch.setattr(discovery, "_loaded", {})
    monkeypatch.setenv("GPUINTEROP_DISABLE", patterns)
    return gi.get_backend("usable").device().capabilities


@pytest.mark.usefixtures("installed_acme")
def test_a_profile_turns_off_the_gaps_of_the_device_that_it_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rules of the other backend and with their words; what is a gap here keeps its own reason."""
    undeclared = "the backend 'acme' does not declare it."
    before = with_disabled("", monkeypatch)
    table = with_disabled("profile:acme-old", monkeypatch)
    for cell in DOMAIN:
        name, found = str(cell), table.of(cell)
        if not before.of(cell):
            assert found == before.of(cell), "a gap of its own"
        elif name.startswith(("map_buffer:", "wait_timeout:")) or "_semaphore:" in name:
            assert found.support is Support.DISABLED, name
            assert found.reason.startswith("turned off by GPUINTEROP_DISABLE=profile:acme-old: "), name
        else:
            assert found == before.of(cell), name
    for named, scope, reason, reference, workaround in (
        ("map_buffer:opaque_fd", Scope.DRIVER, "the driver lacks acmeMap.", "Acme's manual, 1", "update it."),
        ("signal_semaphore:timeline_fd", Scope.DEVICE, "closed since 1999.", "Acme's manual, 2", ""),
        ("wait_timeout:d3d12_fence", Scope.BINDINGS, undeclared, "gpuinterop.backend", ""),
    ):
        gap = table.of(gi.Cell.parse(named))
        assert (gap.scope, gap.reference, gap.workaround) == (scope, reference, workaround)
        assert gap.reason == f"turned off by GPUINTEROP_DISABLE=profile:acme-old: {reason}"
    with pytest.raises(gi.UnsupportedError, match=r"profile:acme-old: .*acmeMap\b"):
        table.require((Operation.MAP_BUFFER, gi.OpaqueFd))
    assert with_disabled("profile:acme-new", monkeypatch)[Operation.MAP_BUFFER, gi.OpaqueFd].usable
    assert "acme" not in sys.modules


@pytest.mark.usefixtures("installed_acme")
@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("acme-older", "expected one of the profiles acme-old, acme-new, acme-half.*; got 'acme-older'"),
        ("acme-half", "expected a profile, got 'acme-half', whose rules are broken: .*none for open"),
        ("acme-yearless", "expected a profile, got 'acme-yearless', whose rules are broken: .*year"),
        ("acme-misspelt", "expected a profile, got 'acme-misspelt', whose rules are broken: .*acmeMop"),
    ],
)
def test_a_profile_that_is_none_is_refused(profile: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gi.InvalidArgumentError, match=f"^GPUINTEROP_DISABLE: {said}"):
        with_disabled(f"graph_capture,profile:{profile}", monkeypatch)


@pytest.mark.parametrize(("package", "profiles"), [("cuda", {"linux", "no-multicast"}), ("hip", {"linux"})])
def test_what_a_profile_of_ours_rests_on(package: str, profiles: set[str]) -> None:
    """It has every fact that the rules name, and no other."""
    rules = Rules(importlib.resources.files(f"gpuinterop_{package}") / "capabilities.toml")
    assert rules.profiles.keys() == profiles
    for facts in rules.profiles.values():
        assert facts.keys() - {"missing"} == rules.facts


def test_the_core_makes_timelines_and_nothing_else(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a backend says whose semaphores the core makes; and only where it knows futexes."""
    cells = [cell for cell in DOMAIN if cell.operation is Operation.CREATE_SEMAPHORE]
    install(Writing)
    table = gi.get_backend("writing").device().capabilities
    assert [cell.handle_type for cell in cells if table.of(cell)] == [gi.TimelineFd]
    assert "only timelines can be made" in table.of((Operation.CREATE_SEMAPHORE, gi.OpaqueFd)).reason
    monkeypatch.setattr(system, "SYS_FUTEX", None)
    install(Writing)
    monkeypatch.setattr(discovery, "_loaded", {})
    table = gi.get_backend("writing").device().capabilities
    assert not [cell for cell in cells if table.of(cell)]
    with pytest.raises(gi.UnsupportedError, match="futexes"):
        gi.get_backend("writing").device().create_semaphore(gi.TimelineFd)
