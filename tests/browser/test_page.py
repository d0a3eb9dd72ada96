"""The report as a person has it: opened, searched, paged through, by mouse, by keyboard, on a
phone, in the dark, and by whoever listens to it.

Whatever a page says on the console, asks of a network or opens as a dialog fails its test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
)
MILLISECONDS = 300_000
"What a page is waited for longer hangs: a busy machine takes seconds."
expect.set_options(timeout=MILLISECONDS)
Open = Callable[..., Page]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WIDTHS = {"desktop": (1280, 900), "tablet": (800, 1000), "phone": (390, 844)}


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mix.html, images.html and mix.json."""
    folder = tmp_path_factory.mktemp("pages")
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
    named = os.environ.get("MDSMIX_CHROMIUM") or next(
        filter(None, map(shutil.which, BROWSERS)), None
    )
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    how: dict[str, Any] = {"executable_path": named, "args": root, "timeout": MILLISECONDS}
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(**how)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Browser, pages: Path) -> Iterator[Open]:
    """Opens a page from file://, at a width and in a scheme."""
    contexts, faults = list[Any](), list[str]()

    def open_page(
        name: str, width: str = "desktop", scheme: str = "light", **settings: Any
    ) -> Page:
        size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
        context = browser.new_context(viewport=size, color_scheme=scheme, **settings)
        contexts.append(context)
        page, at = context.new_page(), (pages / name).as_uri()
        page.on("console", lambda said: faults.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda asked: (
                asked.url in (at,)
                or asked.url.startswith("data:image/")
                or faults.append(f"request: {asked.url}")
            ),
        )
        page.set_default_timeout(MILLISECONDS)
        page.goto(at)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def samples(pages: Path) -> list[str]:
    """The text of each sample of the mix, as `inspect` has it, in the page's order."""
    streams = json.loads((pages / "mix.json").read_text("utf-8"))["streams"]
    return ["".join(p["text"] for p in s["sample"]) for stream in streams for s in stream["shown"]]


def current(page: Page) -> str:
    """The one sample that is shown."""
    (found,) = [e for e in page.locator(".sample").all() if e.is_visible()]
    return found.inner_text()


def test_a_search_finds_the_samples_that_hold_it(opened: Open, pages: Path) -> None:
    page, texts = opened("mix.html"), samples(pages)
    expect(page.locator("#where")).to_have_text(f"1 of {len(texts)}")
    holding = [text for text in texts if "needle" in text]
    assert 0 < len(holding) < len(texts)
    page.get_by_label("Search").fill("NEEDLE")
    expect(page.locator("#where")).to_have_text(f"1 of {len(holding)}")
    assert "needle" in current(page)
    assert page.evaluate("CSS.highlights.get('found').size") >= 1
    found = page.evaluate("[...CSS.highlights.get('found')][0].toString()")
    assert found == "needle", "what is marked spans tokens"
    page.get_by_label("Search").fill("nothing holds this")
    expect(page.locator("#where")).to_have_text("0 of 0")
    expect(page.locator("#none")).to_be_visible()
    assert not any(sample.is_visible() for sample in page.locator(".sample").all())


def test_samples_are_paged_through_by_button_key_and_stream(opened: Open, pages: Path) -> None:
    page = opened("mix.html")
    where, count, first = page.locator("#where"), len(samples(pages)), current(page)
    page.get_by_role("button", name="Next sample").click()
    expect(where).to_have_text(f"2 of {count}")
    assert current(page) != first
    page.locator("h1").click()
    for _ in range(2):
        page.keyboard.press("p")
    expect(where).to_have_text(f"{count} of {count}")
    page.keyboard.press("n")
    expect(where).to_have_text(f"1 of {count}")
    page.locator("#of").select_option("faq")
    expect(where).to_have_text("1 of 8")
    assert "faq" in current(page)


def test_a_token_tells_its_ids_and_whether_it_is_trained(opened: Open) -> None:
    page = opened("mix.html")
    page.locator("#of").select_option("faq")
    sample = page.locator(".sample:not([hidden])")
    split = sample.locator("u.p").first
    ids = str(split.get_attribute("data-i")).split()
    assert len(ids) > 1
    split.hover()
    assert str(split.get_attribute("title")).endswith(
        f"one character of {len(ids)} tokens, ids {', '.join(ids)}, trained"
    )
    sample.locator("i").first.click()
    expect(page.locator("#token")).to_be_visible()
    expect(page.locator("#token")).to_contain_text("not trained")
    page.get_by_label("ids", exact=True).check()
    number = split.evaluate("e => getComputedStyle(e, '::after').content")
    assert number == f'"{" ".join(ids)}"'
    lined = sample.locator("mark").first.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert lined == "underline", "never colour alone"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_whole_at_any_width_and_scheme(
    opened: Open, axe: str, width: str, scheme: str
) -> None:
    """Nothing is cut off at the side, and axe-core finds nothing, with all that folds open."""
    for name in ("mix.html", "images.html"):
        page = opened(name, width, scheme)
        page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        high = page.locator(".brand, #scheme").evaluate_all("all => all.map(e => e.offsetHeight)")
        assert max(high) < 48, "a word of the head is torn"
        page.evaluate(axe)
        found = page.evaluate("rules => axe.run({runOnly: {type: 'tag', values: rules}})", RULES)
        assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
        assert len(found["passes"]) > 20, "nothing was looked at"
        assert len(page.screenshot()) > 10_000, "an empty page"


def test_parts_are_there_and_reached_by_keyboard(opened: Open) -> None:
    page = opened("mix.html")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the mix")).to_be_focused()
    for link in page.get_by_role("navigation").get_by_role("link").all():
        part = page.locator(str(link.get_attribute("href")))
        assert len(part.inner_text()) > 60
    assert "step 0: " in page.locator("#batches").inner_text()
    assert page.locator("#batches svg.ribbon rect").count() >= 3


def test_images_are_shown(opened: Open) -> None:
    page = opened("images.html")
    widths = page.locator("img").evaluate_all(
        "all => Promise.all(all.map(e => e.decode().then(() => e.naturalWidth)))"
    )
    assert widths == [144, 144, 144]


def test_without_its_script_all_samples_are_there(opened: Open, pages: Path) -> None:
    page = opened("mix.html", java_script_enabled=False)
    visible = [sample for sample in page.locator(".sample").all() if sample.is_visible()]
    assert len(visible) == len(samples(pages))
    assert not page.locator(".tools").is_visible()


def test_its_policy_lets_nothing_out(browser: Browser, pages: Path) -> None:
    page = browser.new_page()
    page.goto((pages / "images.html").as_uri())
    refused = page.evaluate(
        "new Promise(done => { document.addEventListener('securitypolicyviolation', e => done(e.violatedDirective)); document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x.png\">'); })"
    )
    assert refused == "img-src"
    page.close()
