"""A damaged stream is mended to the bytes it had, by `repair` or by `convert --verify-target`: only
units that fail are converted again, and what cannot be mended is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion.planning import Options
from mdsmix.conversion.repair import Repaired, repair
from mdsmix.encode import chat
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


def mend(project: Project, *overrides: str, folder: Path | None = None) -> Repaired:
    recipe = open_recipe(project.recipe, overrides)
    return repair(recipe, locate(folder or project.train), Options(workers=1), RecordingWatcher())


def test_only_the_units_of_damaged_shards_are_made_again(published: Project) -> None:
    before, stamps, keys = published.files, read_times(published.train), published.keys
    assert mend(published).faults == ()
    assert read_times(published.train) == stamps, "a whole stream is left as it is"
    bad = [published.shards[0], published.shards[2]]
    flip_byte(bad[0])
    os.truncate(bad[1], 9)
    made = mend(published)
    assert published.files == before
    assert (made.units, made.of, len(made.faults)) == (2, len(keys) - 1, 2), "the last is no unit"
    assert {fault.file for fault in made.faults} == {path.name for path in bad}
    written = {name for name, stamp in read_times(published.train).items() if stamp != stamps[name]}
    records = [p for k in (keys[0], keys[2]) for p in published.train.glob(f".mdsmix/{k}*")]
    assert written == {str(path) for path in [*bad, *records]}


def damages(project: Project) -> Iterator[tuple[str, int]]:
    """One after the other: how the name of a file ends that is faulty then, and how many units are
    done again for it.
    """
    index, manifest = project.train / "index.json", project.train / "mdsmix.manifest"
    flip_byte(project.shards[-1])
    yield ".mds", 0  # it was made of the units' leftovers
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


def test_what_else_lies_there_is_made_again(published: Project) -> None:
    before = published.files
    for number, (file, units) in enumerate(damages(published)):
        made = mend(published)
        assert any(fault.file.endswith(file) for fault in made.faults), (number, made.faults)
        assert before.items() <= published.files.items(), number
        assert made.units == units, number


def changes(project: Project) -> Iterator[tuple[list[str], type[MdsmixError], str]]:
    """One after the other: overrides that are then given, and the refusal."""
    other = train_tokenizer(project.folder / "other", vocab_size=300, documents_n=2)
    for override in ("max_seq_len=32", "special_tokens_in_text=allow", f"tokenizer.name={other}"):
        yield [override], RecipeError, "the recipe or its tokenizer was changed since"
    project.write_source(TEXTS[1:])
    yield [], RecipeError, "files of its source were added"
    (project.train / "mdsmix.manifest").unlink()
    yield [], RecipeError, "--reencode"
    (project.train / "mdsmix.manifest").write_bytes(b"{")
    yield [], Unreachable, "--reencode"


def test_what_would_give_another_stream_is_refused_untouched(published: Project) -> None:
    flip_byte(published.shards[0])
    for overrides, kind, match in changes(published):
        before = published.files
        with pytest.raises(kind, match=match):
            mend(published, *overrides)
        assert published.files == before, match
    with pytest.raises(RecipeError, match=r"does not publish .+; name a stream that it makes"):
        mend(published, folder=published.folder / "elsewhere")


def test_the_day_that_a_template_prints_is_that_of_the_stream(project: Project) -> None:
    project.write_source([{"messages": CHAT}])
    project.tokenizer = train_style(project.folder / "dated", "dated")
    project.configure(chats("a.jsonl"), max_seq_len=512)
    project.patch.setattr(chat, "format_today", lambda: "01 Jan 2026")
    project.run()
    before = project.files
    flip_byte(project.shards[0])
    project.patch.setattr(chat, "format_today", lambda: "02 Jan 2026")
    assert len(mend(project).faults) == 1
    assert project.files == before


def test_a_source_changed_in_secret_is_told(published: Project) -> None:
    """Of the same size, so that only reading it tells: what comes out is whole, but it is another
    version.
    """
    flip_byte(published.shards[0])
    source = published.folder / "a.jsonl"
    source.write_bytes(source.read_bytes().replace(b"Document 0", b"Abstract 0"))
    with pytest.raises(MdsmixError, match="made again, but as a new version"):
        mend(published)
    run_ok("verify", published.train)


WAYS = [(TEXTS, {"compression": "zstd", "publish": "versioned"}), (SAME, {})]
"Compressed versions, and twins in place."


@pytest.mark.parametrize(("texts", "settings"), WAYS)
def test_verifying_makes_damaged_shards_anew(
    project: Project, texts: list[str], settings: Any
) -> None:
    project.set_window_size(1500 if texts == TEXTS else 500)
    project.configure(documents("a.jsonl", layout="document"), **settings).write_source(texts)
    project.run()
    target = project.train.parent
    before, found = read_location(target), project.shards
    assert len({*found}) == len(found), "twins are files of their own"
    said = project.convert_ok("--verify-target", "--workers", 1).out
    assert "at the target read and hashed: none damaged\n" in said
    assert "web: up to date, " in said
    assert read_location(target) == before
    for place in (found[1], found[-1]):
        flip_byte(place)
    assert project.run().done == 0, "a run sees names and sizes"
    told = RecordingWatcher()
    outcome = project.run(verify_target=True, watcher=told)
    assert 0 < outcome.done < outcome.units
    assert [found[1].name in sentence for sentence in told.messages].count(True) == 1
    assert outcome.notes[-1].endswith("files at the target read and hashed: 2 damaged, made again")
    assert read_location(target) == before
