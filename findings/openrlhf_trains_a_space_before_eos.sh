#!/usr/bin/env bash
# Surprise: OpenRLHF's SFT data puts a space between an answer and EOS: " </s>" is appended, and a tokenizer of byte-level BPE
#   makes a token of the space, which is trained. Line breaks at the end of an answer are removed. An answer that is too
#   long loses its last token to EOS as well, so the model learns to stop in the middle of a sentence.
# Likely guess: EOS is the token after the last one of the answer, as in TRL, axolotl and LLM-Foundry, and an answer that is
#   cut has no EOS.
# Why it matters: the model ends each answer with a space that no record has, and then EOS. A model that is trained further
#   with another tool's rows has two endings, and a stop at EOS leaves the space in the text.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'transformers==5.24.0' 'torch==2.15.0'
# Only the source is read: openrlhf needs the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --target "$folder/openrlhf" 'openrlhf==0.11.2'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder/openrlhf" 2>/dev/null <<'PY'
import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, __version__

# The class without the file's imports, which need deepspeed.
path = Path(sys.argv[1], "openrlhf/datasets/sft_dataset.py")
nodes = [
    node
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
]
scope = {"torch": torch, "Callable": Callable, "Dataset": object}
exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)

print("openrlhf 0.11.2, transformers", __version__)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
model = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
model.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")


def trained(response, max_length):
    """Return the tokens that are trained of a record."""
    data = SimpleNamespace(input_key="prompt", output_key="response", apply_chat_template=False)
    record = {"prompt": "2+2?", "response": response}

    class Records(dict):
        column_names = list(record)

        def map(self, function, **_):
            return Records({key: [value] for key, value in function(dict(record)).items()})

        def filter(self, function):
            assert function({key: values[0] for key, values in self.items()})
            return self

    dataset = scope["SFTDataset"](
        Records(), tokenizer, max_length, SimpleNamespace(args=SimpleNamespace(data=data))
    )
    ids, _, mask = dataset[0]
    # The mask of a position is for the next token, which it predicts.
    found = tokenizer.convert_ids_to_tokens(ids[0][1:][mask[0][:-1] == 1].tolist())
    print(f"{response!r}, max_length {max_length}: trained {found}")
    return found


assert trained("Four.", 64) == ["F", "o", "u", "r", ".", "Ġ", "</s>"]
assert trained("Four.\n\n", 64) == ["F", "o", "u", "r", ".", "Ġ", "</s>"]
assert trained("Four.", 8) == ["F", "o", "u", "</s>"]
print("as found: Ġ, the space, is trained before EOS, and EOS after a cut")
PY
