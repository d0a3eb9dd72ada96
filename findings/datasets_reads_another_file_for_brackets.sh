#!/usr/bin/env bash
# Surprise: with a file `part[1].jsonl` next to a `part1.jsonl`, `datasets` (data_files=) and datatrove (glob_pattern=) read
#   part1.jsonl if they are asked for the first by its whole name: brackets are a pattern for them, even if a file
#   has exactly this name.
# Likely guess: a path that exists is that file, and a pattern is tried only for a name that does not exist.
# Why it matters: versions and copies of a file are often named this way. A run then trains the wrong one, without
#   a message.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'datasets==5.2.0' 'datatrove==0.10.1' orjson
export HF_HOME="$folder/home"
"$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import load_dataset
from datatrove.pipeline.readers import JsonlReader

print(*(f"{name} {version(name)}" for name in ("datasets", "datatrove")))
data = Path(sys.argv[1], "data")
data.mkdir()
NAME = "part[1].jsonl"


def read_by_datatrove(name: str) -> list[str]:
    return [document.text for document in JsonlReader(str(data), glob_pattern=name).run()]


def read_by_datasets(name: str) -> list[str]:
    return load_dataset("json", data_files=str(data / name), split="train")["text"][:]


(data / NAME).write_text(json.dumps({"text": "brackets"}))
(data / "part1.jsonl").write_text(json.dumps({"text": "no brackets"}))
for read in (read_by_datasets, read_by_datatrove):
    print(f"{NAME} next to part1.jsonl, {read.__name__}: {read(NAME)}")
    assert read(NAME) == ["no brackets"]
PY
