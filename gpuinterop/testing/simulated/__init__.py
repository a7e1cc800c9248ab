"""Simulated drivers of CUDA and HIP, for test suites on machines without a GPU.

They are libraries in C that stand in for NVIDIA's ``libcuda.so.1`` and AMD's ``libamdhip64.so``. The vendor's own
Python bindings load them. Memory is the host's, and streams are threads. A suite runs on one with::

    python -m gpuinterop.testing.simulated cuda -- python -m pytest tests

The command compiles the library, once for each version of gpuinterop and of the C compiler. It tries the backend on it,
and replaces itself by your command. No run on a simulated driver counts for a real device.

CUDA's device 0 has SwiftShader's UUID: a renderer on SwiftShader finds it by :func:`gpuinterop.match_device`. HIP's
devices are matched by their PCI address, which software Vulkan does not have.

These variables change what the drivers say:

``GPUINTEROP_SIM_DEVICES=2``
    The number of devices; one by default, 16 at most.
``GPUINTEROP_SIM_CUDA_VERSION=12090``, ``GPUINTEROP_SIM_HIP_VERSION=60300000``
    The version of the driver or the runtime, in the vendor's own numbers.
``GPUINTEROP_SIM_INIT=803``
    The error that ``cuInit`` or ``hipInit`` returns: a driver that is installed and does not work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from ... import system
from .build import LIBRARIES, build

__all__ = ["assert_simulated", "build", "environment"]


def environment(vendor: str, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a process that finds the simulated driver, and compile it if need be.

    Parameters
    ----------
    vendor : str
        ``cuda`` or ``hip``.
    variables : Mapping, optional
        The other variables of the process. By default, those of this one.

    Returns
    -------
    dict
        `variables`, with ``GPUINTEROP_BACKEND``, and the paths by which the bindings find the library.

    Raises
    ------
    BackendUnavailableError
        The machine has no C compiler, the compiler fails, or the cache folder cannot be made.

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
    # hip-python 10 looks for the library in ROCM_PATH first, and in /opt/rocm without it.
    return {
        **variables, "GPUINTEROP_BACKEND": vendor, "LD_LIBRARY_PATH": os.pathsep.join(paths), "ROCM_PATH": folder
    }  # fmt: skip


def assert_simulated(vendor: str = "cuda") -> None:
    """Fail unless the driver that this process finds by its usual name is the simulated one, and the only one.

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
    advice = f"run this by `python -m gpuinterop.testing.simulated {vendor} -- COMMAND`."
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
