"""The kit runs every suite that it has."""

from importlib import import_module


def test_every_suite_is_run() -> None:
    test_conformance = import_module(
        "gpuinterop.testing.test_conformance"
    )  # first: it has the suites' asserts rewritten
    suites = import_module("gpuinterop.testing.suites")
    run = {base for one in vars(test_conformance).values() if isinstance(one, type) for base in one.__mro__}
    assert {name for name in suites.__all__ if name.endswith("Suite") and getattr(suites, name) not in run} == set()
