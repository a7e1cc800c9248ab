"""The one door to Vulkan: cffi types of PyPI's `vulkan`, function pointers looked up by ourselves.

PyPI's own wrappers raise ``KeyError`` for results that they do not know (``VK_ERROR_INVALID_EXTERNAL_HANDLE`` is one)
and know nothing of raw handles. Here a VkResult is an int, and a handle is whatever can be cast to one, unless its
type says that it is of another kind. `Any` ends in this package: cffi has no types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from .._arguments import MAX_64, check_int
from ..errors import ArgumentTypeError, BackendUnavailableError, DriverError, InvalidArgumentError, OutOfMemoryError

__all__ = ["Api", "Functions", "check", "check_call", "result_name"]

# -- numbers of the API; spelled here because `vulkan` is imported late, and default arguments are not ---------------

QUEUE_FAMILY_EXTERNAL: Final = 0xFFFFFFFE
QUEUE_FAMILY_FOREIGN: Final = 0xFFFFFFFD

MEMORY_HANDLE_OPAQUE_FD: Final = 0x1
MEMORY_HANDLE_HOST_ALLOCATION: Final = 0x80
MEMORY_HANDLE_DMA_BUF: Final = 0x200
SEMAPHORE_HANDLE_OPAQUE_FD: Final = 0x1

FEATURE_DEDICATED_ONLY: Final = 0x1  # of memory; semaphores have no such bit, theirs begin with exportable
MEMORY_EXPORTABLE: Final = 0x2
MEMORY_IMPORTABLE: Final = 0x4
SEMAPHORE_EXPORTABLE: Final = 0x1

SEMAPHORE_BINARY: Final = 0
SEMAPHORE_TIMELINE: Final = 1

BUFFER_TRANSFER_SRC: Final = 0x1
BUFFER_TRANSFER_DST: Final = 0x2
BUFFER_STORAGE: Final = 0x20

IMAGE_TRANSFER_SRC: Final = 0x1
IMAGE_TRANSFER_DST: Final = 0x2
IMAGE_SAMPLED: Final = 0x4
IMAGE_STORAGE: Final = 0x8
IMAGE_COLOR_ATTACHMENT: Final = 0x10
IMAGE_TYPE_2D: Final = 1
IMAGE_TYPE_3D: Final = 2
TILING_OPTIMAL: Final = 0
TILING_LINEAR: Final = 1
LAYOUT_GENERAL: Final = 1
ASPECT_COLOR: Final = 1

MEMORY_DEVICE_LOCAL: Final = 0x1
MEMORY_HOST_VISIBLE: Final = 0x2
MEMORY_HOST_COHERENT: Final = 0x4

QUEUE_GRAPHICS: Final = 0x1
QUEUE_COMPUTE: Final = 0x2
QUEUE_TRANSFER: Final = 0x4

STAGE_COMPUTE_SHADER: Final = 0x800
STAGE_TRANSFER: Final = 0x1000
STAGE_BOTTOM_OF_PIPE: Final = 0x2000
STAGE_HOST: Final = 0x4000
STAGE_ALL_COMMANDS: Final = 0x10000

ACCESS_SHADER_READ: Final = 0x20
ACCESS_SHADER_WRITE: Final = 0x40
ACCESS_TRANSFER_READ: Final = 0x800
ACCESS_TRANSFER_WRITE: Final = 0x1000
ACCESS_HOST_READ: Final = 0x2000
ACCESS_MEMORY_READ: Final = 0x8000
ACCESS_MEMORY_WRITE: Final = 0x10000

WHOLE_SIZE: Final = 0xFFFFFFFFFFFFFFFF
DEVICE_TYPE_CPU: Final = 4
DRIVER_ID_MESA_LLVMPIPE: Final = 13

SUCCESS: Final = 0
NOT_READY: Final = 1
TIMEOUT: Final = 2

_RESULTS: Final = {
    0: ("VK_SUCCESS", ""),
    1: ("VK_NOT_READY", ""),
    2: ("VK_TIMEOUT", ""),
    5: ("VK_INCOMPLETE", ""),
    -1: ("VK_ERROR_OUT_OF_HOST_MEMORY", "the driver could not allocate host memory"),
    -2: ("VK_ERROR_OUT_OF_DEVICE_MEMORY", "the driver could not allocate device memory"),
    -3: ("VK_ERROR_INITIALIZATION_FAILED", "the driver could not be initialised"),
    -4: ("VK_ERROR_DEVICE_LOST", "the device is lost; destroy it and begin anew"),
    -5: ("VK_ERROR_MEMORY_MAP_FAILED", "the memory could not be mapped"),
    -6: ("VK_ERROR_LAYER_NOT_PRESENT", "a layer that was asked for is not installed"),
    -7: ("VK_ERROR_EXTENSION_NOT_PRESENT", "an extension that was asked for is not offered"),
    -8: ("VK_ERROR_FEATURE_NOT_PRESENT", "a feature that was asked for is not offered"),
    -9: ("VK_ERROR_INCOMPATIBLE_DRIVER", "the loader found no usable driver"),
    -10: ("VK_ERROR_TOO_MANY_OBJECTS", "the driver allows no more objects of this kind"),
    -11: ("VK_ERROR_FORMAT_NOT_SUPPORTED", "the driver does not support this format for this use"),
    -12: ("VK_ERROR_FRAGMENTED_POOL", ""),
    -13: ("VK_ERROR_UNKNOWN", "the driver does not say why"),
    -1000069000: ("VK_ERROR_OUT_OF_POOL_MEMORY", ""),
    -1000072003: ("VK_ERROR_INVALID_EXTERNAL_HANDLE", "the handle is not one of the stated type, or of another driver"),
    -1000161000: ("VK_ERROR_FRAGMENTATION", ""),
    -1000257000: ("VK_ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS", "the address cannot be had"),
}

_NEEDED_BY: Final = {
    "vkGetMemoryFdKHR": "VK_KHR_external_memory_fd",
    "vkGetMemoryFdPropertiesKHR": "VK_KHR_external_memory_fd",
    "vkGetSemaphoreFdKHR": "VK_KHR_external_semaphore_fd",
    "vkImportSemaphoreFdKHR": "VK_KHR_external_semaphore_fd",
    "vkGetMemoryHostPointerPropertiesEXT": "VK_EXT_external_memory_host",
    "vkGetSemaphoreCounterValue": "VK_KHR_timeline_semaphore",
    "vkSignalSemaphore": "VK_KHR_timeline_semaphore",
    "vkGetBufferMemoryRequirements2": "VK_KHR_get_memory_requirements2",
    "vkGetImageMemoryRequirements2": "VK_KHR_get_memory_requirements2",
    "vkCreateDebugUtilsMessengerEXT": "VK_EXT_debug_utils",
    "vkDestroyDebugUtilsMessengerEXT": "VK_EXT_debug_utils",
    "vkGetPhysicalDeviceProperties2": "VK_KHR_get_physical_device_properties2",
    "vkGetPhysicalDeviceFeatures2": "VK_KHR_get_physical_device_properties2",
    "vkGetPhysicalDeviceImageFormatProperties2": "VK_KHR_get_physical_device_properties2",
    "vkGetPhysicalDeviceExternalBufferProperties": "VK_KHR_external_memory_capabilities",
    "vkGetPhysicalDeviceExternalSemaphoreProperties": "VK_KHR_external_semaphore_capabilities",
}

_OUT_OF_MEMORY: Final = (-1, -2)


def result_name(code: int) -> str:
    """The name of a VkResult; its number where nobody named it."""
    return _RESULTS.get(code, (f"VkResult {code}", ""))[0]


def check(call: str, code: int) -> int:
    """Raise for a negative VkResult; return the others, which are statuses.

    Raises
    ------
    OutOfMemoryError
        Host or device memory ran out.
    DriverError
        Everything else.
    """
    if code >= 0:
        return code
    symbol, meaning = _RESULTS.get(code, (f"VkResult {code}", ""))
    kind = OutOfMemoryError if code in _OUT_OF_MEMORY else DriverError
    raise kind(call, code, symbol, meaning)


def check_call(functions: Functions, call: str, *arguments: Any) -> int:
    """Call and :func:`check`."""
    return check(call, getattr(functions, call)(*arguments) or 0)  # None, of those without a result


def load() -> tuple[Any, Any]:
    """PyPI's ``vulkan`` module and its cffi ``ffi``.

    Raises
    ------
    BackendUnavailableError
        It is not installed, or it found no Vulkan loader.
    """
    try:
        import vulkan
    except ImportError:
        raise BackendUnavailableError(
            "the Python package 'vulkan' is not installed.", fix="pip install gpuinterop[vulkan]"
        ) from None
    except OSError as error:  # it opens the loader when imported
        raise BackendUnavailableError(
            f"the Vulkan loader could not be opened ({error}).",
            fix="Install a Vulkan loader: libvulkan1 (Debian, Ubuntu), vulkan-loader (Fedora), or the GPU's driver.",
        ) from None
    return vulkan, vulkan.ffi


# What a struct points to has to live as long as the struct: cffi itself keeps nothing alive through a pointer field.
_kept: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
_stypes: dict[str, int] = {}
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z])(?=[0-9])")


_INTEGER: Final = re.compile(r"u?int\w*_t|s?size_t|(unsigned )?(short|int|long|long long)")
"""cffi's primitive types that hold an address, or a handle of 64 bits."""


