"""The conformance kit on the HIP backend, unchanged: on a simulated runtime, a forwarding one, or an AMD GPU."""

from gpuinterop.testing.test_conformance import *  # noqa: F403
