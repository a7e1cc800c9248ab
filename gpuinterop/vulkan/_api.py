"""Vulkan's functions and cffi types, of PyPI's `vulkan` or of this package, and the check of their results.

PyPI's own wrappers raise ``KeyError`` for unknown results (such as ``VK_ERROR_INVALID_EXTERNAL_HANDLE``), and do not
accept raw handles. Here a VkResult is an int. A handle is any value that can be cast to one, unless its type shows
another kind. `Any` stays in this package: cffi has no static types.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final
from weakref import WeakKeyDictionary

from .._arguments import check_int
from ..errors import ArgumentTypeError, BackendUnavailableError, DriverError, InvalidArgumentError, OutOfMemoryError
from ..installing import install_vulkan, pip_install

# -- numbers of the API ----------------------------------------------------------------------------------------------

QUEUE_FAMILY_IGNORED: Final = 0xFFFFFFFF
QUEUE_FAMILY_EXTERNAL: Final = 0xFFFFFFFE
QUEUE_FAMILY_FOREIGN: Final = 0xFFFFFFFD

MEMORY_HANDLE_OPAQUE_FD: Final = 0x1
MEMORY_HANDLE_HOST_ALLOCATION: Final = 0x80
MEMORY_HANDLE_DMA_BUF: Final = 0x200
SEMAPHORE_HANDLE_OPAQUE_FD: Final = 0x1

FEATURE_DEDICATED_ONLY: Final = 0x1  # only for memory; for semaphores, 0x1 means exportable
MEMORY_EXPORTABLE: Final = 0x2
MEMORY_IMPORTABLE: Final = 0x4
SEMAPHORE_EXPORTABLE: Final = 0x1

SEMAPHORE_BINARY: Final = 0
SEMAPHORE_TIMELINE: Final = 1

BUFFER_TRANSFER_SRC: Final = 0x1
BUFFER_TRANSFER_DST: Final = 0x2
BUFFER_STORAGE: Final = 0x20
BUFFER_DEVICE_ADDRESS: Final = 0x20000
BUFFER_USAGE_UNIFORM_TEXEL_BUFFER: Final = 0x4
BUFFER_USAGE_UNIFORM_BUFFER: Final = 0x10
BUFFER_USAGE_INDEX_BUFFER: Final = 0x40
BUFFER_USAGE_VERTEX_BUFFER: Final = 0x80
BUFFER_USAGE_INDIRECT_BUFFER: Final = 0x100
MEMORY_ALLOCATE_DEVICE_ADDRESS: Final = 0x2

IMAGE_TRANSFER_SRC: Final = 0x1
IMAGE_TRANSFER_DST: Final = 0x2
IMAGE_SAMPLED: Final = 0x4
IMAGE_STORAGE: Final = 0x8
IMAGE_COLOR_ATTACHMENT: Final = 0x10
IMAGE_INPUT_ATTACHMENT: Final = 0x80
FORMAT_FEATURE_SAMPLED_IMAGE: Final = 0x1
FORMAT_FEATURE_STORAGE_IMAGE: Final = 0x2
FORMAT_FEATURE_COLOR_ATTACHMENT: Final = 0x80
IMAGE_TYPE_2D: Final = 1
IMAGE_TYPE_3D: Final = 2
TILING_OPTIMAL: Final = 0
TILING_LINEAR: Final = 1
LAYOUT_UNDEFINED: Final = 0
LAYOUT_GENERAL: Final = 1
ASPECT_COLOR: Final = 1

MEMORY_DEVICE_LOCAL: Final = 0x1
MEMORY_HOST_VISIBLE: Final = 0x2
MEMORY_HOST_COHERENT: Final = 0x4

QUEUE_GRAPHICS: Final = 0x1
QUEUE_COMPUTE: Final = 0x2
QUEUE_TRANSFER: Final = 0x4

STAGE_TRANSFER: Final = 0x1000
STAGE_BOTTOM_OF_PIPE: Final = 0x2000
STAGE_HOST: Final = 0x4000
STAGE_ALL_COMMANDS: Final = 0x10000

ACCESS_TRANSFER_READ: Final = 0x800
ACCESS_TRANSFER_WRITE: Final = 0x1000
ACCESS_HOST_READ: Final = 0x2000
ACCESS_MEMORY_READ: Final = 0x8000
ACCESS_MEMORY_WRITE: Final = 0x10000

COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT: Final = 0x1
WHOLE_SIZE: Final = 0xFFFFFFFFFFFFFFFF
DEVICE_TYPE_CPU: Final = 4
DRIVER_ID_MESA_LLVMPIPE: Final = 13

SUCCESS: Final = 0
NOT_READY: Final = 1
TIMEOUT: Final = 2

_RESULTS: Final = {
    2: ("VK_TIMEOUT", ""),
    -1: ("VK_ERROR_OUT_OF_HOST_MEMORY", "the driver could not allocate host memory"),
    -2: ("VK_ERROR_OUT_OF_DEVICE_MEMORY", "the driver could not allocate device memory"),
    -3: ("VK_ERROR_INITIALIZATION_FAILED", "the driver could not be initialised"),
    -4: ("VK_ERROR_DEVICE_LOST", "the device is lost; destroy it and create a new one"),
    -5: ("VK_ERROR_MEMORY_MAP_FAILED", "the memory could not be mapped"),
    -6: ("VK_ERROR_LAYER_NOT_PRESENT", "a requested layer is not installed"),
    -7: ("VK_ERROR_EXTENSION_NOT_PRESENT", "the driver does not offer a requested extension"),
    -8: ("VK_ERROR_FEATURE_NOT_PRESENT", "the driver does not offer a requested feature"),
    -9: ("VK_ERROR_INCOMPATIBLE_DRIVER", "the loader found no usable driver"),
    -10: ("VK_ERROR_TOO_MANY_OBJECTS", "the driver allows no more objects of this kind"),
    -11: ("VK_ERROR_FORMAT_NOT_SUPPORTED", "the driver does not support this format for this use"),
    -12: ("VK_ERROR_FRAGMENTED_POOL", ""),
    -13: ("VK_ERROR_UNKNOWN", "the driver does not say why"),
    -1000069000: ("VK_ERROR_OUT_OF_POOL_MEMORY", ""),
    -1000072003: ("VK_ERROR_INVALID_EXTERNAL_HANDLE", "the handle is not one of the stated type, or of another driver"),
    -1000161000: ("VK_ERROR_FRAGMENTATION", ""),
    -1000257000: ("VK_ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS", "the requested address is not available"),
}

_FUNCTIONS: Final = {
    "VK_KHR_external_memory_fd": ("vkGetMemoryFdKHR", "vkGetMemoryFdPropertiesKHR"),
    "VK_KHR_external_semaphore_fd": ("vkGetSemaphoreFdKHR", "vkImportSemaphoreFdKHR"),
    "VK_EXT_external_memory_host": ("vkGetMemoryHostPointerPropertiesEXT",),
    "VK_KHR_timeline_semaphore": ("vkGetSemaphoreCounterValue", "vkSignalSemaphore"),
    "VK_KHR_get_memory_requirements2": ("vkGetBufferMemoryRequirements2", "vkGetImageMemoryRequirements2"),
    "VK_KHR_get_physical_device_properties2": (
        "vkGetPhysicalDeviceProperties2", "vkGetPhysicalDeviceFeatures2", "vkGetPhysicalDeviceFormatProperties2",
        "vkGetPhysicalDeviceImageFormatProperties2",
    ),
    "VK_KHR_external_memory_capabilities": ("vkGetPhysicalDeviceExternalBufferProperties",),
    "VK_KHR_external_semaphore_capabilities": ("vkGetPhysicalDeviceExternalSemaphoreProperties",),
}  # fmt: skip
"""The functions that each extension adds, if gpuinterop calls them."""

_OUT_OF_MEMORY: Final = (-1, -2)


def result_name(code: int) -> str:
    """The name of a VkResult; its number if it has no known name."""
    return _RESULTS.get(code, (f"VkResult {code}", ""))[0]


def check(call: str, code: int) -> int:
    """Raise for a negative VkResult, `OutOfMemoryError` or `DriverError`; return any other, because it is a status."""
    if code >= 0:
        return code
    symbol, meaning = _RESULTS.get(code, (f"VkResult {code}", ""))
    kind = OutOfMemoryError if code in _OUT_OF_MEMORY else DriverError
    raise kind(call, code, symbol, meaning)


def check_call(functions: Functions, call: str, *arguments: Any) -> int:
    """Call a function and :func:`check` its result."""
    return check(call, getattr(functions, call)(*arguments) or 0)  # void functions return None


def _choose(handles: Mapping[str, Any]) -> tuple[Any, bool]:
    """PyPI vulkan's ffi and True, if it made one of `handles`; else this package's ffi and False.

    Raises `BackendUnavailableError` if cffi is not installed.
    """
    pypi = getattr(sys.modules.get("vulkan"), "ffi", None)
    if pypi is not None and any(
        isinstance(handle, pypi.CData) and pypi.typeof(handle) == pypi.typeof(kind) for kind, handle in handles.items()
    ):
        return pypi, True
    try:
        from ._declarations import ffi
    except ImportError:
        raise BackendUnavailableError(
            "the Python package 'cffi' is not installed.", fix=pip_install("vulkan")
        ) from None
    return ffi, False


_LOADERS: Final = {"win32": "vulkan-1.dll", "darwin": "libvulkan.dylib"}


@cache
def _loader() -> ctypes.CDLL:
    """The Vulkan loader, under the name that PyPI's `vulkan` uses too; `BackendUnavailableError` if there is none."""
    try:
        return ctypes.CDLL(_LOADERS.get(sys.platform, "libvulkan.so.1"))
    except OSError as error:
        raise BackendUnavailableError(
            f"the Vulkan loader could not be opened ({error}).", fix=install_vulkan()
        ) from None


