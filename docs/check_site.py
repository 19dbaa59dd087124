"""Open every page of the built site in a browser without a window: ``make site``.

Each page is opened in the sizes of a phone and of a desktop. A page fails that asks another host for something, has an
error in its console, is wider than the window, or has a link to a page or to a part of a page that is not there. The
browser is that of playwright, or the system's chromium.
"""

import functools
import http.server
import shutil
import sys
import threading
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

try:
    from playwright.sync_api import Browser, Error, Page, sync_playwright
except ImportError:
    raise SystemExit('the site is checked by playwright: pip install "fshard[docs]"') from None

SIZES = {"phone": (390, 844), "desktop": (1360, 900)}
SHOTS = {
    "site-desktop.png": ("docs/api/steps", "desktop", "light"),
    "site-notebook.png": ("examples/notebooks/5_schedules", "desktop", "dark"),
    "site-phone.png": ("docs/index", "phone", "light"),
}
"""Pictures: the page, its size and its colors."""

MEASURE = """() => ({
    wide: document.documentElement.scrollWidth - window.innerWidth,
    ids: [...document.querySelectorAll('[id]')].map(node => node.id),
    links: [...document.querySelectorAll('a[href]')].map(node => node.href),
    broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
})"""


@dataclass
class Found:
    """What the browser found.

    Attributes:
        ids: by page, the parts of it that a link can lead to.
        links: by page, where its links lead.
        problems: what is wrong.
    """

    ids: dict[str, set[str]] = field(default_factory=dict)
    links: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def loose(self, site: Path, base: str) -> Iterator[str]:
        """Links that lead nowhere."""
        for page, links in self.links.items():
            for link in dict.fromkeys(links):
                target, part = urldefrag(link)
                if not target.startswith(base):
                    continue
                name = target.removeprefix(base) or "index.html"
                if not (site / name).is_file():
                    yield f"{page}: no page {name}"
                elif part and name in self.ids and part not in self.ids[name]:
                    yield f"{page}: {name} has no part {part!r}"


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The site under an address of this machine."""
    handler = functools.partial(Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Silent(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing, also where the browser has gone on to the next page."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file."""
        with suppress(ConnectionError):
            super().copyfile(source, outputfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def launched(playwright: Any) -> Browser:
    """A browser: that of playwright, or that of the system."""
    try:
        return playwright.chromium.launch()
    except Error:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        if found is None:
            raise SystemExit("no browser: playwright install chromium, or install the system's chromium") from None
        return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


def look(page: Page, base: str, name: str, size: str, found: Found) -> None:
    """Open a page and note what is wrong with it."""
    wrong: list[str] = []

    def told(message: Any) -> None:
        if message.type in ("error", "warning"):
            wrong.append(f"console: {message.text}")

    def asked(request: Any) -> None:
        if not request.url.startswith((base, "data:", "blob:")):
            wrong.append(f"asks for {request.url}")

    handlers = {"console": told, "request": asked, "pageerror": lambda error: wrong.append(f"script: {error}")}
    for event, handler in handlers.items():
        page.on(event, handler)
    page.goto(base + name, wait_until="load")
    seen = page.evaluate(MEASURE)
    for event, handler in handlers.items():
        page.remove_listener(event, handler)
    if seen["wide"] > 0:
        wrong.append(f"{seen['wide']} pixels wider than the window")
    wrong += [f"no picture {source}" for source in seen["broken"]]
    found.ids[name] = set(seen["ids"])
    found.links[name] = [urljoin(base + name, link) for link in seen["links"]]
    found.problems += [f"{name} ({size}): {problem}" for problem in wrong]


def searched(page: Page, base: str, words: str) -> int:
    """How many results a search has."""
    page.goto(f"{base}search.html?q={words}")
    page.wait_for_selector("#search-results ul.search li", timeout=20_000)
    return page.locator("#search-results ul.search li").count()


def main() -> None:
    """Check, and write pictures."""
    cli = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    cli.add_argument("site", type=Path, help="the folder of the built site")
    cli.add_argument("--shots", type=Path, help="a folder for pictures of some pages")
    args = cli.parse_args()
    names = sorted(str(path.relative_to(args.site)) for path in args.site.rglob("*.html"))
    names.remove("index.html")  # it leads to the front page
    found = Found()
    with served(args.site) as base, sync_playwright() as playwright:
        browser = launched(playwright)
        for size, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            for name in names:
                look(page, base, name, size, found)
            page.close()
        found.problems += found.loose(args.site, base)
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.goto(base)
        page.wait_for_url("**/docs/index.html", timeout=20_000)
        results = searched(page, base, "reduce_scatter")
        page.close()
        if args.shots:
            shoot(browser, base, args.shots)
        browser.close()
    links = sum(map(len, found.links.values()))
    print(f"{len(names)} pages in {len(SIZES)} sizes, {links} links, {results} results of a search")
    if found.problems:
        sys.exit("\n".join([*found.problems[:60], f"{len(found.problems)} problems"]))


def shoot(browser: Browser, base: str, folder: Path) -> None:
    """Pictures of some pages: of what a window shows that begins with the first output, if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, (name, size, color) in SHOTS.items():
        width, height = SIZES[size]
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=color)  # type: ignore[arg-type]
        page.goto(f"{base}{name}.html")
        page.evaluate("document.querySelector('.cell_output')?.scrollIntoView()")
        page.wait_for_timeout(500)
        page.screenshot(path=folder / file)
        page.close()


if __name__ == "__main__":
    main()
