#!/usr/bin/env python3
"""Look at the built manual in headless Chromium: what sticks out, what is cut, and what its search finds.

    python tools/measure_pages.py docs/_build/html

It lays out each page for phones and screens, in light and in dark. A wide table or block of code may scroll inside its
own box, but the page must not, and no entry of a sidebar may be cut. Words in pictures must contrast with their
background. The exit status is 1 if there is a problem.

It drives Chromium with the DevTools protocol over two pipes: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
WIDTHS: Final = (320, 360, 768, 1366, 1440, 1920, 2560)
FIRST: Final = {
    "existing tensor": "howto/share_arrays",
    "hang": "howto/stream-hangs",
    "another process": "howto/processes",
    "docker": "howto/containers",
    "opengl": "howto/opengl",
}
"""The page that the search must put first, by query."""

LAYOUT: Final = """(() => {
    const said = [], page = document.documentElement, width = page.clientWidth;
    const words = one => one.childElementCount ? "" : one.textContent.trim().slice(0, 40);
    const named = one => `<${one.localName} ${one.getAttribute("class") ?? ""}>${words(one)}`;
    const flow = one => getComputedStyle(one).overflowX, scrolls = one => ["auto", "scroll"].includes(flow(one));
    const above = (one, test) => one !== document.body && (test(one) ? one : above(one.parentElement, test));
    if (page.scrollWidth > width) {
        const out = [...document.body.querySelectorAll("*")].filter(
            one => one.getBoundingClientRect().right > width + 1 && !above(one.parentElement, scrolls));
        const inner = out.filter(one => !out.some(other => other !== one && one.contains(other)));
        said.push(`scrolls sideways, ${page.scrollWidth} px: ${inner.slice(0, 2).map(named).join(", ")}`);
    }
    for (const one of document.querySelectorAll("article, article *")) {
        if (["hidden", "clip"].includes(flow(one)) && one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 1)
            said.push(`cuts what is in it: ${named(one)}`);
    }
    for (const entry of document.querySelectorAll(".sidebar-tree a, .toc-tree a")) {
        if (!entry.getClientRects().length) continue;  // in a branch that is folded
        const box = above(entry, one => scrolls(one) || one.matches(".sidebar-tree, .toc-tree"));
        const text = document.createRange();
        text.selectNodeContents(entry);
        if (text.getBoundingClientRect().right > box.getBoundingClientRect().right + 1)
            said.push(`an entry of a sidebar is cut: ${named(entry)}`);
    }
    return said;
})()"""

TEXTS: Final = """(() => {
    const said = [], names = new Set();
    for (const entry of document.querySelectorAll(".sidebar-tree a.reference")) {
        const name = entry.textContent.trim();
        if (names.has(name)) said.push(`two entries of the sidebar are called "${name}"`);
        names.add(name);
    }
    for (const link of document.querySelectorAll("article a.reference.internal"))
        if (/^[\\w./-]+\\.(md|html)$/.test(link.textContent)) said.push(`a link's text is a file: ${link.textContent}`);
    if (document.querySelector(":is(.highlight-python, .highlight-console) pre") && !document.querySelector(".copybtn"))
        said.push("code has no button that copies it");
    return said;
})()"""

# WCAG's contrast of each text with the topmost filled shape below its middle; body text needs 4.5.
CONTRAST: Final = """(() => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(one => one / 255).map(
            one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const said = [];
    for (const text of document.querySelectorAll("text")) {
        const box = text.getBoundingClientRect();
        const [below] = document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2).filter(
            one => one instanceof SVGGeometryElement && getComputedStyle(one).fill !== "none");
        const ratio = below && light(getComputedStyle(text).fill) / light(getComputedStyle(below).fill);
        if (!(Math.max(ratio, 1 / ratio) >= 4.5))
            said.push(`"${text.textContent}" ` + (below ? "hardly stands out" : "has no background"));
    }
    return said;
})()"""

SEARCH: Final = """new Promise(done => {
    const end = Date.now() + 10000;
    const look = () => {
        const ended = document.querySelector("#search-results h2")?.textContent === "Search Results";
        if (ended || Date.now() > end) done(document.querySelector("#search-results li a")?.getAttribute("href"));
        else setTimeout(look, 10);
    };
    look();
})"""


class BrowserError(Exception):
    """Chromium is missing, or did not do what it was told."""


class Browser:
    """A headless Chromium with one page."""

    def __init__(self) -> None:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        if path is None:
            raise BrowserError(
                f"expected one of {', '.join(BROWSERS)}, got none; apt-get install chromium fonts-dejavu-core"
            )
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads descriptor 3 and writes 4, so the originals must have other numbers.
        theirs = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (theirs_in, theirs_out)]
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
            "--disable-component-update --disable-sync --remote-debugging-pipe"
        )
        self._process = os.posix_spawn(
            path,
            [path, *flags.split(), f"--user-data-dir={self._profile.name}", "about:blank"],
            os.environ,
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, one, number) for number, one in enumerate(theirs, 3)),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
        for one in (theirs_in, theirs_out, *theirs):
            os.close(one)
        self._out, self._in = ours_out, ours_in
        self._calls, self._heard, self._session, self._loaded = 0, b"", dict[str, str](), set[str]()
        (page,) = (one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._call("Page.enable")
        self._call("Page.setLifecycleEventsEnabled", enabled=True)

    def close(self) -> None:
        """End Chromium."""
        os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def open(self, address: str) -> None:
        """Load a page, and wait until it is loaded."""
        page = self._call("Page.navigate", url=address)["loaderId"]
        while page not in self._loaded:
            self._hear()

    def resize(self, width: int) -> None:
        """Set the width of the layout."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=2000, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark colours."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def ask(self, expression: str) -> Any:
        """Evaluate JavaScript in the page and return the result, awaiting a promise."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", **asked)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def _call(self, method: str, **given: Any) -> dict[str, Any]:
        self._calls += 1
        sent = {"id": self._calls, "method": method, "params": given, **self._session}
        os.write(self._out, json.dumps(sent).encode() + b"\0")
        while (answer := self._hear()).get("id") != self._calls:
            pass
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]  # type: ignore[no-any-return]

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._heard:
            more = os.read(self._in, 1 << 16)
            if not more:
                raise BrowserError("Chromium has ended")
            self._heard += more
        text, _, self._heard = self._heard.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Page.lifecycleEvent" and message["params"]["name"] == "load":
            self._loaded.add(message["params"]["loaderId"])
        return message


def problems(browser: Browser, file: Path, widths: Sequence[int] = WIDTHS) -> Iterator[str]:
    """Yield the problems of a page or a picture."""
    browser.open(file.as_uri())
    if file.suffix == ".html":
        yield from browser.ask(TEXTS)
    for width in widths if file.suffix == ".html" else widths[-1:]:
        browser.resize(width)
        told: set[str] = set()
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            found = browser.ask(LAYOUT if file.suffix == ".html" else CONTRAST)
            yield from (f"{one}, at {width} px, {scheme}" for one in found if one not in told)
            told.update(found)


def search(browser: Browser, pages: Path) -> Iterator[str]:
    """Yield the queries for which the search puts another page first."""
    for words, page in FIRST.items():
        browser.open(f"{(pages / 'search.html').as_uri()}?q={quote(words)}")
        found = str(browser.ask(SEARCH)).partition(".html")[0]
        if found != page:
            yield f"search for {words!r}: expected {page} first, got {found}"


def look(files: Sequence[Path], widths: Sequence[int] = WIDTHS) -> dict[str, list[Path]]:
    """Return each problem with its files; several browsers work at the same time."""

    def take(share: Sequence[Path]) -> list[tuple[str, Path]]:
        with contextlib.closing(Browser()) as browser:
            return [(problem, file) for file in share for problem in problems(browser, file, widths)]

    count = min(os.cpu_count() or 1, len(files))
    found: dict[str, list[Path]] = {}
    with ThreadPoolExecutor(count) as pool:
        for problem, file in chain.from_iterable(pool.map(take, (files[number::count] for number in range(count)))):
            found.setdefault(problem, []).append(file)
    return found


def main(folder: str) -> int:
    """Print the problems of the manual; the exit status is 1 if there are any."""
    start, pages = time.monotonic(), Path(folder).resolve()
    files = sorted([*pages.rglob("*.html"), *pages.glob("_images/*.svg")])
    if not files:
        sys.exit(f"measure_pages: expected the built manual in {pages}, got no page; make docs")
    try:
        found = look(files)
        with contextlib.closing(Browser()) as browser:
            found |= {problem: [pages / "search.html"] for problem in search(browser, pages)}
    except BrowserError as error:
        sys.exit(f"measure_pages: {error}")
    for problem, where in found.items():
        more = f", and {len(where) - 1} more" if where[1:] else ""
        print(f"{problem} ({where[0].relative_to(pages)}{more})")
    took = time.monotonic() - start
    print(f"{len(files)} pages and pictures, {len(WIDTHS)} widths, light and dark: {len(found)} problems, {took:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