def _exported(name: str) -> int:
    """The address of a function that the loader exports, or 0."""
    function = getattr(_loader(), name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


# Objects that a struct points to, which must exist as long as the struct: cffi does not keep them.
_pointees: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
_stypes: dict[str, int | None] = {}
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z])(?=[0-9])")


_INTEGER: Final = re.compile(r"u?int\w*_t|s?size_t|(unsigned )?(short|int|long|long long)")
"""cffi's primitive types that hold an address or a 64-bit handle."""


@cache
def _spelling(kind: Any) -> str:
    """Write a C type with Vulkan's handle names: ``struct VkQueue_T *`` becomes ``VkQueue``."""
    return str(re.sub(r"\b(Vk\w+?)_T \*", r"\1", kind.cname.replace("struct ", "")))


class Functions:
    """The functions of a loader, an instance or a device, each looked up on first use.

    `lookup` maps a name to the function or to None. `owner` is ``VkInstance`` or ``VkDevice``, for messages.
    """

    def __init__(self, lookup: Callable[[str], Any], owner: str) -> None:
        self._lookup = lookup
        self._owner = owner

    def has(self, *names: str) -> bool:
        """Whether all these functions can be called."""
        return all(name in self.__dict__ or self._lookup(name) is not None for name in names)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("vk"):
            raise AttributeError(name)
        function = self._lookup(name)
        if function is None:
            extension = next((extension for extension, added in _FUNCTIONS.items() if name in added), None)
            if extension is None:
                raise InvalidArgumentError("vk", f"the {self._owner} has no {name}; create it for a newer Vulkan.")
            raise InvalidArgumentError(
                "vk",
                f"the {self._owner} was created without {extension}, which {name} needs; enable the extensions of "
                "gpuinterop.vulkan.required_extensions(physical_device).",
            )
        self.__dict__[name] = function
        return function


