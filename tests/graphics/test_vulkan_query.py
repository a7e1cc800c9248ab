from __future__ import annotations

import sys
from ctypes import CFUNCTYPE, c_char_p, c_void_p, cast
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import gpuinterop as gi
from gpuinterop.capabilities import DOMAIN, Scope, Support, VerifiedRun
from gpuinterop.testing.exporters.vulkan import VulkanExporter, list_drivers
from gpuinterop.testing.exporters.vulkan.drivers import choose
from gpuinterop.vulkan import _query
from tests.programs import printed

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application
else:
    from vulkan_application import Application


def test_importing_needs_neither_vulkan_nor_numpy() -> None:
    code = (
        "import sys, gpuinterop.vulkan, gpuinterop.testing.exporters.vulkan\n"
        "assert not {'cffi', 'vulkan', 'numpy'} & set(sys.modules), set(sys.modules)"
    )
    printed("-c", code)


def test_without_the_package_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cffi'] = None\n"
        "import gpuinterop as gi\n"
        "from gpuinterop.testing.exporters.vulkan import list_drivers\n"
        "print(list(list_drivers()), list_drivers().reason, *gi.vulkan.required_extensions())\n"
        "try: gi.vulkan.identity(1)\n"
        "except gi.BackendUnavailableError as error: print(error.fix)\n"
    )
    told, fix, _ = printed("-c", code).split("\n")
    assert fix == "pip install 'gpuinterop[vulkan]'"
    assert told.startswith("[] ")
    assert fix in told
    # The instance is made with these: before it, the call needs nothing.
    assert "VK_KHR_external_memory_capabilities" in told
    assert told.endswith(" []")


def test_without_a_driver_the_list_is_empty_and_says_why(tmp_path: object) -> None:
    code = (
        "from gpuinterop.testing.exporters.vulkan import list_drivers, VulkanExporter\n"
        "import gpuinterop as gi\n"
        "print(list(list_drivers()), list_drivers().reason)\n"
        "try: VulkanExporter()\n"
        "except gi.BackendUnavailableError as error: print('refused', error)\n"
    )
    nowhere = f"{tmp_path}/none.json"
    told, refused, _ = printed("-c", code, VK_ICD_FILENAMES=nowhere, VK_DRIVER_FILES=nowhere).split("\n")
    assert len(told) > len("[] ")
    assert refused.startswith("refused ")


