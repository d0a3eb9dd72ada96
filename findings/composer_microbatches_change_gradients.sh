#!/usr/bin/env bash
# Surprise: Composer's device_train_microbatch_size changes the gradient of one and the same batch, if rows have different
#   numbers of trained tokens. Each microbatch has the mean loss of its tokens, and Composer weights it by its rows: a
#   row of 2 trained tokens in a microbatch of its own counts as much as a row of 15.
# Likely guess: the size of a microbatch decides about memory alone, and the batch has the gradient that it has in one piece.
#   It does only with `accumulate_train_batch_on_tokens=True`, which is False by default, and with a function
#   that counts the labels which a position predicts (LLM-Foundry sets both).
# Why it matters: `auto` finds the size by the memory of a GPU, so the same run has other gradients on another GPU, and
#   short answers get the weight of long ones.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'mosaicml==0.32.1' 'torch==2.7.0' 'transformers==4.51.3' 'setuptools<81'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - 2>/dev/null <<'PY'
from importlib.metadata import version

import torch
from composer import DataSpec, Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

print(*(f"{name} {version(name)}" for name in ("mosaicml", "torch", "transformers")))
TRAINED = (15, 2)  # tokens of the two rows of the batch


def make_rows():
    for step, trained in enumerate(TRAINED, start=3):
        ids = torch.arange(16) * step % 50
        labels = torch.full_like(ids, -100)
        labels[1 : trained + 1] = ids[1 : trained + 1]
        yield {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def count_tokens(batch):
    """Count the labels that a position predicts, which are all but those of the first column."""
    trained = int((batch["labels"][:, 1:] != -100).sum())
    return {"total": batch["input_ids"].numel(), "loss_generating": trained}


def update(microbatch_size, by_tokens):
    """Return what one step of SGD adds to the embeddings: the gradient of the batch."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    embeddings = model.transformer.wte.weight
    before = embeddings.detach().clone()
    Trainer(
        model=HuggingFaceModel(model, use_logits=True),
        train_dataloader=DataSpec(
            DataLoader([*make_rows()], batch_size=2), get_num_tokens_in_batch=count_tokens
        ),
        max_duration="1ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        device="cpu",
        device_train_microbatch_size=microbatch_size,
        accumulate_train_batch_on_tokens=by_tokens,
        progress_bar=False,
    ).fit()
    return embeddings.detach() - before


differences = {}
for by_tokens in (False, True):
    whole, split = update(2, by_tokens), update(1, by_tokens)
    differences[by_tokens] = float((whole - split).norm() / whole.norm())
    print(f"accumulate_train_batch_on_tokens={by_tokens}: microbatches of 1 row change the gradient"
          f" of 2 rows by {differences[by_tokens]:.0%}")
assert differences[False] > 0.5
assert differences[True] < 1e-4
print("as found: the size of a microbatch changes the gradient")
PY
