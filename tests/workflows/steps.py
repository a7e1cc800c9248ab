"""Runs the `run` steps of a workflow's job here, as a runner does; what it `uses` is named, and left out."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.limits import LIMIT

ROOT: Final = Path(__file__).resolve().parents[2]
WORKFLOWS: Final = ROOT / ".github" / "workflows"
_EXPRESSION: Final = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class Done:
    """A step that has run."""

    name: str
    status: int
    output: str


@dataclass(frozen=True)
class Runner:
    """A machine, and the checkout that its jobs have.

    Attributes
    ----------
    checkout, temporary : Path
        What is checked out, and the folder for what jobs leave.
    environment : dict
        Variables that the machine has.
    """

    checkout: Path
    temporary: Path
    environment: Mapping[str, str]

    def run(self, job: Mapping[str, Any], **contexts: Any) -> list[Done]:
        """Run a job's steps until one fails; `contexts` are ``inputs``, ``matrix`` and ``vars``."""
        return list(self._steps(job, contexts))

    def file(self, name: str) -> Path:
        """A file of the runner's, ``GITHUB_OUTPUT`` for example."""
        return self.temporary / name

    def _steps(self, job: Mapping[str, Any], contexts: Mapping[str, Any]) -> Iterator[Done]:
        for step in job["steps"]:
            if "run" not in step:
                continue
            variables = {**job.get("env", {}), **step.get("env", {})}
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", step["run"]],  # what `shell: bash` means
                cwd=self.checkout,
                env={
                    **self.environment,
                    **{name: resolved(str(value), contexts) for name, value in variables.items()},
                    "RUNNER_TEMP": str(self.temporary),
                    **{name: str(self.file(name)) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")},
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT,
                check=False,
            )
            yield Done(step.get("name", step["run"]), done.returncode, done.stdout)
            if done.returncode:
                return


def resolved(text: str, contexts: Mapping[str, Any]) -> str:
    """`text` with the values of its expressions, which are names alone; one that is not there is empty."""

    def value(match: re.Match[str]) -> str:
        found: Any = contexts
        for name in match[1].split("."):
            assert name.isidentifier(), f"a runner computes {match[0]}, and this one reads names alone"
            found = found.get(name, "") if isinstance(found, Mapping) else ""
        return str(found)

    return _EXPRESSION.sub(value, text)


def inputs(workflow: Mapping[str, Any], **given: str) -> dict[str, str]:
    """What a called workflow has: what it is given, and its defaults."""
    # YAML 1.1 reads the key `on` as true.
    triggers: Any = dict(workflow).get(True)  # type: ignore[call-overload]
    declared = triggers["workflow_call"]["inputs"]
    assert given.keys() <= declared.keys()
    return {name: given.get(name, one.get("default", "")) for name, one in declared.items()}


def variables() -> dict[str, str]:
    """This machine's, without what belongs to the tests that run here."""
    ours = ("GPUINTEROP_", "PYTEST_", "PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
