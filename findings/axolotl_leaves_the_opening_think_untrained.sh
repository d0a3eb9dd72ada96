#!/usr/bin/env bash
# Surprise: axolotl's chat_template strategy does not train what the template prints before the reasoning of an answer, such as
#   "<think>\n". Under templates in the manner of Qwen 3 the model itself must write it: the generation prompt ends after
#   "<|im_start|>assistant\n".
# Likely guess: `roles_to_train: [assistant]` trains all that the template prints after the generation prompt, as LLM-Foundry
#   does.
# Why it matters: the first token of each answer, which begins the reasoning, is never trained. A model that did not think
#   before does not begin to, and one without a thought in the record is not trained to write the empty one either.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'transformers==5.24.0' jinja2
# Only the source is read: axolotl needs a newer Python, and the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/axolotl" 'axolotl==0.21.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder/axolotl" 2>/dev/null <<'PY'
import ast
import json
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# The two classes of axolotl without the file's imports, and what they use of their bases.
path = Path(sys.argv[1], "axolotl/prompt_strategies/chat_template.py")
names = {"_extract_input_ids", "ChatTemplatePrompter", "ChatTemplateStrategy"}
nodes = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") in names]


class Strategy:
    def __init__(self, prompter, tokenizer, train_on_inputs, sequence_len):
        self.tokenizer = tokenizer
        self.train_on_inputs = train_on_inputs


class Analyzer:
    def __init__(self, template):
        pass

    def get_message_vars(self, field):
        return {"role", "content", "reasoning_content"}


def ignore(*_):
    pass


scope = {
    "json": json,
    "bisect_left": bisect_left,
    "bisect_right": bisect_right,
    "defaultdict": defaultdict,
    "Prompter": object,
    "PromptTokenizingStrategy": Strategy,
    "JinjaTemplateAnalyzer": Analyzer,
    "IGNORE_TOKEN_ID": -100,
    "LOG": SimpleNamespace(debug=ignore, info=ignore, warning=ignore),
}
future = ast.parse("from __future__ import annotations").body
exec(compile(ast.Module([*future, *nodes], []), str(path), "exec"), scope)

# A template in the manner of Qwen 3, and a tokenizer with a token for each byte.
TEMPLATE = """
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\n" }}
{%- if message.role == "assistant" %}
{{- "<think>\n" + (message.reasoning_content or "") + "\n</think>\n\n" }}
{%- endif %}
{{- message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}"""
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
model = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
model.decoder = decoders.ByteLevel()
model.add_special_tokens(["<|im_start|>", "<|im_end|>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", chat_template=TEMPLATE)


def trained(answer):
    """Return the text that is trained, and the text after the generation prompt."""
    question = {"role": "user", "content": "2+2?"}
    prompter = scope["ChatTemplatePrompter"](tokenizer, chat_template=TEMPLATE)
    strategy = scope["ChatTemplateStrategy"](
        prompter, tokenizer, False, 512, roles_to_train=["assistant"], train_on_eos="turn"
    )
    made = strategy._tokenize_single_prompt({"messages": [question, {"role": "assistant"} | answer]})
    found = tokenizer.decode([label for label in made["labels"] if label != -100])
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    written = tokenizer.decode(made["input_ids"]).removeprefix(prompt)
    print(f"the model must write {written!r}\n  trained: {found!r}")
    return found, written


thought = {"content": "Four.", "reasoning_content": "Two and two."}
assert trained(thought) == (
    "Two and two.\n</think>\n\nFour.<|im_end|>",
    "<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>\n",
)
assert trained({"content": "Four."}) == ("Four.<|im_end|>", "<think>\n\n</think>\n\nFour.<|im_end|>\n")
print("as found: the opening of the reasoning is not trained")
PY
