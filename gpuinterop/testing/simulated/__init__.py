"""Simulated CUDA and HIP drivers, to run test suites on machines without a GPU.

They are C libraries that replace NVIDIA's ``libcuda.so.1`` and AMD's ``libamdhip64.so``; the vendor's own Python
bindings load them. Memory is host memory, and streams are threads. To run a suite on one::

    python -m gpuinterop.testing.simulated cuda -- python -m pytest tests

The command compiles the library, once for each version of gpuinterop and of the C compiler. It then tests that the
backend works with it, and replaces its own process with your command. No run on a simulated driver counts for a real
device.

CUDA's device 0 has SwiftShader's UUID, so :func:`gpuinterop.match_device` finds it for a renderer on SwiftShader. HIP's
devices are matched by their PCI address, which software Vulkan does not have.

These variables change the drivers:

``GPUINTEROP_SIM_DEVICES=2``
    The number of devices, at most 16. Default: 1.
``GPUINTEROP_SIM_CUDA_VERSION=12090``, ``GPUINTEROP_SIM_HIP_VERSION=60300000``
    The version of the driver or the runtime, as the vendor encodes it.
``GPUINTEROP_SIM_INIT=803``
    The error that ``cuInit`` or ``hipInit`` returns, to simulate a driver that is installed but does not work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from ... import system
from .build import LIBRARIES, build

__all__ = ["assert_simulated", "build", "environment"]


def environment(vendor: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Compile the simulated driver if necessary, and return the variables of a process that uses it.

    Parameters
    ----------
    vendor : str
        ``cuda`` or ``hip``.
    variables : Mapping, optional
        The process's other variables. Default: those of this process.

    Returns
    -------
    dict
        `variables` with ``GPUINTEROP_BACKEND``, and the paths with which the bindings find the library.

    Raises
    ------
    BackendUnavailableError
        There is no C compiler, the compiler fails, or the cache folder cannot be created.

    Examples
    --------
    >>> import subprocess, sys
    >>> from gpuinterop.testing import simulated
    >>> command = [sys.executable, "-c", "import gpuinterop as gi; print(gi.device().name, end='')"]
    >>> subprocess.check_output(command, env=simulated.environment("cuda"), text=True)
    'Simulated GPU 0'
    """
    variables = os.environ if variables is None else variables
    folder = str(build(vendor).parent)
    paths = [folder, *filter(None, [variables.get("LD_LIBRARY_PATH")])]
    # hip-python 10 searches ROCM_PATH first, or /opt/rocm if it is not set.
    return {
        **variables, "GPUINTEROP_BACKEND": vendor, "LD_LIBRARY_PATH": os.pathsep.join(paths), "ROCM_PATH": folder
    }  # fmt: skip


def assert_simulated(vendor: str = "cuda") -> None:
    """Check that the driver which this process finds by its usual name is the simulated one, and the only one.

    Parameters
    ----------
    vendor : str
        ``cuda`` or ``hip``.

    Raises
    ------
    AssertionError
        The driver is a real one, is missing, or is one of several.

    Examples
    --------
    On CUDA (here a simulated driver):

    >>> from gpuinterop.testing.simulated import assert_simulated
    >>> assert_simulated("cuda")
    """
    name = LIBRARIES[vendor].soname
    advice = f"run this with `python -m gpuinterop.testing.simulated {vendor} -- COMMAND`."
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise AssertionError(f"expected the simulated {name}, got {error}; {advice}") from None
    if not hasattr(library, "gpuinterop_simulated_driver"):
        raise AssertionError(f"expected the simulated {name}, got another; {advice}")
    base = f"/{name.partition('.so')[0]}.so"
    loaded = {one.path for one in system.mappings() if base in one.path}
    if len(loaded) != 1:
        raise AssertionError(f"expected one {name} in this process, got {', '.join(sorted(loaded))}; {advice}")
