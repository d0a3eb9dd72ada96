#!/usr/bin/env bash
# Surprise: unsloth's train_on_responses_only leaves an answer out of the loss if it begins with a line break and the chat
#   template is ChatML, as Qwen's. It searches the tokens of `<|im_start|>assistant\n`, and Qwen's tokenizer joins that line
#   break with those of the answer into one token. In a conversation of several answers nothing is printed.
# Likely guess: all text between `<|im_start|>assistant` and the next message is trained. With `force_match=False` it is; the
#   default, "Match newlines as well!", also has to match the tokens.
# Why it matters: answers whose reasoning was removed, up to `</think>`, often begin with two line breaks. They are then
#   context that is never trained, and a row without another answer is removed.
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

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# unsloth's function and what it calls. Of torch it only asks whether rows are tensors.
NAMES = ("train_on_responses_only", "_find_common_token_ids", "_longest_common_sublist", "_stable_marker_edges")
tree = ast.parse(open(sys.argv[1]).read())
wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
space = {"torch": SimpleNamespace(Tensor=type(None), int64=None), "_itertools": itertools}
exec(compile(ast.Module(wanted, []), sys.argv[1], "exec"), space)

# A byte-level tokenizer that, as Qwen's, keeps line breaks together.
model = Tokenizer(models.BPE())
words = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+|\S+"), "isolated")
model.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
model.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|im_start|>", "<|im_end|>"]
)
model.train_from_iterator(["user\nassistant\n", "a\n\n\nb\n\nc"] * 9, trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
tokenizer.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
messages = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "\n\nYes."},
    {"role": "user", "content": "And in Oslo?"},
    {"role": "assistant", "content": "No."},
]
ids = tokenizer.apply_chat_template(messages, return_dict=False)
trained = {}
for force_match in (True, False):
    mask = space["train_on_responses_only"](
        None,
        tokenizer=tokenizer,
        instruction_part="<|im_start|>user\n",
        response_part="<|im_start|>assistant\n",
        force_match=force_match,
        return_function=True,
    )
    labels = mask({"input_ids": [ids]})["labels"][0]
    trained[force_match] = tokenizer.decode([label for label in labels if label != -100])
print("unsloth_zoo 2026.10.9; answers '\\n\\nYes.' and 'No.'")
print(f"  trained by default:           {trained[True]!r}")
print(f"  trained by force_match=False: {trained[False]!r}")
assert trained == {True: "No.<|im_end|>", False: "\n\n\nYes.<|im_end|>No.<|im_end|>"}
PY
