"""Same input and recipe, same bytes; only what changed is done again; nothing lost, nothing twice."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.convert.run import Outcome
from mdsmix.engines import memory
from mdsmix.errors import RecipeError, TooManyBadRecords
from mdsmix.shards.index import read_index
from mdsmix.storage import locate
from tests.converting import (
    Told,
    chats,
    documents,
    encoder,
    files,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    samples,
    times,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

EOS = 0
TEXTS = [f"Document {n}: " + "the quick brown fox " * (n % 7) for n in range(40)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three files of documents, 4 KB in all."""
    for n in range(3):
        records = [{"text": text} for text in TEXTS[n::3]]
        write_jsonl(tmp_path / "data" / f"{n}.jsonl", records)
    return tmp_path / "data"


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, texts: Path) -> Path:
    streams = {"web": documents(texts / "*.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return tmp_path / "out" / "web" / "train"


def only(outcomes: list[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("size", [8_000, 30_000])
def test_the_number_of_workers_shapes_no_byte(
    tmp_path: Path,
    tokenizer_folder: Path,
    corpus_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    windows(monkeypatch, size)
    streams = {
        "web": documents(corpus_folder / "web.jsonl.zst"),
        "docs": documents(corpus_folder / "docs.jsonl", layout="document", min_tokens=8),
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    found = []
    for workers in (1, 2, 3):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        outcomes = run_recipe(recipe, workers=workers)
        assert all(outcome.units > 1 for outcome in outcomes)
        found.append(files(tmp_path / "out"))
    assert found[0] == found[1] == found[2]


def test_a_unit_may_be_done_by_whoever_did_others_before(
    recipe: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process has done before, the tokenizer proved and texts compared, leaves no trace in what it writes."""
    windows(monkeypatch, 500)
    run_recipe(recipe)
    first = files(published)
    shutil.rmtree(published)
    run_recipe(recipe)
    assert files(published) == first


def test_of_a_unit_of_which_a_part_was_there_the_new_tokens_are_counted(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed file is one unit, and what of it is done falls into windows."""
    windows(monkeypatch, 500)
    source = tmp_path / "packed.jsonl.gz"
    streams = {"web": documents(source, layout="document")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    lines = [f'{{"text": "{text}"}}\n' for text in TEXTS]
    source.write_bytes(gzip.compress("".join(lines).encode()))
    first = only(run_recipe(recipe))
    assert first.new_tokens == first.manifest.totals.tokens
    source.write_bytes(gzip.compress("".join([*lines[:-1], lines[0]]).encode()))
    second = only(run_recipe(recipe))
    assert second.done == 1 < second.reused
    assert 0 < second.new_tokens < first.new_tokens / 3


def test_a_second_run_converts_nothing_and_touches_no_file(
    recipe: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 300)
    first = only(run_recipe(recipe))
    assert first.reused == 0
    assert first.done == first.units > 5
    before, watcher = times(published), Told()
    second = only(run_recipe(recipe, watcher=watcher))
    assert (second.done, second.new_tokens, second.state) == (0, 0, "up to date")
    assert second.manifest == first.manifest
    assert times(published) == before
    assert watcher == Told()


def test_a_touched_source_costs_a_hash_and_nothing_else(
    recipe: Path, published: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 500)
    write_jsonl(texts / "bad.jsonl", [{"text": 1}, {"text": "good"}])
    run_recipe(recipe)
    before, watcher = times(published), Told()
    for path in texts.glob("*.jsonl"):
        os.utime(path)
    again = only(run_recipe(recipe, watcher=watcher))
    assert again.done == 0
    assert watcher.tokens == 0
    assert times(published) == before
    assert only(run_recipe(recipe)).state == "up to date"


def test_a_lost_cache_costs_a_hash_and_nothing_else(
    recipe: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(recipe)
    before = times(published)
    shutil.rmtree(Path(os.environ["MDSMIX_CACHE"]) / "seen")
    assert only(run_recipe(recipe)).done == 0
    assert times(published) == before


def _parts(published: Path) -> set[str]:
    return {part.key for part in manifest_of(published).parts}


def test_an_edited_file_is_done_again_and_its_neighbours_are_not(
    recipe: Path, published: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 300)
    units = only(run_recipe(recipe)).units
    before = _parts(published)
    last = (texts / "1.jsonl").read_bytes().splitlines(keepends=True)
    (texts / "1.jsonl").write_bytes(b"".join([*last[:-1], b'{"text": "another end"}\n']))
    outcome = only(run_recipe(recipe))
    assert (outcome.done, outcome.units) == (1, units)
    assert len(before - _parts(published)) == 2, "the edited unit and the leftovers"


def test_an_added_and_a_removed_file_change_their_own_units_only(
    recipe: Path, published: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 600)
    run_recipe(recipe)
    before, content = _parts(published), files(published)["index.json"]
    write_jsonl(texts / "2b.jsonl", [{"text": "the quick brown fox " * 20}])
    assert only(run_recipe(recipe)).done == 1
    assert len(before - _parts(published)) == 1, "the leftovers"
    (texts / "2b.jsonl").unlink()
    assert only(run_recipe(recipe, reencode=True)).done == 0
    assert _parts(published) == before
    assert files(published)["index.json"] == content
    assert {s.path for s in manifest_of(published).sources} == {f"data/{n}.jsonl" for n in range(3)}


@pytest.mark.parametrize(
    "changes",
    [
        ["max_seq_len=17"],
        ["streams.web.add_eos=false"],
        ["streams.web.min_tokens=5"],
        ["special_tokens_in_text=reject"],
        ["compression=zstd:1"],
        ["streams.web.layout=document"],
    ],
)
def test_a_setting_that_shapes_bytes_rebuilds(recipe: Path, changes: list[str]) -> None:
    run_recipe(recipe)
    outcome = only(run_recipe(recipe, *changes))
    assert outcome.reused == 0
    assert only(run_recipe(recipe, *changes)).state == "up to date"


@pytest.mark.parametrize(
    "changes",
    [
        ["mix.web.repeat=2"],
        ["train_loader.dataset.shuffle_seed=3", "train_loader.num_workers=4"],
        ["train_loader.name=text"],  # as it was by default
        ["target_prompts=none"],
    ],
)
def test_what_shapes_no_byte_rebuilds_nothing(recipe: Path, changes: list[str]) -> None:
    run_recipe(recipe)
    assert only(run_recipe(recipe, *changes)).state == "up to date"


def test_another_tokenizer_rebuilds(recipe: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    run_recipe(recipe)
    other = tmp_path / "other"
    shutil.copytree(tokenizer_folder, other)
    assert only(run_recipe(recipe, f"tokenizer.name={other}")).state == "up to date", (
        "the same files"
    )
    config = (other / "tokenizer_config.json").read_text()
    changed = config.replace('"eos_token": "<|endoftext|>"', '"eos_token": "<|im_end|>"')
    assert changed != config
    (other / "tokenizer_config.json").write_text(changed)
    assert only(run_recipe(recipe, f"tokenizer.name={other}")).reused == 0


def test_concat_rows_are_the_documents_joined_and_cut(
    recipe: Path,
    published: Path,
    tokenizer_folder: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one unit, the rows of one long join; the last tokens, less than a row, are lost and counted."""
    encode = encoder(tokenizer_folder)
    run_recipe(recipe)
    joined = [t for n in range(3) for text in TEXTS[n::3] for t in [*encode(text), EOS]]
    full = len(joined) // 16
    assert token_rows(published) == [joined[16 * i : 16 * i + 16] for i in range(full)]
    assert manifest_of(published).totals.lost_tokens == len(joined) - 16 * full


def test_the_units_leftovers_are_joined_in_order_into_the_last_part(
    recipe: Path, published: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 20)
    run_recipe(recipe, workers=2)
    encode = encoder(tokenizer_folder)
    rows, rest = [], []
    for text in (t for n in range(3) for t in TEXTS[n::3]):  # each is longer than a window
        ids = [*encode(text), EOS]
        cut = len(ids) // 16 * 16
        rows += [ids[i : i + 16] for i in range(0, cut, 16)]
        rest += ids[cut:]
    rows += [rest[i : i + 16] for i in range(0, len(rest) // 16 * 16, 16)]
    assert token_rows(published) == rows
    assert manifest_of(published).totals.lost_tokens == len(rest) % 16


@pytest.mark.parametrize("size", [400, 28_000, 1 << 32])
def test_what_is_counted_is_what_lies_there(
    tmp_path: Path,
    tokenizer_folder: Path,
    corpus_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    """read = written + filtered + quarantined, and the totals are those of the samples read back."""
    windows(monkeypatch, size)
    mixed = write_jsonl(
        tmp_path / "mixed.jsonl",
        [{"text": t} for t in TEXTS] + [{"text": ""}, {"texts": "x"}, {"text": None}, 7],
    )
    streams = {
        "web": documents(mixed),
        "docs": documents(mixed, layout="document", min_tokens=8, max_tokens=60),
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=32)
    for outcome in run_recipe(recipe):
        records, totals = outcome.manifest.records, outcome.manifest.totals
        assert records.read == records.written + records.dropped + records.bad > 0
        rows = token_rows(outcome.target)
        assert totals.samples == len(rows) == sum(p.samples for p in outcome.manifest.parts)
        assert totals.tokens == sum(map(len, rows))
        assert totals.largest_id == max(map(max, rows))
        assert totals.longest == max(map(len, rows))
        assert sum(totals.lengths.values()) == len(rows)
        assert outcome.new_tokens + totals.lost_tokens >= totals.tokens - 32 * outcome.units
    assert manifest_of(tmp_path / "out/web/train").records.quarantined == {
        "field_not_text": 1,
        "missing_field": 1,
        "not_an_object": 1,
    }


COLUMNS = {
    "text": {
        "web": {"tokens": "ndarray:uint16:16"},
        "docs": {"tokens": "ndarray:uint16"},
    },
    "finetuning": {
        "web": {"input_ids": "ndarray:uint16:1", "labels": "ndarray:uint16:15"},
        "docs": {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"},
    },
}


@pytest.mark.parametrize("loader", COLUMNS)
def test_the_loader_decides_the_columns_and_not_the_tokens(
    tmp_path: Path, tokenizer_folder: Path, texts: Path, loader: str
) -> None:
    streams = {
        "web": documents(texts / "*.jsonl"),
        "docs": documents(texts / "*.jsonl", layout="document"),
    }
    settings = {"streams": streams, "train_loader": {"name": loader}}
    recipe = write_recipe(tmp_path, tokenizer_folder, **settings)
    encode = encoder(tokenizer_folder)
    documents_ids = [[*encode(text), EOS] for n in range(3) for text in TEXTS[n::3]]
    joined = [t for ids in documents_ids for t in ids]
    split = [ids[i : i + 16] for ids in documents_ids for i in range(0, len(ids), 16)]
    expected = {
        "web": [joined[i : i + 16] for i in range(0, len(joined) // 16 * 16, 16)],
        "docs": [piece for piece in split if len(piece) > 1],
    }
    for outcome in run_recipe(recipe):
        index = read_index(locate(outcome.target))
        assert index.shards[0].columns == COLUMNS[loader][outcome.stream]
        assert token_rows(outcome.target) == expected[outcome.stream]
        if loader == "finetuning":
            assert {len(s["input_ids"]) for s in samples(outcome.target)} == {1}


def test_a_first_look_reads_the_first_records_and_leaves_the_stream_alone(
    recipe: Path, tmp_path: Path, texts: Path
) -> None:
    run_recipe(recipe)
    before = times(tmp_path / "out")
    look = only(run_recipe(recipe, limit=15))
    assert look.target == str(tmp_path / "out" / "web" / "limit-15")
    assert look.manifest.records.read == 15
    assert before.items() <= times(tmp_path / "out").items()
    whole = token_rows(tmp_path / "out" / "web" / "train")
    assert token_rows(look.target) == whole[: look.manifest.totals.samples]


def test_a_first_look_counts_anew_when_a_file_before_changed(
    recipe: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much of the second file is read follows from how much the first one held."""
    windows(monkeypatch, 200)
    assert only(run_recipe(recipe, limit=15)).manifest.records.read == 15
    lines = (texts / "0.jsonl").read_bytes().splitlines(keepends=True)
    (texts / "0.jsonl").write_bytes(b"".join(lines[:3]))
    assert only(run_recipe(recipe, limit=15)).manifest.records.read == 15


def test_only_names_streams_with_a_source(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--only nothing names no stream.*: web\."):
        run_recipe(recipe, only=["nothing"])
    assert only(run_recipe(recipe, only=["web", "web"])).stream == "web"


def test_a_stream_that_fails_leaves_those_before_it_published(
    tmp_path: Path, tokenizer_folder: Path, texts: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text("not json\n")
    streams = {"web": documents(texts / "*.jsonl"), "lost": documents(tmp_path / "bad.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    with pytest.raises(TooManyBadRecords, match="not one sample"):
        run_recipe(recipe)
    assert only(run_recipe(recipe, only=["web"])).state == "up to date"


def test_the_watcher_hears_of_every_byte_and_every_token(recipe: Path, texts: Path) -> None:
    watcher = Told()
    outcome = only(run_recipe(recipe, watcher=watcher))
    size = sum(path.stat().st_size for path in texts.iterdir())
    assert watcher.began == [("web", size)]
    assert watcher.sizes == size
    assert watcher.tokens == outcome.manifest.totals.tokens + outcome.manifest.totals.lost_tokens


Change = Callable[[Path], Any]


def test_names_and_order_of_files_are_those_of_their_paths(
    tmp_path: Path, tokenizer_folder: Path, texts: Path
) -> None:
    """A list of files in another order is the same stream."""
    paths = sorted(texts.iterdir())
    manifests = []
    for order in (paths, paths[::-1]):
        streams = {"web": documents(list(order))}
        recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
        manifests.append(replace(only(run_recipe(recipe)).manifest))
    assert manifests[0] == manifests[1]


def test_the_ids_are_uint16_arrays(recipe: Path, published: Path) -> None:
    run_recipe(recipe)
    assert {np.asarray(sample["tokens"]).dtype for sample in samples(published)} == {np.dtype("u2")}


def test_a_cap_that_one_worker_does_not_keep_is_told(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not run_recipe(recipe, memory=1 << 40)[0].notes
    monkeypatch.setattr(memory, "held", lambda pid: 1 << 40)
    (note,) = run_recipe(recipe, "max_seq_len=8", memory=1 << 30)[0].notes
    assert "MB of memory were held, more than --memory allows (1,074 MB)" in note


def test_the_first_use_of_a_tokenizer_says_what_it_does(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "new"))
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "one two three " * 20}])
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": documents(source)})
    for said in (1, 0):
        watcher = Told()
        run_recipe(recipe, watcher=watcher)
        assert sum("looking at the tokenizer" in sentence for sentence in watcher.said) == said


def test_a_stream_that_fails_ends_no_other(tmp_path: Path, tokenizer_folder: Path) -> None:
    """All have their turn, each failure is a sentence, and the exit code is the gravest one's."""
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "a document"}])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"body": 1}])
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(b"\x1f\x8b\x08 no gzip")
    of = {"bad": bad, "damaged": damaged, "good": good}
    streams = {name: documents(path, layout="document") for name, path in of.items()}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    answer = mdsmix("convert", recipe)
    assert answer.code == 4
    first, second = answer.err.strip().splitlines()[-2:]
    assert first.startswith("error: stream bad: not one sample")
    assert second.startswith("error: ")
    assert "damaged.jsonl.gz" in second
    assert "good: 1 of 1 work units converted" in answer.out
    assert manifest_of(tmp_path / "out/good/train").totals.samples == 1
    alone = mdsmix("convert", recipe, "--only", "bad", "--only", "good")
    assert alone.code == 5
    assert "good: up to date" in alone.out
