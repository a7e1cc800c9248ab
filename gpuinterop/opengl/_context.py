"""OpenGL contexts that other code made, and the VkDevice that exports to each."""

from __future__ import annotations

import atexit
import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from importlib.resources import files
from struct import unpack
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

from .._arguments import NoCopy
from .._core.lifetime import LIVE
from ..capabilities import Capabilities, Rules
from ..errors import DeviceNotFoundError, InvalidArgumentError, warn_leak
from ..handles import DeviceIdentity
from ..vulkan._context import VulkanContext, check_context
from ..vulkan._device import Instance, VulkanDevice
from . import _api as gl
from ._api import Functions, Loader, Lookup, current_loader

RULES: Final = Rules(files(__package__) / "capabilities.toml")
_SOFTWARE: Final = ("llvmpipe", "softpipe", "SwiftShader")

_contexts: dict[tuple[str, int], Context] = {}
"""Contexts with objects of this package, by loader and address; without a loader, by thread."""
_devices: dict[tuple[bytes | None, bytes | None], VulkanDevice] = {}
"""The library's own VkDevices, by the UUIDs of device and driver. They are kept, because making one is slow."""
_devices_lock = threading.Lock()


class Context(NoCopy):
    """Another library's context, which is called only in the thread where it is current."""

    side: ClassVar[str] = "OpenGL"
    how_to_match: ClassVar[str] = "gpuinterop.opengl.identity()"
    endpoint_gap: ClassVar[str] = ""

    def __init__(self, loader: Loader, address: int) -> None:
        self.key, self.address, self.current = (loader.name, address), address, loader.current
        """Returns `address` while this context, or a later one at the same address, is current."""
        self.functions = Functions(loader.find)
        self.closed_names: deque[tuple[str, int]] = deque()
        """Closed objects that are not deleted yet: the function that deletes each, and its name."""
        self.buffers = WeakValueDictionary[int, Any]()
        """Who shared each name last: other code can delete a buffer, and OpenGL then gives its name to the next one."""
        self._mark = 0, b""
        """A labelled buffer of this package, because another context can get this one's address later."""

    # -- which it is -------------------------------------------------------------------------------------------------

    def is_marked(self) -> bool:
        """Whether the current context is certainly this one."""
        name, label = self._mark
        if not name or not self.functions.glIsBuffer(name):
            return False
        text = ctypes.create_string_buffer(len(label) + 1)
        self.functions.glGetObjectLabel(gl.BUFFER, name, len(text), None, text)
        return text.value == label

    def remember(self) -> None:
        """Mark the context, so that later calls in it find this object."""
        if not self._mark[0]:
            name, label = ctypes.c_uint(), secrets.token_hex(8).encode()
            self.functions.check("glCreateBuffers", 1, ctypes.byref(name))
            self.functions.glObjectLabel(gl.BUFFER, name, len(label), label)
            self._mark = name.value, label
            _contexts[self.key] = self

    def check_current(self) -> None:
        """Refuse a call from a thread in which the context is not current: drivers crash, or use another context."""
        if self.current() != self.address or not self.is_marked():
            raise InvalidArgumentError(
                "context",
                "expected the context that made this to be current in the calling thread, got another or none; make it "
                "current, or call from the thread that draws.",
            )

    # -- what it is --------------------------------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        return (self.functions.glGetString(gl.RENDERER) or b"").decode(errors="replace")

    @cached_property
    def version(self) -> str:
        """``GL_VERSION``, which begins with ``OpenGL ES`` in such a context."""
        return (self.functions.glGetString(gl.VERSION) or b"").decode(errors="replace")

    @cached_property
    def extensions(self) -> frozenset[str]:
        functions = self.functions
        count = functions.integer("glGetIntegerv", gl.NUM_EXTENSIONS)
        return frozenset((functions.glGetStringi(gl.EXTENSIONS, index) or b"").decode() for index in range(count))

    @cached_property
    def is_cpu(self) -> bool:
        return any(name in self.name for name in _SOFTWARE)

    @cached_property
    def identity(self) -> DeviceIdentity:
        """Identity from the UUIDs that the driver reports."""
        uuid, driver = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
        if self.extensions & {"GL_EXT_memory_object", "GL_EXT_semaphore"}:
            self.functions.glGetUnsignedBytei_vEXT(gl.DEVICE_UUID, 0, uuid)
            self.functions.glGetUnsignedBytevEXT(gl.DRIVER_UUID, driver)
        # Mesa's AMD drivers derive the UUID from the PCI address, which is the only identifier in HIP.
        is_amd = bytes(driver).startswith(b"AMD-MESA-DRV")
        return DeviceIdentity(
            name=self.name,
            pci_bus_id="{:04x}:{:02x}:{:02x}.{:x}".format(*unpack("<4I", uuid)) if is_amd else None,
            uuid=bytes(uuid) if any(uuid) else None,
            driver_uuid=bytes(driver) if any(driver) else None,
            is_cpu=self.is_cpu,
        )

    @cached_property
    def capabilities(self) -> Capabilities:
        """The capability table (see :func:`gpuinterop.opengl.capabilities`)."""
        embedded = self.version.startswith("OpenGL ES")
        number = [self.functions.integer("glGetIntegerv", part) for part in (gl.MAJOR_VERSION, gl.MINOR_VERSION)]
        by_name = number >= [4, 5] or "GL_ARB_direct_state_access" in self.extensions  # also in NVIDIA's 3.3 contexts
        cells = RULES.table(
            {
                "driver": self.name,
                "version": self.version,
                "direct state access": by_name and not embedded,
                "software": self.is_cpu,
                **{name: name in self.extensions for name in RULES.facts if name.startswith("GL_")},
            }
        )
        return Capabilities(cells, owner=self.name)

    # -- Vulkan, which makes what OpenGL can only import ---------------------------------------------------------------

    def vulkan(self, vk: VulkanContext | None) -> VulkanContext:
        """The user's VkDevice, checked, or the library's own on the same device and driver."""
        identity = self.identity
        if vk is not None:
            vk_identity = check_context(vk).identity
            if not is_same_driver(vk_identity, identity):
                raise InvalidArgumentError(
                    "vk",
                    f"expected a VkDevice of OpenGL's {identity.name} and of the same driver, got {vk_identity.name}, "
                    "whose UUIDs differ; leave vk out.",
                )
            return vk
        with _devices_lock:
            own = _devices.get((identity.uuid, identity.driver_uuid))
            if own is None or own.vk.lifetime.state is not LIVE:  # before a fork, the parent's
                own = _devices[identity.uuid, identity.driver_uuid] = self._make_device()
        return own.vk

    def _make_device(self) -> VulkanDevice:
        instance, identity = Instance(), self.identity
        physical_devices = instance.physical_devices()
        for physical in physical_devices:
            if is_same_driver(physical.identity, identity):
                return VulkanDevice(instance, physical)
        names = ", ".join(f"{physical.name} ({physical.driver_version})" for physical in physical_devices) or "none"
        instance.close()
        raise DeviceNotFoundError(
            f"expected a Vulkan device with the device UUID and driver UUID of OpenGL's {identity.name} "
            f"({self.version}), got {names}; install OpenGL and Vulkan of one version of the driver: Mesa's are of one "
            "build."
        )

    # -- names ---------------------------------------------------------------------------------------------------------

    def delete(self, names: Iterable[tuple[str, int]]) -> None:
        """Delete names now if the context is current; else in this package's next call in it."""
        self.closed_names.extend(names)
        if self.closed_names and self.current() == self.address and self.is_marked():
            self.delete_closed()

    def delete_closed(self) -> None:
        while self.closed_names:
            delete, name = self.closed_names.popleft()
            if delete == "glDeleteSync":
                self.functions.glDeleteSync(name)
            # llvmpipe 22.3 frees memory that vertex arrays and framebuffers still use: a draw would crash.
            elif not (delete == "glDeleteMemoryObjectsEXT" and self.is_cpu):
                getattr(self.functions, delete)(1, ctypes.byref(ctypes.c_uint(name)))


def is_same_driver(device: DeviceIdentity, other: DeviceIdentity) -> bool:
    """Whether two APIs' devices are one, with one build of its driver: only then can one import from the other."""
    return (device.uuid, device.driver_uuid) == (other.uuid, other.driver_uuid)


def current_context(get_proc_address: Lookup | None = None) -> Context:
    """The context that is current in the calling thread."""
    if (loader := current_loader(get_proc_address)) is not None:
        address = loader.current() or 0
        context = _contexts.get((loader.name, address))
        if context is not None and context.is_marked():
            context.delete_closed()
            return context
        context = Context(loader, address)
        if context.version:  # else no context is current, and only the user's loader was passed
            return context
    raise InvalidArgumentError(
        "context",
        "expected an OpenGL context that is current in this thread, by EGL or GLX, got none; make it current, or pass "
        "get_proc_address, the loader of what made it.",
    )


@atexit.register
def _warn_of_undeleted() -> None:
    if left := sum(len(context.closed_names) for context in _contexts.values()):
        warn_leak(
            f"{left} OpenGL object(s) were closed where their context was not current, and not deleted since: close "
            "them in the thread that draws, before the context is destroyed"
        )
