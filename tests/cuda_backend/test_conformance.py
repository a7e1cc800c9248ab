"""The conformance kit on the CUDA backend: on a simulated driver, or (GPUINTEROP_TEST_CUDA=real) on the GPU."""

from gpuinterop.testing.test_conformance import *  # noqa: F403
