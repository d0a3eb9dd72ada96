#!/usr/bin/env bash
# Surprise: unsloth's train_on_responses_only trains the results of tools if roles have tokens of their own, as in the templates
#   of GLM-4.5 (`<|assistant|>`, `<|observation|>`, `<|user|>`). An answer ends at EOS, at the marker of a question, or at a
#   token with which the markers of both begin. GLM has none of these after a call: the answer goes on to the next `<|user|>`.
# Likely guess: "Train only on responses by masking instruction labels", so text that a tool wrote has no loss. It has none
#   under ChatML, where each message begins with `<|im_start|>`.
# Why it matters: the model learns to write the results itself, after each call, and most tokens of the loss may be results. Only
#   the template decides, and nothing is printed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'transformers==5.24.0' 'tokenizers==0.23.3' jinja2
# Only the source is read: importing unsloth_zoo needs torch.
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" --no-deps --target "$folder/zoo" 'unsloth-zoo==2026.10.9'
"$folder/env/bin/python" - "$folder/zoo/unsloth_zoo/dataset_utils.py" 2>/dev/null <<'PY'
import ast
import itertools
import sys
from types import SimpleNamespace

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# unsloth's function and what it calls. Of torch it only asks whether rows are tensors.
NAMES = ("train_on_responses_only", "_find_common_token_ids", "_longest_common_sublist", "_stable_marker_edges")
tree = ast.parse(open(sys.argv[1]).read())
wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
space = {"torch": SimpleNamespace(Tensor=type(None), int64=None), "_itertools": itertools}
exec(compile(ast.Module(wanted, []), sys.argv[1], "exec"), space)

words = "user assistant tool Rain call weather It rains Yes".split()
vocabulary = {word: number for number, word in enumerate(["?", "\n", *words])}
model = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
model.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| "), "isolated")
model.add_special_tokens(["<|user|>", "<|assistant|>", "<|observation|>", "<|im_start|>", "<|im_end|>"])
messages = [
    {"role": "user", "content": "Rain"},
    {"role": "assistant", "content": "call weather"},
    {"role": "tool", "content": "It rains"},
    {"role": "assistant", "content": "Yes"},
]
templates = {
    "GLM": "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}",
    "ChatML": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
}
markers = {
    "GLM": ("<|user|>\n", "<|assistant|>\n"),
    "ChatML": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
}
trained = {}
for style, template in templates.items():
    eos = "<|im_end|>" if style == "ChatML" else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token=eos)
    tokenizer.chat_template = template
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    question, answer = markers[style]
    mask = space["train_on_responses_only"](
        None, tokenizer=tokenizer, instruction_part=question, response_part=answer, return_function=True
    )
    labels = mask({"input_ids": [ids]})["labels"][0]
    kept = tokenizer.convert_ids_to_tokens([label for label in labels if label != -100])
    trained[style] = " ".join(word for word in kept if word in words)
    print(f"unsloth_zoo 2026.10.9, a template in the manner of {style}: trained {trained[style]!r}")
assert trained == {"GLM": "call weather It rains Yes", "ChatML": "call weather Yes"}
PY
