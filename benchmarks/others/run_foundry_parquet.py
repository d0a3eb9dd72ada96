"""Does the same as Foundry's convert_dataset_json, with `load_dataset("parquet")`.

python run_foundry_parquet.py SOURCE TOKENIZER OUT ROW
"""

from __future__ import annotations

import sys

from datasets import load_dataset
from llmfoundry.data import ConcatTokensDataset
from streaming import MDSWriter
from transformers import AutoTokenizer


def main(source: str, tokenizer: str, output: str, row: str) -> None:
    documents = load_dataset("parquet", data_files=f"{source}/*.parquet", split="train")
    rows = ConcatTokensDataset(
        hf_dataset=documents,
        tokenizer=AutoTokenizer.from_pretrained(tokenizer),
        max_length=int(row),
        bos_text="",
        eos_text="<|endoftext|>",
        no_wrap=False,
    )
    with MDSWriter(columns={"tokens": "ndarray:int32"}, out=f"{output}/train") as writer:
        for sample in rows:
            writer.write(sample)


if __name__ == "__main__":
    main(*sys.argv[1:5])
