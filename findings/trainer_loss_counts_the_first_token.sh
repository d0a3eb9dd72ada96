#!/usr/bin/env bash
# Surprise: Trainer's loss, and with it every gradient, is too small by a factor. It sums the losses of the positions
#   that a model predicts, and divides by the number of labels that are not -100. The first label of each row is one of
#   these, but no position predicts it: rows of n trained tokens give (n - 1) / n of the model's own loss.
# Likely guess: Trainer's loss of one batch is the loss that the model returns for this batch.
# Why it matters: on short rows the factor is large (4 tokens: 0.75), and it differs between data sets, so losses of
#   different row lengths, or of Trainer and LLM-Foundry, cannot be compared. Setting each row's first label to -100
#   makes them equal. Seen under transformers 4 and 5.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet uv
for release in 4.57.6 5.24.0; do
    "$folder/tools/bin/uv" venv --quiet --seed "$folder/$release"
    "$folder/tools/bin/uv" pip install --quiet --python "$folder/$release" \
        "transformers==$release" 'torch==2.15.0' 'accelerate==1.15.0' 'numpy==2.1.3'
    "$folder/$release/bin/python" - "$folder/out-$release" 2>/dev/null <<'PY'
import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def losses(first_label):
    """Return Trainer's loss of one batch of two rows of four tokens, and the model's own."""
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    rows = []
    for start in range(2):
        ids = torch.arange(4) + start
        labels = ids.clone()
        if first_label is not None:
            labels[0] = first_label
        rows.append({"input_ids": ids, "labels": labels})
    own = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss.item()
    arguments = TrainingArguments(
        sys.argv[1], max_steps=1, logging_steps=1, per_device_train_batch_size=2, learning_rate=0.0,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    return float(trainer.state.log_history[0]["loss"]), own


logged, own = losses(None)
masked, own_masked = losses(-100)
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
print(f"all labels:         Trainer {logged:.4f}, model {own:.4f}, ratio {logged / own:.4f}")
print(f"first label is -100: Trainer {masked:.4f}, model {own_masked:.4f}, ratio {masked / own_masked:.4f}")
assert abs(logged / own - 3 / 4) < 1e-3
assert abs(masked / own_masked - 1) < 1e-3
PY
done
echo "as found: rows of 4 tokens give 3/4 of the model's loss"
