"""Runs litdata's optimize as in its documentation for text: one tensor of ids for each document, in
chunks for TokensLoader.

python run_litdata.py SOURCE TOKENIZER OUT WORKERS ROW_TOKENS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import torch
from litdata import TokensLoader, optimize
from tokenizers import Tokenizer


def tokenize(path: str, tokenizer: str) -> Iterator[torch.Tensor]:
    model = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    eos = model.token_to_id("<|endoftext|>")
    with Path(path).open("rb") as lines:
        for line in lines:
            ids = model.encode(orjson.loads(line)["text"], add_special_tokens=False).ids
            yield torch.from_numpy(np.array([*ids, eos], np.uint16))


def main(source: str, tokenizer: str, output: str, workers: int, row_tokens: int) -> None:
    optimize(
        fn=partial(tokenize, tokenizer=tokenizer),
        inputs=sorted(map(str, Path(source).glob("*.jsonl"))),
        output_dir=output,
        chunk_bytes="64MB",
        num_workers=workers,
        item_loader=TokensLoader(block_size=row_tokens),
    )


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
