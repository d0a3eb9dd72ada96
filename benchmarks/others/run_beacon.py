"""Replays FlagEmbedding's script of the activation beacon on a mixture, for its memory:
datasets.map tokenizes the first fifth of each file, and Python lists keep all rows of the budget
until the end.

python run_beacon.py MIXTURE FOLDER TOKENIZER OUT ROW BUDGET
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer


def main(mixture: str, folder: str, name: str, output: str, width: str, budget: str) -> None:
    percents = json.loads(Path(mixture).read_bytes())["mixture"]
    tokenizer, length, rows = AutoTokenizer.from_pretrained(name), int(width), []
    for source, percent in percents.items():
        texts = load_dataset("json", data_files=f"{folder}/{source}.json", split="train[:20%]")
        ids = texts.map(
            lambda batch: {"ids": tokenizer(batch["text"])["input_ids"]},
            batched=True,
            remove_columns=texts.column_names,
        )
        missing = int(int(budget) * percent / 100)
        waiting = []
        for record in ids:
            waiting += record["ids"]
            while len(waiting) >= length and missing > 0:
                rows.append({"input_ids": waiting[:length], "labels": waiting[:length]})
                waiting = waiting[length:]
                missing -= length
            if missing <= 0:
                break
    # The original calls Dataset.from_list, which would keep all rows twice more.
    with Path(output).open("w") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)
    print(sum(len(row["input_ids"]) for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:7])
