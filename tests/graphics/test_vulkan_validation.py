"""The validation layer is there, and what it says turns a test red, in whichever process (`tests.validation`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuinterop.testing.missing_vulkan import give_up
from tests.programs import python
from tests.validation import is_installed
from tools import manual

if TYPE_CHECKING:
    from tests.graphics.vulkan_application import DRIVERS
else:
    from vulkan_application import DRIVERS

PLANTED = '''
import pytest

from tools import manual

PROGRAM = """
import sys

import vulkan as api
from vulkan_application import Application

import gpuinterop as gi

with Application() as application:
    device = gi.match_device(gi.vulkan.identity(application.physical_device))
    usage = 0x20 if "{planted}" == "a usage" else 0x22  # storage; and as a copy's target
    shared = gi.vulkan.share_buffer(application.vk, device, 4096, usage=usage)

    def work(commands):
        api.vkCmdFillBuffer(commands, shared.vk_buffer, 0, 4096, 1)
        if "{planted}" == "a hazard":
            api.vkCmdFillBuffer(commands, shared.vk_buffer, 0, 4096, 2)

    application.run(work)
"""


@pytest.mark.parametrize("planted", ["nothing", "a usage", "a hazard"])
@pytest.mark.parametrize("where", ["here", "in a page", "in an example"])
def test_it(where, planted, tmp_path):
    program = PROGRAM.replace("{planted}", planted)
    if where == "here":
        exec(program, {})
        return
    page = f"```python host\\n{program}```\\n"
    if where == "in an example":
        page = f"```python host file=one.py\\n{program}```\\n\\n```console host\\n$ python one.py\\n```\\n"
    path = tmp_path / "page.md"
    path.write_text(page, encoding="utf-8")
    done = manual.run(str(path), "host")
    assert done.returncode == 0, done.stderr
'''


@pytest.mark.timeout(manual.LIMIT_S)
def test_a_planted_error_and_a_planted_hazard_turn_a_run_red(tmp_path: Path) -> None:
    if not is_installed():
        give_up("the validation layer is not installed")
    if not {*DRIVERS} <= {"swiftshader", "lavapipe"}:
        pytest.skip("the pages run on the host, and so on software")
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED, encoding="utf-8")
    places = os.pathsep.join(filter(None, (str(manual.EXAMPLES), str(manual.ROOT), os.environ.get("PYTHONPATH", ""))))
    options = f"-q -rpE -p tests.validation -p no:cacheprovider -c {os.devnull} --rootdir {tmp_path}".split()
    done = python(
        "-m", "pytest", *options, str(planted), seconds=manual.LIMIT_S, PYTHONPATH=places, GPUINTEROP_BACKEND="host"
    )
    where = "here", "in a page", "in an example"
    red = set(re.findall(r"^ERROR .*::test_it\[(.*)\]", done.stdout, re.MULTILINE))
    assert red == {f"{one}-{what}" for one in where for what in ("a usage", "a hazard")}, done.stdout
    assert len(re.findall(r"^PASSED ", done.stdout, re.MULTILINE)) == 9, done.stdout
    errors = done.stdout.partition(" short test summary info ")[0]  # which repeats them where CI is set
    for name in ("VUID-vkCmdFillBuffer-dstBuffer-00029", "SYNC-HAZARD-WRITE-AFTER-WRITE"):
        assert len(re.findall(rf"^(?:Validation Error: \[ )?{name}\b", errors, re.MULTILINE)) == len(where), done.stdout
