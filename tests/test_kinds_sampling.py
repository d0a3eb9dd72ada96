"""A share of a source, and one of it for evaluation: what a record says decides where it is, and what is not in costs no tokens and is counted."""

from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.kinds.membership import Membership, is_held_out
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.record import Conversation, Document, Pair
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Encoding
from tests.converting import (
    chats,
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

TEXTS = [f"document {n}, with words of its own" for n in range(400)]


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


def test_a_sample_is_a_part_of_the_whole_that_is_told_and_alone_tokenized(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spread over all work units. A stream without it keeps its bytes and key, and all of a source is no sample."""
    windows(monkeypatch, 2_000)
    fill(tmp_path, TEXTS[:200]), fill(tmp_path, TEXTS[200:], "b")
    run_recipe(recipe_of(tmp_path, tokenizer_folder))
    before, whole = files(tmp_path / "out"), rows(tmp_path / "out/web/train")
    (outcome,) = run_recipe(recipe_of(tmp_path, tokenizer_folder, sample="100%"))
    assert (files(tmp_path / "out"), outcome.done) == (before, 0)
    assert Encoding.__dataclass_fields__["sample"].default is None

    seen, encode = list[Any](), Pretraining.encode
    monkeypatch.setattr(Pretraining, "encode", lambda self, of: seen.extend(of) or encode(self, of))
    recipe = recipe_of(tmp_path, tokenizer_folder, sample="20%")
    answer = mdsmix("convert", recipe)
    manifest = manifest_of(tmp_path / "out/web/train")
    written = manifest.records.written
    assert rows(tmp_path / "out/web/train") < whole
    assert 50 < written == len(seen) < 110  # 80, and a standard deviation of 8
    assert (manifest.encoding.sample, manifest.records.read) == ("1/5", 400)
    assert manifest.records.filtered == {NOT_SAMPLED: 400 - written}
    assert sum(part.samples > 0 for part in manifest.parts) == len(manifest.parts) >= 8
    assert f"filtered: {400 - written} not_sampled" in answer.out
    assert "WARNING" not in answer.out
    shown = mdsmix("inspect", tmp_path / "out/web", "-n", "0").out
    assert "sample                  1/5" in shown
    assert f"400 read = {written} written" in shown
    assert mdsmix("check", recipe).code == 0
    assert "up to date" in mdsmix("convert", recipe).out


def test_which_texts_are_in_follows_from_the_second_half_of_their_hash() -> None:
    """Published streams hold these."""
    texts = [f"number {n}" for n in range(40)]
    hashes = [*map(xxhash.xxh3_128_digest, texts)]
    of_pairs = [xxhash.xxh3_128_digest(each + hashes[0]) for each in hashes]
    pairs = [Pair(text, texts[0]) for text in texts]
    for records, said in (([*map(Document, texts)], hashes), (pairs, of_pairs)):
        wanted = [each[8] < 64 for each in said]
        assert 0 < sum(wanted) < 40
        members = Membership(sample=Fraction(1, 4))
        assert [
            each is not NOT_SAMPLED for each in members.judge([None] * 40, records, 0)
        ] == wanted
        kept = b"".join(each if of else bytes(16) for each, of in zip(said, wanted, strict=True))
        assert members.fingerprints(40) == kept


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
    assert 25 < len(held) < 80  # 50, and a standard deviation of 7
    records = [manifest_of(tmp_path / "out/web" / side).records for side in ("train", "eval")]
    for side in records:
        assert side.adds_up
        assert side.filtered[NOT_SAMPLED] == plain.filtered[NOT_SAMPLED]
    assert sum(side.filtered["duplicate"] for side in records) == plain.duplicates > 60


def test_a_bad_record_is_in_by_its_raw_content(tmp_path: Path, tokenizer_folder: Path) -> None:
    """As what `where` leaves out, so that the share of bad records is that of the sample: a tenth of it, as of the source, not nine tenths."""
    lines = [f'{{"text": "{text}", "n": {n}}}' for n in (1, 0) for text in TEXTS]
    lines += [f'{{"body": "{text}", "n": 1}}' for text in TEXTS[:60]]
    lines += [f"no json {n}" for n in range(60)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("\n".join(lines))
    stream = documents("data/*.jsonl", layout="document", sample="10%")
    stream["source"]["where"] = "n == 1"
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": stream}, max_seq_len=64)
    (outcome,) = run_recipe(recipe)
    records = outcome.manifest.records
    assert records.read == 920
    assert 15 < records.filtered["where"] < 70
    assert records.adds_up
    assert records.sampled == 920 - records.filtered[NOT_SAMPLED]
    assert all(0 < records.quarantined[why] < 20 for why in ("missing_field", "not_json"))
    assert len(quarantined(tmp_path / "out/web/train")) == records.bad
    answer = mdsmix("convert", recipe, "--max-bad", "5%")
    assert answer.code == 5
    assert f"of {records.sampled:,} records are bad" in answer.err


def test_a_bad_record_that_cannot_be_written_again_is_in() -> None:
    """Nested deeper than JSON is written, though it could be read; or with half a character."""
    deep: Any = "the end"
    for _ in range(1_000):
        deep = [deep]
    told: list[Any] = [{"body": deep}, {"body": "half \ud800 a character"}]
    bad = ["missing_field"] * 2
    assert Membership(sample=Fraction(1, 1 << 40)).judge(told, [*bad], 0) == bad


@settings(max_examples=40, deadline=None)
@given(st.fractions(0, 1), st.fractions(0, 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_larger_share_only_adds(one: Fraction, other: Fraction, text: str) -> None:
    """To a sample and to a holdout; an item that was too long to be kept is in whatever the share."""
    small, large = sorted((one, other))
    talk = Conversation([{"role": "user", "content": text}])
    for record, holds in product((Document(text), Pair(text, "a"), talk), (is_in, is_held_out)):
        assert holds(record, small) <= holds(record, large)
        assert not holds(record, Fraction(0))
        assert holds(record, Fraction(1))
    few, many = (Membership(sample=share) for share in (small, large))
    assert few.samples_raw(text.encode()) <= many.samples_raw(text.encode())
    assert few.samples_raw(b"")


def test_what_a_record_says_decides_and_not_how_it_is_written() -> None:
    message, turned = {"role": "user", "content": "a"}, {"content": "a", "role": "user"}
    for share in (Fraction(n, 64) for n in range(64)):
        sides = {is_held_out(Conversation([each]), share) for each in (message, turned)}
        assert len(sides) == 1
    assert {is_held_out(Pair("a", str(n)), Fraction(1, 2)) for n in range(64)} == {True, False}


def test_it_is_rendered_as_an_eval_loader_and_no_record_in_it_is_said(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    said_back = {"role": "assistant", "content": "a"}
    asked = ({"role": "user", "content": f"q {n}"} for n in range(60))
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": [each, said_back]} for each in asked])
    streams = {"chat": chats(source, holdout="25%")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    said = mdsmix("convert", recipe, "--only", "chat")
    assert (said.code, "chat-eval" in said.out, "WARNING" in said.out) == (0, True, False)
    assert mdsmix("check", recipe).code == 0
    rendered = mdsmix("render-yaml", recipe).out
    assert "label: chat-eval" in rendered
    assert "split: eval" in rendered
    assert "up to date" in mdsmix("convert", recipe).out

    fill(tmp_path, TEXTS[:1])
    answer = mdsmix("convert", recipe_of(tmp_path, tokenizer_folder, holdout="0.1%"))
    assert answer.code == 5
    assert "web-eval: not one sample came of its source (1 records: 1 not_held_out)" in answer.err
    assert manifest_of(tmp_path / "out/web/train").totals.samples == 1
