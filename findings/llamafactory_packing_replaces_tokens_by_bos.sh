#!/usr/bin/env bash
# Surprise: LLaMA-Factory's packing for pretraining, which is on by default, writes BOS over the first token of each row.
#   That token of the text is lost, and a document in the middle of a row begins without BOS. It happens with tokenizers
#   that add a BOS (`add_bos_token`), such as those of Llama 2, Mistral 7B and DeepSeek.
# Likely guess: BOS is put before each document, or before each row, whose text is one token shorter then.
# Why it matters: each row loses a token, at any place of a text: the beginning of a word, or the EOS between two
#   documents, which then run into each other. The tokenizer's setting alone decides whether it happens.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'transformers==4.57.6'
# Only the source is read: llamafactory needs a newer Python, and torch.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/llamafactory" 'llamafactory==0.9.5'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import ast
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

# The class without its imports and its base.
folder = Path(sys.argv[1])
path = folder / "llamafactory/llamafactory/data/processor/pretrain.py"
nodes = ast.parse(path.read_text()).body
(definition,) = (node for node in nodes if isinstance(node, ast.ClassDef))
scope = {"chain": chain, "Any": Any, "dataclass": lambda cls: cls, "DatasetProcessor": object}
exec(compile(ast.Module([definition], []), str(path), "exec"), scope)

words = "<s> </s> <unk> one two three four five six".split()
model = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
model.add_special_tokens(["<s>", "</s>"])
model.save(str(folder / "tokenizer.json"))
tokenizer = transformers.LlamaTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
print("transformers", transformers.__version__, "add_bos_token:", tokenizer.add_bos_token)
processor = scope["PretrainDatasetProcessor"]()
processor.tokenizer = tokenizer
texts = ["one two three", "four five six"]


def rows(cutoff_len):
    processor.data_args = SimpleNamespace(template="default", packing=True, cutoff_len=cutoff_len)
    made = processor.preprocess_dataset({"_prompt": [[{"content": text}] for text in texts]})
    found = [tokenizer.convert_ids_to_tokens(ids) for ids in made["input_ids"]]
    print(f"{texts}, cutoff_len {cutoff_len}:", *(" ".join(row) for row in found), sep="\n  ")
    return found


assert rows(4) == [["<s>", "two", "three", "</s>"], ["<s>", "five", "six", "</s>"]]
assert rows(3) == [["<s>", "two", "three"], ["<s>", "four", "five"]]
assert rows(8) == [["<s>", "two", "three", "</s>", "four", "five", "six", "</s>"]]
print("as found: the first token of each row is BOS in place of a token of the text")
PY
