#!/usr/bin/env bash
# Surprise: transformers keeps the documents of a packed row apart by position_ids that begin at 0 again, but only without an
#   attention_mask and with use_cache=False. With the default (use_cache is true in a model's config), or with a mask of
#   ones, each document attends to all before it, in training too and without a message.
# Likely guess: position_ids that begin again are enough, as the documentation of packing says, or have no effect at all; a
#   mask of ones and a cache that starts empty change nothing.
# Why it matters: loops of one's own, and Trainer of transformers 4, which leaves use_cache alone, train packed rows with
#   crossed attention. The loss still falls. Trainer of transformers 5 sets use_cache to False, so the same script differs.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet uv
for release in 4.57.6 5.24.0; do
    "$folder/tools/bin/uv" venv --quiet "$folder/$release"
    "$folder/tools/bin/uv" pip install --quiet --python "$folder/$release" "transformers==$release" 'torch==2.15.0' 'numpy==2.1.3'
    "$folder/$release/bin/python" - 2>/dev/null <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape)).train()
first, second = torch.randint(0, 64, (1, 7)), torch.randint(0, 64, (1, 6))
row = torch.cat([first, second], dim=1)
positions = torch.cat([torch.arange(7), torch.arange(6)])[None]
mask = torch.ones_like(row)
CALLS = {
    "nothing more": {},
    "use_cache=False": {"use_cache": False},
    "use_cache=False and a mask of ones": {"use_cache": False, "attention_mask": mask},
}
print("transformers", transformers.__version__, "use_cache of the config:", model.config.use_cache)
apart = {}
with torch.no_grad():
    alone = model(second, use_cache=False).logits
    for name, options in CALLS.items():
        packed = model(row, position_ids=positions, **options).logits[:, 7:]
        difference = float((packed - alone).abs().max())
        apart[name] = difference < 1e-5
        print(f"  position_ids, {name}: the second document differs from itself alone by {difference:.1e}")
assert list(apart.values()) == [False, True, False]
PY
done
