"""The command line in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from gpuinterop.cli import main


@dataclass(frozen=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*arguments: str, encoding: str = "utf-8") -> Done:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
    status = 0
    with (
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
        mock.patch.object(sys, "argv", ["gpuinterop", *arguments]),
    ):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    texts = [stream.buffer.getvalue().decode(encoding) for stream in streams]
    return Done(status, *texts)
