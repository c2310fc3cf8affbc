"""Looks at the built site as a reader does: every picture and link, and some pages in headless Chromium.

``python scripts/site/check.py SITE``. Without Chromium and its driver the second part is left out, and a line says so.
"""

import contextlib
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PICTURED = ("", "docs/results/scaling/", "docs/results/compression/")
SEEN = (*PICTURED, "docs/methods/", "reference/")  # in the browser
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
)
_PICTURES = "return [...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
_COUNTS = "return [document.images.length, document.querySelectorAll('article h1').length]"


class Page(HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value and tag in ("a", "img", "script", "link", "source"):
                self.links.add(value)


def broken_links(site: Path) -> list[str]:
    """Returns each link, picture, script or style of a page that is not in the site, or whose anchor is not."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.is_file() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves the site on this machine; gives its address."""
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


class Browser:
    """Headless Chromium, by the protocol of its driver, which ends with the block."""

    def __init__(self, driver: str, browser: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._browser, self._folder = browser, folder

    def __enter__(self) -> "Browser":
        try:
            assert self._process.stdout is not None
            said = next(line for line in self._process.stdout if "successfully on port" in line)
            self._base = f"http://127.0.0.1:{said.split()[-1].rstrip('.')}/session"
            options = {"binary": self._browser, "args": [*_FLAGS.split(), f"--user-data-dir={self._folder}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self._base += f"/{self.post('', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(self._base, method="DELETE"), timeout=20).close()
        finally:
            self._process.kill()
            self._process.wait(20)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._base + path, data, headers), timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        return self.post("/execute/sync", {"script": script, "args": []})


def faults_in_browser(site: Path, browser: Browser) -> list[str]:
    """Returns what a reader of some pages would miss: pictures that are not shown, and errors in the console."""
    faults = []
    with served(site) as address:
        for page in SEEN:
            browser.post("/url", {"url": address + page})
            until = time.monotonic() + 60
            while browser.run(_PICTURES) and time.monotonic() < until:
                time.sleep(0.1)
            faults += [f"{page or 'front page'}: {source} is not shown" for source in browser.run(_PICTURES)]
            shown, headings = browser.run(_COUNTS)
            faults += [f"{page or 'front page'}: no picture"] if page in PICTURED and not shown else []
            faults += [] if headings == 1 else [f"{page or 'front page'}: {headings} titles"]
            errors = [each for each in browser.post("/se/log", {"type": "browser"}) if each["level"] == "SEVERE"]
            faults += [f"{page or 'front page'}: {each['message']}" for each in errors]
    return faults


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    faults = broken_links(site)
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver and chromium:
        with tempfile.TemporaryDirectory() as folder:
            with Browser(driver, chromium, folder) as browser:
                faults += faults_in_browser(site, browser)
    else:
        print("no chromium and chromedriver here: no page was opened in a browser")
    print(*faults, f"{len(faults)} faults in {sum(1 for _ in site.rglob('*.html'))} pages", sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