class Api:
    """Types of one cffi, and functions from a ``vkGetInstanceProcAddr``; by default, the system loader's.

    `handles` are the caller's, by kind. If one is PyPI vulkan's, all types are PyPI's, and `typed` is True. Raises
    `BackendUnavailableError` if cffi or the loader is missing.
    """

    def __init__(self, handles: Mapping[str, Any], get_instance_proc_addr: Any = None) -> None:
        self.ffi, self.typed = _choose(handles)
        if get_instance_proc_addr is None:
            get_instance_proc_addr = _exported("vkGetInstanceProcAddr")
        self._get_instance_proc_addr = self.handle(
            "PFN_vkGetInstanceProcAddr", get_instance_proc_addr, "get_instance_proc_addr"
        )

    def handle(self, kind: str, handle: Any, argument: str = "") -> Any:
        """Cast a handle and refuse null, which drivers dereference without a check."""
        native = self.cast(kind, handle, argument)
        if not self.address(native):
            raise InvalidArgumentError(argument or kind, f"the {kind} is null; check the call that created it.")
        return native

    def cast(self, kind: str, handle: Any, argument: str = "") -> Any:
        """Make a handle or pointer of `kind` from an int, a ctypes value, or cffi's `kind`, ``void *`` or integer.

        The value may come from another cffi. None and 0 are null. `argument` is its name in messages. Drivers do not
        check a handle's kind: a wrong one crashes them or gives wrong results. So this checks the kind that cffi
        reports; an int and a ``void *`` have none.
        """
        argument = argument or kind
        value: Any
        if isinstance(handle, self.ffi.CData):
            ctype = self.ffi.typeof(handle)
            spelling = _spelling(ctype)
            if ctype.kind == "primitive" and _INTEGER.fullmatch(spelling):
                value = check_int(int(handle), argument, minimum=0)
            elif spelling in (_spelling(self.ffi.typeof(kind)), "void *"):
                value = handle
            else:
                raise ArgumentTypeError(argument, f"expected a {kind}, got a {spelling}; pass the {kind} itself.")
        else:
            number = getattr(handle, "value", handle)
            number = 0 if number is None else number
            value = check_int(number, argument, minimum=0) if hasattr(number, "__index__") else None
        try:
            return self.ffi.cast(kind, value)
        except TypeError:
            raise ArgumentTypeError(
                argument, f"expected PyPI vulkan's {kind}, or its value as an int, got {type(handle).__name__}."
            ) from None

    def address(self, handle: Any) -> int:
        return int(self.ffi.cast("uintptr_t", handle))

    def for_caller(self, handle: Any) -> Any:
        """A handle in the caller's form: an object of `ffi`, or an int."""
        return handle if self.typed else self.address(handle)

    def enumerators(self, kind: str) -> dict[str, int]:
        """The values of an enumeration by name."""
        values: dict[str, int] = self.ffi.typeof(kind).relements
        return values

    def _stype(self, kind: str) -> int | None:
        """A struct's ``VkStructureType``; None if it has none."""
        if self.ffi.typeof(kind).fields[0][0] != "sType":
            return None
        return self.enumerators("VkStructureType")["VK_STRUCTURE_TYPE_" + _WORDS.sub("_", kind[2:]).upper()]

    def new(self, kind: str, **fields: Any) -> Any:
        """Make a struct with sType set. It keeps the objects that it points to."""
        if kind not in _stypes:
            _stypes[kind] = self._stype(kind)
        stype = _stypes[kind]
        struct = self.ffi.new(kind + " *", fields if stype is None else {"sType": stype, **fields})
        pointers = tuple(value for value in fields.values() if isinstance(value, self.ffi.CData))
        if pointers:
            _pointees[struct] = pointers
        return struct

    def array(self, kind: str, items: Iterable[Any]) -> Any:
        """Make a C array, which keeps its items."""
        values = list(items)
        array = self.ffi.new(f"{kind}[]", values)
        _pointees[array] = tuple(value for value in values if isinstance(value, self.ffi.CData))
        return array

    def strings(self, names: Iterable[str]) -> Any:
        return self.array("char *", [self.ffi.new("char[]", name.encode()) for name in names])

    def listed(self, kind: str, functions: Functions, call: str, *arguments: Any) -> Iterator[Any]:
        """Enumerate structs or handles: one call returns the number, the next one the items."""
        count = self.ffi.new("uint32_t *")
        check_call(functions, call, *arguments, count, self.ffi.NULL)
        items = self.ffi.new(f"{kind}[]", count[0])
        check_call(functions, call, *arguments, count, items)
        yield from items[0 : count[0]]

    def text(self, chars: Any) -> str:
        return str(self.ffi.string(chars).decode("utf-8", "replace"))

    def _functions(self, lookup: Callable[[str], Any], owner: str) -> Functions:
        ffi = self.ffi

        def find(name: str) -> Any:
            # Below the version that made it core, a promoted function has only its extension's name.
            for symbol in (name,) if name.endswith(("KHR", "EXT")) else (name, f"{name}KHR"):
                if (pointer := lookup(symbol)) != ffi.NULL:
                    return ffi.cast(f"PFN_{name}", pointer)
            return None

        return Functions(find, owner)

    def global_functions(self) -> Functions:
        """Functions that need no instance."""
        return self._functions(lambda name: self._get_instance_proc_addr(self.ffi.NULL, name.encode()), "loader")

    def exported_functions(self) -> Functions:
        """Functions that the system's loader exports, which work for all of its instances."""
        return self._functions(lambda name: self.ffi.cast("void *", _exported(name)), "loader")

    def instance_functions(self, instance: Any) -> Functions:
        """Functions of a ``VkInstance`` and of its physical devices."""
        return self._functions(lambda name: self._get_instance_proc_addr(instance, name.encode()), "VkInstance")

    def device_functions(self, instance_functions: Functions, device: Any) -> Functions:
        """Functions of a ``VkDevice``, its queues and command buffers, without the loader in between."""
        get_device_proc_addr = instance_functions.vkGetDeviceProcAddr
        return self._functions(lambda name: get_device_proc_addr(device, name.encode()), "VkDevice")
