"""The card says what the manifest says; without one it says that only the index speaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mdsmix.report.inspection import card_rows
from mdsmix.shards.counts import Records
from mdsmix.shards.published import read_in
from mdsmix.shards.side_files import SourceEntry
from mdsmix.storage import locate
from tests.published import CONCAT, TOKEN_ROW, publish


def test_the_manifest_as_rows(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW] * 3, card={})
    stream = read_in(locate(tmp_path / "train"))
    assert stream.manifest is not None
    many = [SourceEntry(path=f"{n}.jsonl", size=1000, hash="") for n in range(7)]
    records = Records(read=9, written=3, filtered={"empty": 4}, quarantined={"not_json": 2})
    manifest = replace(stream.manifest, records=records, sources=many)
    card = dict(card_rows(replace(stream, manifest=manifest)))
    assert card["stream"] == str(tmp_path / "train")
    assert card["samples, shards, bytes"].startswith("3, 1, ")
    assert card["records"] == "9 read = 3 written + 4 filtered + 2 quarantined"
    assert card["filtered"] == "empty: 4"
    assert card["quarantined"] == "not_json: 2"
    assert card["sources"].endswith("4.jsonl (1,000 bytes) and 2 more")
    assert card["columns"] == "tokens: ndarray:uint16:8"
    assert card["index"] == stream.index.hash


def test_an_interrupted_publication_is_told(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW], card={"index_hash": "0" * 32})
    card = dict(card_rows(read_in(locate(tmp_path / "train"))))
    assert "interrupted, run convert again" in card["index"]


def test_a_stream_of_another_tool_has_its_index(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW])
    card = dict(card_rows(read_in(locate(tmp_path / "train"))))
    assert card["columns"] == "tokens: ndarray:uint16:8"
    assert "only the index speaks" in card["manifest"]
