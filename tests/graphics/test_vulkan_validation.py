"""The validation layer is there, and what it says reaches the fixture that turns a test red, from each process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gpuinterop as gi
from tests.programs import printed
from tests.validation import Validation

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import Application, match
else:
    from vulkan_application import Application, match

PLANTED = {
    "a usage": (0x20, 1, "VUID-vkCmdFillBuffer-dstBuffer-00029"),  # storage alone
    "a hazard": (0x22, 2, "SYNC-HAZARD-WRITE-AFTER-WRITE"),
    "nothing": (0x22, 1, ""),
}
"""The buffer's usage, how often it is filled without a barrier, and the message."""
PROGRAM = "import sys; import test_vulkan_validation as it; it.plant(*sys.argv[1:])"


def plant(driver: str, planted: str) -> None:
    """Run a program that the layer has something to say of."""
    application = Application(driver)
    usage, fills, _ = PLANTED[planted]
    with gi.vulkan.share_buffer(application.vk, match(application.vk), 4096, usage=usage) as shared:

        def work(commands: object) -> None:
            for word in range(fills):
                application.api.vkCmdFillBuffer(commands, shared.vk_buffer, 0, 4096, word)

        application.run(work)
    application.close()


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("where", ["here", "in a child"])
def test_what_the_layer_says(driver: str, validation: Validation, where: str, planted: str) -> None:
    if where == "here":
        plant(driver, planted)
    else:
        folder = str(Path(__file__).parent)
        printed("-c", PROGRAM, driver, planted, PYTHONPATH=os.pathsep.join([folder, str(Path(folder).parents[1])]))
    name, said = PLANTED[planted][2], validation.take()
    assert bool(said) == bool(name)
    assert all(name in one for one in said), said
