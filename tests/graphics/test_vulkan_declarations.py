"""The C compiler compares declarations.h, of which gpuinterop.vulkan makes its types, with Vulkan's own headers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from gpuinterop.errors import BackendUnavailableError
from gpuinterop.testing.simulated.build import compiler
from gpuinterop.vulkan import _api
from gpuinterop.vulkan._declarations import ffi
from tests.limits import LIMIT
from tests.missing_vulkan import give_up

HEADER = "#include <vulkan/vulkan_core.h>\n"
DECLARATIONS = (files("gpuinterop.vulkan") / "declarations.h").read_text(encoding="ascii")

NAMES = (
    ("((COMMAND_)?BUFFER_USAGE_.*|FORMAT_FEATURE_.*)", r"\1_BIT"),
    ("(MEMORY|SEMAPHORE)_HANDLE_(.*)", r"EXTERNAL_\1_HANDLE_TYPE_\2_BIT"),
    ("(.*_FOREIGN|.*_HOST_ALLOCATION_BIT|.*_DMA_BUF_BIT)", r"\1_EXT"),
    ("FEATURE_(DEDICATED_ONLY)", r"EXTERNAL_MEMORY_FEATURE_\1_BIT"),
    ("(MEMORY|SEMAPHORE)_((EX|IM)PORTABLE)", r"EXTERNAL_\1_FEATURE_\2_BIT"),
    ("SEMAPHORE_(BINARY|TIMELINE)", r"SEMAPHORE_TYPE_\1"),
    ("BUFFER_STORAGE", "BUFFER_STORAGE_BUFFER"),
    ("BUFFER_DEVICE_ADDRESS", "BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT"),
    ("(MEMORY_ALLOCATE_DEVICE_ADDRESS)", r"\1_BIT"),
    ("(BUFFER|IMAGE)_((TRANSFER|STORAGE|SAMPLED|COLOR|INPUT).*)", r"\1_USAGE_\2_BIT"),
    ("(TILING|LAYOUT)_(.*)", r"IMAGE_\1_\2"),
    ("ASPECT_(.*)", r"IMAGE_ASPECT_\1_BIT"),
    ("MEMORY_((DEVICE|HOST)_.*)", r"MEMORY_PROPERTY_\1_BIT"),
    ("(QUEUE_(?!FAMILY)|ACCESS_)(.*)", r"\1\2_BIT"),
    ("STAGE_(.*)", r"PIPELINE_STAGE_\1_BIT"),
    ("DEVICE_TYPE_(.*)", r"PHYSICAL_DEVICE_TYPE_\1"),
)
"""Patterns of the names in _api.py, and what the headers have for them behind VK_."""


def complaint(source: str, output: Path) -> str:
    """What the compiler says against a C program; empty if it accepts it."""
    try:
        command = [*compiler(), "-std=c11", "-Wall", "-Werror", "-c", "-o", str(output), "-xc", "-"]
    except BackendUnavailableError as error:
        return str(error)
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=LIMIT, check=False)
    return done.stderr if done.returncode else ""


def ours() -> str:
    """The declarations without their enumerations; the names that they give to other types begin with Our.

    A declaration refers to the header's types. A handle is declared again: C allows that where nothing differs.
    """
    text = re.sub(r"typedef enum \{.*?\} \w+;", "", DECLARATIONS, flags=re.DOTALL)
    text = re.sub(r"\} (Vk\w+);", r"} Our\1;", text)
    text = re.sub(r"\(\*(PFN_\w+)\)", r"(*Our\1)", text)
    return re.sub(r"typedef u?int\d+_t [^;]*;", lambda found: re.sub(r"\bVk", "OurVk", found[0]), text)


def claims() -> Iterator[str]:
    """What has to hold, in C. The values, sizes and offsets are cffi's."""
    for name in ffi.list_types()[0]:
        kind = ffi.typeof(name)
        if kind.kind == "enum":
            yield from (f"{name} == {value}" for name, value in kind.relements.items())
        elif kind.kind == "primitive":
            yield f"sizeof({name}) == {ffi.sizeof(name)}"
            yield f"(({name})-1 < 0) == ((Our{name})-1 < 0)"
        elif kind.kind == "struct" and kind.fields is not None:
            yield f"sizeof({name}) == {ffi.sizeof(name)}"
            for member, field in kind.fields:
                yield f"offsetof({name}, {member}) == {field.offset}"
                yield f"SAME((({name} *)0)->{member}, ((Our{name} *)0)->{member})"
        elif name.startswith("PFN_"):
            yield f"SAME(({name})0, (Our{name})0)"
    yield from (f"{name} == {code}" for code, (name, _) in _api._RESULTS.items())
    for name in _api.__annotations__:
        if type(value := getattr(_api, name)) is int:
            for pattern, full in NAMES:
                name = re.sub(f"^{pattern}$", full, name)
            yield f"VK_{name} == {value:#x}"


def test_the_headers_declare_the_same(tmp_path: Path) -> None:
    """Values of enumerations and results; sizes, offsets and types of structs; what functions take and return."""
    output = tmp_path / "checked.o"
    if missing := complaint(HEADER, output):
        give_up(f"there is no C compiler with Vulkan's headers: {missing}")
    same = "#include <stddef.h>\n#define SAME(a, b) __builtin_types_compatible_p(__typeof__(a), __typeof__(b))\n"
    checks = "".join(f'_Static_assert({claim}, "not so");\n' for claim in claims())
    assert complaint(HEADER + same + ours() + checks, output) == ""