@cache
def _spelling(kind: Any) -> str:
    """A C type, its handles named as Vulkan names them: ``struct VkQueue_T *`` is a ``VkQueue``."""
    return str(re.sub(r"\b(Vk\w+?)_T \*", r"\1", kind.cname.replace("struct ", "")))


class Functions:
    """The functions of a loader, an instance or a device, looked up on first use.

    Parameters
    ----------
    lookup : callable
        Name -> function, or None.
    owner : str
        ``VkInstance`` or ``VkDevice``, for messages.
    """

    def __init__(self, lookup: Callable[[str], Any], owner: str) -> None:
        self._lookup = lookup
        self._owner = owner

    def _find(self, name: str) -> Any:
        # A promoted function has its extension's name where the version it was promoted to is not enabled.
        return self._lookup(name) or (None if name.endswith(("KHR", "EXT")) else self._lookup(name + "KHR"))

    def has(self, *names: str) -> bool:
        """Whether all of these can be called."""
        return all(name in self.__dict__ or self._find(name) is not None for name in names)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("vk"):
            raise AttributeError(name)
        function = self._find(name)
        if function is None:
            raise self._missing(name)
        self.__dict__[name] = function
        return function

    def _missing(self, name: str) -> InvalidArgumentError:
        extension = _NEEDED_BY.get(name)
        if extension is None:
            return InvalidArgumentError("vk", f"the {self._owner} has no {name}: is its Vulkan version too old?")
        return InvalidArgumentError(
            "vk",
            f"the {self._owner} was created without {extension}, which {name} needs. Enable it: "
            "gpuinterop.vulkan.required_extensions(physical_device) lists what to enable.",
        )


