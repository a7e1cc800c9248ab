"""Which backend is chosen, and what is said when none is."""

import dataclasses
import gc
import sys
import weakref
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import gpuinterop as gi
from gpuinterop._core import discovery, entry_points
from gpuinterop.backend import DeviceInfo, pci_bus_id
from gpuinterop.cli.info import collect

from . import fake
from .conftest import Install
from .fake import FakeBackend


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


class Misnamed(High):
    name = "somebody"


class Processor(Low):
    name = "processor"

    def devices(self) -> list[DeviceInfo]:
        return [dataclasses.replace(info, is_cpu=True) for info in super().devices()]


class NoBackend:
    name = "nobackend"


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
    missing = EntryPoint("missing", "no_such_module_at_all:Backend", entry_points.GROUP)
    misnamed = EntryPoint("nobody", f"{__name__}:Misnamed", entry_points.GROUP)
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
    install(Low, High, extra=[EntryPoint("high", f"{__name__}:Low", entry_points.GROUP)])
    assert "two distributions" in str(gi.backends()["high"].error)
    with pytest.raises(gi.BackendUnavailableError, match=r"two distributions.*Uninstall"):
        gi.get_backend("high")
    assert gi.get_backend("low").name == "low"
    with pytest.warns(RuntimeWarning, match="two distributions"):
        assert gi.get_backend().name == "low"
    same = EntryPoint("high", f"{__name__}:High", entry_points.GROUP)  # a folder that is twice on the path
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
    install(Low, extra=[EntryPoint("plugin", "thirdparty:Plugin", entry_points.GROUP)])
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
    install(Processor, extra=[EntryPoint("plugin", "thirdparty:Plugin", entry_points.GROUP)])
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
    count(entry_points, "entry_points")
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


def test_a_pci_address_is_written_as_linux_does() -> None:
    """CUDA writes capitals, others a domain of eight digits; Vulkan's has numbers."""
    for text in ("0000:C3:00.0", "0000:c3:00.0", "00000000:C3:00.0", "0:c3:00.0"):
        assert pci_bus_id(text) == "0000:c3:00.0"
    assert pci_bus_id("00010000:01:00.0") == "10000:01:00.0"
