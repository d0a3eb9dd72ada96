"""The card says what the manifest says; every sample is under one bar of the lengths, gaps are shown, and what is rare is seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.report.inspection import BAR, bars, card_rows
from mdsmix.shards.counts import Records, histogram
from mdsmix.shards.published import read_in
from mdsmix.shards.side_files import SourceEntry
from mdsmix.storage import locate
from tests.published import CONCAT, TOKEN_ROW, publish

LINE = re.compile(r" *([\d,]+)(?:-([\d,]+))?  ([█▏▎▍▌▋▊▉ ]{24}) ([\d,]+) \([\d.]+%\)")


def test_the_manifest_as_rows(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW] * 3, card={})
    stream = read_in(locate(tmp_path / "train"))
    assert stream.manifest is not None
    many = [SourceEntry(path=f"{n}.jsonl", size=1000, hash="") for n in range(7)]
    records = Records(read=9, written=3, filtered={"empty": 4}, quarantined={"not_json": 2})
    manifest = replace(stream.manifest, records=records, sources=many)
    card = dict(card_rows(replace(stream, manifest=manifest)))
    assert card["samples, shards, bytes"].startswith("3, 1, ")
    assert card["sources"].endswith("4.jsonl (1,000 bytes) and 2 more")
    expected = {
        "stream": str(tmp_path / "train"),
        "records": "9 read = 3 written + 4 filtered + 2 quarantined",
        "filtered": "empty: 4",
        "quarantined": "not_json: 2",
        "columns": "tokens: ndarray:uint16:8",
        "index": stream.index.hash,
    }
    assert card | expected == card


def test_an_interrupted_publication_and_the_lack_of_a_manifest_are_told(tmp_path: Path) -> None:
    publish(tmp_path / "a", CONCAT, [TOKEN_ROW], card={"index_hash": "0" * 32})
    publish(tmp_path / "b", CONCAT, [TOKEN_ROW])
    broken, bare = (dict(card_rows(read_in(locate(tmp_path / n / "train")))) for n in "ab")
    assert "interrupted, run convert again" in broken["index"]
    assert bare["columns"] == "tokens: ndarray:uint16:8"
    assert "only the index speaks" in bare["manifest"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=60))
def test_each_line_counts_the_samples_within_its_bounds(lengths: list[int]) -> None:
    lines = list(bars(histogram(np.array(lengths, np.int64)), max(lengths)))
    end = 0
    for line in lines:
        found = LINE.fullmatch(line)
        assert found, line
        parts = (part or found[1] for part in found.group(1, 2, 4))
        low, high, count = (int(part.replace(",", "")) for part in parts)
        assert count == sum(low <= length <= high for length in lengths)
        assert (found[3].strip() != "") == (count > 0)
        assert end in (0, low - 1)
        end = high
    assert end == max(lengths)
    assert max(len(line) for line in lines) <= 80 - BAR


def test_bars_are_as_long_as_the_counts() -> None:
    drawn = [re.sub(r"[^█▎]", "", line) for line in bars({"2^1": 96, "2^2": 48, "2^4": 1}, 20)]
    assert drawn == ["█" * 24, "█" * 12, "", "▎"]
    assert "▏" in list(bars({"2^1": 10**6, "2^2": 1}, 7))[1], "what is rare is seen"
    assert list(bars({}, 0)) == [], "a stream without a sample has none"
