"""Tests that fail on AMD's runtime for what AMD's code does, by name: strict, so that one which passes is noticed.

Lines are of clr f9f995c6 (October 2024, ROCm 6.3).
"""

from __future__ import annotations

from typing import Final

AMDS_OWN: Final = {
    "TestAllocation::test_nothing_is_left_over[hip:0]": "an import is never given back (hip_vm.cpp:246, clr #193)",
    "test_where_imported_memory_is": "it names the device that has imported it (hip_vm.cpp:238)",
}
