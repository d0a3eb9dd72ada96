"""Every page for readers does what it says."""

import warnings
from pathlib import Path

import pytest

from tests.docs.homes import Homes
from tests.docs.page import Page
from tests.docs.shell import ROOT

PAGES = sorted(
    {ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "mdsmix").rglob("README.md")}
)
WITH_BLOCKS = [page for page in PAGES if "```" in page.read_text("utf-8")]


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.usefixtures("reader")
def test_a_page_shows_what_happens(path: Path, homes: Homes) -> None:
    page = Page(path, homes)
    page.read()
    if not homes.are_as_written:
        warnings.warn(
            "what commands print was not compared: this Python is not that of the pages",
            stacklevel=1,
        )
    if page.wrong:
        pytest.fail("\n\n".join(page.wrong), pytrace=False)
