"""What FlagEmbedding's script of the activation beacon does with a mixture, as far as its memory
goes: the first fifth of each file is tokenized by datasets.map, and the rows of the budget are held
in Python lists until all of them are there.

python run_beacon.py MIXTURE FOLDER TOKENIZER OUT ROW BUDGET
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer


def main(mixture: str, folder: str, name: str, out: str, row: str, budget: str) -> None:
    percents = json.loads(Path(mixture).read_bytes())["mixture"]
    tokenizer, length, rows = AutoTokenizer.from_pretrained(name), int(row), []
    for source, percent in percents.items():
        texts = load_dataset("json", data_files=f"{folder}/{source}.json", split="train[:20%]")
        ids = texts.map(
            lambda of: {"ids": tokenizer(of["text"])["input_ids"]},
            batched=True,
            remove_columns=texts.column_names,
        )
        left, rest = int(int(budget) * percent / 100), []
        for record in ids:
            rest += record["ids"]
            while len(rest) >= length and left > 0:
                rows.append({"input_ids": rest[:length], "labels": rest[:length]})
                rest, left = rest[length:], left - length
            if left <= 0:
                break
    with Path(out).open(
        "w"
    ) as file:  # its own way, Dataset.from_list, would hold all of them twice more
        file.writelines(f"{json.dumps(each)}\n" for each in rows)
    print(sum(len(each["input_ids"]) for each in rows))


if __name__ == "__main__":
    main(*sys.argv[1:7])
