"""The command line in this process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

from gpuinterop.cli.app import run


@dataclass(frozen=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*arguments: str) -> Done:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            status = run(arguments)
        except SystemExit as end:  # argparse's: --help, or a wrong argument
            status = int(end.code or 0)
    texts = [stream.buffer.getvalue().decode() for stream in streams]
    return Done(status, *texts)
