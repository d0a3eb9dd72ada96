"""`repair` and `convert --verify-target` restore the bytes of a damaged stream. Only damaged units
are converted again, and a stream that cannot be repaired is left as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion.planning import Options
from mdsmix.conversion.repair import Repaired, repair
from mdsmix.encode import open_template
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.storage import locate
from tests.converting import (
    Project,
    RecordingWatcher,
    chats,
    documents,
    flip_byte,
    read_location,
    read_times,
    run_ok,
)
from tests.corpus import train_tokenizer
from tests.published import edit
from tests.styles import train_style

TEXTS = [f"Document {n} is about the number {n}. " * 3 for n in range(60)]
SAME = ["the same text again and again"] * 40
CHAT = [{"role": "user", "content": "What day is it?"}, {"role": "assistant", "content": "A day."}]


@pytest.fixture
def published(project: Project) -> Project:
    project.set_window_size(1500)
    project.write_source([*TEXTS, {"text": 5}])
    project.write_source(TEXTS, "b.jsonl")
    streams = {"web": documents("a.jsonl"), "other": documents("b.jsonl")}
    project.configure(streams=streams).run()
    return project


def repair_stream(project: Project, *overrides: str, folder: Path | None = None) -> Repaired:
    recipe = open_recipe(project.recipe, overrides)
    return repair(recipe, locate(folder or project.train), Options(workers=1), RecordingWatcher())


def test_only_the_units_of_damaged_shards_are_made_again(published: Project) -> None:
    before, stamps, keys = published.files, read_times(published.train), published.keys
    assert repair_stream(published).faults == ()
    assert read_times(published.train) == stamps, "an intact stream is not changed"
    damaged = [published.shards[0], published.shards[2]]
    flip_byte(damaged[0])
    os.truncate(damaged[1], 9)
    repaired = repair_stream(published)
    assert published.files == before
    counts = (repaired.units, repaired.all_units, len(repaired.faults))
    assert counts == (2, len(keys) - 1, 2), "the last key is not one of a unit"
    assert {fault.file for fault in repaired.faults} == {path.name for path in damaged}
    written = {name for name, stamp in read_times(published.train).items() if stamp != stamps[name]}
    records = list[Path]()
    for key in (keys[0], keys[2]):
        records += published.train.glob(f".mdsmix/{key}*")
    assert written == {str(path) for path in [*damaged, *records]}


def damages(project: Project) -> Iterator[tuple[str, int]]:
    """Do one damage after the other. Yield the end of the faulty file's name, and the number of
    units that are converted again.
    """
    index = project.train / "index.json"
    manifest = project.train / "mdsmix.manifest"
    flip_byte(project.shards[-1])
    yield ".mds", 0  # it contains the units' leftovers
    project.shards[0].unlink()
    yield ".mds", 1
    for path in (project.train / ".mdsmix").iterdir():
        path.unlink()
    flip_byte(project.shards[0])
    yield ".mds", 5
    edit(manifest, lambda tree: tree["totals"].update(tokens=1))
    yield "mdsmix.manifest", 0
    for content in (b"", b"{}"):
        index.write_bytes(content)
        yield "index.json", 0
    flip_byte(project.shards[1])
    edit(index, lambda tree: tree["shards"].pop() and None)
    yield "index.json", 1


def test_other_damaged_files_are_made_again(published: Project) -> None:
    before = published.files
    for number, (file, units) in enumerate(damages(published)):
        repaired = repair_stream(published)
        faults = repaired.faults
        assert any(fault.file.endswith(file) for fault in faults), (number, faults)
        assert before.items() <= published.files.items(), number
        assert repaired.units == units, number


def changes(project: Project) -> Iterator[tuple[list[str], type[MdsmixError], str]]:
    """Make one change after the other. Yield the overrides for the repair, and its error."""
    other = train_tokenizer(project.folder / "other", vocab_size=300, documents_n=2)
    for override in ("max_seq_len=32", "special_tokens_in_text=allow", f"tokenizer.name={other}"):
        yield [override], RecipeError, "the recipe or its tokenizer was changed since"
    project.write_source(TEXTS[1:])
    yield [], RecipeError, "files of its source were added"
    (project.train / "mdsmix.manifest").unlink()
    yield [], RecipeError, "--reencode"
    (project.train / "mdsmix.manifest").write_bytes(b"{")
    yield [], Unreachable, "--reencode"


def test_a_repair_that_would_make_another_stream_is_refused(published: Project) -> None:
    flip_byte(published.shards[0])
    for overrides, kind, match in changes(published):
        before = published.files
        with pytest.raises(kind, match=match):
            repair_stream(published, *overrides)
        assert published.files == before, match
    with pytest.raises(
        RecipeError, match=r"does not publish .+; name a stream that the recipe makes"
    ):
        repair_stream(published, folder=published.folder / "elsewhere")


def test_a_template_prints_the_date_of_the_published_stream(project: Project) -> None:
    project.write_source([{"messages": CHAT}])
    project.tokenizer = train_style(project.folder / "dated", "dated")
    project.configure(chats("a.jsonl"), max_seq_len=512)
    project.patch.setattr(open_template, "format_today", lambda: "01 Jan 2026")
    project.run()
    before = project.files
    flip_byte(project.shards[0])
    project.patch.setattr(open_template, "format_today", lambda: "02 Jan 2026")
    assert len(repair_stream(project).faults) == 1
    assert project.files == before
    # The part that is held out is not made of another source by the way.
    flip_byte(project.shards[0])
    project.write_source([*TEXTS, "One more."])
    with pytest.raises(RecipeError, match="files of its source were added"):
        repair_stream(project)


def test_a_source_changed_at_equal_size_is_an_error(published: Project) -> None:
    """Only reading it shows the change. The result is intact, but another version."""
    flip_byte(published.shards[0])
    source = published.folder / "a.jsonl"
    source.write_bytes(source.read_bytes().replace(b"Document 0", b"Abstract 0"))
    with pytest.raises(MdsmixError, match="made again, but with other content"):
        repair_stream(published)
    run_ok("verify", published.train)


CASES = [(TEXTS, {"compression": "zstd", "publish": "versioned"}), (SAME, {})]
"Texts and settings: compressed versions; and equal shards, in place."


@pytest.mark.parametrize(("texts", "settings"), CASES)
def test_verify_target_makes_damaged_shards_again(
    project: Project, texts: list[str], settings: Any
) -> None:
    project.set_window_size(1500 if texts == TEXTS else 500)
    project.configure(documents("a.jsonl", layout="document"), **settings).write_source(texts)
    project.run()
    target = project.train.parent
    before = read_location(target)
    shards = project.shards
    assert len({*shards}) == len(shards), "equal shards are separate files"
    output = project.convert_ok("--verify-target", "--workers", 1).out
    assert "at the target read and hashed: none damaged\n" in output
    assert re.search(r"web: published, (\d+) of \1 work units reused", output)
    assert read_location(target) == before
    for shard in (shards[1], shards[-1]):
        flip_byte(shard)
    assert project.run().done == 0, "a run checks only names and sizes"
    watcher = RecordingWatcher()
    outcome = project.run(verify_target=True, watcher=watcher)
    assert 0 < outcome.done < outcome.units
    assert [shards[1].name in sentence for sentence in watcher.messages].count(True) == 1
    assert outcome.notes[-1].endswith("files at the target read and hashed: 2 damaged, made again")
    assert read_location(target) == before


def test_a_stream_with_a_held_out_part_is_repaired(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure(documents("a.jsonl", holdout="20%")).run()
    before = project.files
    flip_byte(project.shards[0])
    assert len(repair_stream(project).faults) == 1
    assert project.files == before
    # The part that is held out is not made of another source by the way.
    flip_byte(project.shards[0])
    project.write_source([*TEXTS, "One more."])
    with pytest.raises(RecipeError, match="files of its source were added"):
        repair_stream(project)
