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
from tests.converting import Web, chats, documents, files, list_in_parts, pairs, refused, times
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
def web(web: Web) -> Web:
    """Two files of 50 documents each, of other sizes; the first one is the source."""
    for name, end in (("a", ""), ("b", "!")):
        web.holds((f"{name} {n} a text of some words{end}" for n in range(50)), f"{name}.jsonl")
    return web.says(documents("a.jsonl"))


@pytest.fixture
def mixed(web: Web, corpus_folder: Path) -> Web:
    """A stream of each kind, for the finetuning loader, twenty records each."""
    for name in ("docs", "faq", "chat"):
        lines = (corpus_folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (web.folder / f"{name}.jsonl").write_bytes(b"".join(lines[:20]))
    streams = {
        "web": documents("docs.jsonl"),
        "docs": documents("docs.jsonl", layout="document"),
        "faq": pairs("faq.jsonl"),
        "chat": chats("chat.jsonl"),
    }
    return web.says(streams=streams, max_seq_len=48)


def rebuilt(web: Web, *changes: str) -> set[str]:
    return {name for name, outcome in web.runs(*changes).items() if outcome.done}


def previewed(web: Web, *changes: str) -> dict[str, str]:
    """The streams of which a dry run says that units would be converted, and all that it says of
    each.
    """
    said = web.done(*changes, "--dry-run").out
    parts = re.split(r"^(\w+): (\d+) of \d+ work units would", said, flags=re.MULTILINE)
    each = zip(*(parts[i::3] for i in (1, 2, 3)), strict=True)
    return {name: text for name, units, text in each if int(units)}


def test_a_setting_rebuilds_the_streams_that_it_shapes_and_no_other(mixed: Web) -> None:
    """A dry run names them and says why, and does nothing; what was made before is still there when
    one goes back.
    """
    assert rebuilt(mixed) == ALL
    first, before = files(mixed.out), times(mixed.out)
    for changes, shaped, why in CHANGES:
        said = previewed(mixed, *changes)
        assert said.keys() == shaped, changes
        assert all(why in text for text in said.values())
        assert times(mixed.out) == before
    assert rebuilt(mixed, *CHANGES[4][0], *CHANGES[5][0]) == {"web", "docs"}
    assert rebuilt(mixed) == set(), "and back again"
    assert first.items() <= files(mixed.out).items()


def test_another_tokenizer_rebuilds_all_another_template_conversations(mixed: Web) -> None:
    mixed.runs()
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
def two(web: Web) -> Web:
    return web.says(max_bad=None)


def said(web: Web, *overrides: str, **options: Any) -> str:
    return "\n".join(describe_plans(open_recipe(web.recipe, overrides), Options(**options)))


def test_a_dry_run_says_why_and_touches_nothing(two: Web) -> None:
    assert "1 of 1 work units would be converted" in said(two)
    assert "nothing is published there yet" in said(two)
    assert not two.out.exists()
    two.run()
    assert "0 of 1 work units" in said(two)
    for n in range(7):
        two.holds(["another text of other words"], f"b-{n}.jsonl")
    names = ", ".join(["a.jsonl", *(f"b-{n}.jsonl" for n in range(4))])
    assert said(two).endswith(f"{EDITED}{names} and 4 more")
    for name in ("b", *(f"b-{n}" for n in range(7))):
        (two.folder / f"{name}.jsonl").unlink()
    assert "b.jsonl is no longer among its sources" in said(two, reencode=True)
    two.patch.setattr(sources, "content_of", None)
    assert "the first 7 records would be converted" in said(two, limit=7), "no source is read"


def test_a_stream_that_is_published_is_refused_where_less_may_be_bad_now(two: Web) -> None:
    (two.folder / "b.jsonl").write_text("no record\n")
    two.run()
    with pytest.raises(TooManyBadRecords):
        two.run("max_bad=0.001")


def test_a_dry_run_says_what_is_lost_unpublished_or_no_longer_trusted(two: Web) -> None:
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


def replaced(web: Web, match: str, *overrides: str) -> None:
    """The run is refused in a sentence, changes nothing, and `--reencode` does it all the same."""
    before = web.files
    with pytest.raises(RecipeError, match=match):
        web.run(*overrides)
    assert web.files == before
    web.run(*overrides, reencode=True)
    assert web.files["index.json"] != before["index.json"]
    assert web.run(*overrides).state == "up to date"


def test_what_is_another_stream_is_refused(web: Web) -> None:
    """One that mdsmix did not make; other columns, with how much is to be done again; none of the
    sources of before.
    """
    publish(web.train.parent, CONCAT, [TOKEN_ROW])
    replaced(web, "stream web: .*/web/train has a stream without an mdsmix manifest")
    columns = (
        r"for the text loader with the columns tokens, but the recipe asks for input_ids, labels "
        rf"for the finetuning loader. All 50 records, {web.manifest.totals.tokens} tokens, .* pass --reencode"
    )
    finetuning = "train_loader.name=finetuning"
    replaced(web, columns, finetuning)
    none = r"a\.jsonl is no longer among its sources: about 50 of the 50 records published, 100\.0% of their bytes; bring the missing"
    replaced(web, none, finetuning, "streams.web.source.path=b.jsonl")


def test_the_quarantine_is_no_source(web: Web) -> None:
    """It would grow with every run: what is set aside there is no document."""
    web.holds(["a text", {"body": 1}])
    everything = "streams.web.source.path=./**/*.jsonl*"
    web.run(everything)
    for settings in ({}, {"limit": 3}, {"reencode": True}):
        match = r"includes files in .*/web/train/quarantine, .*narrow the pattern"
        with pytest.raises(RecipeError, match=match):
            web.run(everything, **settings)


def vanishing(web: Web, kept: int, gone: int) -> None:
    """The second of two files of records of one length vanishes after it was published."""
    for name, count in (("a", kept), ("b", gone)):
        web.holds((f"{name} {n:04} a text of some words" for n in range(count)), f"g/{name}.jsonl")
    web.says(documents("g/*.jsonl")).run(reencode=True)
    (web.folder / "g/b.jsonl").rename(web.folder / "b.jsonl")


def test_a_source_file_that_has_vanished_is_told_and_more_than_a_tenth_refused(web: Web) -> None:
    """What was moved has not vanished. A file of the size of one that stays has not been moved."""
    words = "g/b.jsonl is no longer among its sources: about 5 of the 100 records published, 5.0% of their bytes"
    vanishing(web, kept=95, gone=5)
    assert words in web.done("--dry-run").out
    assert f"WARNING: {words}" in web.done().out
    assert web.manifest.records.read == 95
    assert "no longer" not in web.done().out
    vanishing(web, kept=9, gone=9)
    with pytest.raises(RecipeError, match=r"about 9 of the 18 records published, 50\.0%"):
        web.run()
    list_in_parts(web.patch)
    vanishing(web, kept=30, gone=300)
    before = web.files
    refused(
        web.convert(),
        2,
        "stream web: g/b.jsonl is no longer among its sources: about 300 of the 330 records published, 90.9% of their bytes; "
        f"bring the missing files back, publish to another place, or pass --reencode to replace {web.train} by a stream without them",
    )
    assert web.files == before
    (web.folder / "b.jsonl").rename(web.folder / "g/c.jsonl")
    outcome = web.run()
    assert outcome.manifest.records.read == 330
    assert not any("no longer" in note for note in outcome.notes)
    (web.folder / "g/c.jsonl").unlink()
    assert web.run(reencode=True).manifest.records.read == 30
