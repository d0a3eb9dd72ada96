"""Runs Megatron-core's GPTDataset on the tokens of a stream, from the start of this process to its
first batch. Prints the seconds as JSON.

    python megatron_index.py FOLDER SAMPLES WIDTH BATCH [--make]

`--make` writes FOLDER/tokens.bin and .idx: the same number of tokens, in documents of 1,000. A
sample has WIDTH tokens. The index is cached in the same folder, as in a training run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

DOCUMENT = 1000


class Tokenizer:
    eod, pad, vocab_size = 0, 1, 65_000

    def __init__(self) -> None:
        self.unique_identifiers = {"class": "none"}


def make(prefix: Path, tokens: int) -> None:
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    lengths = np.full(tokens // DOCUMENT, DOCUMENT, np.int32)
    with prefix.with_suffix(".bin").open("wb") as file:
        for begin in range(0, tokens, 1 << 24):
            file.write(
                (
                    (np.arange(begin, min(tokens, begin + (1 << 24))) % 60_000).astype(np.uint16)
                ).tobytes()
            )
    with _IndexWriter(str(prefix.with_suffix(".idx")), np.uint16) as writer:
        writer.write(lengths, None, np.arange(len(lengths) + 1))


def main() -> None:
    folder, samples, width, batch = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    prefix = folder / "tokens"
    if "--make" in sys.argv:
        make(prefix, samples * width)
        return
    imported, cpu = time.perf_counter(), time.process_time()
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=width,
        blend=([str(prefix)], None),
        split="1",
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        add_extra_token_to_sequence=False,
        create_attention_mask=False,
    )
    low = IndexedDataset(str(prefix), multimodal=False, mmap=True)
    indices = np.arange(len(low), dtype=np.int32)
    dataset = GPTDataset(low, str(prefix), indices, samples, Split.train, config)
    rows = [dataset[i]["tokens"] for i in range(batch)]
    result = {"seconds": time.perf_counter() - imported, "cpu": time.process_time() - cpu}
    print(json.dumps(result | {"samples": len(dataset), "rows": len(rows)}))


if __name__ == "__main__":
    main()
