"""Only what changed is done again: the units of the files that changed, the streams that a setting
shapes. A dry run says what a run would do and why, and does nothing. What stands at the target is
replaced by a new version of itself, and by nothing else unless the user says so.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix import sources
from mdsmix.conversion.planning import Options, describe_plans
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.kinds import open_recipe
from tests.converting import (
    Project,
    assert_refused,
    chats,
    documents,
    list_in_parts,
    pairs,
    read_files,
    read_times,
)
from tests.published import CONCAT, TOKEN_ROW, publish

ALL = {"web", "docs", "faq", "chat"}
CHANGES: list[tuple[list[str], set[str], str]] = [
    (["max_seq_len=40"], ALL, "max_seq_len was 48 and is 40"),
    (["special_tokens_in_text=reject"], ALL, "special_tokens_in_text was escape and is reject"),
    (["compression=zstd:1"], ALL, "compression was not set and is zstd:1"),
    (["target_responses=all"], {"faq", "chat"}, "target_responses was last and is all"),
    (["streams.web.add_eos=false"], {"web"}, "add_eos was true and is false"),
    (["streams.docs.min_tokens=9"], {"docs"}, "min_tokens was 0 and is 9"),
    (["streams.faq.source.response=prompt"], {"faq"}, "source.response was response and is prompt"),
    (["mix.web.repeat=2", "mix.chat.proportion=0.1", "target_prompts=none"], set(), ""),
    (["mix.web.choose=7", "train_loader.dataset.shuffle_seed=3"], set(), ""),
    (["train_loader.num_workers=4", "train_loader.dataset.packing_ratio=auto"], set(), ""),
    (["max_bad=50%", "tokenizer.backend=auto"], set(), ""),
]
EDITED = "edited or incomplete: units of "


@pytest.fixture
def project(project: Project) -> Project:
    """Two files of 50 documents each, of other sizes; the first one is the source."""
    for name, end in (("a", ""), ("b", "!")):
        project.write_source(
            (f"{name} {n} a text of some words{end}" for n in range(50)), f"{name}.jsonl"
        )
    return project.configure(documents("a.jsonl"))


@pytest.fixture
def mixed(project: Project, corpus_folder: Path) -> Project:
    """A stream of each kind, for the finetuning loader, twenty records each."""
    for name in ("docs", "faq", "chat"):
        lines = (corpus_folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (project.folder / f"{name}.jsonl").write_bytes(b"".join(lines[:20]))
    streams = {
        "web": documents("docs.jsonl"),
        "docs": documents("docs.jsonl", layout="document"),
        "faq": pairs("faq.jsonl"),
        "chat": chats("chat.jsonl"),
    }
    return project.configure(streams=streams, max_seq_len=48)


def rebuilt(project: Project, *changes: str) -> set[str]:
    return {name for name, outcome in project.run_all(*changes).items() if outcome.done}


def previewed(project: Project, *changes: str) -> dict[str, str]:
    """The streams of which a dry run says that units would be converted, and all that it says of
    each.
    """
    said = project.convert_ok(*changes, "--dry-run").out
    parts = re.split(r"^(\w+): (\d+) of \d+ work units would", said, flags=re.MULTILINE)
    each = zip(*(parts[i::3] for i in (1, 2, 3)), strict=True)
    return {name: text for name, units, text in each if int(units)}


def test_a_setting_rebuilds_the_streams_that_it_shapes_and_no_other(mixed: Project) -> None:
    """A dry run names them and says why, and does nothing; what was made before is still there when
    one goes back.
    """
    assert rebuilt(mixed) == ALL
    first, before = read_files(mixed.out), read_times(mixed.out)
    for changes, shaped, why in CHANGES:
        said = previewed(mixed, *changes)
        assert said.keys() == shaped, changes
        assert all(why in text for text in said.values())
        assert read_times(mixed.out) == before
    assert rebuilt(mixed, *CHANGES[4][0], *CHANGES[5][0]) == {"web", "docs"}
    assert rebuilt(mixed) == set(), "and back again"
    assert first.items() <= read_files(mixed.out).items()


def test_another_tokenizer_rebuilds_all_another_template_conversations(mixed: Project) -> None:
    mixed.run_all()
    other = shutil.copytree(mixed.tokenizer, mixed.folder / "other")
    same, path = f"tokenizer.name={other}", other / "tokenizer_config.json"
    assert previewed(mixed, same) == {}, "the same files"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": "{{ '\n' }}" + config["chat_template"]}))
    said = previewed(mixed, same)
    assert said.keys() == {"chat"}
    assert "the chat template was " in said["chat"]
    assert rebuilt(mixed, same) == {"chat"}
    path.write_text(json.dumps(config | {"eos_token": "<|im_end|>"}))
    why = previewed(mixed, same)
    assert why.keys() == ALL
    assert re.search(r"the tokenizer was [0-9a-f]{8} and is [0-9a-f]{8}", why["web"])


@pytest.fixture
def two(project: Project) -> Project:
    return project.configure(max_bad=None)


def said(project: Project, *overrides: str, **options: Any) -> str:
    return "\n".join(describe_plans(open_recipe(project.recipe, overrides), Options(**options)))


def test_a_dry_run_says_why_and_touches_nothing(two: Project) -> None:
    assert "1 of 1 work units would be converted" in said(two)
    assert "nothing is published there yet" in said(two)
    assert not two.out.exists()
    two.run()
    assert "0 of 1 work units" in said(two)
    for n in range(7):
        two.write_source(["another text of other words"], f"b-{n}.jsonl")
    names = ", ".join(["a.jsonl", *(f"b-{n}.jsonl" for n in range(4))])
    assert said(two).endswith(f"{EDITED}{names} and 4 more")
    for name in ("b", *(f"b-{n}" for n in range(7))):
        (two.folder / f"{name}.jsonl").unlink()
    assert "b.jsonl is no longer among its sources" in said(two, reencode=True)
    two.patch.setattr(sources, "content_of", None)
    assert "the first 7 records would be converted" in said(two, limit=7), "no source is read"


def test_a_stream_that_is_published_is_refused_where_less_may_be_bad_now(two: Project) -> None:
    (two.folder / "b.jsonl").write_text("no record\n")
    two.run()
    with pytest.raises(TooManyBadRecords):
        two.run("max_bad=0.001")


def test_a_dry_run_says_what_is_lost_unpublished_or_no_longer_trusted(two: Project) -> None:
    two.run()
    place = f"not all of them are, at {two.train}"
    assert f"{place}-" in said(two, "publish=versioned")
    (two.train / "index.json").rename(two.folder / "index")
    assert "0 of 1 work units" in said(two)
    assert said(two).endswith(place)
    (two.folder / "index").rename(two.train / "index.json")
    assert "and is the reference" in said(two, "tokenizer.backend=reference")
    two.run("tokenizer.backend=reference")
    assert two.manifest.backend.startswith("tokenizers ")
    assert len(said(two).splitlines()) == 1
    two.shards[0].unlink()
    assert said(two).endswith(f"{EDITED}a.jsonl, b.jsonl")


def replaced(project: Project, match: str, *overrides: str) -> None:
    """The run is refused in a sentence, changes nothing, and `--reencode` does it all the same."""
    before = project.files
    with pytest.raises(RecipeError, match=match):
        project.run(*overrides)
    assert project.files == before
    project.run(*overrides, reencode=True)
    assert project.files["index.json"] != before["index.json"]
    assert project.run(*overrides).state == "up to date"


def test_what_is_another_stream_is_refused(project: Project) -> None:
    """One that mdsmix did not make; other columns, with how much is to be done again; none of the
    sources of before.
    """
    publish(project.train.parent, CONCAT, [TOKEN_ROW])
    replaced(project, "stream web: .*/web/train has a stream without an mdsmix manifest")
    columns = (
        r"for the text loader with the columns tokens, but the recipe asks for input_ids, labels "
        rf"for the finetuning loader. All 50 records, {project.manifest.totals.tokens} tokens, .* pass --reencode"
    )
    finetuning = "train_loader.name=finetuning"
    replaced(project, columns, finetuning)
    none = r"a\.jsonl is no longer among its sources: about 50 of the 50 records published, 100\.0% of their bytes; bring the missing"
    replaced(project, none, finetuning, "streams.web.source.path=b.jsonl")


def test_the_quarantine_is_no_source(project: Project) -> None:
    """It would grow with every run: what is set aside there is no document."""
    project.write_source(["a text", {"body": 1}])
    everything = "streams.web.source.path=./**/*.jsonl*"
    project.run(everything)
    for settings in ({}, {"limit": 3}, {"reencode": True}):
        match = r"includes files in .*/web/train/quarantine, .*narrow the pattern"
        with pytest.raises(RecipeError, match=match):
            project.run(everything, **settings)


def vanishing(project: Project, kept: int, gone: int) -> None:
    """The second of two files of records of one length vanishes after it was published."""
    for name, count in (("a", kept), ("b", gone)):
        project.write_source(
            (f"{name} {n:04} a text of some words" for n in range(count)), f"g/{name}.jsonl"
        )
    project.configure(documents("g/*.jsonl")).run(reencode=True)
    (project.folder / "g/b.jsonl").rename(project.folder / "b.jsonl")


def test_a_source_file_that_has_vanished_is_told_and_more_than_a_tenth_refused(
    project: Project,
) -> None:
    """What was moved has not vanished. A file of the size of one that stays has not been moved."""
    words = "g/b.jsonl is no longer among its sources: about 5 of the 100 records published, 5.0% of their bytes"
    vanishing(project, kept=95, gone=5)
    assert words in project.convert_ok("--dry-run").out
    assert f"WARNING: {words}" in project.convert_ok().out
    assert project.manifest.records.read == 95
    assert "no longer" not in project.convert_ok().out
    vanishing(project, kept=9, gone=9)
    with pytest.raises(RecipeError, match=r"about 9 of the 18 records published, 50\.0%"):
        project.run()
    list_in_parts(project.patch)
    vanishing(project, kept=30, gone=300)
    before = project.files
    assert_refused(
        project.convert(),
        2,
        "stream web: g/b.jsonl is no longer among its sources: about 300 of the 330 records published, 90.9% of their bytes; "
        f"bring the missing files back, publish to another place, or pass --reencode to replace {project.train} by a stream without them",
    )
    assert project.files == before
    (project.folder / "b.jsonl").rename(project.folder / "g/c.jsonl")
    outcome = project.run()
    assert outcome.manifest.records.read == 330
    assert not any("no longer" in note for note in outcome.notes)
    (project.folder / "g/c.jsonl").unlink()
    assert project.run(reencode=True).manifest.records.read == 30
