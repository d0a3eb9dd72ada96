"""Runs Hugging Face's `tokenizers` alone: encode_batch_fast on blocks of 8 MB on all cores. The ids
are counted and dropped.

python run_tokenizers.py SOURCE TOKENIZER OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
from tokenizers import Tokenizer

BLOCK = 8 << 20


def main(source: str, tokenizer: str, output: str) -> None:
    model = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    tokens = 0
    for path in sorted(Path(source).glob("*.jsonl")):
        with path.open("rb") as file:
            while lines := file.readlines(BLOCK):
                texts = [orjson.loads(line)["text"] for line in lines]
                encodings = model.encode_batch_fast(texts, add_special_tokens=False)
                tokens += sum(len(encoding) + 1 for encoding in encodings)  # and EOS
    Path(output, "tokens").write_text(str(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
