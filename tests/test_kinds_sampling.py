"""What a record says decides whether it is in a sample or held out; what is not trained on is
counted and said.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.kinds.membership import Membership, is_held_out
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.kinds.read_records import FURTHER_NAMES, MAX_NAMES, Diagnostics
from mdsmix.kinds.turn_rows import PLACEHOLDERS, count_placeholders
from mdsmix.record import Conversation, Document, Pair
from mdsmix.shards.counts import NOT_SAMPLED
from mdsmix.shards.manifest import Encoding
from tests.converting import Web, chats, documents, manifest_of, mdsmix, pairs
from tests.styles import in_turn

TEXTS = [f"document {n}, with words of its own" for n in range(400)]


def asked(web: Web, **stream: Any) -> Web:
    return web.says(documents("*.jsonl", layout="document", **stream), max_seq_len=64)


def is_in(record: Any, share: Fraction | str) -> bool:
    (found,) = Membership(sample=Fraction(share)).select([{}], [record], 0)
    return bool(found != NOT_SAMPLED)


def test_a_sample_is_a_part_of_the_whole(web: Web) -> None:
    """Which is told and alone tokenized, and spread over all work units. A stream without it keeps
    its bytes and key, and all of a source is no sample.
    """
    web.windows(2_000)
    web.holds(TEXTS[:200]), web.holds(TEXTS[200:], "b.jsonl")
    asked(web).run()
    before, whole = web.files, {*map(tuple, web.rows)}
    outcome = asked(web, sample="100%").run()
    assert (web.files, outcome.done) == (before, 0)
    assert Encoding.__dataclass_fields__["sample"].default is None

    seen, encode = list[Any](), Pretraining.encode
    web.patch.setattr(Pretraining, "encode", lambda self, of: seen.extend(of) or encode(self, of))
    answer = asked(web, sample="20%").convert()
    manifest = web.manifest
    written = manifest.records.written
    assert {*map(tuple, web.rows)} < whole
    assert 50 < written == len(seen) < 110  # 80, and a standard deviation of 8
    assert (manifest.encoding.sample, manifest.records.read) == ("1/5", 400)
    assert manifest.records.filtered == {NOT_SAMPLED: 400 - written}
    assert sum(part.samples > 0 for part in manifest.parts) == len(manifest.parts) >= 8
    assert f"filtered: {400 - written} not_sampled" in answer.out
    assert "WARNING" not in answer.out
    shown = mdsmix("inspect", web.out / "web", "-n", "0").out
    assert "sample                  1/5" in shown
    assert f"400 read = {written} written" in shown
    assert mdsmix("check", web.recipe).code == 0
    assert "up to date" in web.convert().out


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
        found = members.select([None] * 40, records, 0)
        assert [each is not NOT_SAMPLED for each in found] == wanted
        kept = b"".join(each if of else bytes(16) for each, of in zip(said, wanted, strict=True))
        assert members.fingerprints(40) == kept


def test_a_bad_record_is_in_by_its_raw_content(web: Web) -> None:
    """As what `where` leaves out, so that the share of bad records is that of the sample: a tenth
    of it, as of the source, not nine tenths.
    """
    lines = [f'{{"text": "{text}", "n": {n}}}' for n in (1, 0) for text in TEXTS]
    lines += [f'{{"body": "{text}", "n": 1}}' for text in TEXTS[:60]]
    (web.folder / "a.jsonl").write_text("\n".join([*lines, *(f"no json {n}" for n in range(60))]))
    stream = documents("*.jsonl", layout="document", sample="10%")
    stream["source"]["where"] = "n == 1"
    records = web.says(stream, max_seq_len=64).run().manifest.records
    assert records.read == 920
    assert 15 < records.filtered["where"] < 70
    assert records.adds_up
    assert records.sampled == 920 - records.filtered[NOT_SAMPLED]
    assert all(0 < records.quarantined[why] < 20 for why in ("missing_field", "not_json"))
    assert len(web.bad) == records.bad
    answer = web.convert("--max-bad", "5%")
    assert answer.code == 5
    assert f"of {records.sampled:,} records are bad" in answer.err


def test_a_bad_record_that_cannot_be_written_again_is_in() -> None:
    """Nested deeper than JSON is written, though it could be read; or with half a character."""
    deep: Any = "the end"
    for _ in range(100_000):
        deep = [deep]
    told: list[Any] = [{"body": deep}, {"body": "half \ud800 a character"}]
    bad = ["missing_field"] * 2
    assert Membership(sample=Fraction(1, 1 << 40)).select(told, [*bad], 0) == bad


@settings(max_examples=40, deadline=None)
@given(st.fractions(0, 1), st.fractions(0, 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_larger_share_only_adds(one: Fraction, other: Fraction, text: str) -> None:
    """To a sample and to a holdout; an item that was too long to be kept is in whatever
    the share.
    """
    small, large = sorted((one, other))
    records = Document(text), Pair(text, "a"), Conversation(in_turn(text))
    for record, holds in product(records, (is_in, is_held_out)):
        assert holds(record, small) <= holds(record, large)
        assert not holds(record, Fraction(0))
        assert holds(record, Fraction(1))
    few, many = (Membership(sample=share) for share in (small, large))
    assert few.samples_raw(text.encode()) <= many.samples_raw(text.encode())
    assert few.samples_raw(b"")


def test_it_is_rendered_as_an_eval_loader_and_no_record_in_it_is_said(web: Web) -> None:
    web.holds({"messages": in_turn(f"q {n}", "a")} for n in range(60))
    said = web.says(chats("*.jsonl", holdout="25%"), max_seq_len=64).convert("--only", "web")
    assert (said.code, "web-eval" in said.out, "WARNING" in said.out) == (0, True, False)
    assert mdsmix("check", web.recipe).code == 0
    rendered = mdsmix("render-yaml", web.recipe).out
    assert "label: web-eval" in rendered
    assert "split: eval" in rendered
    assert "up to date" in web.convert().out

    web.holds(TEXTS[:1])
    said = asked(web, holdout="0.1%").convert("--reencode")
    assert said.code == 5
    assert "web-eval: its source gives no sample (1 record: 1 not_held_out)" in said.err
    assert web.manifest.totals.samples == 1


def test_a_field_counts_where_it_says_something_in_bounded_memory() -> None:
    diagnostics = Diagnostics(["text"])
    full = [0, False, 0.0, " ", [None], {"a": None}]
    values = [None, "", [], {}, *full]
    diagnostics.count_unread_fields([{"text": "x", "other": value} for value in values])
    diagnostics.count_unread_fields([["text"], "text", None, {"text": 1}])
    assert diagnostics.counts["unread"] == {"other": len(full)}
    diagnostics = Diagnostics(["text"])
    diagnostics.count_unread_fields([{f"field {n}": 1} for n in range(1_000)])
    found = diagnostics.counts["unread"]
    assert (len(found), found[FURTHER_NAMES]) == (MAX_NAMES + 1, 1_000 - MAX_NAMES)
    assert next(iter(found)) == "field 0"


def test_placeholders_are_counted_once_a_record() -> None:
    texts = ["<image><image>\n<video>", "a < b\n<image>", "<im\nage>"]
    assert count_placeholders(texts, texts) == {"<image>": 2, "<video>": 1}
    assert count_placeholders(["<im", "age>"], ["<im\nage>"]) == {}
    for each in PLACEHOLDERS:
        assert count_placeholders(["a", f"b{each}"], [f"a\nb{each}", "c"]) == {each: 1}


def test_lost_parts_of_records_are_said(web: Web) -> None:
    """With their numbers; and a stream whose records are read whole has nothing to say."""
    records = [{"prompt": f"do {n}", "response": "done", "input": "this" * (n % 3), "label": n % 2 == 0} for n in range(12)]  # fmt: skip
    faq = pairs(web.holds(records, "alpaca.jsonl"))
    whole = web.holds([{"text": "about <image> tags", "id": ""}], "docs.jsonl")
    web.says(streams={"faq": faq, "docs": documents(whole, layout="document")})
    web.windows(300)  # several units: their counts are summed
    for _ in range(2):  # said again when all is up to date
        said = web.convert().out
        assert "fields not read: label (12 of 12 not empty), input (8 of 12 not empty)" in said
        assert "WARNING: the field input of 8 records is not read" in said
        assert "WARNING: the field label of 12 records" in said
        assert said.count("WARNING") == 2
    assert manifest_of(web.out / "faq/train").records.unread == {"input": 8, "label": 12}
    assert b"unread" not in (web.out / "docs/train/mdsmix.manifest").read_bytes()


def talks(web: Web, *texts: tuple[str, ...]) -> Web:
    web.holds({"messages": in_turn(*each)} for each in texts)
    return web.says(chats("*.jsonl"), max_seq_len=64)


def test_many_filtered_records_are_warned_of_with_the_way_out(web: Web) -> None:
    """Two answers, the first of which fits: `all` keeps what `last` filters."""
    long, longer = "word " * 30, "word " * 400
    texts = [(long, "b", "c", "d"), (longer, "b", "c", "d")]
    out = talks(web, tuple("abcd"), ("a", "b", long, "d"), *texts).convert().out
    assert "WARNING: 75.0% of the records are filtered: 3 no_loss_tokens\n" in out
    assert "a larger max_seq_len, or target_responses: all, may keep these records" in out
    for change, kept in (("max_seq_len=128", 3), ("target_responses=all", 2)):
        assert web.run(change).manifest.records.written == kept


def test_tokens_that_the_loader_cuts_off_are_not_counted_as_seen(web: Web) -> None:
    out = talks(web, ("a", "word " * 300), ("a", "b"), ("a", "b")).convert().out
    totals = web.manifest.totals
    cut = totals.cut_tokens
    assert (totals.cut_rows, cut) == (1, totals.longest - 64)
    # The two short ones get the EOS that the loader appends.
    assert totals.seen_tokens == totals.tokens - cut + 2 < 200
    said = f"1 of 3 rows are longer than max_seq_len: the loader cuts off {cut} tokens"
    for words in (said, f" {totals.seen_tokens} ", f"{cut / totals.tokens:.1%}"):
        assert words in out
    mixed = web.folder / "mixed"
    assert mdsmix("mix", web.recipe, "--out", mixed, "--seed", "1").code == 0
    totals = manifest_of(mixed / "train").totals
    assert (totals.cut_rows, totals.cut_tokens) == (1, cut)
