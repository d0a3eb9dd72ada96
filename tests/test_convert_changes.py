"""Only what changed is done again: the units of the files that changed, the streams that a setting shapes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.garbage import delete_garbage
from mdsmix.convert.run import Outcome
from mdsmix.shards.index import read_index
from mdsmix.storage import locate
from tests.converting import (
    chats,
    documents,
    files,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    times,
    windows,
    write_jsonl,
    write_recipe,
)

ALL = {"web", "docs", "faq", "chat"}
CHANGES: list[tuple[list[str], set[str], str]] = [
    (["max_seq_len=40"], ALL, "max_seq_len was 48 and is 40"),
    (["special_tokens_in_text=reject"], ALL, "special_tokens_in_text was escape and is reject"),
    (["compression=zstd:1"], ALL, "compression was None and is zstd:1"),
    (["target_responses=all"], {"faq", "chat"}, "target_responses was last and is all"),
    (["streams.web.add_eos=false"], {"web"}, "add_eos was True and is False"),
    (["streams.docs.min_tokens=9"], {"docs"}, "min_tokens was 0 and is 9"),
    (["streams.faq.source.response=prompt"], {"faq"}, "fields was"),
    (["mix.web.repeat=2", "mix.chat.proportion=0.1"], set(), ""),
    (["mix.web.choose=7", "train_loader.dataset.shuffle_seed=3"], set(), ""),
    (["train_loader.num_workers=4", "train_loader.dataset.packing_ratio=auto"], set(), ""),
    (["max_bad=50%", "tokenizer.backend=auto"], set(), ""),
]


@pytest.fixture
def mixed(tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path) -> Path:
    """A stream of each kind, for the finetuning loader, twenty records each."""
    for name in ("docs", "faq", "chat"):
        lines = (corpus_folder / f"{name}.jsonl").read_bytes().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines[:20]))
    streams = {
        "web": documents(tmp_path / "docs.jsonl"),
        "docs": documents(tmp_path / "docs.jsonl", layout="document"),
        "faq": pairs(tmp_path / "faq.jsonl"),
        "chat": chats(tmp_path / "chat.jsonl"),
    }
    return write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=48)


def rebuilt(outcomes: list[Outcome]) -> set[str]:
    return {outcome.stream for outcome in outcomes if outcome.done}


def previewed(recipe: Path, *changes: str) -> dict[str, tuple[int, str]]:
    """Of each stream, how many units a dry run says would be converted, and all that it says of it."""
    answer = mdsmix("convert", recipe, *changes, "--dry-run")
    assert answer.code == 0, answer.err
    parts = re.split(r"^(\w+): (\d+) of \d+ work units would", answer.out, flags=re.MULTILINE)
    return {n: (int(k), text) for n, k, text in zip(*(parts[i::3] for i in (1, 2, 3)), strict=True)}


def test_a_setting_rebuilds_the_streams_that_it_shapes_and_no_other(
    mixed: Path, tmp_path: Path
) -> None:
    """A dry run names them and says why, and does nothing; what was made before is still there when one goes back."""
    assert rebuilt(run_recipe(mixed)) == ALL
    first = files(tmp_path / "out")
    for changes, shaped, why in CHANGES:
        before = times(tmp_path / "out")
        said = previewed(mixed, *changes)
        assert {name for name, (units, _) in said.items() if units} == shaped, changes
        assert all(why in said[name][1] for name in shaped)
        assert times(tmp_path / "out") == before
        outcomes = run_recipe(mixed, *changes)
        assert rebuilt(outcomes) == shaped, changes
        assert rebuilt(run_recipe(mixed)) == set(), "and back again"
        assert first.items() <= files(tmp_path / "out").items()


def test_another_template_rebuilds_conversations_only(
    mixed: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    run_recipe(mixed)
    other = tmp_path / "other"
    shutil.copytree(tokenizer_folder, other)
    path = other / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ '\n' }}" + config["chat_template"]
    path.write_text(json.dumps(config))
    said = previewed(mixed, f"tokenizer.name={other}")
    assert {name for name, (units, _) in said.items() if units} == {"chat"}
    assert "the chat template is another" in said["chat"][1]
    assert rebuilt(run_recipe(mixed, f"tokenizer.name={other}")) == {"chat"}


@pytest.fixture
def small(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A thousand small files, grouped into about sixty units."""
    windows(monkeypatch, 2_000)
    for n in range(1000):
        write_jsonl(tmp_path / "data" / f"{n:04}.jsonl", [text(n)])
    streams = {"web": documents(tmp_path / "data" / "*.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


def text(number: int) -> dict[str, Any]:
    return {"text": f"This is the text number {number} of a thousand and more."}


def test_of_a_thousand_small_files_one_costs_the_units_that_hold_it(
    small: Path, tmp_path: Path
) -> None:
    """One more, one edited, one touched, one less."""
    data = tmp_path / "data"
    (first,) = run_recipe(small, workers=2)
    assert first.units > 30
    write_jsonl(data / "0500a.jsonl", [text(5000)])
    (more,) = run_recipe(small)
    assert 1 <= more.done <= 2, "a unit that is too large now becomes two"
    write_jsonl(data / "0123.jsonl", [text(1230)])
    (edited,) = run_recipe(small)
    assert edited.done == 1
    os.utime(data / "0123.jsonl", (1, 1))
    (touched,) = run_recipe(small)
    assert touched.done == 0
    (data / "0500a.jsonl").unlink()
    (less,) = run_recipe(small)
    assert less.done == 0, "as it was at first"
    assert less.units == first.units
    write_jsonl(data / "0123.jsonl", [text(123)])
    (back,) = run_recipe(small)
    assert back.manifest == first.manifest


def test_a_file_that_is_removed_leaves_the_index_and_with_gc_the_store(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 1_500)
    for name, first in (("a", 0), ("b", 200)):
        write_jsonl(tmp_path / f"{name}.jsonl", [text(n) for n in range(first, first + 100)])
    streams = {"web": documents(tmp_path / "*.jsonl", layout="document")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    run_recipe(recipe)
    published = tmp_path / "out" / "web" / "train"
    before, parts = shards(published), manifest_of(published).parts
    (tmp_path / "b.jsonl").unlink()
    (outcome,) = run_recipe(recipe, reencode=True)
    assert outcome.done == 0
    assert set(manifest_of(published).parts) < set(parts)
    after = shards(published)
    assert after < before
    assert {path.name for path in published.glob("*.mds")} == before, "a job may still read them"
    delete_garbage(locate(published), 0, lambda _: None)
    assert {path.name for path in published.glob("*.mds")} == after
    (published / "index.json").unlink()
    assert run_recipe(recipe)[0].done == 0, "what stays is all that is needed"


def shards(published: Path) -> set[str]:
    return {shard.stored.basename for shard in read_index(locate(published)).shards}
