"""Reads full rows with litdata's StreamingDataset, as `benchmarks.loading` asks, epoch by epoch.

python run_litdata_rows.py FOLDER ROWS ROW_TOKENS BATCH

Each line of stdin asks for an epoch. The answer is a line of JSON: the wall and CPU seconds that it
took. The batches are those of mdsmix.load: int64 ids, labels and mask. No workers are used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize


def make_row(number: int, row_tokens: int) -> torch.Tensor:
    draw = np.random.default_rng(number)
    return torch.from_numpy(draw.integers(2, 30_000, row_tokens).astype(np.uint16))


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack([*rows]).long()
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def main(folder: str, rows: int, row_tokens: int, batch: int) -> None:
    # litdata prints its progress to stdout, on which only answers may be written.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loader = TokensLoader(block_size=row_tokens)
    optimize(
        fn=partial(make_row, row_tokens=row_tokens),
        inputs=[*range(rows)],
        output_dir=folder,
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=loader,
    )
    dataset = StreamingDataset(folder, item_loader=loader, shuffle=True)
    batches = StreamingDataLoader(dataset, batch_size=batch, num_workers=0, collate_fn=collate)
    for _ in sys.stdin:
        wall_before = time.perf_counter()
        cpu_before = time.process_time()
        count = sum(len(batch["input_ids"]) for batch in batches)
        if count != rows:
            raise SystemExit(f"litdata gave {count} rows of {rows}")
        wall = time.perf_counter() - wall_before
        answers.write(json.dumps([wall, time.process_time() - cpu_before]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
