"""The kit runs every suite that it has."""

from importlib import import_module

import pytest

from gpuinterop.capabilities import Operation
from gpuinterop.handles import OpaqueFd
from gpuinterop.testing import requires


def test_every_suite_is_run() -> None:
    test_conformance = import_module(
        "gpuinterop.testing.test_conformance"
    )  # first: it has the suites' asserts rewritten
    suites = import_module("gpuinterop.testing.suites")
    run = {base for one in vars(test_conformance).values() if isinstance(one, type) for base in one.__mro__}
    assert {name for name in suites.__all__ if name.endswith("Suite") and getattr(suites, name) not in run} == set()


def test_a_requirement_is_a_pair() -> None:
    """A type by itself, its operation's parentheses forgotten, is refused where it stands."""
    with pytest.raises(TypeError, match=r"expected pairs such as .* got OpaqueFd by itself"):
        requires(Operation.MAP_BUFFER, OpaqueFd)
