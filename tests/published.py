"""Writes published streams for tests: with any columns, with or without a manifest, whole or wrong
in one way.

Samples are encoded here and not by `mdsmix convert`. So streams of other tools (bytes and str
columns, no manifest) can be made too, in milliseconds and without importing streaming.
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

from mdsmix.kinds.encodings import find_raised_rules
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
"The tokenizer of every stream, unless a test names another."
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
    """Write `rows` as a stream below `folder`, and return `folder`.

    Args:
        card: arguments of `make_manifest` that differ; None writes no manifest.
        shards: number of shards; empty ones are left out of the index.
    """
    split_folder = folder / split
    split_folder.mkdir(parents=True, exist_ok=True)
    layout = ShardLayout(columns, compression)
    edges = np.linspace(0, len(rows), shards + 1).astype(int)
    entries = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        entries.append(_write_shard(split_folder, layout, rows[start:stop], number))
    index = make_index([entry for entry in entries if entry.samples])
    if card is not None:
        manifest = make_manifest(columns, rows, index, **card)
        (split_folder / "mdsmix.manifest").write_bytes(manifest.to_bytes())
    (split_folder / "index.json").write_bytes(index.content)
    return folder


def write_mix(folder: Path, *streams: str, **settings: Any) -> Path:
    """Write a recipe of streams that are published below `folder`, and return its path."""
    tree = {
        "tokenizer": CARD.name,
        "max_seq_len": LENGTH,
        "streams": {name: {"local": str(folder / name)} for name in streams},
    }
    path = folder / "mix.yaml"
    path.write_text(json.dumps(tree | settings))
    return path


def _write_shard(folder: Path, layout: ShardLayout, rows: Sequence[Any], number: int) -> Shard:
    samples = [_encode_sample(layout.encodings, row) for row in rows]
    raw = b"".join(make_shard_parts(layout, Ragged.from_rows(samples, np.uint8)))
    name = f"shard.{number:05}.mds"
    if layout.compression is None:
        return make_shard(layout, len(rows), _write_file(folder / name, raw), None)
    zipped = _write_file(folder / f"{name}.zstd", zstandard.compress(raw))
    return make_shard(layout, len(rows), StoredFile(basename=name, bytes=len(raw)), zipped)


def _write_file(path: Path, data: bytes) -> StoredFile:
    path.write_bytes(data)
    hashes = {"xxh128": xxhash.xxh128_hexdigest(data)}
    return StoredFile(basename=path.name, bytes=len(data), hashes=hashes)


def _encode_sample(columns: Mapping[str, str], row: Mapping[str, Any]) -> bytes:
    """Return a sample as MDSWriter lays it out: sizes of the variable columns, then the columns."""
    head = b""
    body = b""
    for name in sorted(columns):
        data = encode(columns[name], row[name])
        if len(columns[name].split(":")) < 3:
            head += len(data).to_bytes(4, "little")
        body += data
    return head + body


def encode(encoding: str, value: Any) -> bytes:
    """Return a value in an MDS encoding: str, json, ndarray; bytes for bytes, pkl and others."""
    kind, *settings = encoding.split(":")
    if kind == "str":
        return str(value).encode()
    if kind == "json":
        return json.dumps(value).encode()
    if kind != "ndarray":
        return bytes(value)
    array = np.asarray(value, settings[0])
    has_fixed_shape = len(settings) == 2
    if has_fixed_shape:
        return array.tobytes()
    return bytes([4 | 1]) + len(array).to_bytes(2, "little") + array.tobytes()


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
    """Make a manifest that fits the stream and the current rules, except for the arguments.

    Args:
        totals: fields of the totals that differ.
        encoding: fields of the encoding that differ.
    """
    ids_of_rows = [_list_ids(row) for row in rows]
    counts: dict[str, Any] = {
        "samples": len(rows),
        "tokens": sum(map(len, ids_of_rows)),
        "longest": max(map(len, ids_of_rows), default=0),
        "largest_id": max((token for ids in ids_of_rows for token in ids), default=-1),
    }
    counts |= totals or {}
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
    if is_plain:
        settings |= {"layout": "concat", "add_bos": False, "add_eos": True}
    made_encoding = Encoding(**settings | encoding)
    if not made_encoding.rules:
        made_encoding = replace(made_encoding, rules=find_raised_rules(made_encoding, TOKENIZER))
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version="0",
        encoding=made_encoding,
        tokenizer=tokenizer,
        backend="hand",
        totals=Totals(**counts),
        records=records or Records(read=len(rows), written=len(rows)),
        sources=[],
        parts=[UnitShards(key="0" * 32, shards=len(index.shards), samples=index.samples)],
        index_hash=index_hash or index.hash,
        complete=True,
    )


def seal_manifest(tree: Mapping[str, Any]) -> bytes:
    """Return a manifest with these keys as mdsmix writes it: first the hash of the other bytes."""
    without_hash = {key: value for key, value in tree.items() if key != "hash"}
    body = json.dumps(without_hash, indent=2, sort_keys=True)[1:]
    return b'{\n  "hash": "%s",' % xxhash.xxh128_hexdigest(body).encode() + body.encode()


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change an index or a manifest, whose hash is updated.

    Args:
        change: changes the tree in place or returns another one.
    """
    tree = json.loads(path.read_bytes())
    tree = change(tree) or tree
    is_manifest = path.name == "mdsmix.manifest"
    path.write_bytes(seal_manifest(tree) if is_manifest else json.dumps(tree).encode())


def _list_ids(row: Mapping[str, Any]) -> list[int]:
    ids = list[int]()
    for turn in row.get("turns", [row]):
        for column in ("tokens", "input_ids", "labels"):
            ids += turn.get(column, ())
    return ids
