"""Which backend is chosen, and what is said when none is."""

import dataclasses
import gc
import importlib.resources
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest

import gpuinterop as gi
from gpuinterop import system
from gpuinterop._core import discovery
from gpuinterop.backend import DeviceInfo, pci_bus_id
from gpuinterop.capabilities import DOMAIN, Capability, Operation, Rules, Scope, Support, VerifiedRun, read_verified
from gpuinterop.cli.info import collect

from . import fake
from .fake import FakeBackend, FakeWords


class Low(FakeBackend):
    name = "low"
    priority = -1


class High(FakeBackend):
    name = "high"
    priority = 5


class Absent(FakeBackend):
    name = "absent"
    priority = 9

    def __init__(self) -> None:
        raise gi.BackendUnavailableError("absent has no driver.", fix="Install one.", absent=True)


class Broken(Absent):
    name = "broken"

    def __init__(self) -> None:
        raise gi.BackendUnavailableError("broken's driver is too old.", fix="Update it.")


class Crashing(Absent):
    name = "crashing"

    def __init__(self) -> None:
        raise OSError("libfoo.so: undefined symbol")


class Empty(High):
    name = "empty"
    priority = 20

    def devices(self) -> list[DeviceInfo]:
        return []


class Boastful(High):
    name = "boastful"

    def capabilities(self, ordinal: int) -> Iterable[Capability]:
        return [Capability(operation=Operation.GRAPH_CAPTURE, support=Support.SUPPORTED)]


class Usable(High):
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


class Misnamed(High):
    name = "somebody"


class Processor(Low):
    name = "processor"

    def devices(self) -> list[DeviceInfo]:
        return [dataclasses.replace(info, is_cpu=True) for info in super().devices()]


