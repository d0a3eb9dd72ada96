"""A share of a source: what a record says decides whether it is in, and what is not in costs no tokens and is counted."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mdsmix.kinds.membership import Membership, is_held_out
from mdsmix.record import Conversation, Document, Pair
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Encoding
from tests.converting import (
    documents,
    files,
    manifest_of,
    mdsmix,
    quarantined,
    run_recipe,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

TEXTS = [f"document {n}, with words of its own" for n in range(600)]


def recipe_of(folder: Path, tokenizer: Path, **stream: Any) -> Path:
    stream = documents("data/*.jsonl", layout="document", **stream)
    return write_recipe(folder, tokenizer, streams={"web": stream}, max_seq_len=64)


def rows(folder: Path) -> set[tuple[int, ...]]:
    return {tuple(row) for row in token_rows(folder)}


def fill(folder: Path, texts: list[str], name: str = "a") -> Path:
    return write_jsonl(folder / "data" / f"{name}.jsonl", [{"text": text} for text in texts])


def is_in(record: Any, share: Fraction | str) -> bool:
    (found,) = Membership(sample=Fraction(share)).judge([{}], [record], 0)
    return bool(found != NOT_SAMPLED)


def test_what_is_in_and_what_is_not_are_all_there_is(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spread over all work units."""
    windows(monkeypatch, 3_000)
    fill(tmp_path, TEXTS[:300]), fill(tmp_path, TEXTS[300:], "b")
    whole = recipe_of(tmp_path, tokenizer_folder)
    run_recipe(whole, f"local={tmp_path / 'whole'}")
    recipe = recipe_of(tmp_path, tokenizer_folder, sample="20%")
    run_recipe(recipe)
    manifest = manifest_of(tmp_path / "out/web/train")
    assert rows(tmp_path / "out/web/train") < rows(tmp_path / "whole/web/train")
    assert 80 < manifest.records.written < 160  # 120, and a standard deviation of 10
    assert manifest.encoding.sample == "1/5"
    assert manifest.records.read == 600
    assert manifest.records.filtered == {NOT_SAMPLED: 600 - manifest.records.written}
    assert sum(part.samples > 0 for part in manifest.parts) == len(manifest.parts) >= 10


def test_which_texts_are_in_follows_from_the_second_half_of_their_hash() -> None:
    """Published streams hold these."""
    texts = [f"number {n}" for n in range(40)]
    wanted = [xxhash.xxh3_128_digest(text)[8] < 64 for text in texts]
    assert 0 < sum(wanted) < 40
    found = Membership(sample=Fraction(1, 4)).judge([None] * 40, list(map(Document, texts)), 0)
    assert [each is not NOT_SAMPLED for each in found] == wanted


def test_no_half_says_anything_of_the_other() -> None:
    """Of what is sampled as many are held out as of all."""
    told = [Document(f"document {n}") for n in range(8_000)]
    inside = [each for each in told if is_in(each, "1/4")]
    held = [each for each in inside if is_held_out(each, Fraction(1, 4))]
    assert 1_850 < len(inside) < 2_150  # 2,000, and a standard deviation of 39
    assert 420 < len(held) < 580  # 500, and 19


