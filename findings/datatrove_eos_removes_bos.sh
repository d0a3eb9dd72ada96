#!/usr/bin/env bash
# Surprise: `eos_token` of datatrove's DocumentTokenizer replaces the tokenizer's post-processor. A tokenizer that begins each
#   text with BOS, as Llama 3's does, gives documents without BOS as soon as an EOS is asked for.
# Likely guess: eos_token adds a token at the end of a document, and changes nothing at its beginning.
# Why it matters: a base model that was trained with BOS in front of each document is trained on without it, and at
#   inference its tokenizer adds it again. The count of tokens is the same with and without the option, so
#   nothing shows it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'datatrove==0.10.1' 'tokenizers==0.23.3' 'numpy==2.1.3' orjson
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

print(*(f"{name} {version(name)}" for name in ("datatrove", "tokenizers")))
folder = Path(sys.argv[1])
BOS, EOS = 1, 2
model = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": BOS, "</s>": EOS, "one": 3, "two": 4}, "<unk>"))
model.pre_tokenizer = pre_tokenizers.Whitespace()
model.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
model.save(str(folder / "tokenizer.json"))


def tokenize(name: str, **options: str) -> list[int]:
    """Return the ids of two documents."""
    step = DocumentTokenizer(
        str(folder / name), tokenizer_name_or_path=str(folder / "tokenizer.json"),
        shuffle_documents=False, **options,
    )
    step.run(iter([Document(text="one two", id="a"), Document(text="two", id="b")]), 0, 1)
    (path,) = (folder / name).glob("*.ds")
    ids = np.fromfile(path, np.uint16).tolist()
    print(name, ids)
    return ids


assert tokenize("plain") == [BOS, 3, 4, BOS, 4]
assert tokenize("with eos_token", eos_token="</s>") == [3, 4, EOS, 4, EOS]
PY
