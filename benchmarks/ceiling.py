"""The ceiling: JSONL to MDS and nothing else. mdsmix is compared with it.

Reads blocks of 8 MB, parses each line, tokenizes a block in one call on all cores, joins the
documents with EOS, cuts rows and writes whole shards from numpy arrays. It has no hashes, no
checks, no handling of bad records and no second run, and stops at the first surprise. No program
that reads text and writes MDS with this tokenizer can be much faster in one process.

    python -m benchmarks.ceiling SOURCE TOKENIZER OUT ROW_TOKENS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastokens import Tokenizer
from numpy.typing import NDArray

BLOCK = 8 << 20
SHARD_BYTES = 1 << 26
EOS = "<|endoftext|>"


def main(source: str, tokenizer: str, output: str, row_tokens: int) -> None:
    shard_tokens = SHARD_BYTES // 2 // row_tokens * row_tokens
    shards: list[dict[str, Any]] = []
    waiting = np.empty(0, np.uint16)
    for tokens in _token_blocks(source, tokenizer):
        waiting = np.concatenate([waiting, tokens])
        while len(waiting) >= shard_tokens:
            shards.append(_write(Path(output), len(shards), waiting[:shard_tokens], row_tokens))
            waiting = waiting[shard_tokens:]
    full = len(waiting) // row_tokens * row_tokens
    if full:
        shards.append(_write(Path(output), len(shards), waiting[:full], row_tokens))
    (Path(output) / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _token_blocks(source: str, tokenizer: str) -> Iterator[NDArray[np.uint16]]:
    """Yield the token ids of each block as one array; every document ends with EOS."""
    model = Tokenizer.from_file(tokenizer)
    eos = np.frombuffer(model.encode_batch_flat([EOS])[0], np.uint32)
    for lines in _line_blocks(source):
        texts = [orjson.loads(line)["text"] for line in lines]
        ids, offsets = model.encode_batch_flat(texts, split_special_tokens=True)
        ends = np.frombuffer(offsets, np.int64)[1:] + np.arange(len(texts))
        tokens = np.empty(len(ids) // 4 + len(texts), np.uint16)
        inside = np.ones(len(tokens), bool)
        inside[ends] = False
        tokens[inside] = np.frombuffer(ids, np.uint32)
        tokens[ends] = eos
        yield tokens


def _line_blocks(source: str) -> Iterator[list[bytes]]:
    tail = b""
    with Path(source).open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            *lines, tail = (tail + block).split(b"\n")
            yield lines


def _write(
    output: Path, number: int, tokens: NDArray[np.uint16], row_tokens: int
) -> dict[str, Any]:
    """Write a shard (sample count, offsets, settings, rows). Return its entry in index.json."""
    rows = len(tokens) // row_tokens
    settings = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": SHARD_BYTES,
        "column_names": ["tokens"],
        "column_encodings": [f"ndarray:uint16:{row_tokens}"],
        "column_sizes": [row_tokens * 2],
    }
    text = json.dumps(settings, sort_keys=True).encode()
    offsets = 8 + 4 * rows + len(text) + np.arange(rows + 1) * row_tokens * 2
    name = f"shard.{number:05}.mds"
    with (output / name).open("wb") as file:
        file.write(np.uint32(rows).tobytes() + offsets.astype(np.uint32).tobytes() + text)
        file.write(memoryview(np.ascontiguousarray(tokens)).cast("B"))
    raw = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
    return settings | {"samples": rows, "raw_data": raw, "zip_data": None}


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