class Api:
    """Types of PyPI's cffi, and functions from a ``vkGetInstanceProcAddr``.

    Parameters
    ----------
    get_instance_proc_addr : int or cffi pointer, optional
        The address of ``vkGetInstanceProcAddr``. Default: that of the loader which PyPI's `vulkan` opened.

    Raises
    ------
    BackendUnavailableError
        `vulkan` or the loader is missing.
    """

    def __init__(self, get_instance_proc_addr: Any = None) -> None:
        self.module, self.ffi = load()
        if get_instance_proc_addr is None:
            self._get_instance_proc_addr = self.module.lib.vkGetInstanceProcAddr
        else:
            self._get_instance_proc_addr = self.handle(
                "PFN_vkGetInstanceProcAddr", get_instance_proc_addr, "get_instance_proc_addr"
            )

    def handle(self, kind: str, handle: Any, argument: str = "") -> Any:
        """As `cast`, for a handle that has to be one: drivers dereference a null without looking."""
        found = self.cast(kind, handle, argument)
        if not self.address(found):
            raise InvalidArgumentError(argument or kind, f"the {kind} is null; did the call that made it fail?")
        return found

    def cast(self, kind: str, handle: Any, argument: str = "") -> Any:
        """A handle or pointer of `kind` from an int, a ctypes value, or cffi's `kind`, ``void *`` or integer.

        The cffi may be another one. None and 0 are null. `argument` is what the caller calls it, for messages. A driver
        looks at no handle's kind: it crashes over a wrong one, or hands out rubbish. So a kind that cffi knows is
        checked here; an integer and a ``void *`` have none.
        """
        argument = argument or kind
        if isinstance(handle, self.ffi.CData):
            kept = self.ffi.typeof(handle)
            given = _spelling(kept)
            if kept.kind == "primitive" and _INTEGER.fullmatch(given):
                value = check_int(int(handle), argument, minimum=0, maximum=MAX_64)
            elif given in (_spelling(self.ffi.typeof(kind)), "void *"):
                value = handle
            else:
                raise ArgumentTypeError(argument, f"expected a {kind}, got a {given}; pass the {kind} itself.")
        else:
            value = getattr(handle, "value", handle)
            value = 0 if value is None else value
            if isinstance(value, int) and not isinstance(value, bool):
                check_int(value, argument, minimum=0, maximum=MAX_64)
            else:
                value = None
        try:
            return self.ffi.cast(kind, value)
        except TypeError:
            raise ArgumentTypeError(
                argument, f"must be PyPI vulkan's {kind}, or its value as an int; not {type(handle).__name__}."
            ) from None

    def address(self, handle: Any) -> int:
        """A handle's value."""
        return int(self.ffi.cast("uintptr_t", handle))

    def new(self, kind: str, **fields: Any) -> Any:
        """A struct, with sType set; what it points to stays alive with it."""
        if kind not in _stypes and kind.startswith("Vk"):
            constant = "VK_STRUCTURE_TYPE_" + _WORDS.sub("_", kind[2:]).upper()
            _stypes[kind] = getattr(self.module, constant, -1)
        stype = _stypes.get(kind, -1)
        struct = self.ffi.new(kind + " *", {"sType": stype, **fields} if stype >= 0 else fields)
        pointers = tuple(value for value in fields.values() if isinstance(value, self.ffi.CData))
        if pointers:
            _kept[struct] = pointers
        return struct

    def array(self, kind: str, items: Iterable[Any]) -> Any:
        """A C array; keeps its items alive."""
        values = list(items)
        array = self.ffi.new(f"{kind}[]", values)
        _kept[array] = tuple(value for value in values if isinstance(value, self.ffi.CData))
        return array

    def strings(self, names: Iterable[str]) -> Any:
        """A ``const char *const[]``."""
        return self.array("char *", [self.ffi.new("char[]", name.encode()) for name in names])

    def text(self, chars: Any) -> str:
        """A C string."""
        return str(self.ffi.string(chars).decode("utf-8", "replace"))

    def _functions(self, lookup: Callable[[bytes], Any], owner: str) -> Functions:
        ffi = self.ffi

        def find(name: str) -> Any:
            pointer = lookup(name.encode())
            if pointer == ffi.NULL:
                return None
            try:
                return ffi.cast("PFN_" + name, pointer)
            except ffi.error:  # a name with a suffix that never was
                return None

        return Functions(find, owner)

    def global_functions(self) -> Functions:
        """What can be called before there is an instance."""
        return self._functions(lambda name: self._get_instance_proc_addr(self.ffi.NULL, name), "loader")

    def exported_functions(self) -> Functions:
        """The symbols of the loader that PyPI's `vulkan` opened: they work for every instance of that loader."""
        library = self.module.lib
        return Functions(lambda name: getattr(library, name, None), "loader")

    def instance_functions(self, instance: Any) -> Functions:
        """The functions of a ``VkInstance`` and of its physical devices."""
        return self._functions(lambda name: self._get_instance_proc_addr(instance, name), "VkInstance")

    def device_functions(self, instance_functions: Functions, device: Any) -> Functions:
        """The functions of a ``VkDevice``, its queues and command buffers, without the loader in between."""
        get_device_proc_addr = instance_functions.vkGetDeviceProcAddr
        return self._functions(lambda name: get_device_proc_addr(device, name), "VkDevice")
