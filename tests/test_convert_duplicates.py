"""Duplicates: of equal records the first in the order of the published stream stays, whoever works, in whatever order, and what
changes elsewhere redoes only the units that lose other records than before."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import garbage as gc
from mdsmix.convert import stored
from mdsmix.convert.ledger import FOLDER
from mdsmix.sources import record_batches
from mdsmix.storage import locate
from tests.converting import (
    chats,
    documents,
    files,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

WINDOW = 400
POOL = [f"text {n}, the same wherever it stands" for n in range(12)]
DROP = "streams.web.duplicates=drop"


def lines(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Records of the pool; a number beyond it is one that stands nowhere else, -1 a bad one."""
    texts = {-1: 5}
    return [
        {"text": texts.get(n, POOL[n] if n < len(POOL) else f"only number {n}")} for n in numbers
    ]


def recipe_of(folder: Path, tokenizer: Path, **stream: Any) -> Path:
    stream = {"layout": "document"} | stream
    return write_recipe(folder, tokenizer, streams={"web": documents("*.jsonl*", **stream)})


def write(folder: Path, contents: Sequence[Sequence[int]]) -> None:
    for number, numbers in enumerate(contents):
        write_jsonl(folder / f"{number}.jsonl", lines(numbers))


def unique(rows: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in dict.fromkeys(map(tuple, rows))]


def train(out: Path) -> Path:
    return out / "web/train"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    windows(monkeypatch, WINDOW)


