#!/usr/bin/env bash
# Surprise: `limit` and `skip` of datatrove's readers count for each task, not for the run. JsonlReader(limit=5) reads 5 records
#   with tasks=1 and 20 with tasks=4; skip=5 leaves out 5, or 20. A task has files of its own, and counts in them.
# Likely guess: "limit the number of documents to read" is one number for the pipeline, as in `head -n 5`. tasks= is a
#   setting of speed, which does not change the result.
# Why it matters: a sample grows with the number of tasks that have files: 1,000 tasks of a cluster read 1,000 times as
#   much as the trial with one task on a laptop. A run with skip= and another number of tasks reads documents again
#   that an earlier run has read, or leaves out others.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'datatrove==0.10.1' orjson
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

folder = Path(sys.argv[1])
(folder / "in").mkdir()
for file in range(4):
    lines = [json.dumps({"text": f"document {n} of file {file}"}) for n in range(20)]
    (folder / f"in/{file}.jsonl").write_text("\n".join(lines))


def count(tasks, **settings):
    """Return the number of documents that a pipeline of so many tasks writes."""
    out = folder / f"{tasks}-{'-'.join(settings)}"
    LocalPipelineExecutor(
        [JsonlReader(str(folder / "in"), **settings), JsonlWriter(str(out), compression=None)],
        tasks=tasks,
        workers=1,
        logging_dir=str(out) + "-logs",
    ).run()
    return sum(len(path.read_text().splitlines()) for path in out.iterdir())


print("datatrove", version("datatrove"), "4 files of 20 documents")
found = {}
for settings in ({"limit": 5}, {"skip": 5}):
    found |= {(*settings, tasks): count(tasks, **settings) for tasks in (1, 2, 4)}
    print(settings, {tasks: found[(*settings, tasks)] for tasks in (1, 2, 4)}, "documents by tasks")
assert [found["limit", tasks] for tasks in (1, 2, 4)] == [5, 10, 20]
assert [found["skip", tasks] for tasks in (1, 2, 4)] == [75, 70, 60]
PY
