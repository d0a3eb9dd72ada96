#!/usr/bin/env bash
# Surprise: a record's chat_template_kwargs renders another text after `datasets` has read it. The variable that
#   another record has arrives as null, and a template that asks `reasoning_effort is defined` prints "None".
# Likely guess: the object comes back as it was written, or a null is as good as a missing variable.
#   `datasets` gives all records of a column the same keys, and Jinja's `is defined` is true of None.
# Why it matters: chat_template_kwargs is TRL's column, which it hands to apply_chat_template as it is. Records of two
#   modes in one file are then all trained with the wrong prompt, and nothing fails.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'datasets==4.4.1' 'transformers==4.57.3' 'jinja2==3.1.6'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import load_dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

print(*(f"{name} {version(name)}" for name in ("datasets", "transformers", "jinja2")))
messages = [{"role": "user", "content": "Hi"}]
given = [{"enable_thinking": False}, {"reasoning_effort": "low"}]
path = Path(sys.argv[1], "records.jsonl")
rows = [{"messages": messages, "chat_template_kwargs": each} for each in given]
path.write_text("".join(json.dumps(row) + "\n" for row in rows))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
tokenizer.chat_template = (
    "{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}. {% endif %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def text(row):
    return tokenizer.apply_chat_template(row["messages"], tokenize=False, **row["chat_template_kwargs"])


read = load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))[0]
print("written:", rows[0]["chat_template_kwargs"], repr(text(rows[0])))
print("read:   ", read["chat_template_kwargs"], repr(text(read)))
assert text(rows[0]) == "Hi"
assert text(read) == "Reasoning: None. Hi"
print("as found: the variable of another record is printed as None")
PY