def some(seed: int) -> list[list[int]]:
    """Files of any length, none among them, whose records stand in one another, in themselves, or nowhere else."""
    rng = random.Random(seed)
    return [
        [rng.randrange(-1, 2 * len(POOL)) for _ in range(rng.choice([0, 1, 3, 12, 40]))]
        for _ in range(rng.randint(2, 5))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_first_of_equal_records_stays(
    seed: int, tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    folder = tmp_path
    write(folder, [*some(seed), [0, 99, 0]])
    recipe = recipe_of(folder, tokenizer_folder)
    run_recipe(recipe)
    kept = token_rows(train(folder / "out"))
    all_in = manifest_of(train(folder / "out")).records
    assert all_in.duplicates == len(kept) - len(unique(kept))
    run_recipe(recipe, DROP, f"local={folder / 'dropped'}")
    assert token_rows(train(folder / "dropped")) == unique(kept)
    records = manifest_of(train(folder / "dropped")).records
    assert records.filtered.get("duplicate", 0) == all_in.duplicates
    assert records.adds_up
    assert (records.read, records.quarantined) == (all_in.read, all_in.quarantined)
    assert records.duplicates == 0
    run_recipe(recipe, DROP)  # over what was kept: only what loses records is done
    assert token_rows(train(folder / "out")) == unique(kept)
    assert manifest_of(train(folder / "out")) == manifest_of(train(folder / "dropped"))


def test_a_file_under_two_names_is_trained_once(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    """It has the same content as the other, and so the same key, but for what is dropped; packed, it is one unit of many windows."""
    source = write_jsonl(tmp_path / "a.jsonl", lines(range(100, 140)))
    (once,) = run_recipe(recipe_of(tmp_path, tokenizer_folder), f"local={tmp_path / 'once'}")
    (tmp_path / "b.jsonl").write_bytes(source.read_bytes())
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(source.read_bytes()))
    (twice,) = run_recipe(recipe_of(tmp_path, tokenizer_folder, duplicates="drop"))
    assert token_rows(train(tmp_path / "out")) == token_rows(train(tmp_path / "once"))
    assert twice.manifest.records.filtered == {"duplicate": 80}
    assert once.manifest.totals == twice.manifest.totals


@pytest.mark.parametrize("setting", ["keep", "drop"])
def test_a_unit_without_duplicates_has_the_key_that_it_always_had(
    setting: str, tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [range(20, 60), [1, 1]])
    recipe = recipe_of(tmp_path, tokenizer_folder)
    run_recipe(recipe)
    before = [part.key for part in manifest_of(train(tmp_path / "out")).parts]
    (outcome,) = run_recipe(recipe, f"streams.web.duplicates={setting}")
    after = [part.key for part in outcome.manifest.parts]
    assert before[:-1] == after[:-1]
    assert (before[-1] == after[-1]) == (setting == "keep")
    assert outcome.done == (setting == "drop")


def test_an_edit_elsewhere_redoes_only_units_that_lose_other_records(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    """`b` has a record of `a`, `d` has one of `c`: when it is edited away from `a`, `b` has it again."""
    contents = {"a": [1, *range(20, 28)], "b": [1, *range(30, 38)], "c": [2, *range(40, 48)]}
    contents |= {"d": [2, *range(50, 58)], "e": [*range(60, 68)]}
    for name, numbers in contents.items():
        write_jsonl(tmp_path / f"{name}.jsonl", lines(numbers))
    recipe = recipe_of(tmp_path, tokenizer_folder, duplicates="drop")
    (first,) = run_recipe(recipe)
    assert first.manifest.records.filtered == {"duplicate": 2}
    write_jsonl(tmp_path / "a.jsonl", lines([3, *range(20, 28)]))
    (second,) = run_recipe(recipe)
    assert second.manifest.records.filtered == {"duplicate": 1}
    assert second.done == 2
    changed = {
        number
        for number, (old, new) in enumerate(
            zip(first.manifest.parts, second.manifest.parts, strict=True)
        )
        if old.key != new.key
    }
    assert len(changed) == 2
    write_jsonl(tmp_path / "0.jsonl", lines([4, *range(70, 78)]))  # new, and nobody's double
    assert run_recipe(recipe)[0].done == 1
    (idle,) = run_recipe(recipe)
    assert idle.done == 0
    expected = manifest_of(train(tmp_path / "out"))
    run_recipe(recipe, f"local={tmp_path / 'anew'}")
    assert manifest_of(train(tmp_path / "anew")) == expected


def test_nothing_is_read_or_joined_where_nothing_changed(
    tmp_path: Path, tokenizer_folder: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [range(20), range(10)])
    recipe = recipe_of(tmp_path, tokenizer_folder, duplicates="drop")
    run_recipe(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(stored, "read_blobs", None)
        (outcome,) = run_recipe(recipe)
        assert "0 of " in mdsmix("convert", recipe, "--dry-run").out
        assert outcome.done == 0
    assert mdsmix("verify", train(tmp_path / "out")).code == 0


def test_fingerprints_are_of_what_the_record_says(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    """Not of spaces, the order of keys, fields that are not read, or how characters are escaped."""
    texts = ['{"text": "a é"}', '{"id": 7, "text":"a \\u00e9"}', ' {"text":"a é","id":8 } ']
    (tmp_path / "a.jsonl").write_text("\n".join([*texts, '{"text":"a e"}']))
    talk = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}'
    same = '{"messages": [{"content": "x", "role": "user"}, {"content": "y", "role": "assistant"}]}'
    (tmp_path / "chat.json").write_text(f"{talk}\n{same}\n{talk.replace('y', 'z')}\n")
    asked = [("ab", "c"), ("a", "bc"), ("ab", "c")]
    write_jsonl(tmp_path / "pairs.json", [{"prompt": p, "response": r} for p, r in asked])
    streams = {
        "web": documents("a.jsonl", layout="document"),
        "chat": chats("chat.json"),
        "faq": pairs("pairs.json"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    found = {each.stream: each.manifest.records.duplicates for each in run_recipe(recipe)}
    assert found == {"web": 2, "chat": 1, "faq": 1}


def test_both_sides_of_a_holdout_drop_and_no_record_is_on_both(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [range(200), range(100, 250), [0, 0]])
    recipe = recipe_of(tmp_path, tokenizer_folder, holdout="20%", duplicates="drop")
    found = {each.stream: each.manifest.records for each in run_recipe(recipe)}
    sides = [token_rows(tmp_path / f"out/web/{split}") for split in ("train", "eval")]
    rows = [tuple(row) for side in sides for row in side]
    assert len(rows) == len(set(rows)) == len({*map(str, lines([*range(250)]))})
    assert found["web"].filtered["duplicate"] + found["web-eval"].filtered["duplicate"] == 102


def test_a_limit_drops_among_the_records_that_it_reads(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [[1, 1, -1, 2, 30], [2, 31, 1, 32], range(40, 80)])
    recipe = recipe_of(tmp_path, tokenizer_folder, duplicates="drop")
    (outcome,) = run_recipe(recipe, limit=8)
    records = outcome.manifest.records
    assert (records.read, records.bad, records.filtered) == (8, 1, {"duplicate": 3})
    (kept,) = run_recipe(recipe, "streams.web.duplicates=keep", limit=8)
    assert kept.manifest.records.duplicates == 3


def test_damaged_fingerprints_are_told_and_made_anew_where_that_is_asked(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [range(20), range(10)])
    recipe = recipe_of(tmp_path, tokenizer_folder)
    run_recipe(recipe)
    key = manifest_of(train(tmp_path / "out")).parts[0].key
    for path in (train(tmp_path / "out") / FOLDER).glob(f"{key}*.unit"):
        path.write_bytes(path.read_bytes()[:-1])
    (train(tmp_path / "out") / "index.json").unlink()
    answer = mdsmix("convert", recipe)
    assert (answer.code, ".unit is damaged or gone" in answer.err) == (4, True)
    assert mdsmix("convert", recipe, "--verify-target").code == 0
    (outcome,) = run_recipe(recipe, DROP)
    assert outcome.manifest.records.filtered == {"duplicate": 10}


def test_gc_keeps_the_fingerprints_of_units_in_use(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [range(20), range(10, 30)])
    recipe = recipe_of(tmp_path, tokenizer_folder, duplicates="drop")
    run_recipe(recipe)
    folder = train(tmp_path / "out")
    before = files(folder)
    assert gc.find_garbage(locate(folder), 0) == []
    (tmp_path / "1.jsonl").unlink()
    run_recipe(recipe, reencode=True)
    gone = {item.kind for item in gc.delete_garbage(locate(folder), 0, print)}
    assert "fingerprints" in gone
    left = [name for name in files(folder) if name.endswith(".hashes")]
    assert len(left) == len(manifest_of(folder).parts)
    write(tmp_path, [range(20), range(10, 30)])
    run_recipe(recipe)
    assert {k: v for k, v in files(folder).items() if k in before} == before


def test_a_share_above_one_percent_is_said_with_the_way_out(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    write(tmp_path, [range(100), [5]])
    recipe = recipe_of(tmp_path, tokenizer_folder)
    assert "duplicate" not in mdsmix("convert", recipe).out
    write(tmp_path, [range(100), [5, 5]])
    (row,) = json.loads(mdsmix("convert", recipe, "--json").out)["rows"]
    assert row["duplicates"] == 2
    answer = mdsmix("check", recipe)
    assert "2 of 102 records of web (2.0%) say the same as an earlier one" in answer.out
    assert "duplicates: drop" in answer.out
    answer = mdsmix("convert", recipe, f"local={tmp_path / 'new'}")
    assert "WARNING: 2 of 102 records (2.0%) say the same as an earlier one" in answer.out
    answer = mdsmix("convert", recipe, DROP)
    assert "filtered: 2 duplicate" in answer.out
    assert "WARNING" not in answer.out
    streams = {"old": {"local": str(tmp_path), "duplicates": "drop"}}
    answer = mdsmix("check", write_recipe(tmp_path, tokenizer_folder, streams=streams))
    assert answer.code == 2
    assert "streams.old: duplicates is for streams with a source" in answer.err


def test_a_source_that_was_changed_behind_its_stamp_is_refused_and_read_again_when_asked(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [range(10, 30), range(10, 20)])
    recipe = recipe_of(tmp_path, tokenizer_folder)
    run_recipe(recipe)
    path, stat = tmp_path / "1.jsonl", (tmp_path / "1.jsonl").stat()
    path.write_bytes(path.read_bytes().replace(b"number 19", b"number 77"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    answer = mdsmix("convert", recipe, DROP)
    assert answer.code == 4
    assert "run the same command with --verify-source" in answer.err
    answer = mdsmix("convert", recipe, DROP, "--verify-source")
    assert manifest_of(train(tmp_path / "out")).records.filtered == {"duplicate": 9}


def test_a_repair_makes_the_same_shards_again(
    tmp_path: Path, tokenizer_folder: Path, small: None
) -> None:
    write(tmp_path, [range(20), range(10, 40)])
    recipe = recipe_of(tmp_path, tokenizer_folder, duplicates="drop")
    run_recipe(recipe)
    folder = train(tmp_path / "out")
    before = files(folder)
    for shard in sorted(folder.glob("*.mds"))[-2:]:
        shard.write_bytes(b"damaged")
    assert mdsmix("repair", folder, "--recipe", recipe).code == 0
    assert files(folder) == before


def test_records_are_counted_through_all_batches_of_a_window(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files in one window, a batch each."""
    monkeypatch.setattr(record_batches, "BLOCK_BYTES", 1)
    write(tmp_path, [[20, 21, 22], [30, 21, 31], [40, 41, 22, 40]])
    recipe = recipe_of(tmp_path, tokenizer_folder)
    run_recipe(recipe)
    kept = token_rows(train(tmp_path / "out"))
    (outcome,) = run_recipe(recipe, DROP)
    assert len(outcome.manifest.parts) == 1
    assert outcome.manifest.records.filtered == {"duplicate": 3}
    assert token_rows(train(tmp_path / "out")) == unique(kept)
    first = f"streams.web.source.path={tmp_path / '0.jsonl'}"
    outcomes = run_recipe(recipe, first, reencode=True)
    assert outcomes[0].manifest.encoding.duplicates == "keep"
    (same,) = run_recipe(recipe, first, DROP)
    assert same.done == 0
    assert same.manifest.encoding.duplicates == "drop"
