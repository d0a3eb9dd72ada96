#!/usr/bin/env bash
# Surprise: apply_chat_template of transformers 5.24 prints reasoning that 4.57 leaves out. It copies `reasoning_content`,
#   `thinking` or `reasoning` of a message to `reasoning_content` and `thinking`, whichever of them the template reads. So a
#   record with the one key, under a template that reads the other (gpt-oss: `thinking`), has other tokens. Nothing is logged.
# Likely guess: a template sees the messages as they are, so the same messages and the same template give the same text.
# Why it matters: a model is trained on answers without reasoning in one environment (LLM-Foundry pins transformers 4), and with
#   it in the other. Templates that refuse a message with reasoning, as gpt-oss' does for a call with a content, begin to fail.
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
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

KEYS = ("reasoning_content", "thinking", "reasoning")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


def render(key, template_key):
    """Return what a template that reads one key prints of a message that has another."""
    tokenizer.chat_template = "{% for m in messages %}{% if m.KEY %}<{{ m.KEY }}>{% endif %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("KEY", template_key)
    answer = {"role": "assistant", "content": "Yes.", key: "It rains."}
    return tokenizer.apply_chat_template([answer], tokenize=False)


printed = {(key, read): render(key, read) == "<It rains.>Yes." for key in KEYS for read in KEYS}
print(f"transformers {transformers.__version__}:")
for (key, read), is_printed in printed.items():
    print(f"  {key} under a template that reads {read}: {'printed' if is_printed else 'left out'}")
if transformers.__version__.startswith("4."):
    assert printed == {(key, read): key == read for key in KEYS for read in KEYS}
else:
    assert printed == {(key, read): key == read or read != "reasoning" for key in KEYS for read in KEYS}
PY
done
