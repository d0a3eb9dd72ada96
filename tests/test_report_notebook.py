"""Results in a notebook: an element with a style of its own and no script, whose names and texts
cannot become markup; and one element for the progress.
"""

from __future__ import annotations

import re
import signal
import sys
import types
from html.parser import HTMLParser
from typing import Any

import pytest

import mdsmix
from mdsmix.report import notebook, progress
from mdsmix.report.drawings import RibbonPart
from mdsmix.report.progress import NotebookBar, watching
from mdsmix.report.show import Heading, NamedValues, SampleText, Title
from tests.converting import Project, documents

HOSTILE = (
    "</pre></style></div>\"'><img src=x onerror=alert(1)><script>alert(2)</script>\u202e\x1b[2J"
)
TAGS = {
    *("div", "style", "p", "h4", "table", "thead", "tbody", "tfoot", "tr", "th", "td"),
    *("span", "i", "b", "ul", "li", "pre", "mark", "progress"),
}
WIDTH = re.compile(r"width: \d+\.\d{3}%")


class Checker(HTMLParser):
    """Refuses each tag and attribute that is not one of notebook.py's own, and collects texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open = list[str]()
        self.tags = list[tuple[str, str]]()
        "(tag, its class) of each element."
        self.texts = dict[str, list[str]]()
        "A tag -> the texts directly in such elements."
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag in TAGS
        assert values.keys() <= {"class", "style", "title", "value"}
        assert WIDTH.fullmatch(values.get("style", "width: 0.000%"))
        self.open.append(tag)
        self.tags.append((tag, values.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def texts_of(self, tag: str) -> str:
        return "".join(self.texts[tag])


def check(result: Any) -> Checker:
    return Checker(result._repr_html_())


def test_every_rule_of_the_style_is_for_the_element_alone() -> None:
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", notebook.STYLE.read_text())
    assert len(rules) > 20
    for selectors in rules:
        for selector in selectors.split(","):
            assert re.match(r"(body[^ ]+ )?div\.mdsmix-result( |$)", selector.strip()), selector
    assert "url(" not in notebook.STYLE.read_text()


def test_hostile_items_are_text_in_the_element() -> None:
    items = [
        Title(HOSTILE),
        Heading(f"error {HOSTILE}"),
        f"  - {HOSTILE}",
        NamedValues([(HOSTILE, HOSTILE)]),
        SampleText([("⟦", "mark"), (HOSTILE, "text"), (f"⟨{HOSTILE}⟩", "control"), ("⟧", "mark")]),
        notebook.Ribbon(HOSTILE, [RibbonPart(HOSTILE, "s0", 1.0)]),
        notebook.Table(columns=[notebook.Column(HOSTILE, "text")], rows=[(HOSTILE,)], notes=[HOSTILE]),
        HOSTILE,
    ]  # fmt: skip
    page = Checker(notebook.make_html(items))
    shown = HOSTILE.replace("\u202e", r"\u202e").replace("\x1b", r"\x1b")
    for tag in ("h4", "p", "td", "li", "mark", "b"):
        assert shown in page.texts_of(tag), tag
    assert page.texts_of("th") == HOSTILE


def test_hostile_records_and_files(project: Project) -> None:
    name = HOSTILE.replace("/", "_").replace("\x1b[2J", "") + ".jsonl"
    project.write_source([HOSTILE, *(f"the record {n} of many" for n in range(30))], name)
    project.write_source([{"text": HOSTILE, HOSTILE: "unread"}], "b.jsonl")
    project.configure(documents("*.jsonl", layout="document"))
    conversion = mdsmix.convert(project.recipe, progress=False, workers=1)
    page = check(conversion)
    assert "onerror=alert(1)" in page.texts_of("p")  # the field that is not read
    page = check(mdsmix.inspect(str(project.train), samples=40))
    assert "onerror=alert(1)" in page.texts_of("td")  # the file
    assert "alert(2)" in page.texts_of("mark")
    for result in (mdsmix.check(project.recipe), mdsmix.render_yaml(project.recipe)):
        check(result)
    page_of_report = mdsmix.make_report(str(project.recipe), preview=False, progress=False)
    frame = page_of_report._repr_html_()
    assert frame.count("<") == 2  # <iframe ...></iframe>
    assert 'sandbox="allow-scripts"' in frame


def test_findings_warnings_and_tokens_are_marked(project: Project) -> None:
    project.write_source([{"q": f"What is {n}?", "a": f"It is {n}. " * 9} for n in range(40)])
    source = {"path": "*.jsonl", "prompt": "q", "response": "a"}
    project.configure({"kind": "finetuning", "source": source}, max_seq_len=32)
    conversion = mdsmix.convert(project.recipe, progress=False, workers=1)
    page = check(conversion)
    assert ("p", "in warning") in page.tags
    assert ("div", "ribbon") in page.tags
    checked = mdsmix.check(project.recipe)
    page = check(checked)
    severities = [finding.severity for finding in checked]
    groups = [css for _, css in page.tags if css.startswith("finding")]
    assert groups == [f"finding {name}" for name in dict.fromkeys(severities)]
    assert page.texts_of("h4").startswith(checked.verdict)
    page = check(mdsmix.inspect(str(project.train), samples=1))
    assert "It is 0." in page.texts_of("mark")
    assert "What is 0?" in page.texts_of("pre")
    assert "What is" not in page.texts_of("mark")
    assert page.tags.count(("span", "bar")) == len(conversion.streams[0].manifest.totals.lengths)
    ribbons = check(mdsmix.plan(project.recipe, gpus=1, batch=4)).tags.count(("div", "ribbon"))
    assert ribbons == 4


def test_the_text_of_a_result_is_that_of_the_command(project: Project) -> None:
    project.write_source(["a record of some words"] * 9)
    project.configure()
    conversion = mdsmix.convert(project.recipe, progress=False, workers=1)
    texts = list[str]()
    conversion._repr_pretty_(types.SimpleNamespace(text=texts.append), False)
    assert texts == [str(conversion)]
    assert "quarantined" in texts[0]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What a notebook shows: each display, and each change of it."""
    shown = list[dict[str, str]]()

    def display(data: dict[str, str], **options: Any) -> Any:
        assert options == {"raw": True, "display_id": True}
        shown.append(data)
        return types.SimpleNamespace(update=lambda data, raw: shown.append(data))

    ipython = types.SimpleNamespace(display=types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(progress, "_is_notebook", lambda: True)
    return shown


def test_a_notebook_gets_one_element_that_changes_a_few_times(
    project: Project, shown: list[dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with watching() as watcher:
        assert isinstance(watcher, NotebookBar)
        watcher.expect({HOSTILE: 1000})
        watcher.begin(HOSTILE, 1000)
        for _ in range(1000):
            watcher.on_progress(1, 2)
        watcher.say(f"WARNING: {HOSTILE}")
    assert 2 <= len(shown) < 10
    drawn = Checker(shown[-2]["text/html"])
    assert [tag for tag, _ in drawn.tags].count("progress") == 1
    last = Checker(shown[-1]["text/html"])
    assert ("p", "warning") in last.tags
    assert "progress" not in {tag for tag, _ in last.tags}
    assert "1.0 kB, 2,000 tokens read in" in shown[-1]["text/plain"]
    assert capsys.readouterr() == ("", "")


def test_an_interrupted_cell_says_that_it_stopped(shown: list[dict[str, str]]) -> None:
    def be_interrupted() -> None:
        with watching() as watcher:
            watcher.expect({"web": 1000})
            watcher.on_progress(300, 2)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert shown[-1]["text/plain"].startswith("stopped after 300 bytes, 2 tokens")


def test_without_events_a_notebook_shows_nothing(shown: list[dict[str, str]]) -> None:
    with watching():
        pass
    with watching(False):
        pass
    assert shown == []
