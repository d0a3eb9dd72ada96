"""Published streams for tests, written by hand: any columns, with or without a manifest, whole or
wrong in one way.

Samples are encoded here and not by `mdsmix convert`, so that streams of other tools (bytes and str
columns, no manifest) can be built too, in milliseconds and without importing streaming.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from mdsmix.kinds.encodings import rules_of
from mdsmix.ragged import Ragged
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import Index, Shard, StoredFile, make_index
from mdsmix.shards.manifest import FORMAT_VERSION, Encoding, Manifest, TokenizerCard, UnitShards
from mdsmix.shards.shard_files import ShardLayout, make_shard, make_shard_parts
from mdsmix.tokenizer.card import Tokenizer

TOKENIZER = Tokenizer(
    name="tok",
    hash="a" * 32,
    vocab_size=512,
    bos_id=None,
    eos_id=0,
    pad_id=1,
    path="",
    class_name="",
    padding_side="right",
    chat_template=None,
    prefix_ids=[],
    suffix_ids=[],
    special_tokens=[],
    special_ids=[],
    template_variables={},
)
"The tokenizer of every stream unless a test says otherwise."
CARD = TokenizerCard.from_tokenizer(TOKENIZER)
LENGTH = 8

CONCAT = {"tokens": f"ndarray:uint16:{LENGTH}"}
SPLIT = {"input_ids": "ndarray:uint16:1", "labels": f"ndarray:uint16:{LENGTH - 1}"}
PAIR = {"input_ids": "ndarray:uint16", "labels": "ndarray:uint16"}
TURNS = {"turns": "json"}

TOKEN_ROW = {"tokens": [5, 6, 0, 7, 8, 9, 10, 0]}
SPLIT_ROW = {"input_ids": [5], "labels": [6, 0, 7, 8, 9, 10, 0]}
PAIR_ROW = {"input_ids": [5, 6], "labels": [7, 0]}
PACKED = {"input_ids": "ndarray:uint16", "loss_mask": "ndarray:uint8", "starts": "ndarray:int32"}
PACKED_ROW = {"input_ids": [5, 6, 7, 0, 8, 0], "loss_mask": [0, 0, 1, 1, 0, 1], "starts": [0, 4]}
TURNS_ROW = {"turns": [{"input_ids": [5, 6], "labels": [7, 0]}]}


def publish(
    folder: Path,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    *,
    card: Mapping[str, Any] | None = None,
    shards: int = 1,
    compression: str | None = None,
    split: str = "train",
) -> Path:
    """Writes `rows` as a stream below `folder` and returns `folder`. `card`: fields of the manifest
    that differ, {} for none; without it no manifest is written.
    """
    home = folder / split
    home.mkdir(parents=True, exist_ok=True)
    layout = ShardLayout(columns, compression)
    cuts = np.linspace(0, len(rows), shards + 1).astype(int)
    listed = [_shard(home, layout, rows[a:b], n) for n, (a, b) in enumerate(pairwise(cuts))]
    index = make_index([entry for entry in listed if entry.samples])
    if card is not None:
        manifest = make_manifest(columns, rows, index, **card)
        (home / "mdsmix.manifest").write_bytes(manifest.to_bytes())
    (home / "index.json").write_bytes(index.content)
    return folder


def write_mix(home: Path, *streams: str, **settings: Any) -> Path:
    """A recipe of streams that are published below `home`."""
    tree = {
        "tokenizer": CARD.name,
        "max_seq_len": LENGTH,
        "streams": {name: {"local": str(home / name)} for name in streams},
    }
    path = home / "mix.yaml"
    path.write_text(json.dumps(tree | settings))
    return path


def _shard(home: Path, layout: ShardLayout, rows: Sequence[Any], number: int) -> Shard:
    samples = [_sample(layout.encodings, row) for row in rows]
    raw = b"".join(make_shard_parts(layout, Ragged.from_rows(samples, np.uint8)))
    name = f"shard.{number:05}.mds"
    if layout.compression is None:
        return make_shard(layout, len(rows), _store(home / name, raw), None)
    zipped = _store(home / f"{name}.zstd", zstandard.compress(raw))
    return make_shard(layout, len(rows), StoredFile(basename=name, bytes=len(raw)), zipped)


def _store(path: Path, data: bytes) -> StoredFile:
    path.write_bytes(data)
    hashes = {"xxh128": xxhash.xxh128_hexdigest(data)}
    return StoredFile(basename=path.name, bytes=len(data), hashes=hashes)


def _sample(columns: Mapping[str, str], row: Mapping[str, Any]) -> bytes:
    """One sample as MDSWriter lays it out: sizes of the variable columns, then the columns."""
    head, body = b"", b""
    for name in sorted(columns):
        data = encode(columns[name], row[name])
        if len(columns[name].split(":")) < 3:
            head += len(data).to_bytes(4, "little")
        body += data
    return head + body


def encode(encoding: str, value: Any) -> bytes:
    """One value under an MDS encoding (str, json, bytes, ndarray, pkl taken as bytes)."""
    kind, *settings = encoding.split(":")
    if kind == "str":
        return str(value).encode()
    if kind == "json":
        return json.dumps(value).encode()
    if kind != "ndarray":
        return bytes(value)
    array = np.asarray(value, settings[0])
    shape = b"" if len(settings) == 2 else bytes([4 | 1]) + len(array).to_bytes(2, "little")
    return shape + array.tobytes()


def make_manifest(
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    index: Index,
    *,
    tokenizer: TokenizerCard = CARD,
    totals: Mapping[str, Any] | None = None,
    records: Records | None = None,
    index_hash: str = "",
    **encoding: Any,
) -> Manifest:
    """A manifest that fits the stream, but for the fields that are given, made by the rules of
    today.
    """
    ids = [token for row in rows for token in _ids(row)]
    longest = max((len(_ids(row)) for row in rows), default=0)
    counted = {"samples": len(rows), "tokens": len(ids), "longest": longest}
    counted |= {"largest_id": max(ids, default=-1), **(totals or {})}
    is_plain = "tokens" in columns or "input_ids" in columns
    settings = {
        "kind": "pretraining" if is_plain else "finetuning",
        "loader": "text" if "tokens" in columns else "finetuning",
        "columns": dict(columns),
        "max_seq_len": LENGTH,
        "decoder_only_format": True,
        "target_prompts": "none",
        "target_responses": "last",
        "special_tokens_in_text": "escape",
    }
    settings |= {"layout": "concat", "add_bos": False, "add_eos": True} if is_plain else {}
    made = Encoding(**settings | encoding)
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version="0",
        encoding=made if made.rules else replace(made, rules=rules_of(made, TOKENIZER)),
        tokenizer=tokenizer,
        backend="hand",
        totals=Totals(**counted),
        records=records or Records(read=len(rows), written=len(rows)),
        sources=[],
        parts=[UnitShards(key="0" * 32, shards=len(index.shards), samples=index.samples)],
        index_hash=index_hash or index.hash,
        complete=True,
    )


def sealed(tree: Mapping[str, Any]) -> bytes:
    """A manifest of these keys as mdsmix would write it, with the hash of its bytes."""
    body = json.dumps({k: v for k, v in tree.items() if k != "hash"}, indent=2, sort_keys=True)[1:]
    return b'{\n  "hash": "%s",' % xxhash.xxh128_hexdigest(body).encode() + body.encode()


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest as somebody would who knows its hash, or an index."""
    tree = json.loads(path.read_bytes())
    tree = change(tree) or tree
    path.write_bytes(sealed(tree) if path.name == "mdsmix.manifest" else json.dumps(tree).encode())


def _ids(row: Mapping[str, Any]) -> list[int]:
    if "turns" in row:
        return [t for turn in row["turns"] for t in (*turn["input_ids"], *turn["labels"])]
    return [t for c in ("tokens", "input_ids", "labels") for t in row.get(c, ())]
