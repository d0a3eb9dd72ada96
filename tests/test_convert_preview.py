"""A dry run says what a run would do and why, and does nothing; sources can be verified, bad records bounded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from mdsmix import sources
from mdsmix.convert.dry_run import describe
from mdsmix.convert.planning import Options
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.kinds import open_recipe
from tests.converting import run_recipe as run
from tests.styles import train_style


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    for name in "ab":
        lines = (f'{{"text": "document {i} of file {name}, with some words"}}\n' for i in range(50))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "recipe.yaml").write_text(
        f"{{tokenizer: {tokenizer_folder}, max_seq_len: 16, local: out, streams: {{"
        'web: {kind: pretraining, source: {path: "*.jsonl", text: text}}}}'
    )
    return tmp_path / "recipe.yaml"


def said(recipe: Path, *overrides: str, **options: Any) -> str:
    return "\n".join(describe(open_recipe(recipe, overrides), Options(**options)))


def test_a_dry_run_says_why_and_touches_nothing(recipe: Path) -> None:
    assert "1 of 1 work units would be converted" in said(recipe)
    assert "nothing is published there yet" in said(recipe)
    assert not (recipe.parent / "out").exists()
    run(recipe)
    assert "0 of 1 work units" in said(recipe)
    assert "max_seq_len was 16 and is 32" in said(recipe, "max_seq_len=32")
    (recipe.parent / "b.jsonl").write_text('{"text": "another text of other words"}\n')
    assert said(recipe).endswith("edited or not whole at the target: those of a.jsonl, b.jsonl")
    (recipe.parent / "b.jsonl").unlink()
    assert "b.jsonl is no longer among its sources" in said(recipe, reencode=True)


def test_a_dry_run_names_both_tokenizers_by_eight_digits(recipe: Path, tmp_path: Path) -> None:
    run(recipe)
    why = said(recipe, f"tokenizer.name={train_style(tmp_path / 'other', 'plain')}")
    hash = r"\([0-9a-f]{8}\)"
    assert re.search(rf"the tokenizer was \S+ {hash} and is another {hash}", why), why


def test_a_dry_run_names_five_files_and_counts_the_rest(recipe: Path) -> None:
    run(recipe)
    for n in range(7):
        (recipe.parent / f"new-{n}.jsonl").write_text('{"text": "another text of other words"}\n')
    five = "a.jsonl, b.jsonl, new-0.jsonl, new-1.jsonl, new-2.jsonl and 4 more"
    assert said(recipe).endswith(f"those of {five}")
    run(recipe)
    for n in range(7):
        (recipe.parent / f"new-{n}.jsonl").unlink()
    gone = said(recipe, reencode=True)
    assert (
        "new-0.jsonl, new-1.jsonl, new-2.jsonl and 4 more are no longer among its sources" in gone
    )


def test_a_dry_run_says_that_too_many_are_bad(recipe: Path) -> None:
    (recipe.parent / "b.jsonl").write_text("no record\n")
    run(recipe)
    assert "refused" not in said(recipe, "max_bad=0.9")
    assert "it would be refused: stream web: 1 of " in said(recipe, "max_bad=0.001")


def test_a_dry_run_says_what_is_lost_unpublished_or_no_longer_trusted(recipe: Path) -> None:
    run(recipe)
    published = recipe.parent / "out" / "web" / "train"
    place = f"not all, at {published}"
    assert f"{place}-" in said(recipe, "publish=versioned")
    (published / "index.json").rename(recipe.parent / "index")
    assert "0 of 1 work units" in said(recipe)
    assert said(recipe).endswith(place)
    (recipe.parent / "index").rename(published / "index.json")
    assert "by the reference" in said(recipe, "tokenizer.backend=reference")
    assert len(said(recipe).splitlines()) == 1
    next(iter(published.glob("*.mds"))).unlink()
    assert said(recipe).endswith("edited or not whole at the target: those of a.jsonl, b.jsonl")


def test_a_dry_run_of_a_first_look_reads_no_source(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "content_of", None)
    assert "the first 7 records would be converted" in said(recipe, limit=7)


def test_other_bytes_of_the_same_size_and_time_are_seen_when_asked_for(recipe: Path) -> None:
    run(recipe)
    source = recipe.parent / "a.jsonl"
    stat = source.stat()
    with source.open("r+b") as file:  # in place: the same inode
        file.write(source.read_bytes().replace(b"document 7 ", b"document 8 "))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert [o.done for o in run(recipe)] == [0]
    assert "1 of 1" in said(recipe, verify_source=True)
    assert [o.done > 0 for o in run(recipe, verify_source=True)] == [True]


def test_a_removed_shard_is_made_again(recipe: Path) -> None:
    run(recipe)
    (shard,) = (recipe.parent / "out" / "web" / "train").glob("*.mds")
    content = shard.read_bytes()
    for damage in (shard.unlink, lambda: shard.write_bytes(b"")):
        damage()
        assert "1 of 1" in said(recipe)
        assert [o.done > 0 for o in run(recipe)] == [True]
        assert shard.read_bytes() == content


def test_too_many_bad_records_publish_nothing_but_are_kept(recipe: Path) -> None:
    with (recipe.parent / "b.jsonl").open("a") as file:
        file.write("not json\n")
    with pytest.raises(
        TooManyBadRecords, match=r"1 of 101 records are bad \(1 not_json\), more than"
    ):
        run(recipe, "max_bad=0.9%")
    published = recipe.parent / "out" / "web" / "train"
    assert not (published / "index.json").exists()
    assert list((published / "quarantine").iterdir())
    run(recipe, "max_bad=0.01")
    assert (published / "index.json").exists()
    with pytest.raises(TooManyBadRecords):
        run(recipe, "max_bad=0")


@pytest.mark.parametrize("share", ["2", "x", "101%", "-1", "true"])
def test_a_share_is_between_none_and_all(recipe: Path, share: str) -> None:
    with pytest.raises(RecipeError, match="max_bad"):
        open_recipe(recipe, [f"max_bad={share}"])
