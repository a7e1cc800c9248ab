"""The conformance kit: what every backend must do, as tests that any backend can run.

Test an installed backend, gpuinterop's or another, with::

    pytest --pyargs gpuinterop.testing --gpuinterop-require=NAME

or subclass the suites in your own test module::

    from gpuinterop.testing.suites import MemorySuite

    class TestMemory(MemorySuite):
        pass

With the plugin's fixtures, a library that uses gpuinterop runs its own tests on every backend::

    def test_my_kernel(gpuinterop_device): ...          # each device of each backend that the options choose
    def test_my_registry(gpuinterop_backend): ...       # each backend
    def test_my_reader(gpuinterop_exporter): ...        # each independent exporter, which shares memory with no backend

    @requires((gi.Operation.MAP_BUFFER, gi.OpaqueFd))   # skipped, with the reason, if that is a gap
    def test_my_renderer(gpuinterop_harness):
        theirs, ours = gpuinterop_harness.buffer(4096)    # the same bytes, the exporter's and the device's

The plugin is installed with the package, and is active only if such tests are collected. If pytest-timeout is
installed, it ends each of these tests after 90 seconds (three times ``GPUINTEROP_KIT_LIMIT``, if that is longer) and
shows every thread's stack; your own time-out settings replace this one (for the suites, only ``--timeout`` does). A
test that leaks a handle fails. A ``unittest.TestCase`` cannot use the fixtures. The options:

``--gpuinterop-backend=NAME``
    Test this backend (repeatable). A backend that does not work is skipped with its reason. Without this option and
    ``--gpuinterop-require``, every installed backend is tested.
``--gpuinterop-require=NAME``
    Test this backend, and fail if it does not work (repeatable). ``GPUINTEROP_BACKEND=NAME`` does the same if no option
    names a backend.
``--gpuinterop-strict``
    Fail if a test, or a module during collection, skips itself (``pytest.skip``, ``pytest.importorskip``) for a reason
    that is not declared, with or without the plugin's fixtures.
``--gpuinterop-exporter=NAME``
    Use only these exporters (repeatable): ``memfd``, ``vulkan``, ``vulkan:swiftshader``. Add ``@process`` for the one
    in a child process (``memfd@process``), or ``@here`` for the one in this process. ``@process`` without a name means
    all exporters in child processes.
``--gpuinterop-require-exporter=NAME``
    Fail if this exporter is missing. ``GPUINTEROP_REQUIRE_VULKAN=1`` requires ``vulkan``.
``--gpuinterop-simulated=NAME``
    The devices of this backend are simulated on the CPU by a test double (repeatable). gpuinterop's own simulated
    drivers (:mod:`gpuinterop.testing.simulated`) are recognized without it. Simulated devices have a GPU's identity,
    but their exporters use the CPU: memfd, and the Vulkan drivers whose memory a simulated driver understands
    (:data:`gpuinterop.testing.participants.SIMULATED_DRIVERS`). Their results are never recorded, so they make no cell
    SUPPORTED.

pytest's own ``--junitxml=FILE`` writes JUnit XML, which ``gpuinterop matrix`` merges. The plugin adds properties: to
each test its device (``gpuinterop.device``), its exporter and that exporter's driver (``gpuinterop.exporter``,
``gpuinterop.driver``), and the capabilities that it exercises (``gpuinterop.cells``); to the suite the run's versions,
devices and variables. A run that was killed writes no file.

The test ``gpuinterop::environment`` fails once per run, with the reason, if a required backend does not work; if a
required exporter is missing; if an option or ``GPUINTEROP_BACKEND`` names a backend that is not installed; if that
variable is empty or contradicts the options; if a pattern in ``GPUINTEROP_DISABLE`` matches no capability; if
gpuinterop does not know a variable that begins with ``GPUINTEROP_``; or if a backend fails to list its devices.

On a required backend, a test of the suites must run, or be skipped for a declared gap; any other skip is a failure.
Your own tests can skip themselves for any reason, unless the run is strict. They fail if the plugin skips them on a
required backend for an undeclared reason.

The suites try multicast only on simulated drivers and never record its cells, because on hardware it can block, or
disturb other users of the machine. ``gpuinterop selftest multicast`` tries it when you ask for it.

The oracle never goes through the backend under test: an exporter (:mod:`gpuinterop.testing.exporters`) writes, reads,
signals and waits without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .requirements import KIND as KIND, requires as requires

__all__ = ["KIND", "requires"]


def __getattr__(name: str) -> Any:
    # pytest loads the plugin in every run of every user, so importing this package must cost almost nothing.
    if name in __all__:
        from . import requirements

        return getattr(requirements, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
