"""A Chromium, and the pages that it opens. Whatever a page says on the console, asks of a network or opens as a dialog fails its test."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")  # fmt: skip
MILLISECONDS = 300_000
"What a page is waited for longer hangs: a busy machine takes seconds."
expect.set_options(timeout=MILLISECONDS)
WIDTHS = {"desktop": (1280, 900), "tablet": (800, 1000), "phone": (390, 844)}


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mix.html, images.html and mix.json."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "mix").mkdir()
    (folder / "images").mkdir()
    python = os.environ.get("MDSMIX_PYTHON", str(ROOT / ".venv/bin/python"))
    settings = os.environ | {"MDSMIX_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "tests.browser.make", str(folder)]
    subprocess.run(command, cwd=ROOT, env=settings, check=True)
    return folder


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, from the environment's own folder."""
    (found,) = ROOT.glob(".venv-browser/npm/node_modules/axe-core/axe.min.js")
    return found.read_text("utf-8")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """This machine's Chromium, or Playwright's own where there is none."""
    named = os.environ.get("MDSMIX_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)  # fmt: skip
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=named, args=root, timeout=MILLISECONDS
        )
        yield launched
        launched.close()


Open = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, pages: Path) -> Iterator[Open]:
    """Opens a page from file://, at a width and in a scheme."""
    contexts, faults = list[Any](), list[str]()

    def open_page(name: str, width: str = "desktop", scheme: str = "light", **settings: Any) -> Page:  # fmt: skip
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        context = browser.new_context(viewport=size, color_scheme=scheme, **settings)
        contexts.append(context)
        page, at = context.new_page(), (pages / name).as_uri()
        page.on("console", lambda said: faults.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda asked: asked.url in (at,) or asked.url.startswith("data:image/") or faults.append(f"request: {asked.url}"))  # fmt: skip
        page.set_default_timeout(MILLISECONDS)
        page.goto(at)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
