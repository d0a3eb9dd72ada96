"""Runs gigatoken on whole JSONL files, appends EOS, and writes the ids as one uint16 file, without
rows or an index.

Megatron-LM's script for gigatoken does the same before it builds its index. Everything is in memory
at once.

    python run_gigatoken.py SOURCE TOKENIZER OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import gigatoken
import numpy as np


def main(source: str, tokenizer: str, output: str) -> None:
    model = gigatoken.Tokenizer(f"{tokenizer}/tokenizer.json")
    paths = sorted(map(str, Path(source).glob("*.jsonl")))
    rows = model.encode_files(gigatoken.JsonlFileSource(paths, field="text")).layout
    (eos,) = model.encode("<|endoftext|>").tolist()
    ids, ends = np.asarray(rows.content.data), np.asarray(rows.offsets.data)[1:]
    tokens = np.empty(len(ids) + len(ends), np.uint16)
    places = ends + np.arange(len(ends))
    inside = np.ones(len(tokens), bool)
    inside[places] = False
    tokens[inside] = ids
    tokens[places] = eos
    tokens.tofile(Path(output, "tokens.bin"))


if __name__ == "__main__":
    main(*sys.argv[1:])
