"""The conformance kit, unchanged, on the vendor's backend and whichever driver the run has."""

from gpuinterop.testing.test_conformance import *  # noqa: F403
