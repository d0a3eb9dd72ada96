"""Runs datatrove's tokenizer pipeline as in its documentation, but without shuffling: JSONL or
parquet to flat .ds files.

python run_datatrove.py SOURCE TOKENIZER OUT WORKERS
"""

from __future__ import annotations

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main(source: str, tokenizer: str, output: str, workers: int) -> None:
    kind, reader = (
        ("parquet", ParquetReader)
        if any(Path(source).glob("*.parquet"))
        else ("jsonl", JsonlReader)
    )
    steps = [
        reader(source, glob_pattern=f"*.{kind}"),
        DocumentTokenizer(
            output,
            f"{tokenizer}/tokenizer.json",
            eos_token="<|endoftext|>",
            shuffle_documents=False,
            batch_size=1000,
        ),
    ]
    LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=f"{output}/logs").run()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
