"""cffi's types of Vulkan, from ``declarations.h``. Importing this module needs cffi."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from cffi import FFI

ffi: Any = FFI()
ffi.cdef((files(__package__) / "declarations.h").read_text(encoding="ascii"))
