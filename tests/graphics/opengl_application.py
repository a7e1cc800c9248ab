"""A program that draws with OpenGL and without a window, for the tests: EGL and GL by ctypes, and nothing of ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

EGL_NO_CONFIG: Final = None
EGL_OPENGL_API: Final = 0x30A2
EGL_PLATFORM_DEVICE_EXT: Final = 0x313F
EGL_PLATFORM_SURFACELESS_MESA: Final = 0x31DD
GL_RENDERER: Final = 0x1F01
# What eglCreateContext is asked for: 4.5, and the profile.
_ATTRIBUTES: Final = (0x3098, 4, 0x30FB, 5, 0x30FD)
_CORE, _COMPATIBLE, _END = 1, 2, 0x3038


class OpenGLMissingError(Exception):
    """There is no such OpenGL; the message says what there is."""


class EGL:
    """libEGL, with the extensions that reach a device without a display server."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libEGL.so.1")
        except OSError as error:
            raise OpenGLMissingError(str(error)) from None
        self._library.eglGetProcAddress.restype = ctypes.c_void_p

    def address(self, name: str) -> int:
        """The address of a function of EGL or GL."""
        found: int | None = self._library.eglGetProcAddress(name.encode())
        if not found:
            raise OpenGLMissingError(f"EGL finds no {name}")
        return found

    def call(self, name: str, *arguments: Any, returns: Any = ctypes.c_void_p) -> Any:
        """Call a function; ints are passed as 64 bits, which holds handles and enums alike."""
        given = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments]
        return ctypes.CFUNCTYPE(returns)(self.address(name))(*given)

    def displays(self) -> Iterator[int]:
        """The devices as displays, and then Mesa without a device."""
        count = ctypes.c_int(0)
        self.call("eglQueryDevicesEXT", 0, None, ctypes.byref(count))
        devices = (ctypes.c_void_p * count.value)()
        self.call("eglQueryDevicesEXT", count.value, devices, ctypes.byref(count))
        for device in devices[: count.value]:
            yield self.call("eglGetPlatformDisplayEXT", EGL_PLATFORM_DEVICE_EXT, device, None)
        yield self.call("eglGetPlatformDisplayEXT", EGL_PLATFORM_SURFACELESS_MESA, None, None)


class OpenGLApplication:
    """A context without a surface, current in the thread that made it, of the device whose renderer has this name."""

    def __init__(self, renderer: str, *, core: bool = True) -> None:
        self._egl = EGL()
        self._attributes = *_ATTRIBUTES, _CORE if core else _COMPATIBLE, _END
        found = []
        for display in self._egl.displays():
            if display and self._open(display):
                if renderer in self.text(GL_RENDERER).lower():
                    return
                found.append(self.text(GL_RENDERER))
                self.close()
        raise OpenGLMissingError(f"no device of EGL draws with {renderer!r}; there are {found}")

    def _open(self, display: int) -> bool:
        """Make a context of this display current; whether there is one."""
        self.display = display
        if self._egl.call("eglInitialize", display, None, None, returns=ctypes.c_uint):
            self._egl.call("eglBindAPI", EGL_OPENGL_API)
            attributes = (ctypes.c_int * len(self._attributes))(*self._attributes)
            self.context = self._egl.call("eglCreateContext", display, EGL_NO_CONFIG, None, attributes)
            if self.context and self.make_current():
                return True
            self._egl.call("eglTerminate", display)
        return False

    def make_current(self) -> bool:
        """Make the context current in the calling thread; it must be current in no other."""
        return bool(self._egl.call("eglMakeCurrent", self.display, None, None, self.context, returns=ctypes.c_uint))

    def close(self) -> None:
        self._egl.call("eglMakeCurrent", self.display, None, None, None)
        self._egl.call("eglDestroyContext", self.display, self.context)
        self._egl.call("eglTerminate", self.display)

    def gl(self, name: str, *arguments: Any, returns: Any = None) -> Any:
        """Call a function of GL in the current context."""
        return self._egl.call(name, *arguments, returns=returns)

    def address(self, name: str) -> int:
        """The address of a function of GL: what its users pass as get_proc_address."""
        return self._egl.address(name)

    def text(self, name: int) -> str:
        said: bytes = self.gl("glGetString", name, returns=ctypes.c_char_p)
        return said.decode()


class Doubled:
    """A context's loader with some functions in place of the driver's: (result, *parameters), and what is called."""

    def __init__(self, opengl: OpenGLApplication, **functions: tuple[tuple[Any, ...], Callable[..., Any]]) -> None:
        self._find = opengl.address
        self._made = {name: ctypes.CFUNCTYPE(*kind)(call) for name, (kind, call) in functions.items()}

    def __call__(self, name: str) -> int:
        if name in self._made:
            return ctypes.cast(self._made[name], ctypes.c_void_p).value or 0
        return self._find(name)


def with_extensions(opengl: OpenGLApplication, extensions: list[str], minor: int = 5, **functions: Any) -> Doubled:
    """A loader of a context that says that it has these extensions, and no others, and is of 4.`minor`."""
    names = [ctypes.create_string_buffer(name.encode()) for name in extensions]

    def integer(what: int, out: Any) -> None:
        if what == 0x821D:  # GL_NUM_EXTENSIONS
            out[0] = len(names)
        elif what == 0x821C:  # GL_MINOR_VERSION
            out[0] = minor
        else:
            opengl.gl("glGetIntegerv", what, out)

    functions["glGetIntegerv"] = (None, ctypes.c_uint, ctypes.POINTER(ctypes.c_int)), integer
    kind = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    functions["glGetStringi"] = kind, lambda _, index: ctypes.addressof(names[index])
    return Doubled(opengl, **functions)
