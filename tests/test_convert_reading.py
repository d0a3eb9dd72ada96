"""Every source is read once at a first conversion, and what a killed one had finished is not read again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mdsmix.convert import unit
from mdsmix.errors import MdsmixError
from mdsmix.sources import SourceFile
from tests.converting import (
    documents,
    files,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)

NAMES = ("a.jsonl", "b.jsonl", "c.jsonl.zst", "d.jsonl")


def texts(name: str) -> list[dict[str, str]]:
    return [{"text": f"{name} holds the text number {n} of some words"} for n in range(40)]


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four units, the third of several windows."""
    windows(monkeypatch, 2_500)
    for name in NAMES:
        path = write_jsonl(tmp_path / "data" / name, texts(name))
        if name.endswith(".zst"):
            path.write_bytes(zstandard.compress(path.read_bytes() * 3))
    streams = {"web": documents(tmp_path / "data" / "*", layout="document")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
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
    recipe: Path, opened: Callable[[], list[str]]
) -> None:
    run_recipe(recipe, workers=2)
    assert sorted(opened()) == list(NAMES)
    assert run_recipe(recipe)[0].state == "up to date"
    assert mdsmix("convert", recipe, "--dry-run").code == 0
    assert opened() == []


def test_what_was_finished_before_an_end_is_not_read_again(
    recipe: Path,
    tmp_path: Path,
    opened: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ended in the second window of the third file: that file and what follows are read, its first window is not encoded."""
    really, encoded = unit.UnitTask._convert, tmp_path / "encoded"

    def failing(task: Any, number: int, *given: Any) -> Any:
        if task.unit.name.endswith(".zst") and number == 1:
            raise MdsmixError("the end")
        return really(task, number, *given)

    def noting(task: Any, number: int, *given: Any) -> Any:
        with encoded.open("a") as file:
            file.write(f"{task.unit.name} {number}\n")
        return really(task, number, *given)

    monkeypatch.setattr(unit.UnitTask, "_convert", failing)
    with pytest.raises(MdsmixError, match="the end"):
        run_recipe(recipe)
    assert opened() == list(NAMES[:3])
    monkeypatch.setattr(unit.UnitTask, "_convert", noting)
    (outcome,) = run_recipe(recipe)
    assert opened() == list(NAMES[2:])
    windows_made = encoded.read_text().splitlines()
    assert "data/c.jsonl.zst 0" not in windows_made
    assert "data/c.jsonl.zst 1" in windows_made
    assert outcome.reused == 3
    run_recipe(recipe, f"local={tmp_path / 'quiet'}")
    assert files(tmp_path / "quiet") == files(tmp_path / "out")


def test_without_the_cache_sources_are_read_to_know_them_and_nothing_is_encoded(
    recipe: Path, tmp_path: Path, opened: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(recipe)
    opened()
    before = files(tmp_path / "out")
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "another"))
    (outcome,) = run_recipe(recipe)
    assert (outcome.done, opened()) == (0, list(NAMES))
    (outcome,) = run_recipe(recipe, verify_source=True)
    assert (outcome.done, opened()) == (0, list(NAMES))
    assert files(tmp_path / "out") == before


def test_a_file_that_was_edited_and_kept_its_stamp_is_noticed_when_it_is_read(
    recipe: Path, tmp_path: Path
) -> None:
    """What is remembered of it names records; what is read decides which ones are taken."""
    run_recipe(recipe)
    path = tmp_path / "data" / "c.jsonl.zst"
    content = zstandard.decompress(path.read_bytes()).replace(b"number 39", b"number XX")
    record = max((tmp_path / "out" / "web" / "train" / ".mdsmix").glob("*.unit"))
    shutil.copy(record, tmp_path / "kept")
    path.write_bytes(zstandard.compress(content))
    (outcome,) = run_recipe(recipe, verify_source=True)
    assert outcome.done
    published = tmp_path / "out"
    run_recipe(recipe, f"local={tmp_path / 'quiet'}")
    names = {name for name in files(tmp_path / "quiet") if name.endswith(".mds")}
    assert all(files(published)[name] == files(tmp_path / "quiet")[name] for name in names)


def test_moved_renamed_and_packed_sources_are_the_same_stream_and_nothing_is_done_again(
    recipe: Path, tmp_path: Path
) -> None:
    """Not a name is left, but the content tells."""
    (first,) = run_recipe(recipe)
    (tmp_path / "data").rename(tmp_path / "moved")
    for name in NAMES:
        (tmp_path / "moved" / name).rename(tmp_path / "moved" / f"z{name}")
    (outcome,) = run_recipe(recipe, f"streams.web.source.path={tmp_path}/moved/*")
    assert (outcome.done, outcome.units) == (0, first.units)
    path = tmp_path / "moved" / "zb.jsonl"
    path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(path.read_bytes()))
    path.unlink()
    (outcome,) = run_recipe(recipe, f"streams.web.source.path={tmp_path}/moved/*")
    assert outcome.done == 0
