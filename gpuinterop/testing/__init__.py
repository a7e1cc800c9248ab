"""The conformance kit: what every backend must do, as tests that any backend can run.

A backend that is installed, ours or another's, is tested with::

    pytest --pyargs gpuinterop.testing --gpuinterop-require=NAME

or by subclassing the suites in a test module of its own::

    from gpuinterop.testing.suites import MemorySuite

    class TestMemory(MemorySuite):
        pass

A library that uses gpuinterop tests itself on every backend with the plugin's fixtures::

    def test_my_kernel(gpuinterop_device): ...          # each device of each backend that the options choose
    def test_my_registry(gpuinterop_backend): ...       # each backend
    def test_my_reader(gpuinterop_exporter): ...        # each independent party, which shares memory with no backend

    @requires((gi.Operation.MAP_BUFFER, gi.OpaqueFd))   # skipped, with the reason, where that is a gap
    def test_my_renderer(gpuinterop_harness):
        theirs, ours = gpuinterop_harness.buffer(4096)    # the same bytes, the party's and the device's

The plugin comes with the package and takes part only where such tests are collected. A test of either kind ends after
90 seconds, with every thread's stack, if pytest-timeout is there and nothing gives it other seconds (for the suites,
``--timeout`` alone). A handle that it leaks fails it. A ``unittest.TestCase`` cannot have the fixtures. The options:

``--gpuinterop-backend=NAME``
    Test this backend; may be repeated. One that does not work is skipped with its reason. With neither this nor
    ``--gpuinterop-require`` every installed backend is tested.
``--gpuinterop-require=NAME``
    Test this backend, and fail where it does not work; may be repeated. ``GPUINTEROP_BACKEND=NAME`` does the same where
    no option names a backend.
``--gpuinterop-strict``
    Fail where a test, or a module at its collection, skips itself (``pytest.skip``, ``pytest.importorskip``) for a
    reason that is not declared, with the plugin's fixtures or without.
``--gpuinterop-exporter=NAME``
    Use only these independent parties; may be repeated: ``memfd``, ``vulkan``, ``vulkan:swiftshader``, each with
    ``@process`` for the one in a child process (``memfd@process``) or ``@here`` for the other one; ``@process`` alone
    is all of those.
``--gpuinterop-require-exporter=NAME``
    Fail where this party is missing. ``GPUINTEROP_REQUIRE_VULKAN=1`` requires ``vulkan``.
``--gpuinterop-simulated=NAME``
    The devices of this backend are simulated on the CPU, by a driver that is a test double; may be repeated. For
    gpuinterop's own (:mod:`gpuinterop.testing.simulated`) it is not needed. They have
    a GPU's identity, and the parties that share memory with them are the CPU's: memfd, and the Vulkan drivers whose
    memory such a driver understands (:data:`gpuinterop.testing.participants.SIMULATED_DRIVERS`). What they do is never
    reported, and no cell is called SUPPORTED for it.
``--gpuinterop-report=FILE``
    Write what was exercised and passed, in the format of a backend's ``verified.toml``; not after a run of a part.
``--gpuinterop-json=FILE``
    Write what every test of the run came to, with its device, its independent party and the capabilities that it
    exercises, and what the run had: versions, capability tables, variables. ``gpuinterop matrix`` merges such files.
    A run that was killed leaves what was known by then, with the test that was under way. The names of the device, the
    party and the capabilities are properties of each test in JUnit's XML as well (``--junitxml``).

Whichever suites a run has, the test ``gpuinterop::environment`` fails it, once, and says why: a required backend does
not work, a required party is missing, a name in an option or in ``GPUINTEROP_BACKEND`` is that of no installed backend,
that variable is empty or contradicts the options, a pattern in ``GPUINTEROP_DISABLE`` matches no capability, gpuinterop
does not know a variable that begins with ``GPUINTEROP_``, or a backend fails to list its devices.

On a required backend a test of the suites runs, or is skipped for a declared gap: any other skip of it is a failure. A
test of your own may skip itself as you like, unless the run is strict. What the kit skips in it must be declared.

Multicast is tried on simulated drivers alone, and no run of the suites claims its cells: on hardware it can block, or
upset the machine for others. ``gpuinterop selftest multicast`` tries it where a user asks for that.

The oracle never goes through the backend under test: an exporter (:mod:`gpuinterop.exporters`) writes, reads, signals
and waits by its own means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .requirements import KIND as KIND, requires as requires

__all__ = ["KIND", "requires"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in every pytest run of every user: this package must cost next to nothing to import.
    if name in __all__:
        from . import requirements

        return getattr(requirements, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
