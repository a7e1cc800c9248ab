"""The window of the manual, on a display of Xvfb: what the display shows, by X11's own protocol."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from gpuinterop import system
from tests.fetched import x11

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "opengl_window.py"
SIZE, LIMIT = 720, 60.0


def test_the_window_shows_the_tensor_until_it_is_closed() -> None:
    from Xlib import X, display
    from Xlib.protocol.event import ClientMessage

    with x11() as environment, ExitStack() as scope:
        command = [sys.executable, str(EXAMPLE)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
            try:
                screen = scope.enter_context(closing(display.Display(environment["DISPLAY"])))
                root = screen.screen().root

                def visible() -> Any:  # GLFW has another window, which is not
                    found = [one for one in root.query_tree().children if one.get_geometry().width == SIZE]
                    return [one for one in found if one.get_attributes().map_state == X.IsViewable]

                (window,) = wait_for(visible)

                def shown() -> bytes:
                    data: bytes = window.get_image(0, 0, SIZE, SIZE, X.ZPixmap, 0xFFFFFFFF).data
                    return data if any(data) else b""

                first = wait_for(shown)
                lit = np.argwhere(np.frombuffer(first, np.uint8).reshape(SIZE, SIZE, 4)[..., :3].any(axis=-1))
                distance = np.hypot(*(2 * (lit + 0.5) / SIZE - 1).T)
                assert 0.29 < distance.min() < 0.31  # from the middle to the nearest point, and to the farthest
                assert 0.89 < distance.max() < 0.91
                wait_for(lambda: shown() != first)  # torch moves them
                names = [screen.get_atom(name) for name in ("WM_PROTOCOLS", "WM_DELETE_WINDOW")]
                window.send_event(ClientMessage(window=window, client_type=names[0], data=(32, [names[1], 0, 0, 0, 0])))
                screen.flush()
                said, _ = program.communicate(timeout=LIMIT)
            finally:
                program.kill()
    assert program.returncode == 0
    assert "llvmpipe" in said
    assert "handed over bridged" in said


def wait_for(look: Callable[[], Any]) -> Any:
    found = None

    def is_there() -> bool:
        nonlocal found
        found = look()
        return bool(found)

    assert system.until(is_there, LIMIT)
    return found
