"""The conformance kit, for every installed backend."""

from gpuinterop.testing.test_conformance import *  # noqa: F403