class NoBackend:
    name = "nobackend"


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install exactly these backends; forget what was loaded."""
    monkeypatch.setattr(discovery, "_loaded", {})
    monkeypatch.setattr(discovery, "_warned", {})
    monkeypatch.delenv("GPUINTEROP_BACKEND", raising=False)
    monkeypatch.delenv("GPUINTEROP_DISABLE", raising=False)

    def put(*classes: type[Any], extra: Iterable[EntryPoint] = ()) -> None:
        points = [
            EntryPoint(getattr(cls, "entry", cls.name), f"{cls.__module__}:{cls.__qualname__}", discovery.GROUP)
            for cls in classes
        ]
        monkeypatch.setattr(discovery, "entry_points", lambda group: [*points, *extra])
        monkeypatch.setattr(discovery, "_chosen", ([], {}))

    return put


def test_priority_decides_and_an_explicit_choice_never_falls_back(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Low, High, Absent)
    assert gi.get_backend().name == "high"
    assert gi.get_backend("low").name == "low"
    monkeypatch.setenv("GPUINTEROP_BACKEND", "low")
    assert gi.get_backend().name == "low"
    assert gi.get_backend("high").name == "high"
    monkeypatch.setenv("GPUINTEROP_BACKEND", "absent")
    with pytest.raises(gi.BackendUnavailableError, match=r"absent has no driver\. Install one\.") as caught:
        gi.device()
    assert caught.value.fix == "Install one."
    for chosen, said in ((None, "GPUINTEROP_BACKEND: "), ("absent", "")):  # what names it, where the caller does not
        with pytest.raises(
            gi.BackendUnavailableError, match=f"^{said}the backend 'absent' is not available: absent has"
        ):
            gi.get_backend(chosen)
    monkeypatch.setenv("GPUINTEROP_BACKEND", "nonsense")
    with pytest.raises(gi.BackendNotFoundError, match=r"GPUINTEROP_BACKEND: .*'nonsense'.*absent, high, low"):
        gi.device()
    with pytest.raises(LookupError):
        gi.get_backend("other")
    with pytest.raises(gi.ArgumentTypeError):
        gi.get_backend(3)  # type: ignore[arg-type]


def test_falling_to_the_host_past_a_failed_backend_warns_once_with_its_reason(install: Install) -> None:
    install(Low, Broken, Absent)
    with pytest.warns(RuntimeWarning, match=r"'broken' is not available.*too old") as caught:
        assert gi.device().backend == "low"
    assert (len(caught), caught[0].filename) == (
        1,
        __file__,
    )  # a vendor whose software is not there at all has not failed
    assert gi.get_backend().name == "low"


def test_a_backend_without_devices_is_passed_over(install: Install) -> None:
    install(Low, Empty)
    assert gi.get_backend().name == "low"
    with pytest.raises(gi.DeviceNotFoundError, match="none"):
        gi.get_backend("empty").device()


def test_none_that_works_says_why_each_does_not(install: Install) -> None:
    install(Absent, Broken)
    with pytest.raises(gi.BackendUnavailableError, match=r"no driver.*too old|too old.*no driver"):
        gi.device()
    install()
    with pytest.raises(gi.BackendUnavailableError, match="none is installed"):
        gi.device()


def test_what_is_broken_is_shown_and_takes_nobody_down(install: Install) -> None:
    missing = EntryPoint("missing", "no_such_module_at_all:Backend", discovery.GROUP)
    misnamed = EntryPoint("nobody", f"{__name__}:Misnamed", discovery.GROUP)
    install(High, Crashing, NoBackend, extra=[missing, misnamed])
    found = gi.backends()
    assert sorted(found) == ["crashing", "high", "missing", "nobackend", "nobody"]
    assert found["high"].available
    assert found["high"].error is None
    reasons = {name: str(backend.error) for name, backend in found.items()}
    assert "undefined symbol" in reasons["crashing"]
    assert "no_such_module_at_all" in reasons["missing"]
    assert "subclass" in reasons["nobackend"]
    assert "somebody" in reasons["nobody"]
    with pytest.raises(gi.BackendUnavailableError) as caught:
        gi.get_backend("crashing")
    assert isinstance(caught.value.__cause__, OSError)


def test_two_backends_of_one_name_are_an_error_not_a_lottery(install: Install) -> None:
    """Of that name: the others are what they were."""
    install(Low, High, extra=[EntryPoint("high", f"{__name__}:Low", discovery.GROUP)])
    assert "two distributions" in str(gi.backends()["high"].error)
    with pytest.raises(gi.BackendUnavailableError, match=r"two distributions.*Uninstall"):
        gi.get_backend("high")
    assert gi.get_backend("low").name == "low"
    with pytest.warns(RuntimeWarning, match="two distributions"):
        assert gi.get_backend().name == "low"
    same = EntryPoint("high", f"{__name__}:High", discovery.GROUP)  # a folder that is twice on the path
    install(High, extra=[same])
    assert gi.backends()["high"].distribution == "unknown"


HIGH = f"from {__name__} import High\nclass Plugin(High):"


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit(3)",
        "1/0",
        "def Plugin(): return 7",
        "from gpuinterop.backend import Backend\nclass Plugin(Backend): name = 'plugin'",  # abstract
        f"{HIGH}\n    name = 'other'",
        f"{HIGH}\n    name = 'plugin'\n    priority = 'first'",
        f"{HIGH}\n    name = 'plugin'\n    def devices(self): return [1]",
    ],
)
def test_a_third_partys_backend_takes_nobody_down(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> None:
    """Least of all the program; it is not available, and says why."""
    (tmp_path / "thirdparty.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "thirdparty", raising=False)
    install(Low, extra=[EntryPoint("plugin", "thirdparty:Plugin", discovery.GROUP)])
    error = gi.backends()["plugin"].error
    assert isinstance(error, gi.BackendUnavailableError)
    assert "plugin" in error.reason.lower()
    with pytest.raises(gi.BackendUnavailableError, match="plugin"):
        gi.get_backend("plugin")
    with pytest.warns(RuntimeWarning, match=r"'plugin' is not available.*[^.]\. Set"):
        assert gi.device().backend == "low"


@pytest.mark.parametrize("outcome", ["return None", "return [7]", "raise RuntimeError(3)", "raise SystemExit(3)"])
@pytest.mark.parametrize("question", ["capabilities(self, ordinal)", "versions(self)", "libraries(self)"])
def test_what_a_third_partys_backend_fails_to_answer_is_its_own_defect(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, question: str, outcome: str
) -> None:
    """The others are found as ever; `gpuinterop info` says the reason."""
    source = f"{HIGH}\n    name = 'plugin'\n    def {question}: {outcome}\n"
    (tmp_path / "thirdparty.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "thirdparty", raising=False)
    install(Processor, extra=[EntryPoint("plugin", "thirdparty:Plugin", discovery.GROUP)])
    asked = question.partition("(")[0]
    with pytest.raises(discovery.BrokenBackendError, match=f"plugin: {asked}"):
        plugin = gi.get_backend("plugin")
        _ = (plugin.devices(), plugin.versions, plugin.libraries)
    assert gi.match_device(identity(is_cpu=True)).backend == "processor"
    if asked == "capabilities":
        with pytest.raises(gi.DeviceNotFoundError, match=f"plugin: {asked}"):
            gi.match_device(identity(uuid=b"1" * 16))
    entries = {entry["name"]: entry for entry in collect().backends}
    assert entries["processor"]["available"]
    assert not entries["plugin"]["available"]
    assert f"plugin: {asked}() failed" in entries["plugin"]["reason"]


def test_devices_are_made_once(install: Install) -> None:
    install(High)
    assert gi.device() is gi.device(0) is gi.devices()[0] is gi.get_backend("high").device()
    with pytest.raises(gi.DeviceNotFoundError, match=r"no device 3; devices: 0: fake"):
        gi.device(3)


@pytest.mark.parametrize("chosen", [None, "", "low", "high"])
def test_entry_points_and_drivers_are_asked_once(
    install: Install, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Not at each `gi.device()`."""
    asked: list[str] = []

    def count(where: Any, name: str) -> None:
        real = getattr(where, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)

    install(Low, High)
    if chosen is not None:
        monkeypatch.setenv("GPUINTEROP_BACKEND", chosen)
    count(discovery, "entry_points")
    count(FakeBackend, "devices")
    first = gi.device()
    assert first.backend == (chosen or "high")
    assert asked.count("entry_points") == 1
    asked.clear()
    assert all(gi.device() is first for _ in range(9))
    assert not asked

    other = "low" if chosen == "high" else "high"
    monkeypatch.setenv("GPUINTEROP_BACKEND", other)
    assert gi.device().backend == other
    monkeypatch.setenv("GPUINTEROP_BACKEND", "later")
    for _ in range(2):
        asked.clear()
        with pytest.raises(gi.BackendNotFoundError, match="later"):
            gi.device()
        assert asked.count("entry_points") == 1  # a failure is not remembered


