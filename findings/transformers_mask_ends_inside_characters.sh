#!/usr/bin/env bash
# Surprise: if the last character of an answer has several tokens (an emoji, often an accented or Chinese letter), the mask of
#   `apply_chat_template(return_assistant_tokens_mask=True)` has only the first of them, unless the template's block
#   `generation` goes on after the answer. So does 4.57.6; in 5.24.0 the mask has all tokens.
# Likely guess: the mask has all tokens of the text between `{% generation %}` and `{% endgeneration %}`.
# Why it matters: a model that is trained with this mask (TRL's assistant_only_loss) does not learn to finish the character;
#   with ASCII answers nobody notices.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cat >"$folder/mask.py" <<'PY'
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print(*(f"{name} {version(name)}" for name in ("transformers", "tokenizers")))
# Each byte is a token.
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
model = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
model.add_special_tokens(["<|end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
)
missing = {}
for answer in ("Yes", "Café", "Yes 👍", "是"):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    row = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    count, in_mask = len(answer.encode()), sum(row["assistant_masks"])
    missing[answer] = count - in_mask
    print(f"  {answer}: {count} tokens, in the mask: {in_mask}")
is_cut = version("transformers").startswith("4.")
expected = [0, 1, 3, 2] if is_cut else [0, 0, 0, 0]
sys.exit(f"tokens that are missing: {missing}" if [*missing.values()] != expected else 0)
PY
for release in 'transformers==4.57.6' 'transformers==5.24.0'; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install --quiet "$release" 'jinja2==3.1.6'
    HF_HUB_OFFLINE=1 "$folder/$release/bin/python" "$folder/mask.py" 2>/dev/null
done