def test_a_broken_driver_does_not_hide_the_others(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list_drivers()
    broken = next(d for d in found if driver.replace("lavapipe", "llvmpipe") in f"{d.name} {d.driver}".lower())
    real = _query.PhysicalDevice.buffer_features

    def fail(self: _query.PhysicalDevice, *arguments: Any) -> int:
        if self.name == broken.name:
            raise gi.DriverError("vkSomething", -3, "VK_ERROR_INITIALIZATION_FAILED")
        return real(self, *arguments)

    monkeypatch.setattr(_query.PhysicalDevice, "buffer_features", fail)
    left = list_drivers()
    assert [d.index for d in left] == [d.index for d in found if d.name != broken.name]  # two GPUs may share it
    assert broken.name in left.reason
    assert "VK_ERROR_INITIALIZATION_FAILED" in left.reason


def test_what_was_listed_is_opened_by_its_index(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of two devices of one name, and whatever the default prefers."""
    found = list_drivers()
    assert [d.index for d in found] == list(range(len(found)))
    assert found.reason == ""
    assert any(driver.replace("lavapipe", "llvmpipe") in f"{one.name} {one.driver}".lower() for one in found)
    assert all(one.version and one.identity.name == one.name and len(one.capabilities) == len(DOMAIN) for one in found)
    for listed in found:
        with VulkanExporter(device_index=listed.index) as exporter:
            assert exporter.identity == listed.identity
    devices: list[Any] = [SimpleNamespace(name="Twin", driver_name="twins", is_cpu=False) for _ in range(3)]
    for index in range(3):
        assert choose(devices, None, index) is devices[index]
        assert choose(devices, "twin", index) is devices[index]
    for wrong in (3, -1):
        with pytest.raises(gi.DeviceNotFoundError):
            choose(devices, None, wrong)
    with pytest.raises(gi.ArgumentTypeError, match="device_index"):
        VulkanExporter(driver, device_index="0")  # type: ignore[arg-type]
    with pytest.raises(gi.ArgumentTypeError, match="driver"):
        VulkanExporter(7)  # type: ignore[arg-type]


def test_an_unknown_driver_names_those_there_are(driver: str) -> None:
    with pytest.raises(gi.DeviceNotFoundError, match=r"'voodoo'.*: '"):
        VulkanExporter("voodoo")
    with pytest.raises(gi.DeviceNotFoundError, match="device_index 99"):
        VulkanExporter(driver, device_index=99)


def test_identity_by_every_way(application: Application, driver: str) -> None:
    identity = gi.vulkan.identity(application.physical_device)
    assert identity.name
    assert identity.uuid is not None
    assert len(identity.uuid) == 16
    assert gi.vulkan.identity(application.vk) == identity == application.vk.identity
    assert gi.vulkan.identity(application.physical_device, instance=application.instance) == identity
    raw = application.number(application.physical_device)
    assert gi.vulkan.identity(raw) == identity
    address = application.number(application.api.lib.vkGetInstanceProcAddr)
    instance = application.number(application.instance)
    assert gi.vulkan.identity(raw, instance=instance, get_instance_proc_addr=address) == identity
    if driver in ("swiftshader", "lavapipe"):
        assert identity.is_cpu
        assert identity.uuid.startswith(b"SwiftShaderUUID" if driver == "swiftshader" else b"mesa")
        assert identity.pci_bus_id is None


def test_an_instance_that_has_extensions_names_alone(application: Application) -> None:
    """An instance of Vulkan 1.0 has vkGetPhysicalDeviceProperties2KHR, and no vkGetPhysicalDeviceProperties2."""
    lookup, number = CFUNCTYPE(c_void_p, c_void_p, c_char_p), application.number
    real, asked = lookup(number(application.api.lib.vkGetInstanceProcAddr)), []

    def old(instance: int, name: bytes) -> Any:
        asked.append(name)
        return None if name.endswith(b"2") else real(instance, name.removesuffix(b"KHR"))

    callback = lookup(old)
    address = cast(callback, c_void_p).value
    for physical, instance in (
        (application.physical_device, application.instance),
        (number(application.physical_device), number(application.instance)),
    ):
        found = gi.vulkan.identity(physical, instance=instance, get_instance_proc_addr=address)
        assert found == application.vk.identity
    assert asked.count(b"vkGetPhysicalDeviceProperties2KHR") == 2


def test_capabilities(application: Application, driver: str) -> None:
    table = gi.vulkan.capabilities(application.physical_device)
    assert len(table) == len(DOMAIN)
    for found in table.values():
        assert found.support is Support.SUPPORTED or (found.reason and found.reference and found.scope)
    usable = {str(found.cell) for found in table.values() if found}
    memory = {"import_memory:opaque_fd", "map_buffer:opaque_fd", "map_mipmapped_array:opaque_fd"}
    binary = {f"{verb}_semaphore:opaque_fd" for verb in ("import", "signal", "wait")}
    if driver == "swiftshader":
        assert usable == memory | binary | {"export_allocation:vmm_fd", "export_array:vmm_fd", "export_array:opaque_fd"}
        gap = table.of((gi.Operation.IMPORT_SEMAPHORE, gi.TimelineFd))
        assert "reports no exportable handle types for timeline semaphores" in gap.reason
        assert gap.scope is Scope.DRIVER
    elif driver == "lavapipe":
        assert memory <= usable
        assert "export_array:opaque_fd" in usable


def test_a_run_on_this_driver_promotes_its_cells(exporter: VulkanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = gi.Cell(gi.Operation.MAP_BUFFER, gi.OpaqueFd)
    run = VerifiedRun(
        date="2026-11-21",
        platform=sys.platform,
        device=exporter.physical.driver_name,
        versions={},
        cells=frozenset({cell}),
    )
    for runs, support in (([run], Support.SUPPORTED), ([replace(run, device="another")], Support.UNVERIFIED)):
        monkeypatch.setattr(_query, "recorded", lambda file, runs=runs: runs)
        assert gi.vulkan.capabilities(exporter.physical.handle).of(cell).support is support


def test_required_extensions(application: Application, driver: str) -> None:
    instance, device = gi.vulkan.required_extensions(application.physical_device)
    assert gi.vulkan.required_extensions() == (instance, [])
    offered = {e.extensionName for e in application.api.vkEnumerateInstanceExtensionProperties(None)}
    assert set(instance) <= offered
    offered = {
        e.extensionName for e in application.api.vkEnumerateDeviceExtensionProperties(application.physical_device, None)
    }
    assert set(device) <= offered
    assert "VK_KHR_external_memory_fd" in device
    if driver in ("swiftshader", "lavapipe"):
        assert ("VK_KHR_external_semaphore_fd" in device) == (driver == "swiftshader")
        assert ("VK_EXT_external_memory_host" in device) == (driver == "lavapipe")
