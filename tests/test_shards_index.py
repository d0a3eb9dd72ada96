"""index.json and the manifest are read strictly: they may come from anywhere."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from mdsmix.errors import Unreachable
from mdsmix.shards.counts import Records, Totals, histogram
from mdsmix.shards.index import StoredFile, make_index, parse_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard, parse_manifest
from mdsmix.shards.shard_files import ShardLayout, shard_of
from tests.published import sealed

LAYOUT = ShardLayout({"tokens": "ndarray:uint16:8"})
FILE = StoredFile(basename="ab.mds", bytes=100, hashes={"xxh128": "ab"})
INDEX = make_index([shard_of(LAYOUT, 3, FILE, None)])
MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    tool_version="0",
    encoding=Encoding(
        kind="pretraining",
        loader="text",
        columns=LAYOUT.encodings,
        max_seq_len=8,
        decoder_only_format=True,
        target_prompts="none",
        target_responses="last",
        special_tokens_in_text="escape",
    ),
    tokenizer=TokenizerCard(name="t", hash="h", vocab_size=9),
    backend="b",
    totals=Totals(samples=3),
    records=Records(read=3, written=3),
    sources=[],
    parts=[],
    index_hash=INDEX.hash,
    complete=True,
)


def test_an_index_comes_back() -> None:
    """Streaming ignores keys at its top that it does not know; so does this."""
    again = parse_index(INDEX.content, "x")
    assert again == INDEX
    assert (again.samples, again.bytes, len(again.hash)) == (3, 100, 32)
    tree = json.loads(INDEX.content)
    assert INDEX.content == json.dumps(tree, sort_keys=True).encode(), "as MDSWriter does"
    assert parse_index(json.dumps(tree | {"extra": 1}).encode(), "x").shards == INDEX.shards


def change(path: str, value: Any) -> bytes:
    tree = json.loads(INDEX.content)
    *parents, last = path.split(".")
    node = tree["shards"][0]
    for key in parents:
        node = node[key]
    node[last] = value
    return json.dumps(tree).encode()


OUTSIDE = "not inside the stream's folder"
HOSTILE: list[tuple[bytes, str]] = [
    (b"", "is no index"),
    (b"[" * 100_000, "is no index"),
    (b"[]", "no list `shards`"),
    (b'{"shards": 3}', "no list `shards`"),
    (b'{"shards": [null]}', "must hold keys"),
    (b'{"shards": ' + b"[" * 900 + b"]" * 900 + b"}", "must hold keys"),
    *(
        (change("raw_data.basename", name), OUTSIDE)
        for name in ("../ab.mds", "a/b.mds", "a\0b", "")
    ),
    (change("raw_data.bytes", 1 << 32), "says it has 4294967296 bytes"),
    (change("raw_data.bytes", 10**4000), "says it has 1000"),
    (change("raw_data.bytes", 1.5), "must be a whole number"),
    (change("samples", -1), "contradicts itself"),
    (change("samples", True), "must be a whole number"),
    (change("samples", float("inf")), "must be a whole number"),
    (change("column_names", []), "contradicts itself"),
    (change("column_names", [7]), "must be text"),
    (change("column_encodings", ["ndarray:tensor:1"]), "'ndarray:tensor:1', which is none"),
    (change("compression", "zstd"), "in whether it is compressed"),
    (change("zip_data", {"basename": "../x", "bytes": 1, "hashes": {}}), OUTSIDE),
    (change("surprise", 1), "surprise is not a known key"),
]


def test_a_hostile_or_damaged_index_is_one_sentence() -> None:
    for content, sentence in HOSTILE:
        with pytest.raises(Unreachable) as refusal:
            parse_index(content, "there/index.json")
        assert sentence in str(refusal.value), content[:200]
        assert "there/index.json" in str(refusal.value)
        assert ".;" not in str(refusal.value)


def test_a_manifest_comes_back_byte_for_byte() -> None:
    used = replace(MANIFEST, encoding=replace(MANIFEST.encoding, compact=True))
    for manifest in (MANIFEST, used):
        again = parse_manifest(manifest.to_bytes(), "x")
        assert again == manifest
        assert again.to_bytes() == manifest.to_bytes()


def test_a_damaged_or_newer_manifest_is_one_sentence() -> None:
    whole = orjson.loads(MANIFEST.to_bytes())
    changed = MANIFEST.to_bytes().replace(b'"hash": "h"', b'"hash": "i"')
    for content, sentence in (
        (b"{", "cannot be read as a manifest"),
        (b"3", "format_version is None"),
        (orjson.dumps({"format_version": 4}), "format_version is 4, and this mdsmix reads 3"),
        (orjson.dumps({"format_version": 1}), "an earlier commit of mdsmix (format version 1,"),
        (sealed({"format_version": 3}), "is missing"),
        (changed, "its hash is not that of its"),
        (sealed(whole | {"compleat": True}), "did you mean complete"),
        (sealed(whole | {"complete": False}), "complete"),
    ):
        with pytest.raises(Unreachable) as refusal:
            parse_manifest(content, "there")
        assert sentence in str(refusal.value)


def test_what_a_manifest_leaves_out_is_not_known() -> None:
    tree = orjson.loads(MANIFEST.to_bytes())
    assert set(tree["encoding"]) == {
        *("kind", "loader", "columns", "max_seq_len", "decoder_only_format"),
        *("target_prompts", "target_responses", "special_tokens_in_text"),
    }
    assert (tree["totals"], tree["records"]) == ({"samples": 3}, {"read": 3, "written": 3})
    assert {"mixed", "seed", "source_parts", "side_files"}.isdisjoint(tree)
    card = parse_manifest(sealed(tree), "x")
    how = card.encoding
    assert {how.layout, how.add_bos, how.add_eos, how.min_tokens, how.max_tokens} == {None}
    assert (how.fields, how.compact, how.date_string, how.compression) == ({}, False, None, None)
    ids = (card.tokenizer.bos_id, card.tokenizer.eos_id, card.tokenizer.pad_id)
    assert {*ids, card.tokenizer.chat_template_hash, card.seed} == {None}
    assert (card.totals.samples, card.totals.largest_id) == (3, -1)


def test_the_histogram_counts_by_powers_of_two() -> None:
    assert histogram(np.array([1, 2, 3, 4, 7, 8])) == {"2^0": 1, "2^1": 2, "2^2": 2, "2^3": 1}
    assert histogram(np.array([], np.int64)) == {}