class Array:
    """What a caller has."""


@pytest.mark.parametrize("kind", [Absent, NoBackend, Crashing])
def test_a_backend_that_does_not_work_keeps_nothing_of_its_first_caller(install: Install, kind: type[Any]) -> None:
    def call() -> weakref.ref[Array]:
        array = Array()
        with pytest.raises(gi.BackendUnavailableError) as caught:
            gi.get_backend(kind.name)
        caught.value.__traceback__ = None
        return weakref.ref(array)

    install(kind)
    array = call()
    gc.collect()
    assert array() is None


@pytest.mark.parametrize("ordinal", ["cuda", [], "0", None, True, False, 0.0])
def test_an_ordinal_is_an_int(install: Install, ordinal: Any) -> None:
    install(High)
    for ask in (gi.device, gi.get_backend().device):
        how = r"call gpuinterop\.get_backend\(NAME\)\.device\(\), or set GPUINTEROP_BACKEND\."
        with pytest.raises(gi.ArgumentTypeError, match=rf"ordinal: expected an int, got .*; .*{how}") as caught:
            ask(ordinal)
        assert caught.value.argument == "ordinal"


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
        install(extra=[EntryPoint("recorded", f"{folder.name}:Recorded", discovery.GROUP)])
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
    return EntryPoint("acme", "acme.backend:Acme", discovery.GROUP)


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


def identity(**marks: Any) -> gi.DeviceIdentity:
    return gi.DeviceIdentity(name="theirs", **marks)


def test_matching_wants_proof(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Low, High)
    assert gi.match_device(identity(uuid=b"f" * 16)).backend == "high"
    assert gi.match_device(identity(pci_bus_id="0000:01:00.0")).backend == "high"
    for other in (
        identity(),
        identity(uuid=b"x" * 16),
        identity(uuid=b"x" * 16, pci_bus_id="0000:01:00.0"),
        identity(is_cpu=True),
        identity(luid=b"12345678"),
    ):
        with pytest.raises(gi.DeviceNotFoundError, match="high:0 fake"):
            gi.match_device(other)
    monkeypatch.setenv("GPUINTEROP_BACKEND", "low")
    assert gi.match_device(identity(uuid=b"f" * 16)).backend == "low"
    with pytest.raises(gi.DeviceNotFoundError, match=r"low:0 fake; GPUINTEROP_BACKEND=low "):
        gi.match_device(identity(uuid=b"x" * 16))
    assert discovery.search(lambda one: one.backend == "high", "").backend == "high"  # memory is where it is
    monkeypatch.setattr(
        fake, "fake_info", lambda: DeviceInfo(ordinal=0, name="cpu", is_cpu=True, dlpack=(1, 0), array_interface="x")
    )
    monkeypatch.setattr(discovery, "_loaded", {})
    assert gi.match_device(identity(is_cpu=True, uuid=b"llvmpipe".ljust(16))).backend == "low"
    with pytest.raises(gi.ArgumentTypeError):
        gi.match_device("GPU 0")  # type: ignore[arg-type]


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


def test_a_pci_address_is_written_as_linux_does() -> None:
    """CUDA writes capitals, others a domain of eight digits; Vulkan's has numbers."""
    for text in ("0000:C3:00.0", "0000:c3:00.0", "00000000:C3:00.0", "0:c3:00.0"):
        assert pci_bus_id(text) == "0000:c3:00.0"
    assert pci_bus_id("00010000:01:00.0") == "10000:01:00.0"
