"""OpenGL's functions, found by the current context's own loader and called through ctypes; and its constants."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from ..errors import ArgumentTypeError, DriverError, OutOfMemoryError

# -- numbers of the API ----------------------------------------------------------------------------------------------

OUT_OF_MEMORY: Final = 0x0505
RENDERER: Final = 0x1F01
VERSION: Final = 0x1F02
EXTENSIONS: Final = 0x1F03
MAJOR_VERSION: Final = 0x821B
MINOR_VERSION: Final = 0x821C
NUM_EXTENSIONS: Final = 0x821D
DEVICE_UUID: Final = 0x9597
DRIVER_UUID: Final = 0x9598

BUFFER: Final = 0x82E0
BUFFER_SIZE: Final = 0x8764
BUFFER_MAPPED: Final = 0x88BC
BUFFER_IMMUTABLE_STORAGE: Final = 0x821F
PIXEL_PACK_BUFFER: Final = 0x88EB
PIXEL_UNPACK_BUFFER: Final = 0x88EC
PIXEL_PACK_BUFFER_BINDING: Final = 0x88ED
PIXEL_UNPACK_BUFFER_BINDING: Final = 0x88EF

HANDLE_TYPE_OPAQUE_FD: Final = 0x9586
DEDICATED_MEMORY_OBJECT: Final = 0x9581
TEXTURE_TILING: Final = 0x9580
NUM_TILING_TYPES: Final = 0x9582
TILING_TYPES: Final = 0x9583
OPTIMAL_TILING: Final = 0x9584
LINEAR_TILING: Final = 0x9585
LAYOUT_GENERAL: Final = 0x958D
TIMELINE_SEMAPHORE_VALUE: Final = 0x9595
SEMAPHORE_TYPE: Final = 0x95B3
SEMAPHORE_TYPE_TIMELINE: Final = 0x95B5

TEXTURE_2D: Final = 0x0DE1
TEXTURE_BINDING_2D: Final = 0x8069
TEXTURE_RECTANGLE: Final = 0x84F5
TEXTURE_BINDING_RECTANGLE: Final = 0x84F6
TEXTURE_WIDTH: Final = 0x1000
TEXTURE_HEIGHT: Final = 0x1001
TEXTURE_INTERNAL_FORMAT: Final = 0x1003

SYNC_GPU_COMMANDS_COMPLETE: Final = 0x9117
TIMEOUT_EXPIRED: Final = 0x911B
WAIT_FAILED: Final = 0x911D

_ERRORS: Final = {
    0x0500: "GL_INVALID_ENUM",
    0x0501: "GL_INVALID_VALUE",
    0x0502: "GL_INVALID_OPERATION",
    OUT_OF_MEMORY: "GL_OUT_OF_MEMORY",
    0x0507: "GL_CONTEXT_LOST",
}

_KINDS: Final[dict[str, Any]] = {
    "v": None,
    "b": ctypes.c_ubyte,
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "n": ctypes.c_ssize_t,
    "q": ctypes.c_uint64,
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
}
_SIGNATURES: Final = {
    "glBindBuffer": "vuu",
    "glBindTexture": "vuu",
    "glClientWaitSync": "upuq",
    "glCreateBuffers": "vip",
    "glCreateMemoryObjectsEXT": "vip",
    "glCreateSemaphoresNV": "vip",
    "glCreateTextures": "vuip",
    "glDeleteBuffers": "vip",
    "glDeleteMemoryObjectsEXT": "vip",
    "glDeleteSemaphoresEXT": "vip",
    "glDeleteSync": "vp",
    "glDeleteTextures": "vip",
    "glFenceSync": "puu",
    "glFlush": "v",
    "glGenSemaphoresEXT": "vip",
    "glGetError": "u",
    "glGetIntegerv": "vup",
    "glGetInternalformativ": "vuuuip",
    "glGetNamedBufferParameteri64v": "vuup",
    "glGetNamedBufferParameteriv": "vuup",
    "glGetObjectLabel": "vuuipp",
    "glGetString": "su",
    "glGetStringi": "suu",
    "glGetTextureLevelParameteriv": "vuiup",
    "glGetTextureSubImage": "vuiiiiiiiuuip",
    "glGetUnsignedBytei_vEXT": "vuup",
    "glGetUnsignedBytevEXT": "vup",
    "glImportMemoryFdEXT": "vuqui",
    "glImportSemaphoreFdEXT": "vuui",
    "glIsBuffer": "bu",
    "glIsTexture": "bu",
    "glMemoryObjectParameterivEXT": "vuup",
    "glNamedBufferStorageMemEXT": "vunuq",
    "glObjectLabel": "vuuip",
    "glPixelStorei": "vui",
    "glSemaphoreParameterivNV": "vuup",
    "glTextureParameteri": "vuui",
    "glTextureStorageMem2DEXT": "vuiuiiuq",
    "glTextureSubImage2D": "vuiiiiiuup",
}
"""The result and the parameters of each function, in the letters above."""

Lookup = Callable[[str], Any]


class Loader(NamedTuple):
    """Finds the current context and its functions: EGL, GLX, or the user's loader.

    `current` returns the context's address; for the user's loader, which has no such call, the thread's number. `find`
    maps a name to an address.
    """

    name: str
    current: Callable[[], int | None]
    find: Lookup


_LOADERS: Final = {
    "EGL": (("libEGL.so.1",), "eglGetCurrentContext", "eglGetProcAddress"),
    "GLX": (("libGLX.so.0", "libGL.so.1"), "glXGetCurrentContext", "glXGetProcAddressARB"),
}


def _find(lookup: Any, name: str) -> Any:
    lookup.restype, lookup.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    return lookup(name.encode())


def current_loader(find: Lookup | None) -> Loader | None:
    """The loader of the context that is current in this thread, or None.

    It looks only at loaded libraries, because only these can have a current context.
    """
    for name, (libraries, current, lookup) in _LOADERS.items():
        for library in libraries:
            try:  # PyDLL: these calls are too short to release the interpreter's lock
                opened = ctypes.PyDLL(library, mode=os.RTLD_NOLOAD)
            except (OSError, AttributeError):  # not loaded; or a system without RTLD_NOLOAD, EGL and GLX
                continue
            current_address = ctypes.PYFUNCTYPE(ctypes.c_void_p)((current, opened))
            if current_address():
                return Loader(name, current_address, find or partial(_find, getattr(opened, lookup)))
    return None if find is None else Loader("", threading.get_ident, find)


class Functions:
    """A context's functions, each looked up on first use."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    def __getattr__(self, name: str) -> Any:
        if name not in _SIGNATURES:
            raise AttributeError(name)
        result, *parameters = (_KINDS[letter] for letter in _SIGNATURES[name])
        function = ctypes.CFUNCTYPE(result, *parameters)(self._address(name))
        self.__dict__[name] = function
        return function

    def _address(self, name: str) -> int:
        function = self._lookup(name)
        address = function if isinstance(function, int) else ctypes.cast(function or 0, ctypes.c_void_p).value
        if not address:
            raise ArgumentTypeError(
                "get_proc_address", f"expected the address of {name}, got {function!r}; pass the context's own loader."
            )
        return address

    def unchecked(self, name: str) -> Any:
        """A function without a result, for 32-bit integers and pointers; called without checks, which is faster."""
        return ctypes.CFUNCTYPE(None)(self._address(name))

    def integer(self, name: str, *arguments: int) -> int:
        """Call a query that writes one 32-bit integer."""
        value = ctypes.c_int()
        getattr(self, name)(*arguments, ctypes.byref(value))
        return value.value

    def drop_errors(self) -> None:
        """Drop the errors of earlier calls."""
        for _ in range(16):  # a lost context returns errors forever
            if not self.glGetError():
                break

    def check(self, call: str, *arguments: Any) -> None:
        """Call a function, and raise for its error. Earlier errors are other code's, and are dropped.

        Raises `OutOfMemoryError` for ``GL_OUT_OF_MEMORY``, which drivers also report for memory that they cannot
        import, and `DriverError` for any other error.
        """
        self.drop_errors()
        getattr(self, call)(*arguments)
        if code := self.glGetError():
            kind = OutOfMemoryError if code == OUT_OF_MEMORY else DriverError
            raise kind(call, code, _ERRORS.get(code, f"{code:#06x}"))
