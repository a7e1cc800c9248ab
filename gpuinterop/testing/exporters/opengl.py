"""OpenGL without a window: an EGL context on its own device, for reports and tests."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any, Final, Self

from ..._arguments import NoCopy
from ...errors import BackendUnavailableError, DriverError
from ...opengl._context import current_context
from ...opengl._handoff import gaps
from .base import Driver, DriverList

__all__ = ["HeadlessContext", "device_count", "list_drivers"]

_PLATFORM_DEVICE: Final = 0x313F
_OPENGL_API: Final = 0x30A2
_CONFIG: Final = (0x3040, 0x0008, 0x3033, 0x0001, 0x3038)  # RENDERABLE_TYPE OPENGL, SURFACE_TYPE PBUFFER
_CONTEXT: Final = (0x3098, 4, 0x30FB, 5, 0x30FD, 1, 0x3038)  # version 4.5, core profile
_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "eglQueryDevicesEXT": (c_int, c_int, c_void_p, c_void_p),
    "eglGetPlatformDisplayEXT": (c_void_p, c_int, c_void_p, c_void_p),
    "eglInitialize": (c_int, c_void_p, c_void_p, c_void_p),
    "eglBindAPI": (c_int, c_int),
    "eglChooseConfig": (c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p),
    "eglCreateContext": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "eglMakeCurrent": (c_int, c_void_p, c_void_p, c_void_p, c_void_p),
    "eglDestroyContext": (c_int, c_void_p, c_void_p),
    "eglTerminate": (c_int, c_void_p),
    "eglGetError": (c_int,),
}

_opened: Final = Counter[int]()
"""Contexts per display; a driver keeps its threads until the display is terminated."""

_FIX: Final = "Install the GPU's OpenGL driver, or Mesa's; on Debian: apt install libegl1 libgl1-mesa-dri"


def _ints(values: Sequence[int]) -> Any:
    return (c_int * len(values))(*values)


class _Egl:
    """EGL's functions."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libEGL.so.1")
        except OSError as error:
            raise BackendUnavailableError(f"EGL could not be opened ({error}).", fix=_FIX) from None
        self.find = library.eglGetProcAddress
        self.find.restype, self.find.argtypes = c_void_p, (c_char_p,)
        for name, (result, *parameters) in _FUNCTIONS.items():
            address = self.find(name.encode())
            if not address:
                raise BackendUnavailableError(f"EGL has no {name}.", fix=_FIX)
            setattr(self, name, ctypes.CFUNCTYPE(result, *parameters)(address))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def check(self, name: str, *arguments: Any) -> Any:
        """Call a function that returns 0 if it fails."""
        if not (found := getattr(self, name)(*arguments)):
            code = self.eglGetError()
            raise DriverError(name, code, f"EGL error {code:#06x}")
        return found

    def devices(self) -> list[int]:
        """EGLDeviceEXT of each GPU, and of Mesa's software renderer."""
        count = c_int()
        if not self.eglQueryDevicesEXT(0, None, byref(count)) or not count.value:
            raise BackendUnavailableError("EGL finds no driver.", fix=_FIX)
        found = (c_void_p * count.value)()
        self.check("eglQueryDevicesEXT", count, found, byref(count))
        return [one or 0 for one in found]


def device_count() -> int:
    """How many devices EGL lists. Raises `BackendUnavailableError` without EGL, or if it has no driver."""
    return len(_Egl().devices())


def list_drivers() -> DriverList:
    """List the OpenGL driver of each device that EGL lists. Never raises because OpenGL is missing.

    It opens a context on each device. Afterwards no context is current in the calling thread. A device without an
    OpenGL 4.5 context is left out, and the list's `reason` names it. `reason` also explains why the list is empty.
    """
    found = DriverList()
    try:
        count = device_count()
    except BackendUnavailableError as error:
        found.reason = str(error)
        return found
    for index in range(count):
        with found.noting(f"EGL device {index}"), HeadlessContext(index):
            context = current_context()
            found.append(
                Driver(
                    api="opengl",
                    index=index,
                    name=context.name,
                    driver="OpenGL",
                    version=context.version,
                    identity=context.identity,
                    capabilities=context.capabilities,
                    endpoint_gap="",
                    gaps=gaps,
                )
            )
    return found


class HeadlessContext(NoCopy):
    """An OpenGL 4.5 context without a window, on EGL's device `index`, current in the thread that made it.

    Raises `BackendUnavailableError` without EGL, or if it has no driver, and `DriverError` if the device has no such
    context.
    """

    def __init__(self, index: int = 0) -> None:
        self._egl = egl = _Egl()
        self._display = egl.check("eglGetPlatformDisplayEXT", _PLATFORM_DEVICE, egl.devices()[index], None)
        egl.check("eglInitialize", self._display, None, None)
        egl.check("eglBindAPI", _OPENGL_API)
        config, count = c_void_p(), c_int()
        egl.check("eglChooseConfig", self._display, _ints(_CONFIG), byref(config), 1, byref(count))
        self._context = egl.check("eglCreateContext", self._display, config, None, _ints(_CONTEXT))
        _opened[self._display] += 1
        self.make_current()

    def make_current(self, current: bool = True) -> None:
        """Make it current in the calling thread, or no context."""
        self._egl.check("eglMakeCurrent", self._display, None, None, self._context if current else None)

    def function(self, name: str, result: Any, *parameters: Any) -> Any:
        """Return an OpenGL function by its name, with its result and parameter types."""
        return ctypes.CFUNCTYPE(result, *parameters)(self._egl.find(name.encode()))

    def close(self) -> None:
        """Destroy the context. Idempotent."""
        context, self._context = self._context, None
        if context is not None:
            self.make_current(False)
            self._egl.check("eglDestroyContext", self._display, context)
            _opened[self._display] -= 1
            if not _opened[self._display]:
                self._egl.check("eglTerminate", self._display)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