def test_sample_holdout_and_duplicates_go_together(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The holdout is a share of what is sampled, and copies are found among what is."""
    fill(tmp_path, [*TEXTS, *TEXTS[:200]])
    both = {"holdout": "25%", "duplicates": "drop"}
    run_recipe(recipe_of(tmp_path, tokenizer_folder, sample="50%"), f"local={tmp_path / 'plain'}")
    run_recipe(recipe_of(tmp_path, tokenizer_folder, sample="50%", **both))
    train, held = (rows(tmp_path / "out/web" / side) for side in ("train", "eval"))
    plain = manifest_of(tmp_path / "plain/web/train").records
    assert train | held == rows(tmp_path / "plain/web/train")
    assert not train & held
    assert 40 < len(held) < 110  # 75, and a standard deviation of 9
    records = [manifest_of(tmp_path / "out/web" / side).records for side in ("train", "eval")]
    for side in records:
        assert side.adds_up
        assert side.filtered[NOT_SAMPLED] == plain.filtered[NOT_SAMPLED]
    assert sum(side.filtered["duplicate"] for side in records) == plain.duplicates > 60


def test_what_is_not_in_is_not_tokenized(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mdsmix.kinds.pretraining import Pretraining as Encoder

    seen, encode = list[Any](), Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, of: seen.extend(of) or encode(self, of))
    fill(tmp_path, TEXTS)
    (outcome,) = run_recipe(recipe_of(tmp_path, tokenizer_folder, sample="5%"))
    assert 0 < len(seen) == outcome.manifest.records.written < 60


def test_a_bad_record_is_in_by_its_raw_content(tmp_path: Path, tokenizer_folder: Path) -> None:
    """As what `where` leaves out, so that the share of bad records is that of the sample: a tenth of it, as of the source, not nine tenths."""
    lines = [f'{{"text": "{text}", "n": 1}}' for text in TEXTS]
    lines += [f'{{"text": "{text}", "n": 0}}' for text in TEXTS]
    lines += [f'{{"body": "{text}", "n": 1}}' for text in TEXTS[:60]] + [
        f"no json {n}" for n in range(60)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("\n".join(lines))
    stream = documents("data/*.jsonl", layout="document", sample="10%")
    stream["source"]["where"] = "n == 1"
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": stream}, max_seq_len=64)
    (outcome,) = run_recipe(recipe)
    records = outcome.manifest.records
    assert records.read == 1_320
    assert 30 < records.filtered["where"] < 90
    assert records.adds_up
    assert records.sampled == 1_320 - records.filtered[NOT_SAMPLED]
    assert 0 < records.quarantined["missing_field"] < 20
    assert 0 < records.quarantined["not_json"] < 20
    assert len(quarantined(tmp_path / "out/web/train")) == records.bad
    answer = mdsmix("convert", recipe, "--max-bad", "5%")
    assert answer.code == 5
    assert f"of {records.sampled:,} records are bad" in answer.err


def test_the_summary_says_the_setting_and_what_it_came_to(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    fill(tmp_path, TEXTS)
    recipe = recipe_of(tmp_path, tokenizer_folder, sample="2.5%")
    answer = mdsmix("convert", recipe)
    records = manifest_of(tmp_path / "out/web/train").records
    assert f"filtered: {600 - records.written} not_sampled" in answer.out
    assert "WARNING" not in answer.out
    shown = mdsmix("inspect", tmp_path / "out/web", "-n", "0")
    assert "sample                  1/40" in shown.out
    assert f"600 read = {records.written} written" in shown.out
    assert mdsmix("check", recipe).code == 0
    assert "up to date" in mdsmix("convert", recipe).out


def test_a_stream_without_it_keeps_its_bytes_and_key(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """And all of a source is no sample."""
    fill(tmp_path, TEXTS[:20])
    run_recipe(recipe_of(tmp_path, tokenizer_folder))
    before = files(tmp_path / "out")
    (outcome,) = run_recipe(recipe_of(tmp_path, tokenizer_folder, sample="100%"))
    assert files(tmp_path / "out") == before
    assert outcome.done == 0
    assert Encoding.__dataclass_fields__["sample"].default is None


def test_a_mix_of_a_sample_and_a_whole_is_neither(tmp_path: Path, tokenizer_folder: Path) -> None:
    fill(tmp_path, TEXTS[:100])
    streams = {
        "a": documents("data/*.jsonl", layout="document", sample="50%"),
        "b": documents("data/*.jsonl", layout="document"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    run_recipe(recipe)
    answer = mdsmix("mix", recipe, "--out", tmp_path / "mixed", "--seed", "1")
    assert answer.code == 0
    assert manifest_of(tmp_path / "mixed/train").encoding.sample is None


def test_a_bad_record_that_cannot_be_written_again_is_in() -> None:
    """Nested deeper than JSON is written, though it could be read; or with half a character."""
    deep: Any = "the end"
    for _ in range(1_000):
        deep = [deep]
    told: list[Any] = [{"body": deep}, {"body": "half \ud800 a character"}]
    assert (
        Membership(sample=Fraction(1, 1 << 40)).judge(told, ["missing_field"] * 2, 0)
        == ["missing_field"] * 2
    )


@given(st.fractions(0, 1), st.fractions(0, 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_larger_share_only_adds(one: Fraction, other: Fraction, text: str) -> None:
    """To a sample and to a holdout; an item that was too long to be kept is in whatever the share."""
    small, large = sorted((one, other))
    talk = Conversation([{"role": "user", "content": text}])
    for record, holds in product((Document(text), Pair(text, "a"), talk), (is_in, is_held_out)):
        assert holds(record, small) <= holds(record, large)
        assert not holds(record, Fraction(0))
        assert holds(record, Fraction(1))
    assert Membership(sample=small).samples_raw(text.encode()) <= Membership(
        sample=large
    ).samples_raw(text.encode())
    assert Membership(sample=small).samples_raw(b"")
