"""The card says what the manifest says; every sample is in one row of the lengths."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.report.inspection import by_length, card_rows
from mdsmix.shards.counts import Records, Totals, histogram
from mdsmix.shards.published import Stream, read_in
from mdsmix.shards.side_files import SourceEntry
from mdsmix.storage import locate
from tests.published import CONCAT, TOKEN_ROW, publish


def published(folder: Path, **settings: object) -> Stream:
    publish(folder, CONCAT, [TOKEN_ROW] * 3, **settings)
    return read_in(locate(folder / "train"))


def test_the_card_tells_the_manifest_its_lack_and_an_interrupted_publication(
    tmp_path: Path,
) -> None:
    stream = published(tmp_path / "web", card={})
    assert stream.manifest is not None
    many = [SourceEntry(path=f"{n}.jsonl", size=1000, hash="") for n in range(7)]
    records = Records(read=9, written=3, filtered={"empty": 4}, quarantined={"not_json": 2})
    manifest = replace(stream.manifest, records=records, sources=many)
    card = dict(card_rows(replace(stream, manifest=manifest)))
    assert card["samples, shards, bytes"].startswith("3, 1, ")
    assert "cut_tokens" not in card, "what is zero"
    expected = {
        "stream": str(tmp_path / "web/train"),
        "tokens": f"{manifest.totals.tokens:,}",
        "records": "9 read = 3 written + 4 filtered + 2 quarantined",
        "filtered": "empty: 4",
        "quarantined": "not_json: 2",
        "sources": "7 files: 0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl, 4.jsonl and 2 more",
        "columns": "tokens: ndarray:uint16:8",
        "index": stream.index.hash,
    }
    assert card | expected == card
    broken = dict(card_rows(published(tmp_path / "broken", card={"index_hash": "0" * 32})))
    assert "interrupted, run convert again" in broken["index"]
    bare = dict(card_rows(published(tmp_path / "bare")))
    assert bare["columns"] == "tokens: ndarray:uint16:8"
    assert "only the index speaks" in bare["manifest"]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=60))
def test_each_row_of_lengths_counts_the_samples_within_its_bounds(lengths: list[int]) -> None:
    totals = Totals(longest=max(lengths), lengths=histogram(np.array(lengths, np.int64)))
    rows, end = list(by_length(totals)), 0
    for bounds, count, share in rows:
        low, high = (int(bound.replace(",", "")) for bound in bounds.split("-"))
        assert count == sum(low <= length <= high for length in lengths) > 0
        assert share == count / len(lengths)
        assert end < low <= high
        end = high
    assert (end, sum(row[1] for row in rows)) == (max(lengths), len(lengths))
