"""Every page for readers does what it says; one that lies is noticed, and what may differ from run
to run is not.

Pages may load and preview, so torch is wanted; all of them share one process, one corpus and its
streams.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from mdsmix.processor import server
from tests.docs.blocks import blocks
from tests.docs.homes import ROOT, Homes
from tests.docs.page import Page
from tests.with_torch.conftest import _own_numbers  # noqa: F401

PAGES = sorted(
    {ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "mdsmix").rglob("README.md")}
)
WITH_BLOCKS = [page for page in PAGES if "```" in page.read_text("utf-8")]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Homes:
    return Homes(tmp_path_factory.mktemp("pages"))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody with mdsmix and python at the prompt, in a window of 80 columns."""
    monkeypatch.setattr(server, "try_to_ask", _answered)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(Path.cwd())


def _answered(name: str, asked: Any) -> tuple[Any, str]:
    """By transformers in this process: one of its own takes 10 s."""
    from mdsmix.load.vision import load_processor
    from mdsmix.processor.answers import answer_question

    return answer_question(load_processor(name), asked), ""


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.usefixtures("reader")
def test_a_page_shows_what_happens(path: Path, homes: Homes) -> None:
    page = Page(path, homes)
    page.read()
    if not homes.are_as_written:
        warnings.warn("nothing printed was compared: pages are of Python 3.11.7", stacklevel=1)
    if page.wrong:
        pytest.fail("\n\n".join(page.wrong), pytrace=False)


LIES = (
    ("```console\n$ mdsmix --version\nmdsmix 9.9\n```\n", "mdsmix 9.9"),
    ("```console\n$ echo 1 2 in 0.1 s, 3\n1 ... in\n0.2 s, 3\n```\n", ""),
    ("```console\n$ echo 1 2 3\n1 2\n```\n", "the page: 1 2"),
    ("```console\n$ echo 12 3\n...\n2 3\n```\n", "the page: 2 3"),
    ("```console\n$ echo 1 2 3\n...\n2\n...\n1\n...\n```\n", "the page: 1"),
    ("```console\n$ mdsmix check \\\n  nothing.yaml\n```\n", "ended with 2"),
    ("```console\n$ mdsmix --version\nerror: no\n```\n", "ended with 0"),
    ("```console\n$ nonesuch\n```\n", "not found"),
    ("```python\nfrom mdsmix.load import nonesuch\n```\n", "ImportError"),
    ("```text\nsomething\n```\n", "needs a mark"),
    ("<!-- printed -->\n```text\nsomething\n```\n", "no command before it printed this"),
    ("<!-- not run: wants a cluster -->\n```console\n$ nonesuch\n```\n", ""),
)


def test_a_page_that_differs_from_the_output_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Page, "_home", lambda page, kind: None)
    path, homes = tmp_path / "page.md", Homes(tmp_path)
    homes.__dict__["are_as_written"] = True
    for text, says in LIES:
        path.write_text(f"# A page\n\n{text}")
        page = Page(path, homes)
        page.read()
        assert page.wrong if says else not page.wrong, text
        assert says in "".join(page.wrong), text
    for text in ("```console\n$ a\n", "<!-- printed -->\nText.\n", "<!-- file: a -->\n"):
        path.write_text(text)
        with pytest.raises(AssertionError, match=r"page\.md"):
            list(blocks(path))
