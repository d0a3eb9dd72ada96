"""Every page for readers does what it says."""

from pathlib import Path

import pytest

from tests.docs.homes import Homes
from tests.docs.page import Counts, Page
from tests.docs.shell import ROOT

PAGES = sorted(
    {ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "mdsmix").rglob("README.md")}
)
WITH_BLOCKS = [page for page in PAGES if "```" in page.read_text("utf-8")]


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_shows_what_happens(path: Path, homes: Homes, reader: Counts) -> None:
    page = Page(path, homes, reader)
    page.read()
    reader.not_compared |= not homes.are_as_written
    if page.wrong:
        pytest.fail("\n\n".join(page.wrong), pytrace=False)
