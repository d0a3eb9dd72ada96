#!/usr/bin/env bash
# Surprise: `pandas.read_json` reads the texts of a field as numbers if all of them look like one, quotes or not: "007" is
#   7.0 and "1e3" is 1000.0. With `chunksize` each chunk decides for itself: one has numbers, the next one texts. A
#   field whose name is `date`, or ends in `_at` or `_time`, becomes a time.
# Likely guess: a JSON string is a string; only a csv file, which has no types, is guessed at.
# Why it matters: answers to questions of mathematics are such texts. Written again, to JSON Lines or parquet, the answer
#   "42" is 42.0, which is trained, or refused where a text is expected. `dtype=False` keeps texts, `convert_dates=False`
#   keeps times.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'pandas==3.1.1'
"$folder/env/bin/python" - "$folder" <<'PY'
import json
import sys
from pathlib import Path

import pandas

print("pandas", pandas.__version__)
folder = Path(sys.argv[1])


def read(answers: list[str], **options: object) -> list[object]:
    """Return the answers of a file as pandas reads them."""
    lines = [json.dumps({"response": answer, "asked_at": "2024-01-05"}) for answer in answers]
    (folder / "a.jsonl").write_text("\n".join(lines))
    read = pandas.read_json(folder / "a.jsonl", lines=True, **options)
    frames = read if "chunksize" in options else [read]
    return [answer for frame in frames for answer in frame["response"].tolist()]


numbers, mixed = ["42", "007", "1e3"], ["42", "007", "1e3", "none"]
print(numbers, "are read as", read(numbers))
print(mixed, "are read as", read(mixed))
print("in chunks of 3:", read(mixed, chunksize=3))
assert read(numbers) == [42.0, 7.0, 1000.0]
assert read(mixed) == mixed
assert read(mixed, chunksize=3) == [42.0, 7.0, 1000.0, "none"]
assert read(numbers, dtype=False) == numbers
frame = pandas.read_json(folder / "a.jsonl", lines=True)
print('asked_at, "2024-01-05" in the file, is read as', frame["asked_at"][0])
assert isinstance(frame["asked_at"][0], pandas.Timestamp)
PY
