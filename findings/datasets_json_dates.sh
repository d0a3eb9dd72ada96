#!/usr/bin/env bash
# Surprise: if every text of a JSON Lines field is a date, `datasets` reads a datetime and not the text. If an earlier file
#   has other texts in this field, the dates become texts again, but other ones: "2024-01-05" is "2024-01-05 00:00:00".
# Likely guess: a JSON string is a string. A file of questions and answers has the type that its quotes say, and the order
#   of the files changes nothing. (The type is guessed from the texts of one block; a later block is cast to the first.)
# Why it matters: the answer to "When?" is trained with a time that nobody wrote, or only from the second file on. With the
#   file of dates first, loading fails at the first other text.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'datasets==5.2.0' 'pyarrow==26.0.1'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from datasets import Features, Value, load_dataset

print(*(f"{name} {version(name)}" for name in ("datasets", "pyarrow")))
folder = Path(sys.argv[1])
dates = ["2024-01-05", "2024-02-29"]
answers = {"dates": dates, "others": ["In May.", *dates]}
for name, texts in answers.items():
    lines = [
        {"prompt": "When?", "response": text} for text in texts
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def read(*names, features=None):
    """Return the responses of these files."""
    rows = load_dataset(
        "json",
        data_files=[str(folder / f"{name}.jsonl") for name in names],
        split="train",
        features=features,
        cache_dir=str(folder / "cache"),
    )
    print(*names, "->", rows.features["response"], rows["response"][:])
    return rows["response"][:]


assert read("others") == ["In May.", *dates]
assert read("dates") == [datetime(2024, 1, 5), datetime(2024, 2, 29)]
with_time = ["2024-01-05 00:00:00", "2024-02-29 00:00:00"]
strings = Features({"prompt": Value("string"), "response": Value("string")})
assert read("dates", features=strings) == with_time
assert read("others", "dates") == ["In May.", *dates, *with_time]
try:
    read("dates", "others")
except Exception as error:
    print("dates others ->", type(error).__name__, "from", str(error.__cause__)[:80])
else:
    sys.exit("the file of dates may come first now")
print("as found: a time is added to texts that are dates")
PY
