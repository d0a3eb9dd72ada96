"""As run_datatrove.py, over parquet.

python run_datatrove_parquet.py SOURCE TOKENIZER OUT ROW
"""

from __future__ import annotations

import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main(source: str, tokenizer: str, out: str, _: str) -> None:
    steps = [
        ParquetReader(source, glob_pattern="*.parquet"),
        DocumentTokenizer(
            out,
            f"{tokenizer}/tokenizer.json",
            eos_token="<|endoftext|>",
            shuffle_documents=False,
            batch_size=1000,
        ),
    ]
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=f"{out}/logs").run()


if __name__ == "__main__":
    main(*sys.argv[1:5])
