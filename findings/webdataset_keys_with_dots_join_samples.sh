#!/usr/bin/env bash
# Surprise: webdataset's TarWriter takes keys with a dot, and WebDataset reads all samples with the same beginning up to the
#   first dot as one: three papers with arXiv's ids 2401.00001 to 2401.00003 come back as one sample with the key `2401`
#   and the fields `00001.txt`, `00002.txt`, `00003.txt`. With the decoder of `.txt` it has all three texts, and no error.
# Likely guess: the key that TarWriter is given is the key that is read, or TarWriter refuses a key that cannot be read.
#   The field is what follows the last dot, as in os.path.splitext.
# Why it matters: ids of arXiv, names of hosts, versions, dates and times have dots. A pipeline that takes any field (a
#   callable, `datasets`) trains one of a month's papers, or fails far from the cause. `datasets` reads the same tar so,
#   and takes the first sample's names as the columns.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'webdataset==1.0.2' 'torch==2.15.0' 'datasets==5.2.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version

import datasets
import webdataset

keys = ["2401.00001", "2401.00002", "2401.00003"]
path = f"{sys.argv[1]}/papers.tar"
with webdataset.TarWriter(path) as writer:
    for key in keys:
        writer.write({"__key__": key, "txt": f"the text of {key}"})
print("webdataset", version("webdataset"), "datasets", datasets.__version__)
samples = []
for sample in webdataset.WebDataset(path, shardshuffle=False).decode():
    fields = {name: text for name, text in sample.items() if not name.startswith("__")}
    samples.append((sample["__key__"], fields))
print("written", keys)
print("webdataset reads", samples)
rows = list(datasets.load_dataset("webdataset", data_files=path, split="train", streaming=True))
found = [(row["__key__"], sorted(name for name in row if not name.startswith("__"))) for row in rows]
print("datasets reads", found)
joined = ["00001.txt", "00002.txt", "00003.txt"]
assert [(key, sorted(fields)) for key, fields in samples] == [("2401", joined)]
assert list(samples[0][1].values()) == [f"the text of {key}" for key in keys]
assert found == [("2401", joined)]
PY
