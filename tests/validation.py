"""Vulkan's validation layer, with synchronization validation, in a test's process and in those that it starts.

A folder whose conftest imports `validation`, or a module that does, runs with it, and any message fails the test. The
layer writes into a named pipe: each process empties the file that it opens, and would lose what another has said.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests import leftovers

LAYER: Final = "VK_LAYER_KHRONOS_validation"
UNJUSTIFIED: Final = {
    "VUID-VkSemaphoreSignalInfo-value-03259": (
        "The layer of 1.3.239 loses count of an exported timeline: 'value (2) must be less than value of any pending "
        "signal operation (0)', with nothing but a 3 pending. Only an abort signals one from the host."
    ),
}
"""Messages without a fault, by their names, and why."""

_SYNCHRONIZATION: Final = "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT"
# Without a limit, a message of each frame fills the pipe, and the layer blocks.
_SETTINGS: Final = """\
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn,perf
khronos_validation.duplicate_message_limit = 3
khronos_validation.log_filename = {}
"""
# NAME(ERROR / SPEC): msgNum: ...; newer layers write Validation Error: [ NAME ] ...
_MESSAGE: Final = re.compile(r"^(?=\S+\([A-Z /]+\): msgNum: |Validation [A-Z][\w ]*: \[ )", re.MULTILINE)
_NAME: Final = re.compile(r"Validation [\w ]+: \[ (\S+)|([^\s(]+)\(")
_PIPE: Final = "gpuinterop.validation"

# The layer opens its log for each VkInstance, and never closes it.
leftovers.kept_by_drivers.append(rf"descriptor \d+ of .*{_PIPE}")


class Validation:
    """What the layer says, in whichever process."""

    def __init__(self, folder: Path) -> None:
        pipe, self.settings = folder / _PIPE, folder / "vk_layer_settings.txt"
        os.mkfifo(pipe)
        self.settings.write_text(_SETTINGS.format(pipe))
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # for both: a pipe without a reader blocks who opens it

    def take(self, *unjustified: str) -> list[str]:
        """The messages since the last call, without those of these names."""
        said = b""
        try:
            while True:
                said += os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            messages = _MESSAGE.split(said.decode(errors="replace"))
        known = {*UNJUSTIFIED, *unjustified}
        return [one for one in messages if one.strip() and not known.intersection(_names(one))]


def _names(message: str) -> list[str]:
    """The message's name; none in a form that is not known, which is justified by nothing."""
    found = _NAME.match(message)
    return [found[1] or found[2]] if found else []


@cache
def is_installed() -> bool:
    """Whether the loader finds the layer."""
    try:
        import vulkan
    except OSError:  # there is no loader
        return False
    return LAYER in {one.layerName for one in vulkan.vkEnumerateInstanceLayerProperties()}


def descriptors() -> int:
    """How many descriptors are open, without the layer's."""
    links = (os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(link) and not os.readlink(link).endswith(_PIPE) for link in links)


@pytest.fixture(scope="session")
def _validation(tmp_path_factory: pytest.TempPathFactory) -> Validation:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return Validation(tmp_path_factory.mktemp("validation"))


@pytest.fixture(autouse=True)
def validation(request: pytest.FixtureRequest, _validation: Validation) -> Iterator[Validation]:
    with pytest.MonkeyPatch.context() as environment:  # not the test's own, which it may undo
        environment.setenv("VK_INSTANCE_LAYERS", LAYER)
        environment.setenv("VK_LAYER_SETTINGS_PATH", str(_validation.settings))
        if request.node.get_closest_marker("signals_beside") is None:
            environment.setenv("VK_LAYER_ENABLES", _SYNCHRONIZATION)
        yield _validation
    if said := _validation.take(*(name for mark in request.node.iter_markers("unjustified") for name in mark.args)):
        pytest.fail("the validation layer says:\n" + "".join(said), pytrace=False)
