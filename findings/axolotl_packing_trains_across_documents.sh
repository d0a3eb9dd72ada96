#!/usr/bin/env bash
# Surprise: axolotl's sample packing joins labels unchanged, so the last token of each document is trained to predict the first
#   token of the next one, though attention_mask and position_ids keep the documents apart.
# Likely guess: packing that keeps documents apart also leaves out the one target that crosses their border, as TRL's
#   collator does: the first label of each document is -100 there.
# Why it matters: data whose first token has a label (`type: completion`, `train_on_inputs: true`, tokenized rows of others)
#   trains each EOS to be followed by a random word. With documents of 20 tokens it is one target in 20, and the loss
#   of the same data differs from that without packing.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'trl==1.16.0' 'transformers==5.24.0' 'torch==2.15.0' 'accelerate==1.15.0' 'datasets==5.2.0'
# Only the source is read: axolotl needs a newer Python, and the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/axolotl" 'axolotl==0.21.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder/axolotl" 2>/dev/null <<'PY'
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

# The module of axolotl's collators, with a logger in place of the one that it imports.
sys.modules["axolotl.utils.logging"] = ModuleType("logging")
sys.modules["axolotl.utils.logging"].get_logger = logging.getLogger
path = Path(sys.argv[1], "axolotl/utils/collators/batching.py")
axolotl = ModuleType("batching")
sys.modules["batching"] = axolotl
exec(compile(path.read_text(), str(path), "exec"), vars(axolotl))

print("axolotl 0.21.0", *(f"{name} {version(name)}" for name in ("trl", "transformers")))
EOS, SIZE = 9, 10
documents = [[1, 2, EOS], [5, 6, EOS]]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": EOS}, "<pad>")),
    pad_token="<pad>",
    eos_token="<eos>",
)
rows = [
    {"input_ids": ids, "labels": ids, "attention_mask": [1] * 3, "position_ids": [0, 1, 2]}
    for ids in documents
]
packed = {
    "axolotl": axolotl.V2BatchSamplerDataCollatorForSeq2Seq(tokenizer)([rows]),
    "TRL": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
        [{"input_ids": ids, "labels": ids} for ids in documents]
    ),
}
# A model that is sure of each next token of its own document, and knows nothing after EOS.
logits = torch.zeros(1, 6, SIZE)
for position, following in ((0, 2), (1, EOS), (3, 6), (4, EOS)):
    logits[0, position, following] = 100
losses = {}
for name, batch in packed.items():
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    losses[name] = float(ForCausalLMLoss(logits, batch["labels"], SIZE))
    print(f"{name}: labels {batch['labels'][0].tolist()}, loss {losses[name]:.3f}")
assert packed["axolotl"]["labels"].tolist() == [[1, 2, EOS, 5, 6, EOS]]
assert packed["TRL"]["labels"].tolist() == [[-100, 2, EOS, -100, 6, EOS]]
# One of the five targets is a guess among all tokens.
assert abs(losses["axolotl"] - torch.log(torch.tensor(SIZE)).item() / 5) < 1e-3
assert losses["TRL"] < 1e-6
PY
