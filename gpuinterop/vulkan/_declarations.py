"""cffi's types of Vulkan, made of the declarations in ``declarations.h``. Importing this needs cffi."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from cffi import FFI

ffi: Any = FFI()
ffi.cdef((files(__package__) / "declarations.h").read_text(encoding="ascii"))
