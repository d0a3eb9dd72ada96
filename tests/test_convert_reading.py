"""Every source is read once at a first conversion, and what a killed one had finished is not read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix.sources import SourceFile
from tests.converting import Web, documents, files, windows

NAMES = ["a.jsonl", "b.jsonl", "c.jsonl.zst", "d.jsonl"]
Opened = Callable[[], list[str]]


@pytest.fixture
def web(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    """Four units, the third of several windows."""
    windows(monkeypatch, 2_500)
    for name in NAMES:
        texts = (f"{name} holds the text number {n} of some words" for n in range(40))
        path = web.holds(texts, f"data/{name}")
        if name.endswith(".zst"):
            path.write_bytes(zstandard.compress(path.read_bytes() * 3))
    return web.says(documents("data/*", layout="document"))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """The sources that were opened since it was asked last, by whatever process, in order."""
    log, really = tmp_path / "opened", SourceFile.open

    def opening(self: SourceFile, *where: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{self.name}\n")
        return really(self, *where)

    def asked() -> list[str]:
        names = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return [name.removeprefix("data/") for name in names]

    monkeypatch.setattr(SourceFile, "open", opening)
    return asked


def test_a_first_conversion_reads_every_source_once_and_a_second_none(
    web: Web, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the cache sources are read to know them, and nothing is encoded."""
    web.run(workers=2)
    assert sorted(opened()) == NAMES
    assert web.run().state == "up to date"
    assert web.convert("--dry-run").code == 0
    assert opened() == []
    before = files(web.out)
    monkeypatch.setenv("MDSMIX_CACHE", str(web.folder / "another"))
    for verify_source in (False, True):
        assert (web.run(verify_source=verify_source).done, opened()) == (0, NAMES)
    assert files(web.out) == before


def test_moved_renamed_and_packed_sources_are_the_same_stream_and_nothing_is_done_again(
    web: Web,
) -> None:
    """Not a name is left, but the content tells."""
    units, moved = web.run().units, web.folder / "moved"
    (web.folder / "data").rename(moved)
    for name in NAMES:
        (moved / name).rename(moved / f"z{name}")
    again = web.run("streams.web.source.path=moved/*")
    assert (again.done, again.units) == (0, units)
    path = moved / "zb.jsonl"
    path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(path.read_bytes()))
    path.unlink()
    assert web.run("streams.web.source.path=moved/*").done == 0
