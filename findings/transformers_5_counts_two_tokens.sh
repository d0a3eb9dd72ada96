#!/usr/bin/env bash
# Surprise: under transformers 5 `len(tokenizer.apply_chat_template(messages))` is 2 for every conversation: the call
#   returns a dict (input_ids, attention_mask), and len() counts its keys. Under transformers 4 it returned the ids.
# Likely guess: a changed return value breaks a script with an error. This one does not: a filter such as
#   `len(...) <= 4096` keeps everything, and a sum of lengths is twice the number of conversations.
# Why it matters: this line is how data sets are filtered by length before training, and how their tokens are counted.
#   Conversations that are too long then reach the trainer, which cuts them, often in the answer. `return_dict=False`
#   gives the ids under both.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet uv
for release in 4.57.6 5.24.0; do
    "$folder/tools/bin/uv" venv --quiet "$folder/$release"
    "$folder/tools/bin/uv" pip install --quiet --python "$folder/$release" "transformers==$release" 'jinja2==3.1.6'
    "$folder/$release/bin/python" - 2>/dev/null <<'PY'
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MOST = 100
model = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2}, unk_token="<unk>"))
model.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"

conversations = [[{"role": "user", "content": "one " * words}] for words in (3, 5000)]
lengths = [len(tokenizer.apply_chat_template(each)) for each in conversations]
ids = [len(tokenizer.apply_chat_template(each, return_dict=False)) for each in conversations]
kept = sum(length <= MOST for length in lengths)
print(f"transformers {transformers.__version__}: tokens {ids}, len() {lengths}, kept {kept} of 2")
assert ids == [4, 5001]
if transformers.__version__.startswith("4."):
    assert (lengths, kept) == (ids, 1)
else:
    assert (lengths, kept) == ([2, 2], 2)
PY
done
