"""A page that lies is noticed, and what may differ from run to run is not."""

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, shown
from tests.docs.compare import difference, part_of
from tests.docs.homes import Homes
from tests.docs.page import Counts, Page

PRINTED = """  stream   read   tokens   seconds    tokens/s
 ─────────────────────────────────────────────
  web       150   19,133       0.1   6,169,537

  all       150   19,133       0.1   6,169,537

web: 1 of 1 work units converted, /home/you/mdsmix/web/train
peak memory: 156 MB
"""


def test_times_folds_and_what_is_left_out_are_no_difference_and_all_else_is() -> None:
    last = "web: 1 of 1 work units converted, /home/you/mdsmix/web/train\n"
    for page in (
        PRINTED,
        PRINTED.replace("0.1   6,169,537", "12.4   16,169"),
        PRINTED.replace("156 MB", "1,056 MB").replace("─" * 10, "─"),
        PRINTED.replace("converted, ", "converted,\n  "),
        f"...\n{last}...",
        "  stream ...\nweb: 1 of 1 ... /home/you/mdsmix/web/train",
    ):
        assert difference(page, PRINTED) == ""
    for page in (
        PRINTED.replace("150", "151", 1),
        PRINTED.replace("19,133", "19,134", 1),
        PRINTED + "and more",
        PRINTED.replace(last, ""),
        f"{last}...",
        "...\n  all       150   19,133       0.1   6,169,537",
        "...\nweb: 1 of 1\n...\nall 150\n...",
    ):
        assert difference(page, PRINTED).startswith("the page: ")
    assert part_of("web: 1 of 1 work units", PRINTED) == ""
    assert part_of("web: 2 of 2 work units", PRINTED)


def test_a_console_is_cut_into_commands_and_what_they_print() -> None:
    text = "$ cat a\nx\n$ mdsmix convert \\\n    a.yaml\n$ ls\ny\n\nz\n"
    assert list(shown(text)) == [("cat a", "x"), ("mdsmix convert a.yaml", ""), ("ls", "y\n\nz")]


def _page(folder: Path, text: str, is_as_written: bool = True) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    homes = Homes(folder)
    homes.__dict__["are_as_written"] = is_as_written
    page = Page(path, homes, Counts())
    page._home = lambda kind: None  # type: ignore[method-assign]
    page.read()
    return page


LIES = (
    ("```console\n$ mdsmix --version\nmdsmix 9.9\n```\n", "mdsmix 9.9"),
    ("```console\n$ mdsmix check nothing.yaml\n```\n", "ended with 2"),
    ("```console\n$ mdsmix --version\nerror: no\n```\n", "ended with 0"),
    ("```console\n$ mdsmix convrt a.yaml\n```\n", "ended with 2"),
    ("```console\n$ nonesuch\n```\n", "not found"),
    ("```console\n$ make nonesuch\n```\n", "nonesuch"),
    ("```python\nfrom mdsmix.load import nonesuch\n```\n", "ImportError"),
    ("```text\nsomething\n```\n", "Say it in a mark"),
    ("<!-- printed -->\n```text\nsomething\n```\n", "no command before it printed this"),
)


def test_a_page_that_lies_is_told_and_what_is_not_run_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for text, says in LIES:
        wrong = _page(tmp_path, f"# A page\n\n{text}").wrong[0]
        assert says in wrong
        assert wrong.startswith(("page.md, line 3: ", "page.md, line 4: "))
    # Under another Python commands run, and what they print is not compared.
    text = "```console\n$ mdsmix --version\nmdsmix 9.9\n$ mdsmix check nothing.yaml\n```\n"
    (wrong,) = _page(tmp_path, text, is_as_written=False).wrong
    assert "ended with 2" in wrong
    text = "<!-- not run: wants a cluster -->\n```console\n$ nonesuch\n```\n\n```console\n$ sbatch a\n```\n"
    page = _page(tmp_path, text)
    assert (page.wrong, len(page.counts.not_run), page.counts.commands) == ([], 2, 0)
    for text in ("```console\n$ a\n", "<!-- printed -->\nText.\n", "<!-- file: a -->\n"):
        (tmp_path / "page.md").write_text(text)
        with pytest.raises(AssertionError, match=r"page\.md"):
            list(blocks(tmp_path / "page.md"))
