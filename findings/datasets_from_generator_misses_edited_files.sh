#!/usr/bin/env bash
# Surprise: `Dataset.from_generator` does not run a generator that it has run before. It knows it by its code and its
#   `gen_kwargs`, not by the files that it reads, nor by what the functions that it imports do: after an edit of either
#   it returns the old records, in the next process too. Nothing is logged.
# Likely guess: a function that is handed over is called. `load_dataset` notices an edited file, so its neighbour does.
# Why it matters: the way to read a format of one's own is a generator. A corpus that was cleaned, or a parser that was
#   corrected, is trained as it was before. A new `cache_dir` or `fingerprint`, or deleted cache files, help.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'datasets==5.2.0'
export HF_HOME="$folder/home"
cat > "$folder/read.py" <<'PY'
import json
import sys

from cleaning import clean
from datasets import Dataset, load_dataset


def records(path):
    """Yield the records of a file."""
    with open(path) as lines:
        for line in lines:
            yield {"text": clean(json.loads(line)["text"])}


path = sys.argv[1]
made = Dataset.from_generator(records, gen_kwargs={"path": path})["text"][:]
loaded = load_dataset("json", data_files=path, split="train")["text"][:]
print(json.dumps([made, loaded]))
PY
"$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

print("datasets", version("datasets"))
folder = Path(sys.argv[1])


def read(text: str, cleaning: str) -> list[list[str]]:
    """Write the file and the module that the generator imports, and read both ways."""
    (folder / "a.jsonl").write_text(json.dumps({"text": text}))
    (folder / "cleaning.py").write_text(f"def clean(text): return text{cleaning}")
    command = [sys.executable, "-B", folder / "read.py", folder / "a.jsonl"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    made, loaded = json.loads(result.stdout.splitlines()[-1])
    print(f"{text!r}, cleaned by text{cleaning}: from_generator {made}, load_dataset {loaded}")
    return made, loaded


assert read("first text", "") == (["first text"], ["first text"])
assert read("the second", "") == (["first text"], ["the second"])
assert read("the second", ".upper()") == (["first text"], ["the second"])
PY
